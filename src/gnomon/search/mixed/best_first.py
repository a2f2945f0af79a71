"""The search over plans of unlike devices: best first by bounds, until nothing left can be faster.

`MixedSearch` looks at blocks, then at partial pipelines rank by rank, then at points, each with a bound below every
plan that it leads to (`mixed.bounds`); a point's value is that of `predict`. It ends when no bound is below the best
plan, or after `tries` predictions, and then says how much faster anything left could be.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count as counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError, ProgramError
from gnomon.plans import Mesh, Plan, Workload
from gnomon.plans.check import problems
from gnomon.prediction import Prediction, predict
from gnomon.search.bounds.families import is_split
from gnomon.search.bounds.in_flight import under_way
from gnomon.search.budget import always
from gnomon.search.mixed.bounds import (
    SLACK,
    Doubles,
    LayerTables,
    Longs,
    held_bytes,
    static_bytes,
)
from gnomon.search.mixed.point_bounds import Bounds, Rows
from gnomon.search.mixed.results import MixedCounts, MixedFound, fits
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
    stages_of_ranks,
)
from gnomon.search.results import why_not
from gnomon.software import Stack

TRIES = 300
"""Predictions of one search, unless more are asked for."""

MOST_NODES = 400_000
"""Partial pipelines that one search looks at."""

PLAYED = 256
"""Points of a block whose schedule is played at once."""


class Pipe:
    """A block of pipelines over kinds, as its nodes see it: tables and numbers of its ranks."""

    def __init__(self, search: MixedSearch, block: MixedBlock) -> None:
        self.block, self.shape, tables = block, block.shape, search.tables
        self.count, self.virtual = block.microbatches, block.shape.virtual
        self.workers = search.space.workers(block.shape)
        self.variants = tuple(
            each
            for each in search.space.variants(block.shape, block.microbatches)
            if search.rows.has_room(block, each[0], (each[1],))
        )
        """Those of which some point may fit."""
        size = search.space.global_batch // self.count
        self.tables = [tables.of(block, rank, -(-size // n)) for rank, n in enumerate(self.workers)]
        begin, end = tables.counted[0], tables.counted[-1] + 1
        self.holder = 0 if self.shape.turned else self.shape.pp - 1
        last = self.tables[self.holder]
        self.head = [float(each[-1] - each[end]) for each in (last.forward, last.back)]
        first = self.tables[0]
        self.embed = [float(each[begin] - each[0]) for each in (first.forward, first.back)]
        least = [(float(table.least[0]), float(table.least[3])) for table in self.tables]
        self.head_layers = sum(self.head) / least[-1][1] if self.holder else 0.0
        """What the head takes on the last rank, in layers."""
        self.rates = {
            split: [search.rate(least[rank:], self.count, self.virtual, split=split) for rank in range(len(least))]
            for split in (False, True)
        }
        """Layers by the second that the ranks from each on take through."""
        zero, schedules = max((each for each, _ in self.variants), default=0), {name for _, name in self.variants}
        ranks = range(self.shape.pp) if self.variants else ()
        rooms = [search.rows.most_layers(block, rank, zero, schedules) for rank in ranks]
        self.room = [sum(rooms[rank:]) for rank in range(len(rooms) + 1)]
        """Layers that the ranks from each on have room for, at most."""


@dataclass(frozen=True, slots=True)
class Node:
    """A pipeline whose first ranks have their layers."""

    pipe: Pipe
    split: bool
    layers: tuple[int, ...]
    """Of ranks."""
    used: int
    ahead: float
    """Seconds of one forward through their first stages, and with clipping one backward unless it is split."""
    most: float
    """The largest bound of these ranks."""

    @property
    def variants(self) -> list[tuple[int, str]]:
        """(ZeRO stage, schedule) of its points."""
        return [each for each in self.pipe.variants if is_split(each[1]) == self.split]


@dataclass(frozen=True, slots=True)
class Shaped:
    """Blocks of one shape that may run, not looked at yet."""

    shape: Shape
    blocks: tuple[MixedBlock, ...]


Item = Shaped | MixedBlock | Node | Rows


@dataclass(frozen=True, kw_only=True)
class Large:
    """Shapes and blocks that are too large, of several searches for plans that fit."""

    known: frozenset[Shape | MixedBlock] = frozenset()
    """Shown so at less work, longer sequences or a larger model taking no less memory: not looked at."""
    found: set[Shape | MixedBlock] = field(default_factory=set)
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
        told: Callable[[int], None] | None = None,
        most_nodes: int | None = None,
        large: Large | None = None,
        more: Callable[[], bool] = always,
    ) -> None:
        """limits: bytes that a device of each kind may hold. known: plans that were predicted already. most_nodes:
        partial pipelines that are looked at, at most. large: what need not be looked at. more: whether to go on."""
        self.tables, self.workload, self.stack, self.space, self.limits = tables, workload, stack, space, limits
        self.top, self.tries, self.told, self.more = top, tries, told, more
        self.most_nodes = most_nodes or self.most_nodes
        self.known = {found.point: found for found in known if found.point is not None}
        self.best = sorted(known, key=lambda each: each.step_s)[:top]
        self.large = large or Large()
        self.counts = MixedCounts(space=space.size)
        self.bound_s = float("inf")
        self.heap: list[tuple[float, int, Item]] = []
        self._serial = counter()
        self._nodes = 0
        self.rows = Bounds(tables, space, limits)
        self.clip = self.rows.clip
        self._legal: dict[object, str] = {}
        self._rates: dict[object, Doubles] = {}
        self._leasts: dict[object, tuple[float, float]] = {}
        self.why: dict[str, int] = {}
        """What cannot run breaks -> points."""

    def run(self) -> None:
        """Best first, until nothing that is left can be better, or the tries are used up, or it is stopped."""
        for shape, blocks in self.space.by_shape:
            self._begin(shape, blocks)
        while self.heap:
            bound, _, item = heapq.heappop(self.heap)
            if bound >= self.worst():
                self.counts.too_slow += self._points(item) + sum(self._points(each) for _, _, each in self.heap)
                self.heap.clear()
            elif self.counts.priced >= self.tries or self._nodes >= self.most_nodes or not self.more():
                self.bound_s = bound
                self.counts.left += self._points(item) + sum(self._points(each) for _, _, each in self.heap)
                self.heap.clear()
            elif isinstance(item, Shaped):
                self._spread(item)
            elif isinstance(item, MixedBlock):
                self._open(item)
            elif isinstance(item, Node):
                self._extend(item)
            elif item.played:
                self._next(item)
            else:
                self._play(item)
            if self.told is not None:
                self.told(self.counts.covered - self.counts.left)
        assert self.counts.covered == self.counts.space, (self.counts, "points must add up")

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
                self._reject(wrong, self._points(block))
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
        self.large.found.add(item)
        self.counts.too_large += points

    def worst(self) -> float:
        """What a plan must be faster than: only the best one is looked for, the next are those met on the way."""
        return self.best[0].step_s if self.best else float("inf")

    def _push(self, bound: float, item: Item) -> None:
        """Later, unless it is too slow already. Bounds of children are not below their parents'."""
        if bound * (1 - SLACK) >= self.worst():
            self.counts.too_slow += self._points(item)
        else:
            heapq.heappush(self.heap, (bound * (1 - SLACK), next(self._serial), item))

    def _points(self, item: Item) -> int:
        if isinstance(item, MixedBlock):
            return self.space.count(item)
        if isinstance(item, Shaped):
            return sum(map(self.space.count, item.blocks))
        if isinstance(item, Rows):
            return len(item.bounds)
        return self._completions(item) * len(item.variants)

    def _completions(self, node: Node) -> int:
        rest, ranks = self.space.num_layers - node.used, node.pipe.shape.pp - len(node.layers)
        if self.space.equal or not ranks:
            return 1
        return divisions(rest, ranks, node.pipe.virtual)

    # --- blocks

    def _rough(self, block: MixedBlock) -> float:
        """A bound on all points of a block, from the layers that cost least."""
        shape, workers = block.shape, self.space.workers(block.shape)
        if shape.form == "replicas":
            return self._rough_replicas(block, workers)
        split = any(is_split(schedule) for _, schedule in self.space.variants(shape, block.microbatches))
        size = self.space.global_batch // block.microbatches
        least = [self._least(block, rank, -(-size // n)) for rank, n in enumerate(workers)]
        if not self.space.equal:
            return self.space.num_layers / self.rate(least, block.microbatches, shape.virtual, split=split)
        layers, ahead, most = equal_layers(self.space.num_layers, shape.pp * shape.virtual), 0.0, 0.0
        for stages, (forward, both) in zip(stages_of_ranks(shape), least, strict=True):
            most = max(most, ahead + block.microbatches * both * sum(layers[s] for s in stages))
            ahead += layers[stages[0]] * (forward if split else both) if self.clip else 0.0
        return most

    def rate(self, least: Sequence[tuple[float, float]], microbatches: int, virtual: int, *, split: bool) -> float:
        """Layers by the second of a step that pipeline ranks take through, at most. least: seconds of a layer, forward
        and in all, on each rank.

        Proof: a rank with n layers is busy for x = microbatches x n x seconds. With clipping it begins after the first
        stages of the ranks before it, of n / virtual layers or more each, forward, and ends before they go back (which
        may be over earlier where weight gradients wait): x is no more than the step less a share of each x before. What
        the ranks from one on can take is then linear in what is left of the step, and a rank does best with all of it,
        or none.
        """
        found = 0.0
        for forward, both in reversed(least):
            share = (forward if split else both) / (microbatches * both * virtual) if self.clip else 0.0
            found = max(found, 1 / (microbatches * both) + found * (1 - share))
        return found

    def _least(self, block: MixedBlock, entry: int, batch: int) -> tuple[float, float]:
        """(forward, forward and backward) seconds of the layer that takes least."""
        key = block.shape.kinds[entry], block.shape.tp[entry], block.shape.cp, block.shape.ep[entry], block[2:], batch
        if key not in self._leasts:
            least = self.tables.every(block, entry).least[:, self.tables.column[batch]]
            self._leasts[key] = float(least[0]), float(least[3])
        return self._leasts[key]

    def _rough_replicas(self, block: MixedBlock, workers: Sequence[int]) -> float:
        """No worker takes its layers through faster, by the sequence, than it would a microbatch of the best size, and
        together they take all layers of all sequences through. With clipping, the last rank of each begins after the
        first stages of the others."""
        shape, size, layers = block.shape, self.space.global_batch // block.microbatches, self.space.num_layers
        rate, alone = 0.0, 0.0
        for entry, count in enumerate(workers):
            key = shape.kinds[entry], shape.tp[entry], shape.cp, shape.ep[entry], block[2:]
            if key not in self._rates:
                least = self.tables.every(block, entry).least[[0, 3]] / np.array(self.tables.micro, float)
                self._rates[key] = np.minimum.accumulate(least, axis=1)
            able = bisect_right(self.tables.micro, size if not self.space.equal else size // sum(workers)) - 1
            forward, both = self._rates[key][:, able].tolist()
            each, stages = layers // (shape.pp * shape.virtual), shape.pp - 1
            busy = block.microbatches * both * max(layers / shape.pp, each * shape.virtual)
            if self.clip:
                busy = max(busy, each * (block.microbatches * both * shape.virtual + stages * forward))
            rate, alone = rate + count / busy, max(alone, busy)
        return alone * size / sum(workers) if self.space.equal else size / rate

    def _open(self, block: MixedBlock) -> None:
        """The block's points or first nodes, with bounds."""
        if block.shape.form == "replicas":
            self._open_replicas(block)
        else:
            pipe, every = Pipe(self, block), self.space.variants(block.shape, block.microbatches)
            members = self.space.members(block.shape, block.microbatches)
            self.counts.too_large += members * (len(every) - len(pipe.variants))
            if not pipe.variants:
                self.large.found.add(block)
            for split in (False, True):
                node = Node(pipe, split, (), 0, 0.0, 0.0)
                if node.variants:
                    self._push(float(self._level(node, 0, 0.0, 0)), node)

    def _reject(self, why: str, points: int) -> None:
        self.counts.illegal += points
        self.why[why] = self.why.get(why, 0) + points

    def _why_not(self, tp: int, ep: int, block: MixedBlock) -> str:
        """What the model says against dividing it so; empty if nothing."""
        cp, sequence = block.shape.cp, block.sequence_parallel
        key = tp, cp, ep, sequence, block.context
        if key not in self._legal:
            base = self.space.base
            layout = replace(base.layout, sequence_parallel=sequence, context=block.context)
            mesh = Mesh(tp=tp, cp=cp, ep=ep, dp_shard=ep)
            plan = Plan(mesh=mesh, layout=layout, precision=base.precision, saved=base.saved)
            one = Workload(global_batch_size=1, seq_len=self.workload.sequence_lengths()[0], sizes=self.workload.sizes)
            found = problems(plan, self.tables.graph, None, one)
            wrong = [p.message for p in found if p.severity == "error" and p.name != "batch"]
            self._legal[key] = wrong[0] if wrong else ""
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
        forward, back, first = self._of_rank(node, choices)
        step = first[0] + (0.0 if node.split else first[1]) if self.clip else 0.0 * choices
        ahead, used = node.ahead + step, node.used + choices
        most = self._most(node, node.ahead + pipe.count * (forward + back))
        bounds = np.maximum(most, self._level(node, used, ahead, rank + 1)) + 0.0 * choices
        able = self._may_begin(node, choices)
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

    def _of_rank(self, node: Node, choices: Longs) -> tuple[Any, Any, tuple[Any, Any]]:
        """Seconds of a microbatch forward and backward, at least, on the rank after those of a node with so many
        layers, and those of its first stage."""
        pipe, rank = node.pipe, len(node.layers)
        table, tables = pipe.tables[rank], self.tables
        if pipe.virtual == 1:
            first = 0 if not rank else tables.counted[node.used]
            last = rank == pipe.shape.pp - 1
            ends = [tables.num_layers if last else tables.counted[node.used + n] for n in choices.tolist()]
            forward, back = (each[ends] - each[first] for each in (table.forward, table.back))
            return forward, back, (forward, back)
        embed = pipe.embed if not rank else (0.0, 0.0)
        head = pipe.head if rank == pipe.holder else (0.0, 0.0)
        begins = -(-choices // pipe.virtual)
        least = [float(each) for each in table.least[:2]]
        forward, back = (choices * least[i] + (embed[i] + head[i]) for i in (0, 1))
        return forward, back, (begins * least[0] + embed[0], begins * least[1] + embed[1])

    def _may_begin(self, node: Node, choices: Longs) -> NDArray[np.bool_]:
        """Whether the rank after those of a node may fit with so many layers, and those after it with the rest."""
        rest = self.space.num_layers - node.used - choices
        able = rest <= node.pipe.room[len(node.layers) + 1]
        return self._rank_fits(node, choices) & able if able.any() else able

    def _rank_fits(self, node: Node, choices: Longs) -> NDArray[np.bool_]:
        """Whether the rank after those of a node may fit with so many layers."""
        pipe, rank = node.pipe, len(node.layers)
        kind, table, tables = pipe.shape.kinds[rank], pipe.tables[rank], self.tables
        variants = node.variants
        zero = max(v[0] for v in variants)
        if pipe.virtual > 1:
            dense: Doubles = choices * table.least[4]
            held = static_bytes(
                dense, 0.0, self.space.base, zero, self.rows.ways(pipe.shape, pipe.workers, rank), tables.stack
            )
            kept = choices * float(table.least[5])  # a microbatch in each stage
            if not rank:
                ways = min(under_way(s, pipe.shape.pp, pipe.virtual, pipe.count) for _, s in variants)
                kept = np.maximum(kept, choices // pipe.virtual * ways * float(table.least[5]))
            held = np.asarray(held + kept)
            return np.asarray(held + tables.workspace[kind] <= self.limits[kind])
        schedules = tuple(dict.fromkeys(schedule for _, schedule in variants))
        first = 0 if not rank else tables.counted[node.used]
        last = rank == pipe.shape.pp - 1
        ends = np.array([tables.num_layers if last else tables.counted[node.used + n] for n in choices.tolist()])
        held = static_bytes(
            table.dense[ends] - table.dense[first],
            table.routed[ends] - table.routed[first],
            self.space.base,
            zero,
            self.rows.ways(pipe.shape, pipe.workers, rank),
            tables.stack,
        )
        held = held + held_bytes(
            [table.kept[ends] - table.kept[first]], 0.0, schedules, rank, pipe.shape.pp, pipe.count
        )
        return np.asarray(held + tables.workspace[kind] <= self.limits[kind])

    # --- points

    def _price(self, point: MixedPoint) -> None:
        """What the simulator says."""
        if point in self.known:
            self.counts.priced += 1
            return
        found = self.predicted(point)
        if isinstance(found, str):
            self._reject(found, 1)
            return
        self.counts.priced += 1
        if fits(found, self.space.kinds, self.limits):
            made = MixedFound(point=point, plan=found.plan, prediction=found, kinds=tuple(sorted(set(point.kinds))))
            self.best = sorted([*self.best, made], key=lambda each: each.step_s)[: self.top]

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


@lru_cache(maxsize=1024)
def _shares_array(size: int, workers: tuple[int, ...], equal: bool) -> Longs:
    """[choices, kinds] every way to share a microbatch."""
    return np.array(shares_of(size, workers, equal), np.int64).reshape(-1, len(workers))
