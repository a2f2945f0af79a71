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
    groups = []
    for part, counts in zip(layers, split_by_stage(plan.overlap.fused, list(map(len, layers)), "fused"), strict=True):
        ends = [0, *accumulate(counts)]
        groups.append(tuple(tuple(part[a:b]) for a, b in zip(ends, ends[1:], strict=False)))
    return tuple(groups)


def split_by_stage(counts: Sequence[int], stages: Sequence[int], field: str) -> tuple[tuple[int, ...], ...]:
    """Counts of neighbours, by stage. stages: how many each has. PlanError where some reach over two stages, or there
    are more or fewer."""
    by_stage, remaining = list[tuple[int, ...]](), list(counts)
    for size in stages:
        mine, total = list[int](), 0
        while remaining and total < size:
            total += remaining[0]
            mine.append(remaining.pop(0))
        if total != size:
            break
        by_stage.append(tuple(mine))
    if remaining or len(by_stage) != len(stages):
        raise PlanError(
            f"overlap.{field} = {list(counts)} does not divide stages of {list(stages)} layers (embedding and head "
            f"counted) as they are; let a number end where a stage does"
        )
    return tuple(by_stage)
