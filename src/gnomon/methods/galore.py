"""GaLore: Adam's moments of gradients that are projected to a few dimensions, whose update is projected back.

This file says what the method is; its states are `sharding.matrices.extra_state_bytes`, its price
`prices.optimizer.optimizer_seconds`. Leaves out quantised projections (Q-GaLore).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method
from gnomon.plans import LowRank, Plan

REASON = "the runtime's update has no projections; LLaMA-Factory's and transformers' trainers train so"

ROWS = "the rows are those of the same step without it: only the update's price and the states differ"


def with_low_rank(plan: Plan, low_rank: LowRank) -> Iterator[Plan]:
    """The plan with projected gradients, where each rank has whole ones and Adam's moments on the device."""
    optimizer, mesh = plan.optimizer, plan.mesh
    whole = not plan.stages and mesh.tp == 1 and not (optimizer.zero and mesh.dp_shard * mesh.cp > 1)
    adam = optimizer.kind in ("adamw", "adam") and optimizer.low_rank is None and optimizer.offload is None
    if whole and adam and not optimizer.offload_parameters:
        yield replace(plan, optimizer=replace(optimizer, low_rank=low_rank))


METHOD = Method(
    name="galore",
    paper="GaLore, Zhao et al., ICML 2024",
    about="Adam's moments are of gradients projected to a few dimensions",
    switch="optimizer.low_rank",
    exactness="statistical",
    missing={"rewritten": ROWS, "run": REASON},
    on=lambda plan: plan.optimizer.low_rank is not None and plan.optimizer.low_rank.method == "galore",
    variants=lambda plan: with_low_rank(plan, LowRank(method="galore")),
)
