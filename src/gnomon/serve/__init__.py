"""Room `serve`: an inference engine on the wall clock: weights, pages of keys and values, sampling, HTTP.

It drives the scheduler of room `serving`, which the replay drives with predicted seconds. `engine.Engine` answers
requests in this process, `server` speaks OpenAI's API over it. Leaves out training and everything that is predicted.
"""
