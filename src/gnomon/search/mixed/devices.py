"""A space of plans over devices of several kinds, as the search sees it: what its candidates share.

`MixedDevices` bounds blocks, partial pipelines rank by rank, and points (`mixed.bounds`, always below every plan that
they lead to), predicts a point, and says what ends a search: no bound below the best plan, or `tries` predictions,
after which it says how much faster anything left could be. Leaves out the candidates (`candidates`) and the order in
which they are looked at (`best_first`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from gnomon.errors import PlanError, ProgramError
from gnomon.plans import Mesh, Workload
from gnomon.prediction import Prediction, predict
from gnomon.search.best_first import Ended, Search
from gnomon.search.budget import KeepGoing, always
from gnomon.search.mixed.bounds import SLACK, Doubles, LayerTables, Longs
from gnomon.search.mixed.pipelines import PipelineNode, Ranks
from gnomon.search.mixed.point_bounds import Bounds, PointRows
from gnomon.search.mixed.results import MixedFound, fits
from gnomon.search.mixed.rough_bounds import RoughBounds
from gnomon.search.mixed.space import MixedBlock, MixedPoint, MixedSpace, Shape
from gnomon.search.results import Counts, why_not
from gnomon.search.space.legal import broken_rule
from gnomon.software import Stack

TRIES = 300
"""Predictions of one search, unless the caller gives another number."""

MOST_NODES = 400_000
"""Partial pipelines that one search looks at, at most."""

DIVE = 200
"""Items that are opened after the budget, at most, to predict one plan of a space of which none was."""


@dataclass(frozen=True, kw_only=True)
class Large:
    """Shapes and blocks that are too large, of several searches for plans that fit."""

    known_too_large: frozenset[Shape | MixedBlock] = frozenset()
    """Shown too large at less work (longer sequences or a larger model take no less memory), so not looked at."""
    added: set[Shape | MixedBlock] = field(default_factory=set)
    """Shown too large by this search, which adds them."""


class MixedDevices:
    """A space over kinds whose bounds are seconds of a step."""

    prune = True
    most_nodes = MOST_NODES
    shapes_apart = False
    """Whether shapes are put in order before their blocks are."""

    def __init__(
        self,
        tables: LayerTables,
        workload: Workload,
        stack: Stack,
        space: MixedSpace,
        limits: tuple[int, ...],
        *,
        tries: int = TRIES,
        most_nodes: int | None = None,
        large: Large | None = None,
        keep_going: KeepGoing = always,
    ) -> None:
        """Takes the limits (bytes that a device of each kind may hold), most_nodes (partial pipelines that are looked
        at, at most), large (what need not be looked at) and keep_going (the budget)."""
        self.tables, self.workload, self.stack, self.space, self.limits = tables, workload, stack, space, limits
        self.tries, self.keep_going = tries, keep_going
        self.most_nodes = most_nodes or self.most_nodes
        self.large = large or Large()
        self.counts = Counts(space=space.size)
        self.nodes = 0
        """Partial pipelines that were looked at."""
        self.bounds = Bounds(tables, space, limits)
        self.clip = self.bounds.clip
        self.rough = RoughBounds(tables, space, clip=self.clip)
        self.ranks = Ranks(tables, space, self.bounds, limits)
        self._known: set[MixedPoint] = set()
        self._legal: dict[object, str] = {}

    # --- what ends a search

    def spent(self) -> Ended:
        """Says which limit is spent: predictions, partial pipelines or time; empty if none."""
        if self.counts.num_predicted >= self.tries:
            return "tries"
        if self.nodes >= self.most_nodes:
            return "nodes"
        return "" if self.keep_going() else "budget"

    def dives(self, search: Search[Any]) -> bool:
        """Never before the budget is spent: a plan on one kind of device bounds what is worth a look."""
        return False

    def last_resort(self, search: Search[Any]) -> None:
        """One plan of the space is predicted, however short the budget: always on from what is nearest to a plan, the
        least bound first. Candidates are not taken in the order of their bounds, so one that is too slow closes no
        other."""
        if search.ended == "budget" and not self.counts.num_predicted:
            steps = count()
            search.explore(lambda: not self.counts.num_predicted and next(steps) < DIVE, dive=True)

    # --- bounds

    def too_large(self, item: Shape | MixedBlock, points: int) -> None:
        """Counts what no device has room for."""
        self.large.added.add(item)
        self.counts.too_large += points

    def excludes(self, bound: float) -> bool:
        """Whether a bound by itself rules plans out as too large."""
        return False

    def order(self, bound: float, *, whole: bool) -> float:
        """Returns where a candidate stands among others, its bound less rounding. whole: its points are complete."""
        return bound * (1 - SLACK)

    def of_block(self, block: MixedBlock) -> float:
        """A bound on all points of a block."""
        return self.rough.of(block)

    def of_rest(self, node: PipelineNode, used: Any, ahead: Any, ranks: int) -> Any:
        """A bound on every pipeline that begins so: the ranks left take the other layers and the head through. used,
        ahead: of its first `ranks`, also arrays."""
        # At rates[ranks] layers a second the ranks left take the other layers through, side by side, behind `ahead`
        # seconds.
        pipe = node.pipe
        return (self.space.num_layers - used + pipe.head_layers) / pipe.rates[node.split][ranks] + ahead

    def of_ranks(self, node: PipelineNode, seconds: Any) -> Any:
        """The largest bound of a node's ranks and the next."""
        return np.maximum(node.most, seconds)

    def completed(self, block: MixedBlock, variants: Sequence[tuple[int, str]], layers: Longs, shares: Longs,
                  worst: float) -> Iterator[PointRows]:  # fmt: skip
        """Points of several variants by their first bounds, the least first, without those that are too slow or too
        large. layers: [points, stages]."""
        rows = PointRows(block, variants[0], layers, shares, np.zeros(len(layers)), False)
        # First the cheap bound on time for all variants, then memory only for points that are still fast enough.
        for variant, bounds in zip(variants, self.bounds.bounds(rows, variants, played=False), strict=True):
            able = np.flatnonzero(bounds * (1 - SLACK) < worst)
            self.counts.too_slow += len(bounds) - len(able)
            if len(able):
                mine = replace(rows, variant=variant).part(able, bounds)
                fits = self.fitting(self.bounds.ratio(mine))
                if len(fits):
                    yield mine.part(fits[np.argsort(mine.bounds[fits], kind="stable")])

    def fitting(self, ratios: Doubles) -> Longs:
        """Indices of points that may fit; the others are counted. ratios: shares of its device that the fullest rank
        holds at least."""
        able = np.flatnonzero(ratios <= 1)
        self.counts.too_large += len(ratios) - len(able)
        return able

    def played(self, part: PointRows) -> PointRows:
        """Points with better bounds, the least first, without those that are too large by a better one."""
        pipelined = part.block.shape.pp > 1
        # Memory by the played schedule first: it drops points before their time is played.
        if pipelined:
            part = part.part(self.fitting(self.bounds.ratio(part, played=True)))
        bounds = part.bounds
        # A play is a lower bound only where all ranks meet (clip) and stages form a chain that waits link by link.
        if len(bounds) and self.clip and pipelined and self.tables.chain:
            bounds = np.maximum(bounds, self.bounds.bounds(part, [part.variant], played=True)[0])
        return part.part(np.argsort(bounds, kind="stable"), bounds, played=True)

    # --- what runs, and what the simulator says

    def illegal(self, shape: Shape, blocks: Sequence[MixedBlock]) -> dict[MixedBlock, str]:
        """What the model says against each block of a shape; empty if nothing."""
        # What runs depends on axes of a worker and the layout alone, not on kinds' order, microbatches or
        # recomputation.
        axes = dict.fromkeys(zip(shape.tp, shape.ep, strict=True))
        why: dict[object, str] = {}
        for block in blocks:
            layout = block.sequence_parallel, block.context
            if layout not in why:
                why[layout] = next((w for tp, ep in axes if (w := self._why_not(tp, ep, block))), "")
        return {block: why[block.sequence_parallel, block.context] for block in blocks}

    def _why_not(self, tp: int, ep: int, block: MixedBlock) -> str:
        """What the model says against dividing it so; empty if nothing."""
        cp, sequence = block.shape.cp, block.sequence_parallel
        key = tp, cp, ep, sequence, block.context
        if key not in self._legal:
            base, mesh = self.space.base, Mesh(tp=tp, cp=cp, ep=ep, dp_shard=ep)
            layout = replace(base.layout, sequence_parallel=sequence, context=block.context)
            broken = broken_rule(self.tables.graph, base, self.workload, mesh, layout)
            self._legal[key] = broken.message if broken else ""
        return self._legal[key]

    def know(self, plans: Iterable[MixedFound]) -> None:
        """Plans that are among the best already, and are not predicted again."""
        self._known.update(candidate.point for candidate in plans if candidate.point is not None)

    def price(self, point: MixedPoint, search: Search[MixedFound]) -> None:
        """What the simulator says; kept where it fits."""
        if point in self._known:
            # Counted as priced so that `tries` means the same whether earlier searches helped or not.
            self.counts.num_predicted += 1
            return
        prediction = self.predicted(point)
        if isinstance(prediction, str):
            self.counts.reject(prediction, 1)
            return
        self.counts.num_predicted += 1
        if fits(prediction, self.space.kinds, self.limits):
            search.shortlist.add(
                MixedFound(
                    point=point, plan=prediction.plan, prediction=prediction, kinds=tuple(sorted(set(point.kinds)))
                )
            )

    def predicted(self, point: MixedPoint) -> Prediction | str:
        """A point's prediction, made once for all searches of this work; why it cannot run."""
        known = self.tables.predicted
        if point not in known:
            plan = self.space.plan(point)
            try:
                known[point] = predict(self.tables.graph, self.tables.cluster, plan, self.workload, self.stack)
            except (PlanError, ProgramError) as error:
                known[point] = why_not(error)
        return known[point]
