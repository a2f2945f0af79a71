"""Stages: layers cut unevenly over stages, recomputation by stage, and replicas by stage (DAPPLE).

The passes after the exact search over equal stages. Left out: the axes, which are the plan's.
"""
