"""ZeRO: optimizer states, gradients and parameters divided over data-parallel ranks (stages 1, 2 and 3).

This file says what the method is; lowering makes its rows (`lowering.zero` and `lowering.fsdp`), and the exact search
has its stages as a field of every plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method
from gnomon.plans import Plan


def _variants(plan: Plan) -> Iterator[Plan]:
    if plan.optimizer.zero == 0 and plan.mesh.dp_shard * plan.mesh.cp > 1:
        for stage in (1, 2, 3):
            yield replace(plan, optimizer=replace(plan.optimizer, zero=stage))


METHOD = Method(
    name="zero",
    paper="DeepSpeed ZeRO, Rajbhandari et al., SC 2020",
    about="optimizer states, gradients and parameters divided over data-parallel ranks",
    switch="optimizer.zero",
    exactness="up to the order of sums",
    on=lambda plan: plan.optimizer.zero > 0,
    variants=_variants,
    searched=True,
)
