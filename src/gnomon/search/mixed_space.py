"""Plans for a cluster of unlike devices: side by side with uneven shares, or a pipeline whose stages differ by kind.

`make_mixed_space` lists the choices, a `MixedBlock` is the points that differ only in shares or layers, ZeRO stage and
schedule, and `MixedSpace.plan` makes a point's Plan. Two forms: *replicas*, where every stage has workers of all kinds
and each takes its share of every microbatch; *stages*, where each stage stands on devices of one kind, with as many
layers as suit it, and kinds may differ in tensor and data parallelism. Kinds may be left out whole.
Context parallelism is for workers side by side, within a node, and only where it is asked for.
Leaves out expert parallelism over kinds, and several stages on a rank.
Source: Jia et al. 2022 (Whale, USENIX ATC), Yi et al. 2020 (HeteroG, CoNEXT).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, permutations, product
from math import comb
from typing import Literal, NamedTuple, cast

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.hardware.kinds import Kind, kinds_of
from gnomon.plans import Mesh, Plan, Saved, Schedule, Stack, Stage, Workload, stage_layers
from gnomon.plans.parts import ScheduleName
from gnomon.plans.select import format_layers, format_ranks
from gnomon.search.space import (
    FLAT_SCHEDULES,
    Limit,
    Recompute,
    count_layers,
    divisors,
    has_tied,
    narrowed,
    stack_limits,
)

Form = Literal["replicas", "stages"]

MOST_STAGES = 16
"""Stages of a pipeline over kinds, at most."""

ARRANGED = 4
"""Pipelines of up to so many stages are tried with their kinds in every order; in longer ones a kind's stages follow
each other, in every order of the kinds."""

LARGEST_SHARE = 32
"""Sequences of a microbatch on one worker, at most, where workers share one unevenly."""

OPEN_FIELDS = ("tp", "cp", "pp", "zero", "recompute", "schedule", "sequence_parallel")
"""Fields of a plan that a request may fix or limit here; `pp` is the number of stages. `cp` is 1 unless it is fixed."""


class MixedPoint(NamedTuple):
    """One plan."""

    form: Form
    kinds: tuple[int, ...]
    """replicas: the kinds that take part; stages: the kind of each stage."""
    tp: tuple[int, ...]
    """Tensor-parallel ranks of each entry of `kinds`."""
    layers: tuple[int, ...]
    """Of each stage; embedding and head are not counted."""
    shares: tuple[int, ...]
    """replicas: sequences of a microbatch that the workers of each kind take together; stages: empty."""
    microbatches: int
    sequence_parallel: bool
    recompute: Recompute
    zero: int
    schedule: ScheduleName
    cp: int = 1
    """Context-parallel ranks of a worker; replicas only."""


class MixedBlock(NamedTuple):
    """Points that differ in shares or layers, ZeRO stage and schedule."""

    form: Form
    kinds: tuple[int, ...]
    tp: tuple[int, ...]
    pp: int
    microbatches: int
    sequence_parallel: bool
    recompute: Recompute
    cp: int = 1


@dataclass(frozen=True, kw_only=True)
class MixedSpace:
    """What is searched."""

    graph: Graph
    base: Plan
    kinds: tuple[Kind, ...]
    global_batch: int
    num_layers: int
    all_devices: int
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    microbatches: tuple[int, ...]
    sequence_parallel: tuple[bool, ...]
    recompute: tuple[Recompute, ...]
    zero: tuple[int, ...]
    schedule: tuple[ScheduleName, ...]
    cp: tuple[int, ...] = (1,)
    tied_alike: bool = False
    """Tied weights want equal meshes and no ZeRO: what Gnomon's runtime asks."""
    equal: bool = False
    """Only equal shares and equal layers: what unlike devices are not made for, to compare with."""

    def workers(self, block: MixedBlock) -> tuple[int, ...]:
        """replicas: workers of each kind; stages: data-parallel ranks of each stage."""
        if block.form == "replicas":
            return tuple(len(self.kinds[k].devices) // (block.pp * block.tp[0] * block.cp) for k in block.kinds)
        return tuple(
            len(self.kinds[k].devices) // (block.kinds.count(k) * tp)
            for k, tp in zip(block.kinds, block.tp, strict=True)
        )

    def blocks(self) -> Iterator[MixedBlock]:
        """Every block with at least one point."""
        for some in self._subsets():
            shapes = [(cp, shape) for cp in self.cp for shape in self._replicas(some, cp)]
            shapes += [(1, shape) for shape in self._pipelines(some)] if 1 in self.cp else []
            for cp, (tps, pp, arranged) in shapes:
                form: Form = "stages" if arranged else "replicas"
                sequence = self.sequence_parallel if max(tps) > 1 else (self.sequence_parallel[0],)
                for count, sp, recompute in product(self.microbatches, sequence, self.recompute):
                    block = MixedBlock(form, arranged or some, tps, pp, count, sp, recompute, cp)
                    if self.variants(block) and self.members(block):
                        yield block

    def _subsets(self) -> Iterator[tuple[int, ...]]:
        for size in range(len(self.kinds), 1, -1):
            yield from combinations(range(len(self.kinds)), size)

    def _replicas(self, some: tuple[int, ...], cp: int) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...]]]:
        for tp, pp in product(self.tp, self.pp):
            if all(self._divides(k, tp * cp, pp) for k in some) and pp <= self.num_layers:
                yield (tp,) * len(some), pp, ()

    def _pipelines(self, some: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...]]]:
        each = [[(tp, p) for tp in self.tp for p in self._cuts(k, tp)] for k in some]
        for chosen in product(*each):
            pp = sum(p for _, p in chosen)
            if pp in self.pp and pp <= min(self.num_layers, MOST_STAGES):
                tp_of = {k: tp for k, (tp, _) in zip(some, chosen, strict=True)}
                for order in _orders(tuple((k, p) for k, (_, p) in zip(some, chosen, strict=True))):
                    yield tuple(tp_of[k] for k in order), pp, order

    def _cuts(self, kind: int, tp: int) -> tuple[int, ...]:
        return tuple(p for p in divisors(len(self.kinds[kind].devices)) if self._divides(kind, tp, p))

    def _divides(self, kind: int, tp: int, pp: int) -> bool:
        return self.kinds[kind].node.count % tp == 0 and len(self.kinds[kind].devices) % (tp * pp) == 0

    def variants(self, block: MixedBlock) -> tuple[tuple[int, ScheduleName], ...]:
        """(ZeRO stage, schedule) of a block's points; without a choice where they would change nothing, and without
        ZeRO where some stages have nobody to divide with, which has no rows."""
        workers = self.workers(block)
        alone = block.form == "stages" and min(workers) == 1
        zeros: tuple[int, ...] = self.zero
        if alone:
            zeros = tuple(z for z in self.zero if z == 0) or (self.zero[:1] if max(workers) == 1 else ())
        schedules = self.schedule if block.pp > 1 else self.schedule[:1]
        if self.tied_alike and block.pp > 1:
            unlike = block.form == "stages" and len(set(zip(workers, block.tp, strict=True))) > 1
            zeros = () if unlike else tuple(z for z in zeros if z == 0)
        return tuple((zero, schedule) for zero in zeros for schedule in schedules)

    def members(self, block: MixedBlock) -> int:
        """Shares, or layers, that a block has."""
        size, workers = self.global_batch // block.microbatches, self.workers(block)
        if block.form == "stages":
            if max(workers) > size or (self.equal and any(size % n for n in workers)):
                return 0
            return 1 if self.equal else comb(self.num_layers - 1, block.pp - 1)
        return len(shares_of(size, workers, self.equal))

    @property
    def size(self) -> int:
        """Number of points."""
        return sum(self.members(block) * len(self.variants(block)) for block in self.blocks())

    def points(self) -> Iterator[MixedPoint]:
        """All of them, legal or not."""
        for block in self.blocks():
            for layers, shares in self.choices(block):
                for zero, schedule in self.variants(block):
                    yield self.point(block, layers, shares, zero, schedule)

    def choices(self, block: MixedBlock) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(layers, shares) of each point of a block."""
        even = equal_layers(self.num_layers, block.pp)
        if block.form == "replicas":
            size = self.global_batch // block.microbatches
            yield from ((even, shares) for shares in shares_of(size, self.workers(block), self.equal))
        elif self.equal:
            yield even, ()
        else:
            for cuts in combinations(range(1, self.num_layers), block.pp - 1):
                edges = (0, *cuts, self.num_layers)
                yield tuple(b - a for a, b in zip(edges, edges[1:], strict=False)), ()

    def point(
        self,
        block: MixedBlock,
        layers: tuple[int, ...],
        shares: tuple[int, ...],
        zero: int,
        schedule: ScheduleName,
    ) -> MixedPoint:
        """One of a block's points."""
        return MixedPoint(
            block.form, block.kinds, block.tp, layers, shares, block.microbatches, block.sequence_parallel,
            block.recompute, zero, schedule, block.cp,
        )  # fmt: skip

    def plan(self, point: MixedPoint) -> Plan:
        """The Plan of a point. Ranks are numbered as the devices that take part are."""
        devices = self._stage_devices(point)
        used = sorted(device for each in devices for device in each)
        rank_of = {device: rank for rank, device in enumerate(used)}
        parts, meshes = selectors(self.graph, point.layers), self._meshes(point)
        stages = tuple(
            Stage(
                calls=calls,
                mesh=mesh,
                devices=format_ranks([rank_of[device] for device in each]),
                shares=shares,
            )
            for calls, each, (mesh, shares) in zip(parts, devices, meshes, strict=True)
        )
        base = self.base
        return replace(
            base,
            mesh=Mesh(),
            stages=stages,
            schedule=replace(
                base.schedule, name=point.schedule, micro_batch_size=None, num_microbatches=point.microbatches
            ),
            saved=base.saved if base.saved.rules else Saved(preset=point.recompute),
            layout=replace(base.layout, sequence_parallel=point.sequence_parallel),
            optimizer=replace(base.optimizer, zero=cast(Literal[0, 1, 2, 3], point.zero)),
            placement=() if len(used) == self.all_devices else tuple(used),
        )

    def _stage_devices(self, point: MixedPoint) -> list[tuple[int, ...]]:
        if point.form == "replicas":
            pp = len(point.layers)
            parts = [_cut(self.kinds[k].devices, pp) for k in point.kinds]
            return [tuple(device for part in parts for device in part[stage]) for stage in range(pp)]
        cut = {k: iter(_cut(self.kinds[k].devices, point.kinds.count(k))) for k in set(point.kinds)}
        return [next(cut[k]) for k in point.kinds]

    def _meshes(self, point: MixedPoint) -> list[tuple[Mesh, tuple[int, ...]]]:
        """Mesh and shares of each stage."""
        pp, size = len(point.layers), self.global_batch // point.microbatches
        block = MixedBlock(point.form, point.kinds, point.tp, pp, point.microbatches, False, "none", point.cp)
        workers = self.workers(block)
        if point.form == "replicas":
            dealt = tuple(part for n, t in zip(workers, point.shares, strict=True) for part in deal_out(t, n))
            shares = dealt if len(set(dealt)) > 1 else ()
            return [(Mesh(dp_shard=sum(workers), tp=point.tp[0], cp=point.cp), shares)] * pp
        return [
            (Mesh(dp_shard=n, tp=tp), deal_out(size, n) if size % n else ())
            for n, tp in zip(workers, point.tp, strict=True)
        ]


def deal_out(total: int, workers: int) -> tuple[int, ...]:
    """Whole sequences of each worker, as equal as can be, the first ones taking one more."""
    each, more = divmod(total, workers)
    return tuple(each + (i < more) for i in range(workers))


def equal_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """As `Plan` divides layers when nothing is said."""
    return deal_out(num_layers, pp)


@lru_cache(maxsize=4096)
def shares_of(size: int, workers: tuple[int, ...], equal: bool) -> tuple[tuple[int, ...], ...]:
    """Every way to give kinds their sequences of a microbatch: each worker at least one, at most LARGEST_SHARE."""
    if equal:
        each, rest = divmod(size, sum(workers))
        return () if rest or not 1 <= each <= LARGEST_SHARE else (tuple(each * n for n in workers),)
    if len(workers) == 1:
        return ((size,),) if workers[0] <= size <= LARGEST_SHARE * workers[0] else ()
    mine, others = workers[0], workers[1:]
    return tuple(
        (total, *rest)
        for total in range(mine, min(size - sum(others), LARGEST_SHARE * mine) + 1)
        for rest in shares_of(size - total, others, False)
    )


@lru_cache(maxsize=4096)
def _orders(counts: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Kinds of the stages, in every order that is tried. counts: (kind, its stages)."""
    total = sum(count for _, count in counts)
    blocks = tuple((kind,) * count for kind, count in counts)
    if total <= ARRANGED:
        flat = tuple(kind for block in blocks for kind in block)
        return tuple(dict.fromkeys(permutations(flat)))
    return tuple(tuple(kind for block in order for kind in block) for order in permutations(blocks))


def _cut(devices: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    size = len(devices) // parts
    return [devices[i * size : (i + 1) * size] for i in range(parts)]


@lru_cache(maxsize=1024)
def selectors(graph: Graph, layers: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """What each stage computes, as `Stage.calls`."""
    whole = Plan(mesh=Mesh(pp=len(layers)), schedule=Schedule(layers_per_stage=layers))
    return tuple(format_layers(part) for part in stage_layers(whole, graph))


def make_mixed_space(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    *,
    base: Plan | None = None,
    fixed: Mapping[str, object] | None = None,
    limits: Iterable[Limit] = (),
    stack: Stack | None = None,
) -> MixedSpace:
    """All choices for a model on unlike devices, less what is fixed, forbidden or beyond the stack.

    fixed: one of OPEN_FIELDS -> its value; `pp` is the number of stages. PlanError for other fields, and for one that
    is left without a choice.
    """
    base, kinds = base or Plan(), kinds_of(cluster)
    fixed, limits = dict(fixed or {}), list(limits)
    _refuse(cluster, fixed, limits)
    total = count_layers(graph)
    tps = sorted({d for kind in kinds for d in divisors(kind.node.count)})
    choices: dict[str, tuple[object, ...]] = {
        "tp": tuple(tps),
        "cp": (1,),
        "pp": tuple(range(1, min(total, max(MOST_STAGES, *(len(k.devices) for k in kinds))) + 1)),
        "zero": (0, 1, 2, 3),
        "recompute": ("none", "selective", "full"),
        "schedule": FLAT_SCHEDULES,
        "sequence_parallel": (False, True),
    }
    choices = narrowed(choices, fixed, [*limits, *(stack_limits(stack, graph, tps) if stack is not None else ())])
    return MixedSpace(
        graph=graph,
        base=base,
        kinds=kinds,
        global_batch=workload.batch_size,
        num_layers=total,
        all_devices=cluster.num_devices,
        microbatches=divisors(workload.batch_size),
        tied_alike=stack is not None and stack.name == "gnomon" and has_tied(graph),
        **choices,  # type: ignore[arg-type]
    )


def _refuse(cluster: Cluster, fixed: Mapping[str, object], limits: Iterable[Limit]) -> None:
    """PlanError for fields that plans over unlike devices do not have; what they do not use is 1."""
    wrong = [name for name, value in fixed.items() if name not in OPEN_FIELDS and value != 1]
    wrong += [limit.field for limit in limits if limit.field not in OPEN_FIELDS and limit.forbids(1)]
    if wrong:
        raise PlanError(
            f"{wrong[0]} is asked for, but cluster {cluster.name!r} has devices of {len(kinds_of(cluster))} kinds, "
            f"whose plans are searched by {', '.join(OPEN_FIELDS)}; leave it open, or plan for one kind alone"
        )
