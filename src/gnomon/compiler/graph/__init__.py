"""Passes over the graph of operations: which are computed together, and what is rewritten before that.

Leaves out operations that have kernels of their own (`kernels`).
"""
