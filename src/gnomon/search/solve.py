"""The search: every point of a space is priced by the simulator, or shown not to matter.

`solve(graph, cluster, workload, …)` orders points by a bound on their time (`bounds`), the least first, drops those
that cannot fit (`leaves.memory_bound`), and predicts the rest one by one until no bound is below the best that was
found. The result is what predicting every point would have given, and says how many points went which way. Leaves out
reasons (`reasons`) and other questions than the shortest step (`goals`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count as counter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Layout, Mesh, Plan, Stack, Workload
from gnomon.plans.check import problems
from gnomon.plans.parts import ScheduleName
from gnomon.prediction import Prediction, predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.prices.allocator import workspace_bytes
from gnomon.search.bounds import (
    ACTIONS,
    ENDS,
    MIXED,
    Actions,
    Ends,
    Family,
    Job,
    Pipeline,
    Sends,
    actions,
    halves,
    is_split,
    layer_seconds,
    no_ends,
    time_bound,
    v_placed,
    weight_at_most,
)
from gnomon.search.flight import flight
from gnomon.search.leaves import Sharding, groups_of, held_bytes, least_held, room, unsharded
from gnomon.search.skeleton import Reductions
from gnomon.search.space import Point, Recompute, Space
from gnomon.search.tighten import Durations, Loose, Tighten, gathered

SLACK = 1e-9
"""Bounds are lowered by this share: sums of floats are rounded."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One plan that was predicted and fits."""

    point: Point
    plan: Plan
    prediction: Prediction

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s


@dataclass(kw_only=True)
class Counts:
    """How many points went which way; they add up to the space."""

    space: int = 0
    priced: int = 0
    """Predicted."""
    too_slow: int = 0
    """Not predicted: a bound on the time is above the best."""
    too_large: int = 0
    """Not predicted: a bound on the memory is above the limit."""
    duplicates: int = 0
    """The same run as another point."""
    illegal: int = 0
    """Cannot run: axes that do not divide, a batch that does not, too few layers."""

    @property
    def bounded(self) -> int:
        """Bounded away, by time or memory."""
        return self.too_slow + self.too_large

    @property
    def covered(self) -> int:
        """All of these."""
        return self.priced + self.bounded + self.duplicates + self.illegal


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search found."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    stack: Stack
    goal: Goal
    space: Space
    best: tuple[Found, ...]
    """The fastest plans that fit, the best first."""
    counts: Counts
    limit_bytes: int
    """What a device's peak may be."""
    near: tuple[Found, ...] = ()
    """Plans that are faster than the best and do not fit, the fastest first."""
    least_bytes: int | None = None
    """Bytes that every plan holds on some rank at least; None where no bound was asked."""
    why_illegal: dict[str, int] = field(default_factory=dict)
    """Name of a rule -> points that break it."""


def memory_limit(cluster: Cluster, goal: Goal) -> int:
    """Bytes that a rank's peak may be: the goal's, or its share of the smallest device."""
    least = min(group.node.device.memory_bytes for group in cluster.groups)
    return min(least, goal.memory_bytes) if goal.memory_bytes else int(least * goal.memory_fraction)


def solve(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    space: Space,
    stack: Stack = PLAIN_STACK,
    goal: Goal | None = None,
    *,
    top: int = 5,
    prune: bool = True,
    told: Callable[[int], None] | None = None,
) -> Result:
    """The `top` fastest plans of a space within the goal's memory.

    prune: without it every legal point is predicted, which shows that the bounds are right. told: is called with the
    points covered so far. PlanError if no plan fits.
    """
    goal = goal or Goal()
    search = Search(graph, cluster, workload, space, stack, goal, top=top, prune=prune, told=told)
    search.run()
    return search.result()


_Sharded = tuple[int, int, int, bool]
_Acts = tuple[Pipeline, Actions, NDArray[np.float64], NDArray[np.bool_]]


@dataclass(frozen=True)
class _Block:
    """Points that differ in sharding, ZeRO and overlap only."""

    family: Family
    schedule: str
    virtual: int
    column: int


_Item = _Block | Loose | Point


class Search:
    """One search under way: see `solve`."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        workload: Workload,
        space: Space,
        stack: Stack,
        goal: Goal,
        *,
        top: int = 1,
        prune: bool = True,
        told: Callable[[int], None] | None = None,
    ) -> None:
        self.graph, self.cluster, self.workload, self.space = graph, cluster, workload, space
        self.stack, self.goal, self.top, self.prune, self.told = stack, goal, top, prune, told
        self.job = Job(graph, cluster, workload, stack, space)
        self.sends = Sends(self.job)
        self.counts = Counts(space=space.size)
        self.tighten = Tighten(self.job)
        self.limit = memory_limit(cluster, goal)
        self.workspace = min(workspace_bytes(device, self.job.stack) for device in self.job.devices)
        self.best: list[Found] = []
        self.near: list[Found] = []
        self.least = float("inf")
        self.why: dict[str, int] = {}
        self.heap: list[tuple[float, int, _Item]] = []
        self._serial = counter()
        self._rooms: dict[int, float] = {}
        self._shardings: dict[object, Sharding] = {}
        self._statics: dict[object, NDArray[np.float64]] = {}
        self._legal: dict[object, str] = {}
        self._choices: dict[object, tuple[tuple[_Sharded, ...], int]] = {}

    def run(self) -> None:
        """Best first, until nothing that is left can be better."""
        for bound, block in self._blocks():
            heapq.heappush(self.heap, (bound, next(self._serial), block))
        while self.heap:
            bound, _, item = heapq.heappop(self.heap)
            if self.prune and bound >= self.worst():
                self.counts.too_slow += self._points(item) + sum(self._points(each) for _, _, each in self.heap)
                self.heap.clear()
            elif isinstance(item, _Block):
                self._open(item)
            elif isinstance(item, Loose):
                self._tighten(item, bound)
            else:
                self._price(item)
            if self.told is not None:
                self.told(self.counts.covered)

    def worst(self) -> float:
        """What a plan must be faster than."""
        return self.best[-1].step_s if len(self.best) >= self.top else float("inf")

    def result(self) -> Result:
        assert self.counts.covered == self.counts.space, (self.counts, "points must add up")
        return Result(
            graph=self.graph,
            cluster=self.cluster,
            workload=self.workload,
            stack=self.stack,
            goal=self.goal,
            space=self.space,
            best=tuple(self.best),
            counts=self.counts,
            limit_bytes=self.limit,
            near=tuple(self.near),
            least_bytes=int(self.least) if self.least < float("inf") else None,
            why_illegal=dict(sorted(self.why.items(), key=lambda item: -item[1])),
        )

    def _points(self, item: _Item) -> int:
        """Points that stand for themselves and may run: illegal ones and duplicates were counted with the block."""
        return len(self._sharded(item.family)[0]) if isinstance(item, _Block) else 1

    def _members(self, block: _Block) -> Iterator[Point]:
        family, name = block.family, cast(ScheduleName, block.schedule)
        layout, micro, preset = family.layout, family.micro[block.column], cast(Recompute, family.recompute)
        for replicas, shards, zero, overlap in self._sharded(family)[0]:
            yield Point(
                family.tp, family.cp, family.ep, family.pp, replicas, shards, name, block.virtual, micro,
                layout.sequence_parallel, layout.keep_gathered, layout.context, preset, zero, overlap,
            )  # fmt: skip

    def _key(self, family: Family) -> tuple[object, ...]:
        layout = family.layout
        return family.tp, family.cp, family.ep, family.dp, family.pp > 1, layout.sequence_parallel, layout.keep_gathered

    def _sharded(self, family: Family) -> tuple[tuple[_Sharded, ...], int]:
        """((dp_replicate, dp_shard, ZeRO stage, overlap) of points that stand for themselves and may run, number of
        those that cannot: experts that do not divide, ZeRO 3 that waits with its reductions, what
        the stack has not). The same in every block of a family."""
        key, layout = self._key(family), family.layout
        if key not in self._choices:
            kept, illegal = [], 0
            for replicas, shards in self.space.shardings(family.dp):
                if shards * family.cp * family.tp % (family.ep * self.space.base.mesh.etp):
                    illegal += self.space.leaves
                    continue
                for zero in self.space.zero:
                    for overlap in self.space.overlap:
                        point = Point(
                            family.tp, family.cp, family.ep, family.pp, replicas, shards, "one_f_one_b", 1, 1,
                            layout.sequence_parallel, layout.keep_gathered, layout.context, "none", zero, overlap,
                        )  # fmt: skip
                        if zero == 3 and not overlap and shards * family.cp > 1:
                            illegal += 1  # full sharding reduces layer by layer
                        elif not self.space.runs(family.pp, zero) and self.space.canonical(point) == point:
                            illegal += 1
                        elif self.space.canonical(point) == point:
                            kept.append((replicas, shards, zero, overlap))
            self._choices[key] = tuple(kept), illegal
        return self._choices[key]

    def _blocks(self) -> Iterator[tuple[float, _Block]]:
        """Every block with a bound on its time; counts what is illegal or a duplicate."""
        space = self.space
        for tp, cp, ep, pp, dp in space.axes():
            shardings = space.shardings(dp)
            each = len(shardings) * space.leaves
            if not each:
                continue
            pipelines = space.pipelines(pp)
            for sequence, keep, context in space.layouts(cp):
                layout = replace(space.base.layout, sequence_parallel=sequence, keep_gathered=keep, context=context)
                why = self._illegal(tp, cp, ep, layout)
                whole = each * len(pipelines) * len(space.micro_batch_size)
                for recompute in space.recompute:
                    family = Family(self.job, tp, cp, ep, pp, dp, layout, recompute, space.micro_batch_size)
                    if why:
                        self._reject(why, whole)
                    else:
                        yield from self._of(family, pipelines, each)

    def _of(self, family: Family, pipelines: tuple[tuple[str, int], ...], each: int) -> Iterator[tuple[float, _Block]]:
        """Blocks of a family."""
        counts = [divmod(self.space.global_batch, micro * family.dp) for micro in family.micro]
        kept, unfolded = self._sharded(family)
        acts: dict[tuple[int, bool], _Acts] = {}
        for schedule, virtual in pipelines:
            columns = []
            for column, (count, rest) in enumerate(counts):
                why = "batch" if rest or not count else _unscheduled(schedule, count, family.pp)
                if why:
                    self._reject(why, each)
                    continue
                self._reject("sharding", unfolded)
                self.counts.duplicates += each - unfolded - len(kept)
                if kept:
                    columns.append(_Block(family, schedule, virtual, column))
            if columns:
                yield from self._bounded(columns, [counts[b.column][0] for b in columns], acts)

    def _bounded(
        self,
        blocks: list[_Block],
        counts: list[int],
        acts: dict[tuple[int, bool], _Acts],
    ) -> Iterator[tuple[float, _Block]]:
        """Bounds without sharding, of all microbatch sizes at once."""
        if not self.prune:
            for block in blocks:
                yield 0.0, block
            return
        first = blocks[0]
        family, key = first.family, (first.virtual, v_placed(first.schedule))
        if key not in acts:
            pipeline = self.job.pipeline(family.pp, *key)
            none = np.zeros(len(self.job.kinds.kinds))
            acts[key] = (
                pipeline,
                actions(family.table, pipeline.split.counts, none, none, by_layer=False),
                self.sends.of(family, pipeline),
                self._may_fit(family, pipeline),
            )
        pipeline, act, sends, fits = acts[key]
        small = [i for i, block in enumerate(blocks) if fits[block.column]]
        self.counts.too_large += (len(blocks) - len(small)) * len(self._sharded(family)[0])
        if not small:
            return
        blocks, counts = [blocks[i] for i in small], [counts[i] for i in small]
        columns = [block.column for block in blocks]
        bounds = time_bound(
            pipeline,
            halves(_columns(act, columns)) if first.schedule in MIXED else _columns(act, columns),
            sends[:, columns],
            np.array(counts, float),
            no_ends(len(act.forward)),
            split_backward=is_split(first.schedule),
            clip=self.space.base.optimizer.clip,
        )
        for bound, block in zip(bounds.tolist(), blocks, strict=True):
            yield bound * (1 - SLACK), block

    def _may_fit(self, family: Family, pipeline: Pipeline) -> NDArray[np.bool_]:
        """[microbatch sizes] whether some sharding may fit, going by one unit under way."""
        held = least_held(family.table, pipeline) + self.workspace
        out = np.zeros(held.shape[1], bool)
        for replicas, shards, zero in dict.fromkeys(each[:3] for each in self._sharded(family)[0]):
            sharding = self._sharding(family, replicas, shards, zero)
            static = pipeline.on_rank @ self._static(sharding, pipeline)
            least = (static[:, None] + held).max(axis=0)
            self.least = min(self.least, float(least.min()))
            out |= least <= self._room(sharding)
        return out

    def _open(self, block: _Block) -> None:
        """Bounds of a block's points; those that may be better go on the heap."""
        members = tuple(self._members(block))
        if not self.prune:
            for point in members:
                heapq.heappush(self.heap, (0.0, next(self._serial), point))
            return
        family, column = block.family, block.column
        count = self.space.global_batch // (family.micro[column] * family.dp)
        pipeline = self.job.pipeline(family.pp, block.virtual, v_placed(block.schedule))
        try:
            rows = flight(block.schedule, family.pp, block.virtual, count)
        except PlanError:
            self._reject("schedule", len(members))
            return
        sends = self.sends.of(family, pipeline)[:, [column]]
        held: dict[int, NDArray[np.float64]] = {}
        groups: dict[int, list[tuple[Point, Sharding]]] = {}
        for point in members:
            sharding = self._sharding(family, point.dp_replicate, point.dp_shard, point.zero)
            static = pipeline.on_rank @ self._static(sharding, pipeline) + self.workspace
            if (kind := max(sharding.zero, 1)) not in held:
                extra = unsharded(sharding, split_backward=is_split(block.schedule))
                frees = bool(self.stack.split_backward_frees)
                held[kind] = held_bytes(
                    family.table, column, pipeline, rows, extra, by_layer=sharding.zero == 3, frees=frees
                )
            if (static + held[kind]).max() > self._room(sharding):
                self.counts.too_large += 1
            else:
                groups.setdefault(kind, []).append((point, sharding))
        for group in groups.values():
            self._bound_leaves(group, pipeline, column, count, sends, rows.most)

    def _adding(self, sharding: Sharding, count: int) -> NDArray[np.float64]:
        precision = self.space.base.precision
        adding = sharding.adding * (1.0 if precision.grad != precision.compute else (count - 1) / count)
        return adding

    def _actions(self, sharding: Sharding, pipeline: Pipeline, column: int, count: int) -> Actions:
        adding, by_layer = self._adding(sharding, count), sharding.zero == 3
        return actions(
            sharding.table, pipeline.split.counts, adding, sharding.copying, by_layer=by_layer, column=column
        )

    def _bound_leaves(
        self,
        group: list[tuple[Point, Sharding]],
        pipeline: Pipeline,
        column: int,
        count: int,
        sends: NDArray[np.float64],
        most: NDArray[np.int64],
    ) -> None:
        """Bounds of points of one block whose actions last equally long, one column each; onto the heap."""
        point, sharding = group[0]
        split_backward, clip = is_split(point.schedule), self.space.base.optimizer.clip
        act = self._actions(sharding, pipeline, column, count)
        given = act
        forward, back = act.forward[:, 0], (act.weight if split_backward else act.whole)[:, 0]
        if point.schedule in MIXED:
            act, beside = halves(act), self._adding(sharding, count)
            back = weight_at_most(sharding.table, pipeline.split.counts, beside, column)
        parts = [each.ends(pipeline, forward, back, overlap=point.overlap) for point, each in group]
        ends = Ends(**{name: np.stack([getattr(p, name) for p in parts], axis=-1) for name in ENDS})
        if sharding.zero == 3:
            wait = [each.waits(pipeline, act) for _, each in group]
            act = Actions(*(np.concatenate([getattr(w, name) for w in wait], axis=1) for name in ACTIONS))
        found = np.broadcast_to(
            time_bound(pipeline, act, sends, count, ends, split_backward=split_backward, clip=clip, most=most[:, None]),
            (len(group),),
        )
        for i, (point, sharding) in enumerate(group):
            bound = float(found[i])
            if sharding.zero == 3 and clip:
                bound = max(bound, sharding.streams(pipeline, given, sends, count))
            item: _Item = point
            if clip:
                durations = self._durations(sharding, pipeline, given, sends, column, count, parts[i])
                item = Loose(
                    point=point,
                    durations=self.tighten.register(point, durations),
                    sharding=sharding,
                    column=column,
                    blocked=parts[i].blocked,
                    norm=float(parts[i].norm),
                    adding=self._adding(sharding, count),
                )
            heapq.heappush(self.heap, (bound * (1 - SLACK), next(self._serial), item))

    def _durations(
        self,
        sharding: Sharding,
        pipeline: Pipeline,
        act: Actions,
        sends: NDArray[np.float64],
        column: int,
        count: int,
        ends: Ends,
    ) -> Durations:
        reduce, final = ends.each, ends.reduce
        kind: Reductions = "stages" if reduce.any() else "once" if final.any() and not ends.blocked.any() else ""
        if sharding.zero == 3:
            kind, reduce = "layers", pipeline.split.counts @ sharding.reduced_s
            final = reduce + pipeline.split.counts @ sharding.summed_s * pipeline.own
        found = Durations(
            pipeline=pipeline,
            act=act,
            sends=sends,
            count=count,
            head=ends.head[:, None],
            reduce=reduce[:, None],
            final=final[:, None],
            reductions=kind,
        )
        if sharding.zero < 3 or not sharding.optimizer.reshard_after_forward:
            return found
        seconds = layer_seconds(sharding.table, self._adding(sharding, count), sharding.copying, column)
        prefetch = self.space.base.overlap.prefetch
        lead, gathers, lasts = gathered(pipeline, sharding, seconds, prefetch)
        return replace(found, lead=lead, gathers=gathers, lasts=lasts)

    def _tighten(self, loose: Loose, bound: float) -> None:
        """A better bound for a point."""
        found = self.tighten.bound(loose) * (1 - SLACK)
        heapq.heappush(self.heap, (max(bound, found), next(self._serial), loose.point))

    def bounds(self, point: Point) -> tuple[list[float], bool]:
        """(every bound on a point's time, the first the loosest; whether a bound on memory allows it). For tests."""
        layout = replace(
            self.space.base.layout,
            sequence_parallel=point.sequence_parallel,
            keep_gathered=point.keep_gathered,
            context=point.context,
        )
        dp = point.dp_replicate * point.dp_shard
        family = Family(
            self.job, point.tp, point.cp, point.ep, point.pp, dp, layout, point.recompute, self.space.micro_batch_size
        )
        column = family.micro.index(point.micro_batch_size)
        count = self.space.global_batch // (point.micro_batch_size * dp)
        block = _Block(family, point.schedule, point.virtual_stages, column)
        found = [bound for bound, _ in self._bounded([block], [count], {})]
        allowed = bool(found)
        self._choices[self._key(family)] = ((point.dp_replicate, point.dp_shard, point.zero, point.overlap),), 0
        self.heap.clear()
        self._open(block)
        allowed = allowed and bool(self.heap)
        while self.heap:
            bound, _, item = self.heap.pop()
            found.append(bound)
            if isinstance(item, Loose):
                self._tighten(item, bound)
        del self._choices[self._key(family)]
        return found, allowed

    def _static(self, sharding: Sharding, pipeline: Pipeline) -> NDArray[np.float64]:
        key = sharding, id(pipeline)
        if key not in self._statics:
            self._statics[key] = sharding.static_bytes(pipeline.split)
        return self._statics[key]

    def _sharding(self, family: Family, replicas: int, shards: int, zero: int) -> Sharding:
        key = (id(family.table), family.pp, replicas, shards, zero)
        if key not in self._shardings:
            self._shardings[key] = Sharding(family, replicas, shards, zero)
        return self._shardings[key]

    def _room(self, sharding: Sharding) -> float:
        groups = groups_of(sharding, self.space.devices, self.space.base.optimizer.clip)
        if groups not in self._rooms:
            self._rooms[groups] = room(self.job, self.limit, groups)
        return self._rooms[groups]

    def _price(self, point: Point) -> None:
        """What the simulator says."""
        plan = self.space.plan(point)
        try:
            found = predict(self.graph, self.cluster, plan, self.workload, self.stack)
        except PlanError as error:
            self._reject(str(error).partition(";")[0][:80], 1)
            return
        self.counts.priced += 1
        made = Found(point=point, plan=plan, prediction=found)
        if all(rank.peak_bytes <= self.limit for rank in found.memory):
            self.best = sorted([*self.best, made], key=lambda each: each.step_s)[: self.top]
        elif len(self.near) < self.top:
            self.near = sorted([*self.near, made], key=lambda each: each.step_s)

    def _reject(self, why: str, points: int) -> None:
        if points:
            self.counts.illegal += points
            self.why[why] = self.why.get(why, 0) + points

    def _illegal(self, tp: int, cp: int, ep: int, layout: Layout) -> str:
        """Name of the rule that axes and layout break; empty if none."""
        key = tp, cp, ep, layout
        if key not in self._legal:
            base = self.space.base
            need = ep * base.mesh.etp
            shards = need // np.gcd(need, tp * cp)
            mesh = Mesh(tp=tp, cp=cp, ep=ep, etp=base.mesh.etp, dp_shard=int(shards), order=base.mesh.order)
            plan = Plan(mesh=mesh, layout=layout, precision=base.precision, saved=base.saved)
            one = Workload(global_batch_size=1, seq_len=self.workload.sequence_lengths()[0])
            found = problems(plan, self.graph, None, one)
            wrong = [p.name for p in found if p.severity == "error" and p.name != "batch"]
            self._legal[key] = wrong[0] if wrong else ""
        return self._legal[key]


def _columns(act: Actions, columns: list[int]) -> Actions:
    return Actions(
        forward=act.forward[:, columns],
        whole=act.whole[:, columns],
        input=act.input[:, columns],
        weight=act.weight[:, columns],
    )


def _unscheduled(schedule: str, count: int, pp: int) -> str:
    """The rule of schedules that a number of microbatches breaks."""
    if schedule in ("interleaved_one_f_one_b", "interleaved_zero_bubble") and count % pp:
        return "microbatches"
    return "microbatches" if schedule == "dualpipe_v" and count < 2 * pp else ""
