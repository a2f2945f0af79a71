"""Refinement: choices that the exact search leaves alone, tried on its best plans by the simulator.

`refine` gains time, `make_fit` gains memory; `choices` lists them. Left out: exactness.
"""
