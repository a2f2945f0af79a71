"""Whether any plan over heterogeneous devices fits: the search for the fastest one, in order of memory, not of time.

`FirstFit` prices the points that hold least on their fullest rank first, and ends with the first one that fits. It has
shown that none fits when it ends without one and `left` nothing. `roomiest` is a plan on devices of one kind that
leaves much room: it most likely fits more work too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gnomon.errors import PlanError, ProgramError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Workload
from gnomon.prediction import predict
from gnomon.search.exact.solve import Search
from gnomon.search.mixed.bounds import Longs
from gnomon.search.mixed.pipelines import Node
from gnomon.search.mixed.point_bounds import Rows
from gnomon.search.mixed.search import PLAYED, Item, MixedSearch, Shaped
from gnomon.search.mixed.space import MixedBlock
from gnomon.search.results import Found
from gnomon.search.space.points import Point, Space
from gnomon.software import Stack

FIT_TRIES = 24
"""Predictions after which it gives up."""

SPARE = 0.9
"""Share of its device that the fullest rank holds, at least, up to which a point most likely fits."""

FIT_NODES = 3000
"""Partial pipelines that it looks at."""

ROOMY = 12
"""Plans on one kind that are predicted to find one with much room."""


class FirstFit(MixedSearch):
    """Bounds are shares of what devices may hold."""

    most_nodes = FIT_NODES

    def worst(self) -> float:
        """Nothing is looked at beyond the first plan that fits."""
        return -float("inf") if self.best else float("inf")

    def _push(self, bound: float, item: Item) -> None:
        if bound > 1:
            self.counts.too_large += self._points(item)
        else:  # points with room to spare before anything else: one of them will do
            super()._push(bound - 2 if isinstance(item, Rows) and bound < SPARE else bound, item)

    def _may_fit(self, shaped: Shaped, ratio: float) -> None:
        self._push(ratio, shaped)

    def _rough(self, block: MixedBlock) -> float:
        return self.rows.least_ratio(block)

    def _level(self, node: Node, used: Any, ahead: Any, ranks: int) -> Any:
        return self.rows.least_ratio(node.pipe.block)

    def _most(self, node: Node, seconds: Any) -> Any:
        return 0.0

    def _complete(self, block: MixedBlock, variants: Sequence[tuple[int, str]], layers: Longs, shares: Longs) -> None:
        for variant in variants:
            made = Rows(block, variant, layers, shares, np.zeros(len(layers)), False)
            self._push_sorted(made, self.rows.ratio(made))

    def _play(self, item: Rows) -> None:
        part = item.part(slice(0, PLAYED))
        if len(item.bounds) > PLAYED:
            self._push_rows(item.part(slice(PLAYED, None)))
        bounds = part.bounds
        if item.block.shape.pp > 1:
            bounds = np.maximum(bounds, self.rows.ratio(part, played=True))
        self._push_sorted(replace(part, played=True), bounds)

    def _push_sorted(self, item: Rows, ratios: Any) -> None:
        """Those that may fit, the least first."""
        fits = np.flatnonzero(ratios <= 1)
        self.counts.too_large += len(ratios) - len(fits)
        if len(fits):
            self._push_rows(item.part(fits[np.argsort(ratios[fits], kind="stable")], ratios))


def roomiest(
    graph: Graph, cluster: Cluster, workload: Workload, space: Space, stack: Stack, limit_bytes: int
) -> Found | None:
    """Of a space of plans on one kind of device, that which fits and holds the least by a bound; None if of the first
    ROOMY meshes none fits."""
    search = Search(graph, cluster, workload, space, stack, Goal(memory_bytes=limit_bytes))
    able: list[tuple[float, Point]] = []
    for _, family in search.blocks.families():
        for schedule, virtual, columns in search.blocks.legality.scheduled(family.pp, family.dp).rows:
            held = search.blocks.memory.held(family, schedule, virtual)
            for column in columns:
                block = search.opening.block(family, schedule, virtual, column)
                least = int(np.argmin(held[:, column]))
                able += [(float(held[least, column]), point) for point in search.opening.points(block, [least])]
    meshes: set[object] = set()
    for held_bytes, point in sorted(able):
        if held_bytes > limit_bytes or len(meshes) == ROOMY:
            break
        mesh = point.tp, point.cp, point.ep, point.pp
        if mesh in meshes:
            continue
        meshes.add(mesh)
        try:
            prediction = predict(graph, cluster, space.plan(point), workload, stack)
        except (PlanError, ProgramError):
            continue
        if all(rank.peak_bytes <= limit_bytes for rank in prediction.memory):
            return Found(point=point, plan=prediction.plan, prediction=prediction)
    return None
