"""What is tried before or instead of a run: a plan against the plain model, a capture against its module, the machines.

Leaves out what needs no tensors, which is asked first (`request.runnable`).
"""
