"""The fastest plan for a cluster of unlike devices, and what it gains over treating them as alike or leaving some out.

`plan_mixed` searches `mixed_space` best first: blocks, then partial pipelines stage by stage, then points, each with a
bound below every plan that it leads to (`mixed_bounds`); a point's value is that of `predict`. It ends when no bound is
below the best plan, or after `tries` predictions, and then says how much faster anything left could be. Each kind of
device alone is searched by the search for equal devices. Leaves out what `mixed_space` leaves out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as counter
from math import comb

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.hardware.kinds import Kind
from gnomon.models.presets import model as preset
from gnomon.plans import Goal, Mesh, Plan, Stack, Workload
from gnomon.plans.check import problems
from gnomon.prediction import Prediction, predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.prediction.step import SPLIT_BACKWARD
from gnomon.search.mixed_bounds import LayerTable, LayerTables, in_flight, least_step_s, static_bytes
from gnomon.search.mixed_space import (
    MixedBlock,
    MixedPoint,
    MixedSpace,
    equal_layers,
    make_mixed_space,
    shares_of,
)
from gnomon.search.planning import default_precision
from gnomon.search.planning import plan as plan_alike
from gnomon.search.space import Limit, Recompute, parse_limit

SLACK = 1e-9
"""Bounds are lowered by this share: sums of floats are rounded."""

TRIES = 300
"""Predictions of one search, unless more are asked for."""

LOOSE = 0.8
"""Of the peaks' bound that is used: it only says which blocks are looked at first."""

MOST_NODES = 400_000
"""Partial pipelines that one search looks at."""


@dataclass(frozen=True, kw_only=True)
class MixedFound:
    """One plan that was predicted and fits."""

    point: MixedPoint | None
    """None for a plan of one kind of device alone, which the search for equal devices found."""
    plan: Plan
    prediction: Prediction
    kinds: tuple[int, ...]
    """The kinds that take part."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s


@dataclass(kw_only=True)
class MixedCounts:
    """How many points went which way; they add up to the space."""

    space: int = 0
    priced: int = 0
    """Predicted."""
    too_slow: int = 0
    """A bound on the time is above the best."""
    too_large: int = 0
    """A bound on the memory is above a device's."""
    illegal: int = 0
    """Cannot run."""
    left: int = 0
    """Not looked at when the predictions ran out."""

    @property
    def covered(self) -> int:
        """All of these."""
        return self.priced + self.too_slow + self.too_large + self.illegal + self.left


@dataclass(frozen=True, kw_only=True)
class MixedResult:
    """What a search of a mixed cluster found."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    stack: Stack
    space: MixedSpace
    best: tuple[MixedFound, ...]
    """The fastest plans that fit, the best first."""
    counts: MixedCounts
    """Of plans over several kinds."""
    bound_s: float
    """No plan of the space is faster than this; the best one's step where that is proved."""
    equal: MixedFound | None
    """The best with equal shares and equal layers on all kinds; None if none fits."""
    alone: tuple[tuple[Kind, MixedFound | None], ...]
    """The best on each kind by itself; None if none fits."""
    predicted: int
    """Predictions of all searches together."""

    @property
    def proved(self) -> bool:
        """Whether nothing in the space is faster than the best."""
        return self.bound_s >= self.best[0].step_s


@dataclass(frozen=True, slots=True)
class _Node:
    """A pipeline whose first stages have their layers."""

    block: MixedBlock
    split: bool
    layers: tuple[int, ...]
    used: int
    ahead: float
    """Seconds of one forward through these stages, and with clipping one backward unless it is split."""
    most: float
    """The largest bound of these stages."""


_Item = MixedBlock | _Node | MixedPoint


class MixedSearch:
    """One search under way."""

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
    ) -> None:
        """limits: bytes that a device of each kind may hold. known: plans that were predicted already."""
        self.tables, self.workload, self.stack, self.space, self.limits = tables, workload, stack, space, limits
        self.top, self.tries, self.told = top, tries, told
        self.known = {found.point: found for found in known if found.point is not None}
        self.best = sorted(known, key=lambda each: each.step_s)[:top]
        self.counts = MixedCounts(space=space.size)
        self.bound_s = float("inf")
        self.heap: list[tuple[float, int, _Item]] = []
        self._serial = counter()
        self._nodes = 0
        optimizer = space.base.optimizer
        self.clip = optimizer.clip and optimizer.offload is None
        self._legal: dict[tuple[int, int, bool], str] = {}
        self.why: dict[str, int] = {}
        """What cannot run breaks -> points."""

    def run(self) -> None:
        """Best first, until nothing that is left can be better, or the tries are used up."""
        for block in self.space.blocks():
            self._push(self._rough(block), block)
        while self.heap:
            bound, _, item = heapq.heappop(self.heap)
            if bound >= self.worst():
                self.counts.too_slow += self._points(item) + sum(self._points(each) for _, _, each in self.heap)
                self.heap.clear()
            elif self.counts.priced >= self.tries or self._nodes >= MOST_NODES:
                self.bound_s = bound
                self.counts.left += self._points(item) + sum(self._points(each) for _, _, each in self.heap)
                self.heap.clear()
            elif isinstance(item, MixedBlock):
                self._open(item)
            elif isinstance(item, _Node):
                self._extend(item)
            else:
                self._price(item)
            if self.told is not None:
                self.told(self.counts.covered - self.counts.left)
        assert self.counts.covered == self.counts.space, (self.counts, "points must add up")

    def worst(self) -> float:
        """What a plan must be faster than: only the best one is looked for, the next are those met on the way."""
        return self.best[0].step_s if self.best else float("inf")

    def _push(self, bound: float, item: _Item) -> None:
        heapq.heappush(self.heap, (bound * (1 - SLACK), next(self._serial), item))

    def _points(self, item: _Item) -> int:
        if isinstance(item, MixedBlock):
            return self.space.members(item) * len(self.space.variants(item))
        if isinstance(item, _Node):
            return self._completions(item) * len(self._variants(item.block, item.split))
        return 1

    def _completions(self, node: _Node) -> int:
        rest, stages = self.space.num_layers - node.used, node.block.pp - len(node.layers)
        if self.space.equal or not stages:
            return 1
        return comb(rest - 1, stages - 1)

    def _variants(self, block: MixedBlock, split: bool) -> list[tuple[int, str]]:
        return [each for each in self.space.variants(block) if (each[1] in SPLIT_BACKWARD) == split]

    # --- blocks

    def _rough(self, block: MixedBlock) -> float:
        """A bound without prices: no product is faster than the devices' peaks."""
        kinds = [self.space.kinds[k] for k in set(block.kinds)]
        dtype = self.space.base.precision.compute
        peak = sum(kind.node.device.flops_per_s(dtype) * len(kind.devices) for kind in kinds)
        return LOOSE * self.tables.least_flops / peak if self.space.base.precision.fp8 is None else 0.0

    def _open(self, block: MixedBlock) -> None:
        """The block's points or first nodes, with bounds."""
        why = next(
            (w for tp in sorted(set(block.tp)) if (w := self._why_not(tp, block.cp, block.sequence_parallel))), ""
        )
        if why:
            self._reject(why, self._points(block))
        elif block.recompute != "none" and block.form == "stages" and self._too_slow(block):
            self.counts.too_slow += self._points(block)
        elif block.form == "replicas":
            self._open_replicas(block)
        else:
            for split in (False, True):
                if self._variants(block, split):
                    node = _Node(block, split, (), 0, 0.0, 0.0)
                    self._push(self._ahead(node), node)

    def _too_slow(self, block: MixedBlock) -> bool:
        """Whether even without recomputation, which only adds to it, none of a pipeline's points is better."""
        block = block._replace(recompute="none")
        nodes = [_Node(block, split, (), 0, 0.0, 0.0) for split in (False, True) if self._variants(block, split)]
        return all(self._ahead(node) * (1 - SLACK) >= self.worst() for node in nodes)

    def _reject(self, why: str, points: int) -> None:
        self.counts.illegal += points
        self.why[why] = self.why.get(why, 0) + points

    def _why_not(self, tp: int, cp: int, sequence_parallel: bool) -> str:
        """What the model says against dividing it so; empty if nothing."""
        key = tp, cp, sequence_parallel
        if key not in self._legal:
            base = self.space.base
            layout = replace(base.layout, sequence_parallel=sequence_parallel)
            plan = Plan(mesh=Mesh(tp=tp, cp=cp), layout=layout, precision=base.precision, saved=base.saved)
            one = Workload(global_batch_size=1, seq_len=self.workload.sequence_lengths()[0])
            found = problems(plan, self.tables.graph, None, one)
            wrong = [p.message for p in found if p.severity == "error" and p.name != "batch"]
            self._legal[key] = wrong[0] if wrong else ""
        return self._legal[key]

    def table(self, block: MixedBlock, kind: int, tp: int, batch: int) -> LayerTable:
        """Prices of the layers of a block's plans."""
        return self.tables.of(kind, tp, batch, block.sequence_parallel, block.recompute, block.cp)

    def _open_replicas(self, block: MixedBlock) -> None:
        """Every way to share a microbatch: a step is as long as that of the worker that takes longest."""
        workers = self.space.workers(block)
        layers = equal_layers(self.space.num_layers, block.pp)
        variants = self.space.variants(block)
        workers_of = _Workers(self, block, self.tables.edges(layers), sum(workers) * block.cp)
        for shares in shares_of(self.space.global_batch // block.microbatches, workers, self.space.equal):
            each = [(k, -(-total // n)) for k, total, n in zip(block.kinds, shares, workers, strict=True)]
            # the cheapest bound first: peaks, then prices without recomputation, then all
            if any(bound(k, share) * (1 - SLACK) >= self.worst() for bound in workers_of.quick for k, share in each):
                self.counts.too_slow += len(variants)
                continue
            for zero, schedule in variants:
                if all(workers_of.fits(k, share, zero, schedule) for k, share in each):
                    split = schedule in SPLIT_BACKWARD
                    bound = max(workers_of.seconds(k, share, split) for k, share in each)
                    self._push(bound, self.space.point(block, layers, shares, zero, schedule))
                else:
                    self.counts.too_large += 1

    def pipeline_s(self, tables: Sequence[LayerTable], edges: Sequence[int], count: int, split: bool) -> float:
        """A bound on a step of a pipeline. edges: first layer of the graph in each stage, and the end."""

        def each(name: str) -> list[float]:
            columns = [getattr(table, name) for table in tables]
            return [float(c[b] - c[a]) for c, a, b in zip(columns, edges, edges[1:], strict=False)]

        forward, back, drain = each("forward"), each("back"), each("drain")
        return least_step_s(forward, back, drain, count, split=split, clip=self.clip)

    # --- pipelines over kinds

    def _tables(self, block: MixedBlock) -> list[LayerTable]:
        size = self.space.global_batch // block.microbatches
        return [
            self.table(block, kind, tp, -(-size // n))
            for kind, tp, n in zip(block.kinds, block.tp, self.space.workers(block), strict=True)
        ]

    def _ahead(self, node: _Node) -> float:
        """A bound on every pipeline that begins so: the layers left could be divided without rest, so that all stages
        left take equally long. (The mean of stages' bounds, weighed by their speeds, is below the largest.)"""
        block, rest = node.block, self.space.num_layers - node.used
        stages = range(len(node.layers), block.pp)
        if not stages:
            return node.most
        tables, count = self._tables(block), block.microbatches
        weights = [1 / (count * tables[s].least_layer_s) for s in stages]
        last = tables[-1]
        end, after = self.tables.counted[-1] + 1, self.tables.num_layers
        head = float(last.forward[after] - last.forward[end] + last.back[after] - last.back[end])
        offsets = [node.ahead + (count * head if s == block.pp - 1 else 0.0) for s in stages]
        level = (rest + sum(o * w for o, w in zip(offsets, weights, strict=True))) / sum(weights)
        return max(node.most, level)

    def _extend(self, node: _Node) -> None:
        """One stage more, with every number of layers."""
        self._nodes += 1
        block, stage = node.block, len(node.layers)
        rest, after = self.space.num_layers - node.used, block.pp - stage - 1
        table, workers = self._tables(block)[stage], self.space.workers(block)[stage]
        if self.space.equal:
            choices: Iterable[int] = (equal_layers(self.space.num_layers, block.pp)[stage],)
        else:
            choices = (rest,) if not after else range(1, rest - after + 1)
        variants = self._variants(block, node.split)
        zero, schedule = max(v[0] for v in variants), "" if any(v[1] != "gpipe" for v in variants) else "gpipe"
        for layers in choices:
            first = 0 if not stage else self.tables.counted[node.used]
            last = self.tables.num_layers if not after else self.tables.counted[node.used + layers]
            f, b = float(table.forward[last] - table.forward[first]), float(table.back[last] - table.back[first])
            step = f + (0.0 if node.split else b) if self.clip else 0.0
            child = replace(
                node,
                layers=(*node.layers, layers),
                used=node.used + layers,
                ahead=node.ahead + step,
                most=max(node.most, node.ahead + block.microbatches * (f + b)),
            )
            if not self.may_fit(block, stage, block.kinds[stage], table, (first, last), zero, schedule, workers):
                self.counts.too_large += self._points(child)
            elif after:
                self._push(self._ahead(child), child)
            else:
                self._finish(child)

    def _finish(self, node: _Node) -> None:
        """The points of a whole pipeline."""
        block, edges, tables = node.block, self.tables.edges(node.layers), self._tables(node.block)
        workers = self.space.workers(block)
        bound = self.pipeline_s(tables, edges, block.microbatches, node.split)
        for zero, schedule in self._variants(block, node.split):
            point = self.space.point(block, node.layers, (), zero, schedule)  # type: ignore[arg-type]
            stages = enumerate(zip(tables, block.kinds, workers, edges, edges[1:], strict=False))
            if all(self.may_fit(block, s, k, t, (a, b), zero, schedule, n) for s, (t, k, n, a, b) in stages):
                self._push(max(bound, node.most), point)
            else:
                self.counts.too_large += 1

    def may_fit(
        self,
        block: MixedBlock,
        stage: int,
        kind: int,
        table: LayerTable,
        layers: tuple[int, int],
        zero: int,
        schedule: str,
        workers: int,
    ) -> bool:
        """Whether a stage of the graph's layers from the first to before the second may fit on a device of a kind."""
        first, last = layers
        dense, routed = float(table.dense[last] - table.dense[first]), float(table.routed[last] - table.routed[first])
        held = static_bytes(
            dense,
            routed,
            self.space.base,
            zero,
            workers,
            block.tp[0 if block.form == "replicas" else stage],
            self.tables.stack,
        )
        held += in_flight(schedule, stage, block.pp, block.microbatches) * float(table.kept[last] - table.kept[first])
        return held + self.tables.workspace[kind] <= self.limits[kind]

    # --- points

    def _price(self, point: MixedPoint) -> None:
        """What the simulator says."""
        if point in self.known:
            self.counts.priced += 1
            return
        plan = self.space.plan(point)
        try:
            found = predict(self.tables.graph, self.tables.cluster, plan, self.workload, self.stack)
        except PlanError as error:
            self._reject(str(error).partition(";")[0], 1)
            return
        self.counts.priced += 1
        if fits(found, self.space.kinds, self.limits):
            made = MixedFound(point=point, plan=plan, prediction=found, kinds=tuple(sorted(set(point.kinds))))
            self.best = sorted([*self.best, made], key=lambda each: each.step_s)[: self.top]


def fits(found: Prediction, kinds: tuple[Kind, ...], limits: tuple[int, ...]) -> bool:
    """Whether every rank's peak is within what its device may hold."""
    allowed = {device: limit for kind, limit in zip(kinds, limits, strict=True) for device in kind.devices}
    place = found.plan.device_of
    return all(rank.peak_bytes <= min(allowed[place[r]] for r in rank.ranks) for rank in found.memory)


def memory_limits(kinds: tuple[Kind, ...], goal: Goal) -> tuple[int, ...]:
    """Bytes that a device of each kind may hold: the goal's, or its share of that device."""
    own = [kind.node.device.memory_bytes for kind in kinds]
    if goal.memory_bytes:
        return tuple(min(each, goal.memory_bytes) for each in own)
    return tuple(int(each * goal.memory_fraction) for each in own)


def plan_mixed(
    model: Graph | str,
    cluster: Cluster | str,
    workload: Workload,
    stack: Stack = PLAIN_STACK,
    goal: Goal | None = None,
    *,
    base: Plan | None = None,
    fixed: Mapping[str, object] | None = None,
    forbid: Iterable[str | Limit] = (),
    top: int = 5,
    tries: int = TRIES,
    most_bytes: int | None = None,
    told: Callable[[int, int], None] | None = None,
) -> MixedResult:
    """The fastest plan that fits, over all kinds of a mixed cluster or some of them, and the next `top` - 1.

    Arguments as for `plan`; `fixed` and `forbid` may name the fields in `mixed_space.OPEN_FIELDS`, of which `pp` is the
    number of stages. tries: predictions after which the search over kinds stops; so many more go to plans with equal
    shares, which the result is compared with. most_bytes: what any device may hold, below what the goal allows it.
    PlanError for a cluster of one kind, and when nothing fits.
    """
    graph = preset(model) if isinstance(model, str) else model
    machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    limits = [parse_limit(each) if isinstance(each, str) else each for each in forbid]
    base, goal = base or Plan(precision=default_precision(machines)), goal or Goal()
    space = make_mixed_space(graph, machines, workload, base=base, fixed=fixed, limits=limits, stack=stack)
    if len(space.kinds) < 2:
        raise PlanError(f"cluster {machines.name!r} has devices of one kind; gnomon.plan searches it")
    tables = LayerTables(graph, machines, workload, stack, base, space.kinds)
    allowed = memory_limits(space.kinds, goal)
    if most_bytes is not None:
        allowed = tuple(min(each, most_bytes) for each in allowed)
    alone, predicted = [], 0
    for index, kind in enumerate(space.kinds):
        found, tried = None, 0
        try:
            there, own = part_of(machines, kind), Goal(memory_bytes=allowed[index])
            result = plan_alike(graph, there, workload, stack, own, base=base, fixed=fixed, forbid=limits, top=1)
            whole = () if len(kind.devices) == machines.num_devices else kind.devices
            made = replace(result.best[0].plan, placement=whole)
            prediction = predict(graph, machines, made, workload, stack)
            found, tried = (
                MixedFound(point=None, plan=made, prediction=prediction, kinds=(index,)),
                result.counts.priced,
            )
        except PlanError:
            pass  # too small for the model, or without a plan that is asked for
        alone.append((kind, found))
        predicted += tried
    even = MixedSearch(tables, workload, stack, replace(space, equal=True), allowed, tries=tries)
    even.run()
    size = space.size
    progress = None if told is None else lambda done: told(done, size)
    known = [found for found in (*(f for _, f in alone), *even.best) if found is not None]
    search = MixedSearch(tables, workload, stack, space, allowed, top=top, tries=tries, known=known, told=progress)
    search.run()
    if not search.best:
        raise PlanError(_nothing_fits(graph, machines, space, search))
    return MixedResult(
        graph=graph,
        cluster=machines,
        workload=workload,
        stack=stack,
        space=space,
        best=tuple(search.best),
        counts=search.counts,
        bound_s=min(search.bound_s, search.best[0].step_s),
        equal=even.best[0] if even.best else None,
        alone=tuple(alone),
        predicted=predicted + even.counts.priced + search.counts.priced,
    )


def part_of(cluster: Cluster, kind: Kind) -> Cluster:
    """The cluster's devices of one kind."""
    groups, first = [], 0
    for group in cluster.groups:
        if first in kind.devices:
            groups.append(group)
        first += group.count * group.node.count
    return replace(cluster, name=f"{kind.name} of {cluster.name}", groups=tuple(groups))


def _nothing_fits(graph: Graph, cluster: Cluster, space: MixedSpace, search: MixedSearch) -> str:
    counts = search.counts
    if not counts.space:
        sizes = " and ".join(f"{kind.node.count} of {kind.name}" for kind in space.kinds)
        return (
            f"no plan over the kinds of {cluster.name} has what is asked, and none fits on one kind alone: tp x cp "
            f"must divide the devices of a node, {sizes}; ask for less of them, or leave them open"
        )
    why = f"{counts.too_large:,} of {counts.space:,} plans over its kinds are too large, {counts.illegal:,} cannot run"
    if search.why:
        most = max(search.why, key=lambda name: search.why[name])
        why += f" (most often: {most})"
    return (
        f"no plan of {graph.name} fits on {cluster.name}, nor on one kind of it alone: {why}, {counts.priced:,} were "
        f"predicted; {space.all_devices} devices want at least a sequence each of a batch of {space.global_batch}: use "
        f"fewer or larger devices, a larger batch, or --memory"
    )


class _Workers:
    """Bounds on the workers of a block of replicas, by kind and sequences of a microbatch, each computed once."""

    def __init__(self, search: MixedSearch, block: MixedBlock, edges: tuple[int, ...], workers: int) -> None:
        self.search, self.block, self.edges, self.workers = search, block, edges, workers
        self._seconds: dict[tuple[int, int, bool, Recompute], float] = {}
        self._fits: dict[tuple[int, int, int, str], bool] = {}

    @property
    def quick(self) -> tuple[Callable[[int, int], float], ...]:
        """Bounds, the cheapest first: peaks of the devices, prices without recomputation, prices."""
        return (self.peak_s, lambda k, s: self.seconds(k, s, True, "none"), lambda k, s: self.seconds(k, s, True))

    def peak_s(self, kind: int, share: int) -> float:
        """All products of a worker's stages, of which each has its share of the layers, at the peak of its devices."""
        space, block = self.search.space, self.block
        if space.base.precision.fp8 is not None:
            return 0.0
        peak = (
            space.kinds[kind].node.device.flops_per_s(space.base.precision.compute) * block.tp[0] * block.pp * block.cp
        )
        return LOOSE * self.search.tables.least_flops / space.global_batch * share * block.microbatches / peak

    def seconds(self, kind: int, share: int, split: bool, recompute: Recompute | None = None) -> float:
        """Of a step of a worker of this kind; of a split schedule it is the lower of both."""
        key = kind, share, split, recompute or self.block.recompute
        if key not in self._seconds:
            table = self.search.table(self.block._replace(recompute=key[3]), kind, self.block.tp[0], share)
            tables, count = [table] * self.block.pp, self.block.microbatches
            self._seconds[key] = self.search.pipeline_s(tables, self.edges, count, split)
        return self._seconds[key]

    def fits(self, kind: int, share: int, zero: int, schedule: str) -> bool:
        """Whether a worker may fit."""
        key = kind, share, zero, schedule
        if key not in self._fits:
            table = self.search.table(self.block, kind, self.block.tp[0], share)
            self._fits[key] = all(
                self.search.may_fit(self.block, s, kind, table, (a, b), zero, schedule, self.workers)
                for s, (a, b) in enumerate(zip(self.edges, self.edges[1:], strict=False))
            )
        return self._fits[key]
