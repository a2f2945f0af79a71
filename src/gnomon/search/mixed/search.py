"""The search over plans of mixed devices, which ends when nothing left can be faster.

`MixedSearch` looks at blocks, then at partial pipelines rank by rank, then at points, each with a bound below every
plan that it leads to (`mixed.bounds`); a point's value is that of `predict`. It ends when no bound is below the best
plan, or after `tries` predictions, and then says how much faster anything left could be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any, Literal

import numpy as np

from gnomon.errors import PlanError, ProgramError
from gnomon.plans import Mesh, Workload
from gnomon.prediction import Prediction, predict
from gnomon.search.best_first import Frontier
from gnomon.search.budget import KeepGoing, always
from gnomon.search.mixed.bounds import (
    SLACK,
    LayerTables,
    Longs,
)
from gnomon.search.mixed.pipelines import Node, Pipe, Ranks
from gnomon.search.mixed.point_bounds import Bounds, Rows
from gnomon.search.mixed.results import MixedFound, fits
from gnomon.search.mixed.rough_bounds import RoughBounds
from gnomon.search.mixed.space import (
    MixedBlock,
    MixedPoint,
    MixedSpace,
    Shape,
    divisions,
    equal_layers,
    layers_of_stages,
    point_of,
    shares_of,
)
from gnomon.search.results import Counts, why_not
from gnomon.search.space.legal import broken_rule
from gnomon.software import Stack

TRIES = 300
"""Predictions of one search, unless more are asked for."""

MOST_NODES = 400_000
"""Partial pipelines that one search looks at."""

PLAYED = 256
"""Points of a block whose schedule is played at once."""

DIVE = 200
"""Items that are opened after the budget, at most, to predict one plan of a space of which none was."""

Ended = Literal["", "tries", "nodes", "budget"]
"""What ended a search before its bounds did; empty where nothing did."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """Blocks of one shape, not looked at yet."""

    shape: Shape
    blocks: tuple[MixedBlock, ...]
    legal: bool = True
    """They are known to run, and one may fit."""


Item = Shaped | MixedBlock | Node | Rows


@dataclass(frozen=True, kw_only=True)
class Large:
    """Shapes and blocks that are too large, of several searches for plans that fit."""

    known: frozenset[Shape | MixedBlock] = frozenset()
    """Shown so at less work, longer sequences or a larger model taking no less memory: not looked at."""
    added: set[Shape | MixedBlock] = field(default_factory=set)
    """Shown so by this search, which adds them."""


class MixedSearch:
    """One search under way."""

    most_nodes = MOST_NODES

    def __init__(
        self,
        tables: LayerTables,
        workload: Workload,
        stack: Stack,
        space: MixedSpace,
        limits: tuple[int, ...],
        *,
        top: int = 1,
        tries: int = TRIES,
        known: Iterable[MixedFound] = (),
        on_progress: Callable[[int], None] | None = None,
        most_nodes: int | None = None,
        large: Large | None = None,
        keep_going: KeepGoing = always,
    ) -> None:
        """limits: bytes that a device of each kind may hold. known: plans that were predicted already. most_nodes:
        partial pipelines that are looked at, at most. large: what need not be looked at. keep_going: the budget."""
        self.tables, self.workload, self.stack, self.space, self.limits = tables, workload, stack, space, limits
        self.top, self.tries, self.on_progress, self.keep_going = top, tries, on_progress, keep_going
        self.most_nodes = most_nodes or self.most_nodes
        self.known = {candidate.point: candidate for candidate in known if candidate.point is not None}
        self.best = sorted(known, key=lambda candidate: candidate.step_s)[:top]
        self.large = large or Large()
        self.counts = Counts(space=space.size)
        self.bound_s = float("inf")
        self.ended: Ended = ""
        self.frontier: Frontier[Item] = Frontier(self._points, self.counts)
        self._nodes = 0
        self.rows = Bounds(tables, space, limits)
        self.clip = self.rows.clip
        self.rough = RoughBounds(tables, space, clip=self.clip)
        self.ranks = Ranks(tables, space, self.rows, limits)
        self._legal: dict[object, str] = {}

    def run(self) -> None:
        """Best first, until nothing that is left can be better, or the tries are used up, or it is stopped."""
        for shape, blocks in self.space.by_shape:
            if self.keep_going():
                self._begin(shape, blocks)
            else:  # nothing is known of its plans: neither that they run nor how long they take
                self.frontier.push(0.0, Shaped(shape, tuple(blocks), legal=False))
        self.frontier.explore(self._expand, self.worst, self._more)
        if self.frontier and self.ended == "budget" and not self.counts.priced:
            self._dive()
        self.bound_s = self.frontier.leave(self.worst())
        self.ended = self.ended if self.counts.left else ""
        assert self.counts.covered == self.counts.space, (self.counts, "points must add up")

    def _more(self) -> bool:
        """Whether another item may be looked at."""
        if self.counts.priced >= self.tries:
            self.ended = "tries"
        elif self._nodes >= self.most_nodes:
            self.ended = "nodes"
        elif not self.keep_going():
            self.ended = "budget"
        return not self.ended

    def _dive(self) -> None:
        """One plan of the space is predicted, however short the budget: always on from what is nearest to a plan, the
        least bound first. Items are not taken in the order of their bounds, so one that is too slow closes no other."""
        steps = count()

        def expand(item: Item, bound: float) -> None:
            if bound >= self.worst():
                self.counts.too_slow += self._points(item)
            else:
                self._expand(item, bound)

        self.frontier.explore(
            expand,
            lambda: float("inf"),
            lambda: not self.counts.priced and next(steps) < DIVE,
            lambda: self.frontier.pop_by(lambda item: (-_depth(item),)),
        )

    def _expand(self, item: Item, _: float) -> None:
        """The smaller items of an item, with bounds; of a point, its prediction."""
        if isinstance(item, Shaped):
            self._spread(item) if item.legal else self._begin(item.shape, item.blocks)
        elif isinstance(item, MixedBlock):
            self._open(item)
        elif isinstance(item, Node):
            self._extend(item)
        elif item.played:
            self._next(item)
        else:
            self._play(item)
        if self.on_progress is not None:
            self.on_progress(self.counts.covered)

    def _begin(self, shape: Shape, blocks: Sequence[MixedBlock]) -> None:
        """Those blocks of a shape that may run, if any may fit."""
        axes = dict.fromkeys(zip(shape.tp, shape.ep, strict=True))
        why = {(block.sequence_parallel, block.context): "" for block in blocks}
        for layout in why:
            one = next(block for block in blocks if (block.sequence_parallel, block.context) == layout)
            why[layout] = next((w for tp, ep in axes if (w := self._why_not(tp, ep, one))), "")
        legal = [block for block in blocks if not why[block.sequence_parallel, block.context]]
        for block in blocks if len(legal) < len(blocks) else ():
            if wrong := why[block.sequence_parallel, block.context]:
                self.counts.reject(wrong, self._points(block))
        if not legal:
            return
        ratio, shaped = self.rows.roomiest_ratio(shape, legal), Shaped(shape, tuple(legal))
        if shape in self.large.known or ratio > 1:
            self._too_large(shape, self._points(shaped))
        else:
            self._may_fit(shaped, ratio)

    def _may_fit(self, shaped: Shaped, ratio: float) -> None:
        """Blocks of a shape that may fit. ratio: the share of its device that the fullest rank holds at least."""
        self._spread(shaped)

    def _spread(self, shaped: Shaped) -> None:
        """The blocks of a shape that may fit, with bounds."""
        for block in shaped.blocks:
            if block in self.large.known or self.rows.least_ratio(block) > 1:
                self._too_large(block, self._points(block))
            else:
                self._push(self._rough(block), block)

    def _too_large(self, item: Shape | MixedBlock, points: int) -> None:
        self.large.added.add(item)
        self.counts.too_large += points

    def worst(self) -> float:
        """What a plan must be faster than: only the best one is looked for, the next are those met on the way."""
        return self.best[0].step_s if self.best else float("inf")

    def _push(self, bound: float, item: Item) -> None:
        """Later, unless it is too slow already. Bounds of children are not below their parents'."""
        if bound * (1 - SLACK) >= self.worst():
            self.counts.too_slow += self._points(item)
        else:
            self.frontier.push(bound * (1 - SLACK), item)

    def _points(self, item: Item) -> int:
        if isinstance(item, MixedBlock):
            return self.space.count(item)
        if isinstance(item, Shaped):
            return sum(map(self.space.count, item.blocks))
        if isinstance(item, Rows):
            return len(item.bounds)
        return _completions(self.space, item) * len(item.variants)

    # --- blocks

    def _rough(self, block: MixedBlock) -> float:
        """A bound on all points of a block."""
        return self.rough.of(block)

    def _open(self, block: MixedBlock) -> None:
        """The block's points or first nodes, with bounds."""
        if block.shape.form == "replicas":
            self._open_replicas(block)
        else:
            pipe, every = Pipe(self.rough, self.rows, block), self.space.variants(block.shape, block.microbatches)
            members = self.space.members(block.shape, block.microbatches)
            self.counts.too_large += members * (len(every) - len(pipe.variants))
            if not pipe.variants:
                self.large.added.add(block)
            for split in (False, True):
                node = Node(pipe, split, (), 0, 0.0, 0.0)
                if node.variants:
                    self._push(float(self._level(node, 0, 0.0, 0)), node)

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

    # --- points of a block together

    def _play(self, item: Rows) -> None:
        """The points with the least bounds, with better ones; the rest later."""
        part = item.part(slice(0, PLAYED))
        if len(item.bounds) > PLAYED:
            self._push_rows(item.part(slice(PLAYED, None)))
        if item.block.shape.pp > 1:
            fits = np.flatnonzero(self.rows.ratio(part, played=True) <= 1)
            self.counts.too_large += len(part.bounds) - len(fits)
            part = part.part(fits)
        bounds = part.bounds
        if len(bounds) and self.clip and item.block.shape.pp > 1 and self.tables.chain:
            bounds = np.maximum(bounds, self.rows.bounds(part, [item.variant], played=True)[0])
        self._push_rows(part.part(np.argsort(bounds, kind="stable"), bounds, played=True))

    def _push_rows(self, item: Rows) -> None:
        """Later; those that are too slow already are counted."""
        able = int(np.searchsorted(item.bounds * (1 - SLACK), self.worst()))
        self.counts.too_slow += len(item.bounds) - able
        if able:
            self._push(float(item.bounds[0]), item.part(slice(0, able)))

    def _next(self, item: Rows) -> None:
        """The point with the least bound; the rest later."""
        layers, shares = tuple(item.layers[0].tolist()), tuple(item.shares[0].tolist())
        self._price(point_of(item.block, layers, shares, *item.variant))
        if len(item.bounds) > 1:
            self._push_rows(item.part(slice(1, None)))

    def _complete(self, block: MixedBlock, variants: Sequence[tuple[int, str]], layers: Longs, shares: Longs) -> None:
        """Points of several variants, by their first bounds. layers: [points, stages]."""
        made = Rows(block, variants[0], layers, shares, np.zeros(len(layers)), False)
        for variant, bounds in zip(variants, self.rows.bounds(made, variants, played=False), strict=True):
            able = np.flatnonzero(bounds * (1 - SLACK) < self.worst())
            self.counts.too_slow += len(bounds) - len(able)
            if len(able):
                mine = replace(made, variant=variant).part(able, bounds)
                fits = np.flatnonzero(self.rows.ratio(mine) <= 1)
                self.counts.too_large += len(able) - len(fits)
                if len(fits):
                    self._push_rows(mine.part(fits[np.argsort(mine.bounds[fits], kind="stable")]))

    def _open_replicas(self, block: MixedBlock) -> None:
        """Every way to share a microbatch: a step is as long as that of the worker that takes longest."""
        shape, space = block.shape, self.space
        shares = _shares_array(space.global_batch // block.microbatches, space.workers(shape), space.equal)
        layers = np.array(equal_layers(space.num_layers, shape.pp * shape.virtual))
        every = np.broadcast_to(layers, (len(shares), len(layers)))
        self._complete(block, space.variants(shape, block.microbatches), every, shares)

    # --- pipelines over kinds

    def _level(self, node: Node, used: Any, ahead: Any, ranks: int) -> Any:
        """A bound on every pipeline that begins so: the ranks left take the other layers and the head through. used,
        ahead: of its first `ranks`, also arrays."""
        pipe = node.pipe
        return (self.space.num_layers - used + pipe.head_layers) / pipe.rates[node.split][ranks] + ahead

    def _most(self, node: Node, seconds: Any) -> Any:
        """The largest bound of a node's ranks and the next."""
        return np.maximum(node.most, seconds)

    def _extend(self, node: Node) -> None:
        """One rank more, with every number of layers; at the last but one, whole pipelines."""
        self._nodes += 1
        pipe, rank = node.pipe, len(node.layers)
        shape, virtual = pipe.shape, pipe.virtual
        if self.space.equal:
            stages = np.array([equal_layers(self.space.num_layers, shape.pp * virtual)])
            self._whole(node, stages)
            return
        rest, after = self.space.num_layers - node.used, shape.pp - rank - 1
        choices = np.arange(virtual, rest - virtual * after + 1)
        if after == 1:
            columns = [np.full(len(choices), n) for n in node.layers]
            self._whole(node, layers_of_stages([*columns, choices, rest - choices], virtual, shape.turned))
            return
        forward, back, first = self.ranks.seconds(node, choices)
        step = first[0] + (0.0 if node.split else first[1]) if self.clip else 0.0 * choices
        ahead, used = node.ahead + step, node.used + choices
        most = self._most(node, node.ahead + pipe.count * (forward + back))
        bounds = np.maximum(most, self._level(node, used, ahead, rank + 1)) + 0.0 * choices
        able = self.ranks.may_begin(node, choices)
        for i, layers in enumerate(choices.tolist()):
            own = float(most[i]) if np.ndim(most) else 0.0
            child = Node(pipe, node.split, (*node.layers, layers), int(used[i]), float(ahead[i]), own)
            if able[i]:
                self._push(float(bounds[i]), child)
            else:
                self.counts.too_large += self._points(child)

    def _whole(self, node: Node, layers: Longs) -> None:
        """Points of whole pipelines. layers: [points, stages]."""
        self._complete(node.pipe.block, node.variants, layers, np.zeros((len(layers), 0), np.int64))

    # --- points

    def _price(self, point: MixedPoint) -> None:
        """What the simulator says."""
        if point in self.known:
            self.counts.priced += 1
            return
        prediction = self.predicted(point)
        if isinstance(prediction, str):
            self.counts.reject(prediction, 1)
            return
        self.counts.priced += 1
        if fits(prediction, self.space.kinds, self.limits):
            made = MixedFound(
                point=point, plan=prediction.plan, prediction=prediction, kinds=tuple(sorted(set(point.kinds)))
            )
            self.best = sorted([*self.best, made], key=lambda candidate: candidate.step_s)[: self.top]

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


def _depth(item: Item) -> int:
    """How near an item is to a plan that is predicted."""
    if isinstance(item, Rows):
        return 3 + item.played
    return (Shaped, MixedBlock, Node).index(type(item))


def _completions(space: MixedSpace, node: Node) -> int:
    """Whole pipelines that begin so."""
    ranks = node.pipe.shape.pp - len(node.layers)
    if space.equal or not ranks:
        return 1
    return divisions(space.num_layers - node.used, ranks, node.pipe.virtual)


@lru_cache(maxsize=1024)
def _shares_array(size: int, workers: tuple[int, ...], equal: bool) -> Longs:
    """[choices, kinds] every way to share a microbatch."""
    return np.array(shares_of(size, workers, equal), np.int64).reshape(-1, len(workers))
