"""A plan with its layers cut into stages otherwise, or others of them recomputed, as a Plan.

`Recut(plan, graph).plan_of(counts, presets)` writes numbers of layers as `layers_per_stage`, and presets as the fewest
rules that say them. Leaves out what such a plan takes (`repredict`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gnomon.graph import Graph, Layer
from gnomon.plans import Plan, Saved, SavedRule
from gnomon.plans.parts import Preset
from gnomon.plans.select import format_layers

Presets = tuple[tuple[Preset, ...], ...]
"""Recompute preset of each repeated layer, stage by stage."""

LESS_KEPT: tuple[Preset, ...] = ("none", "selective", "full")
"""Presets, from what keeps most to what keeps least."""


class Recut:
    """Plans that differ from one in layers_per_stage and in which layers are recomputed."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.num_stages = plan, plan.num_stages
        self.layers = graph.layers()
        repeated = [i for i, layer in enumerate(self.layers) if layer.call.first is not None]
        self.counted = tuple(repeated or range(len(self.layers)))
        """Positions in the graph of the layers that stages are counted in."""

    def bounds(self, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """First and one past the last position in the graph of each stage's layers."""
        ends = np.cumsum((0, *counts)).tolist()
        # One place more, for a stage that ends after the last counted layer.
        places = [*self.counted, self.counted[-1] + 1]
        for stage, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
            last = stage == len(counts) - 1
            yield (0 if stage == 0 else places[a]), (len(self.layers) if last else places[b])

    def plain(self, counts: Sequence[int], preset: Preset = "none") -> Presets:
        """One preset for every layer."""
        return tuple((preset,) * count for count in counts)

    def plan_of(self, counts: Sequence[int], presets: Presets) -> Plan:
        """The plan, its presets as rules by stage."""
        schedule = self.plan.schedule
        if self.num_stages > 1:
            schedule = replace(schedule, layers_per_stage=tuple(counts))
        return replace(self.plan, schedule=schedule, saved=self._saved(counts, presets))

    def _saved(self, counts: Sequence[int], presets: Presets) -> Saved:
        """Writes presets as rules: one for all, then for each run of others in a stage a rule; as few as there can
        be."""
        return min((self._saved_on(base, counts, presets) for base in LESS_KEPT), key=lambda saved: len(saved.rules))

    def _saved_on(self, base: Preset, counts: Sequence[int], presets: Presets) -> Saved:
        rules: dict[tuple[Preset, str, int | None], list[int]] = {}
        done = 0
        for stage, (count, mine) in enumerate(zip(counts, presets, strict=True)):
            if set(mine) - {base}:
                layers = [self.layers[i] for i in self.counted[done : done + count]]
                for preset, calls, first in _runs(base, mine, layers):
                    rules.setdefault((preset, calls, first), []).append(stage)
            done += count
        # A rule with a preset undoes those before it. So what keeps less, for the first layers of a stage, comes last.
        saved_rules = tuple(
            SavedRule(calls=calls, stages=tuple(stages) if self.num_stages > 1 else (), first_per_stage=n, preset=p)
            for (p, calls, n), stages in sorted(rules.items(), key=lambda item: LESS_KEPT.index(item[0][0]))
        )
        return Saved(preset=base, rules=saved_rules)


def _runs(base: Preset, presets: Sequence[Preset], layers: Sequence[Layer]) -> Iterator[tuple[Preset, str, int | None]]:
    """(preset, selector, first layers or None for all of them) of rules that give a stage's layers their presets."""
    if len(set(presets)) == 1:
        yield presets[0], "*", None
        return
    order = list(dict.fromkeys(presets))
    if list(presets) == sorted(presets, key=order.index) and order == sorted(
        order, key=LESS_KEPT.index, reverse=True
    ):  # each preset once, one after the other: count from the front
        if order[-1] != base:
            yield order[-1], "*", None
        for preset in reversed(order[:-1]):
            yield preset, "*", sum(order.index(other) <= order.index(preset) for other in presets)
        return
    for preset in order:
        if preset != base:
            chosen = [layer for layer, other in zip(layers, presets, strict=True) if other == preset]
            yield from ((preset, calls, None) for calls in format_layers(chosen))
