"""Layers that one action computes, where a Program goes finer than a stage.

`layer_groups(plan, layers)` divides the layers of each stage: one by one, or as `overlap.fused` says. Leaves out when a
Program goes so fine, and which groups share a gradient bucket: both are `lowering`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gnomon.errors import PlanError
from gnomon.graph import Layer
from gnomon.plans.plan import Plan

Groups = tuple[tuple[tuple[Layer, ...], ...], ...]
"""[stages][groups] layers."""


def layer_groups(plan: Plan, layers: Sequence[Sequence[Layer]]) -> Groups:
    """Groups of neighbouring layers of each stage. layers: of each stage, in order. PlanError for groups that do not
    fit the stages."""
    if not plan.overlap.fused:
        return tuple(tuple((layer,) for layer in part) for part in layers)
    made = []
    for part, counts in zip(layers, split_by_stage(plan.overlap.fused, list(map(len, layers)), "fused"), strict=True):
        ends = [0, *accumulate(counts)]
        made.append(tuple(tuple(part[a:b]) for a, b in zip(ends, ends[1:], strict=False)))
    return tuple(made)


def split_by_stage(counts: Sequence[int], stages: Sequence[int], field: str) -> tuple[tuple[int, ...], ...]:
    """Counts of neighbours, by stage. stages: how many each has. PlanError where some reach over two stages, or there
    are more or fewer."""
    made, left = list[tuple[int, ...]](), list(counts)
    for size in stages:
        mine, total = list[int](), 0
        while left and total < size:
            total += left[0]
            mine.append(left.pop(0))
        if total != size:
            break
        made.append(tuple(mine))
    if left or len(made) != len(stages):
        raise PlanError(
            f"overlap.{field} = {list(counts)} does not divide stages of {list(stages)} layers (embedding and head "
            f"counted) as they are; let a number end where a stage does"
        )
    return tuple(made)
