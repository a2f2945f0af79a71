"""Sizes of gradient buckets that cut the layers of one plan differently.

`bucket_sizes(graph, plan)` gives one size for each way, the small buckets first. A simulator that has a row for each
bucket then says which is fastest: small buckets start early, large ones pay a message's latency less often.
Source: Yi et al. 2022 (DisCo, TPDS), whose search merges neighbouring all-reduces. Left out: merging of operations, and
boundaries that no one size gives.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.lowering.gradient_buckets import gradient_buckets
from gnomon.plans import Plan, stage_layers

SMALLEST = 2**20
"""Bytes: below, the latency of a message is most of its time."""
LARGEST = 2**33


def bucket_sizes(graph: Graph, plan: Plan) -> tuple[int, ...]:
    """Sizes in bytes, doubled from 1 MiB on, each of which cuts the plan's layers differently than the one before, up
    to one bucket a stage. None where ranks share no gradients or the plan's rows do not go layer by layer."""
    if plan.mesh.data_ranks == 1:
        return ()
    layers, sizes, size = stage_layers(plan, graph), list[int](), SMALLEST
    known: tuple[tuple[int, ...], ...] = ()
    while size <= LARGEST:
        try:
            cut = gradient_buckets(graph, replace(plan, overlap=replace(plan.overlap, bucket_bytes=size)), layers)
        except PlanError:
            return ()
        if cut != known:
            sizes.append(size)
        known = cut
        size *= 2
    return tuple(sizes)
