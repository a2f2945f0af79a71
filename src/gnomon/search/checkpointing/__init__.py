"""Selective activation checkpointing as integer programmes: which tensors of which layers are kept, which are
recomputed and which wait on the host, so that a plan fits and loses the least time.

`layer_ways` solves one layer, `least_recompute` a whole plan. The solver is HiGHS in scipy, an optional package.
"""

from gnomon.search.checkpointing.layer import Way, layer_ways
from gnomon.search.checkpointing.plan import Least, least_recompute

__all__ = ["Least", "Way", "layer_ways", "least_recompute"]
