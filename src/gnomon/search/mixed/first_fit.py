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
from gnomon.prediction import fits_within, predict
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
"""Predictions after which the search for a first fit gives up."""

SPARE = 0.9
"""A lower bound on the share of its device that the fullest rank fills, up to which a point most likely fits."""

FIT_NODES = 3000
"""Partial pipelines that the search looks at."""

ROOMY = 12
"""Meshes on one kind of device of which a plan is predicted, to find one with much room."""


class RoomyFirst(MixedDevices):
    """The space of `MixedDevices` ordered by memory: its bounds are the share of its device that the fullest rank fills
    at least (1: all that it may hold), where those of its parent are seconds."""

    most_nodes = FIT_NODES
    shapes_apart = True

    def excludes(self, bound: float) -> bool:
        """Whether no point under the bound fits: a rank would hold more than all of its device."""
        return bound > 1

    def order(self, bound: float, *, whole: bool) -> float:
        """Points with room to spare before anything else: one of them will do."""
        # Bounds that are not excluded lie in 0 … 1, so such a point less 2 precedes all others.
        return super().order(bound - 2 if whole and bound < SPARE else bound, whole=whole)

    def of_block(self, block: MixedBlock) -> float:
        """The share of its device that the fullest rank holds at least."""
        return self.bounds.least_ratio(block)

    def of_rest(self, node: PipelineNode, used: Any, ahead: Any, ranks: int) -> Any:
        """Bounds what is left of a partial pipeline by its whole block: memory is no sum over ranks."""
        return self.bounds.least_ratio(node.pipe.block)

    def of_ranks(self, node: PipelineNode, seconds: Any) -> Any:
        """No bound of single ranks: 0."""
        return 0.0

    def completed(self, block: MixedBlock, variants: Sequence[tuple[int, str]], layers: Longs, shares: Longs,
                  worst: float) -> Iterator[PointRows]:  # fmt: skip
        """Yields the points of each variant (ZeRO stage, schedule) that may fit, the roomiest first. layers, shares:
        a row for each point."""
        for variant in variants:
            rows = PointRows(block, variant, layers, shares, np.zeros(len(layers)), False)
            yield from self._sorted(rows, self.bounds.ratio(rows))

    def played(self, part: PointRows) -> PointRows:
        """The same points by better bounds, of a schedule that is played; without those that these exclude."""
        ratios = part.bounds
        if part.block.shape.pp > 1:
            ratios = np.maximum(ratios, self.bounds.ratio(part, played=True))
        none = part.part(slice(0, 0), played=True)
        return next(self._sorted(replace(part, played=True), ratios), none)

    def _sorted(self, rows: PointRows, ratios: Doubles) -> Iterator[PointRows]:
        """Yields the rows that may fit in one block, the least ratio first; nothing where none may."""
        able = self.fitting(ratios)
        if len(able):
            yield rows.part(able[np.argsort(ratios[able], kind="stable")], ratios)


def first_fit(devices: RoomyFirst) -> Search[MixedFound]:
    """Runs the search until a plan fits, none is left, or a limit is met; returns it as it ended."""
    search = Search(devices, First[MixedFound](1))
    search.run(roots(devices))
    return search


def roomiest(
    graph: Graph, cluster: Cluster, workload: Workload, space: Space, stack: Stack, limit_bytes: int
) -> FoundPlan | None:
    """Finds a plan on devices of one kind that fits `limit_bytes` on every rank: predicts the point of each mesh that
    holds least by a bound, the roomiest mesh first; None if none of the first ROOMY meshes fits."""
    devices = EqualDevices(graph, cluster, workload, space, stack, Goal(memory_bytes=limit_bytes))
    able: list[tuple[float, Point]] = []  # (bytes that the fullest rank holds at least, the point)
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
        # In order of memory, the first point of a mesh is its roomiest.
        mesh = point.tp, point.cp, point.ep, point.pp
        if mesh in meshes:
            continue
        meshes.add(mesh)
        try:
            prediction = predict(graph, cluster, space.plan(point), workload, stack)
        except (PlanError, ProgramError):
            continue
        if fits_within(prediction, limit_bytes):
            return FoundPlan(point=point, plan=prediction.plan, prediction=prediction)
    return None
