"""Room `serving`: an inference engine's requests, KV blocks, scheduler, iteration price, capacity and replay. Pure.

One scheduler (`scheduler.Scheduler`) decides what an iteration computes; the replay drives it with predicted seconds,
a server with measured ones. Leaves out tokens, tensors and HTTP.
"""
