"""Whether any plan over heterogeneous devices fits: the search for the fastest one, in order of memory, not of time.

`first_fit` prices the points that hold least on their fullest rank first (`RoomyFirst`), and ends with the first one
that fits. It has shown that none fits when it ends without one and `left` nothing. `roomiest` is a plan on devices of
one kind that leaves much room: it most likely fits more work too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gnomon.errors import PlanError, ProgramError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Workload
from gnomon.prediction import predict
from gnomon.search.best_first import Search
from gnomon.search.equal.devices import EqualDevices
from gnomon.search.mixed.bounds import Doubles, Longs
from gnomon.search.mixed.candidates import roots
from gnomon.search.mixed.devices import MixedDevices
from gnomon.search.mixed.pipelines import PipelineNode
from gnomon.search.mixed.point_bounds import PointRows
from gnomon.search.mixed.results import MixedFound
from gnomon.search.mixed.space import MixedBlock
from gnomon.search.results import FoundPlan
from gnomon.search.shortlist import First
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


class RoomyFirst(MixedDevices):
    """Bounds are shares of what devices may hold."""

    most_nodes = FIT_NODES
    shapes_apart = True

    def excludes(self, bound: float) -> bool:
        """More than all of a device."""
        return bound > 1

    def order(self, bound: float, *, whole: bool) -> float:
        """Points with room to spare before anything else: one of them will do."""
        return super().order(bound - 2 if whole and bound < SPARE else bound, whole=whole)

    def of_block(self, block: MixedBlock) -> float:
        """The share of its device that the fullest rank holds at least."""
        return self.bounds.least_ratio(block)

    def of_rest(self, node: PipelineNode, used: Any, ahead: Any, ranks: int) -> Any:
        """Bounds what is left of a pipeline by its block."""
        return self.bounds.least_ratio(node.pipe.block)

    def of_ranks(self, node: PipelineNode, seconds: Any) -> Any:
        """Nothing is known of single ranks."""
        return 0.0

    def completed(self, block: MixedBlock, variants: Sequence[tuple[int, str]], layers: Longs, shares: Longs,
                  worst: float) -> Iterator[PointRows]:  # fmt: skip
        """Points of several variants, the roomiest first."""
        for variant in variants:
            rows = PointRows(block, variant, layers, shares, np.zeros(len(layers)), False)
            yield from self._sorted(rows, self.bounds.ratio(rows))

    def played(self, part: PointRows) -> PointRows:
        """The same by better bounds."""
        ratios = part.bounds
        if part.block.shape.pp > 1:
            ratios = np.maximum(ratios, self.bounds.ratio(part, played=True))
        return next(self._sorted(replace(part, played=True), ratios), part.part(slice(0, 0), played=True))

    def _sorted(self, rows: PointRows, ratios: Doubles) -> Iterator[PointRows]:
        """Those that may fit, the least first, if there are any."""
        able = self.fitting(ratios)
        if len(able):
            yield rows.part(able[np.argsort(ratios[able], kind="stable")], ratios)


def first_fit(devices: RoomyFirst) -> Search[MixedFound]:
    """The search for the first plan that fits, ended."""
    search = Search(devices, First[MixedFound](1))
    search.run(roots(devices))
    return search


def roomiest(
    graph: Graph, cluster: Cluster, workload: Workload, space: Space, stack: Stack, limit_bytes: int
) -> FoundPlan | None:
    """Finds in a space of plans on one kind of device the plan that fits and holds the least by a bound; None if of the
    first ROOMY meshes none fits."""
    devices = EqualDevices(graph, cluster, workload, space, stack, Goal(memory_bytes=limit_bytes))
    able: list[tuple[float, Point]] = []
    for _, family in devices.blocks.families():
        for schedule, virtual, columns in devices.blocks.legality.scheduled(family.pp, family.dp).rows:
            peak_bytes = devices.blocks.memory.held_bytes(family, schedule, virtual)
            for column in columns:
                block = devices.opening.block(family, schedule, virtual, column)
                least = int(np.argmin(peak_bytes[:, column]))
                able += [(float(peak_bytes[least, column]), point) for point in devices.opening.points(block, [least])]
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
            return FoundPlan(point=point, plan=prediction.plan, prediction=prediction)
    return None
