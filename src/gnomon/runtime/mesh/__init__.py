"""Ranks that meet: process groups as the Program names them, collectives, and who sends which rows to whom.

Leaves out which tensors are communicated (`runtime.module`, `runtime.step`).
"""
