"""Plans for a cluster of heterogeneous devices: side by side with uneven shares, or stages by kind.

`make_mixed_space` lists the choices, a `MixedBlock` is the points that differ only in shares or layers, ZeRO stage and
schedule, and `MixedSpace.plan` makes a point's Plan. Two forms: *replicas*, where every stage has workers of all kinds
and each takes its share of every microbatch; *stages*, where each pipeline rank stands on devices of one kind, with as
many layers as suit it, and kinds may differ in tensor, data and expert parallelism. Kinds may be left out whole.
A pipeline rank may hold several stages (loop or V placement): its layers are then divided over them equally.
Context parallelism is the same for all kinds, tensor and context ranks share a node, and the groups over which experts
are divided never hold devices of two kinds: an exchange of tokens would be as slow as the slowest of them.
Source: Jia et al. 2022 (Whale, USENIX ATC), Yi et al. 2020 (HeteroG, CoNEXT).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, groupby, permutations, product
from math import comb
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gnomon import orders
from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.hardware.kinds import DeviceKind, kinds_of
from gnomon.plans import Mesh, Plan, Saved, Schedule, Stage, Workload, stage_layers
from gnomon.plans.parts import Preset
from gnomon.plans.plan import pipeline_rank
from gnomon.plans.select import format_layers, format_ranks
from gnomon.search.space.dispatchers import with_dispatcher
from gnomon.search.space.points import (
    CHUNK_TOKENS,
    Context,
    Limit,
    Recompute,
    count_layers,
    divisors,
    narrowed,
    refuse_divided,
    stack_limits,
)
from gnomon.software import Stack, own

Longs = NDArray[np.int64]
Form = Literal["replicas", "stages"]
"""How kinds of devices work together; the module's docstring says what each means."""

MOST_STAGES = 16
"""The most ranks of a pipeline whose ranks stand on devices of several kinds."""

MOST_VIRTUAL = 4
"""The most stages on a rank, unless another number is fixed."""

ARRANGED = 4
"""Pipelines of up to so many ranks are tried with their kinds in every order; in longer ones a kind's ranks follow
each other, in every order of the kinds."""

LARGEST_SHARE = 32
"""The most sequences of a microbatch on one worker, where workers share it unevenly."""

OPEN_FIELDS = (
    "tp", "cp", "ep", "pp", "virtual_stages", "zero", "recompute", "schedule", "sequence_parallel", "context",
)  # fmt: skip
"""Fields of a plan that a request may fix or limit here; `pp` is the number of pipeline ranks, `ep` that of the kinds
that can be divided so (others take the most that divides it)."""

Ranks = tuple[int, ...]
"""A number of ranks for each entry of a shape's `kinds`."""


class MixedPoint(NamedTuple):
    """One plan of the space, in numbers."""

    form: Form
    """How kinds work together: replicas side by side, or stages one after the other."""
    kinds: tuple[int, ...]
    """replicas: the kinds that take part; stages: the kind of each pipeline rank."""
    tp: Ranks
    """Tensor-parallel ranks of each entry of `kinds`."""
    layers: tuple[int, ...]
    """Layers of each stage; embedding and head are not counted."""
    shares: tuple[int, ...]
    """replicas: sequences of a microbatch that the workers of each kind take together; stages: empty."""
    microbatches: int
    """Microbatches of a step."""
    sequence_parallel: bool
    """Whether sequences are divided over tp between the tensor-parallel regions."""
    recompute: Recompute
    """What becomes of activations between forward and backward."""
    zero: int
    """ZeRO stage, 0 to 3."""
    schedule: str
    """Name of the pipeline schedule."""
    cp: int = 1
    """Context-parallel ranks of every worker."""
    ep: Ranks = ()
    """Expert-parallel ranks of each entry of `kinds`; empty: 1."""
    context: Context = "ring"
    """How context-parallel ranks exchange keys and values."""
    virtual: int = 1
    """The number of stages on each pipeline rank."""

    @property
    def pp(self) -> int:
        """Counts the pipeline ranks."""
        return len(self.layers) // self.virtual

    @property
    def placement(self) -> Literal["loop", "v"]:
        """Says how stages lie on ranks: in a loop, or turning at the last rank."""
        return orders.find(self.schedule).placement


class Shape(NamedTuple):
    """Axes of a plan over kinds."""

    form: Form
    """How kinds work together."""
    kinds: tuple[int, ...]
    """As in `MixedPoint`."""
    tp: Ranks
    """Tensor-parallel ranks of each entry of `kinds`."""
    pp: int
    """Pipeline ranks."""
    cp: int
    """Context-parallel ranks of every worker."""
    ep: Ranks
    """Expert-parallel ranks of each entry of `kinds`."""
    virtual: int
    """Stages on each pipeline rank."""
    v_placement: bool
    """Whether stages turn at the last rank (V placement)."""


class MixedBlock(NamedTuple):
    """Points that differ in shares or layers, ZeRO stage and schedule."""

    shape: Shape
    """Its axes."""
    microbatches: int
    """Microbatches of a step."""
    sequence_parallel: bool
    """Whether sequences are divided over tp between the tensor-parallel regions."""
    recompute: Recompute
    """What becomes of activations between forward and backward."""
    context: Context
    """How context-parallel ranks exchange keys and values."""


@dataclass(frozen=True, kw_only=True)
class MixedSpace:
    """The plans that are searched."""

    graph: Graph
    """The model."""
    base: Plan
    """The plan whose other fields every point takes over."""
    kinds: tuple[DeviceKind, ...]
    """The kinds of devices."""
    global_batch: int
    """Sequences of a step."""
    num_layers: int
    """Layers that a pipeline divides."""
    all_devices: int
    """Devices of the cluster; a plan that leaves some idle names the ones that it uses."""
    tp: tuple[int, ...]
    """Numbers of tensor-parallel ranks."""
    pp: tuple[int, ...]
    """Numbers of pipeline ranks."""
    microbatches: tuple[int, ...]
    """Numbers of microbatches."""
    sequence_parallel: tuple[bool, ...]
    """Whether sequences are divided over tp between the tensor-parallel regions."""
    recompute: tuple[Recompute, ...]
    """What becomes of activations between forward and backward."""
    zero: tuple[int, ...]
    """ZeRO stages."""
    schedule: tuple[str, ...]
    """Names of pipeline schedules."""
    cp: tuple[int, ...] = (1,)
    """Numbers of context-parallel ranks."""
    ep: tuple[int, ...] = (1,)
    """Numbers of expert-parallel ranks; a stage that cannot be divided so takes the most that divides the number."""
    context: tuple[Context, ...] = ("ring",)
    """How context-parallel ranks exchange keys and values."""
    virtual_stages: tuple[int, ...] = (1,)
    """Numbers of stages on each pipeline rank."""
    zero_in_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that the stack runs with several pipeline ranks."""
    tied_alike: bool = False
    """Whether tied weights want equal meshes and no ZeRO, which is a limit of Gnomon's runtime."""
    equal: bool = False
    """Whether shares and layers are equal: the baseline that plans for heterogeneous devices are compared with."""

    def workers(self, shape: Shape) -> Ranks:
        """Counts the workers of each kind (replicas), or the data-parallel ranks of each pipeline rank (stages)."""
        if shape.form == "replicas":
            per_worker = shape.pp * shape.tp[0] * shape.cp
            return tuple(len(self.kinds[k].devices) // per_worker for k in shape.kinds)
        return tuple(
            len(self.kinds[k].devices) // (shape.kinds.count(k) * tp * shape.cp)
            for k, tp in zip(shape.kinds, shape.tp, strict=True)
        )

    @cached_property
    def blocks(self) -> tuple[MixedBlock, ...]:
        """Every block with at least one point; choices that change nothing for a shape are made once."""
        blocks = []
        for shape in self._shapes():
            sequence = self.sequence_parallel if max(shape.tp) > 1 else self.sequence_parallel[:1]
            contexts = self.context if shape.cp > 1 else self.context[:1]
            for count in self.microbatches:
                if self.variants(shape, count) and self.members(shape, count):
                    blocks += [
                        MixedBlock(shape, count, *choices) for choices in product(sequence, self.recompute, contexts)
                    ]
        return tuple(blocks)

    @cached_property
    def by_shape(self) -> tuple[tuple[Shape, tuple[MixedBlock, ...]], ...]:
        """The blocks of each shape."""
        return tuple((shape, tuple(blocks)) for shape, blocks in groupby(self.blocks, key=lambda block: block.shape))

    def _shapes(self) -> Iterator[Shape]:
        """Yields every shape: choices nested in the order kinds that take part, context ranks, form with its axes,
        expert ranks, stages on a rank."""
        for some in self._subsets():
            for cp in self.cp:
                for form, kinds, tps, pp in (*self._replicas(some, cp), *self._pipelines(some, cp)):
                    for ep in self._expert_ranks(Shape(form, kinds, tps, pp, cp, (), 1, False)):
                        for virtual, turned in self._rounds(pp):
                            yield Shape(form, kinds, tps, pp, cp, ep, virtual, turned)

    def _subsets(self) -> Iterator[tuple[int, ...]]:
        """Yields the kinds that take part: all of them, down to each two. One kind alone is searched elsewhere
        (`equal`)."""
        for size in range(len(self.kinds), 1, -1):
            yield from combinations(range(len(self.kinds)), size)

    def _replicas(self, some: tuple[int, ...], cp: int) -> Iterator[tuple[Form, tuple[int, ...], Ranks, int]]:
        """Yields (form, kinds, tp of each, pp) of replicas on some kinds: tp and pp are the same for all."""
        for tp, pp in product(self.tp, self.pp):
            if all(self._divides(k, tp * cp, pp) for k in some) and pp <= self.num_layers:
                yield "replicas", some, (tp,) * len(some), pp

    def _pipelines(self, some: tuple[int, ...], cp: int) -> Iterator[tuple[Form, tuple[int, ...], Ranks, int]]:
        """Yields (form, kind of each pipeline rank, tp of each, pp) of pipelines over some kinds."""
        options = [[(tp, p) for tp in self.tp for p in self._cuts(k, tp * cp)] for k in some]
        # A kind's devices are cut into p pipeline ranks; the tensor axis is one for a kind, wherever its ranks stand.
        for chosen in product(*options):
            pp = sum(p for _, p in chosen)
            if pp in self.pp and pp <= min(self.num_layers, MOST_STAGES):
                tp_of = {k: tp for k, (tp, _) in zip(some, chosen, strict=True)}
                for order in _orders(tuple((k, p) for k, (_, p) in zip(some, chosen, strict=True))):
                    yield "stages", order, tuple(tp_of[k] for k in order), pp

    def _cuts(self, kind: int, ranks: int) -> tuple[int, ...]:
        """Numbers of pipeline ranks that a kind's devices can be cut into, for workers of so many ranks."""
        return tuple(p for p in divisors(len(self.kinds[kind].devices)) if self._divides(kind, ranks, p))

    def _divides(self, kind: int, ranks: int, pp: int) -> bool:
        """Whether a kind's devices make pp pipeline ranks of whole workers of `ranks` ranks (tp x cp) each, which do
        not straddle nodes."""
        return self.kinds[kind].node.count % ranks == 0 and len(self.kinds[kind].devices) % (ranks * pp) == 0

    def _expert_ranks(self, shape: Shape) -> tuple[Ranks, ...]:
        """Expert-parallel ranks of each kind: their groups hold devices of one kind. Side by side all kinds have the
        same, since they hold replicas of each other; stages take the most that divides the number."""
        # Ranks among which experts may be divided: dp x tp x cp of one pipeline rank.
        ranks = [n * tp * shape.cp for n, tp in zip(self.workers(shape), shape.tp, strict=True)]
        choices = []
        for ep in self.ep:
            if shape.form == "replicas":
                choices += [(ep,) * len(ranks)] if not any(n % ep for n in ranks) else []
            else:
                # A stage whose ranks do not divide by ep takes the largest divisor of ep that does.
                choices.append(tuple(max(e for e in divisors(ep) if n % e == 0) for n in ranks))
        fixed = self.ep[0] if len(self.ep) == 1 else 1
        return tuple(dict.fromkeys(choice for choice in choices if max(choice) >= fixed))

    def _rounds(self, pp: int) -> tuple[tuple[int, bool], ...]:
        """(stages on a rank, V placement) that some schedule takes with so many pipeline ranks."""
        known = [orders.find(name) for name in self.schedule]
        rounds = [(1, False)] if any(order.takes(1) for order in known) and 1 in self.virtual_stages else []
        if pp > 1:
            able = [v for v in self.virtual_stages if v > 1 and pp * v <= self.num_layers]
            for turned, placement in enumerate(("loop", "v")):
                placed = [order for order in known if order.placement == placement]
                rounds += [(v, bool(turned)) for v in able if any(order.takes(v) for order in placed)]
        return tuple(rounds)

    def variants(self, shape: Shape, microbatches: int) -> tuple[tuple[int, str], ...]:
        """(ZeRO stage, schedule) of a block's points: one of those that change nothing, no ZeRO where some stages have
        one data-parallel rank, and only schedules that are legal for its numbers of ranks and microbatches."""
        key = shape, microbatches
        if key not in self._variants:
            self._variants[key] = self._variants_of(shape, microbatches)
        return self._variants[key]

    @cached_property
    def _variants(self) -> dict[tuple[Shape, int], tuple[tuple[int, str], ...]]:
        return {}

    def _variants_of(self, shape: Shape, microbatches: int) -> tuple[tuple[int, str], ...]:
        ranks = tuple(n * shape.cp for n in self.workers(shape))
        zeros: tuple[int, ...] = self.zero
        # A pipeline rank of one worker has nothing to divide over. ZeRO then changes nothing, so only ZeRO 0 stands for
        # all; if the request fixes another stage, it is kept only where no rank could divide (all are alone).
        if shape.form == "stages" and min(ranks) == 1:
            zeros = tuple(z for z in self.zero if z == 0) or (self.zero[:1] if max(ranks) == 1 else ())
        # Without a pipeline the schedules do not differ: the first one that takes one stage stands for all.
        if shape.pp == 1:
            flat = [name for name in self.schedule if orders.find(name).takes(1)]
            return tuple((zero, name) for name in flat[:1] for zero in zeros)
        zeros = tuple(z for z in zeros if z in self.zero_in_pipeline)
        if self.tied_alike:
            # Tied weights live on two stages: the runtime adds their gradients up rank by rank, which needs the same
            # mesh on both.
            differs = shape.form == "stages" and len(set(zip(ranks, shape.tp, strict=True))) > 1
            zeros = () if differs else tuple(z for z in zeros if z == 0)
        known = [order for order in map(orders.find, self.schedule) if (order.placement == "v") == shape.v_placement]
        fits = [order for order in known if order.legal(shape.pp, microbatches, shape.virtual) is None]
        return tuple((z, order.name) for z in zeros for order in fits if z < 3 or not order.composite)

    def members(self, shape: Shape, microbatches: int) -> int:
        """The number of ways to give kinds their shares (replicas), or pipeline ranks their layers (stages), in a
        block."""
        size, workers = self.global_batch // microbatches, self.workers(shape)
        if shape.form == "stages":
            # Every worker takes at least one sequence; equal shares need a whole number each.
            if max(workers) > size or (self.equal and any(size % n for n in workers)):
                return 0
            return 1 if self.equal else divisions(self.num_layers, shape.pp, shape.virtual)
        return len(shares_of(size, workers, self.equal))

    @cached_property
    def size(self) -> int:
        """Counts the points of all blocks."""
        return sum(self.count(block) for block in self.blocks)

    def count(self, block: MixedBlock) -> int:
        """Counts the points of a block."""
        key = block.shape, block.microbatches
        if key not in self._counts:
            self._counts[key] = self.members(*key) * len(self.variants(*key))
        return self._counts[key]

    @cached_property
    def _counts(self) -> dict[tuple[Shape, int], int]:
        return {}

    def points(self) -> Iterator[MixedPoint]:
        """Yields every point, whether or not its plan passes `check`."""
        for block in self.blocks:
            for layers, shares in self.choices(block):
                for zero, schedule in self.variants(block.shape, block.microbatches):
                    yield point_of(block, layers, shares, zero, schedule)

    def choices(self, block: MixedBlock) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yields (layers of each stage, shares) of each way that `members` counts."""
        shape = block.shape
        even = equal_layers(self.num_layers, shape.pp * shape.virtual)
        if shape.form == "replicas":
            size = self.global_batch // block.microbatches
            yield from ((even, shares) for shares in shares_of(size, self.workers(shape), self.equal))
        elif self.equal:
            yield even, ()
        else:
            spare = self.num_layers - shape.pp * (shape.virtual - 1)  # every rank has a layer for each stage
            # Choosing pp - 1 of spare - 1 cuts lists each composition of the layers into pp positive parts once.
            for cuts in combinations(range(1, spare), shape.pp - 1):
                ends = (0, *cuts, spare)
                of_ranks = [np.array([b - a + shape.virtual - 1]) for a, b in zip(ends, ends[1:], strict=False)]
                yield tuple(layers_of_stages(of_ranks, shape.virtual, shape.v_placement)[0].tolist()), ()

    def plan(self, point: MixedPoint) -> Plan:
        """Makes the Plan of a point."""
        devices, parts = self.rank_devices(point.form, point.kinds, point.pp), selectors(self.graph, point.layers)
        # Ranks are numbered in the order of devices, so ranks of a node stay neighbours whatever the kinds' order is.
        used = sorted(device for of_rank in devices for device in of_rank)
        rank_of = {device: rank for rank, device in enumerate(used)}
        rank_names, meshes = [format_ranks([rank_of[d] for d in of_rank]) for of_rank in devices], self._meshes(point)
        stages = []
        for stage, calls in enumerate(parts):
            rank = pipeline_rank(stage, point.pp, point.placement)
            mesh, shares = meshes[rank]
            stages.append(Stage(calls=calls, mesh=mesh, devices=rank_names[rank], shares=shares))
        base = self.base
        return replace(
            base,
            mesh=Mesh(),  # stages have meshes of their own
            stages=tuple(stages),
            schedule=replace(
                base.schedule,
                name=point.schedule,
                micro_batch_size=None,
                num_microbatches=point.microbatches,
                virtual_stages=point.virtual,
                placement=point.placement,
            ),
            saved=base.saved if base.saved.rules else Saved(preset=cast(Preset, point.recompute)),
            layout=replace(
                base.layout,
                sequence_parallel=point.sequence_parallel,
                context=point.context,
                dispatch=base.layout.dispatch if max(point.ep, default=1) > 1 else None,
            ),
            optimizer=replace(base.optimizer, zero=cast(Literal[0, 1, 2, 3], point.zero)),
            placement=() if len(used) == self.all_devices else tuple(used),
        )

    def rank_devices(self, form: Form, kinds: tuple[int, ...], pp: int) -> list[tuple[int, ...]]:
        """Indices in the cluster of the devices of each pipeline rank."""
        if form == "replicas":
            # Replicas: pipeline rank r stands on the r-th slice of every kind's devices, so each stage spans all kinds.
            parts = [_cut(self.kinds[k].devices, pp) for k in kinds]
            return [tuple(device for part in parts for device in part[rank]) for rank in range(pp)]
        cut = {k: iter(_cut(self.kinds[k].devices, kinds.count(k))) for k in set(kinds)}
        return [next(cut[k]) for k in kinds]

    def _meshes(self, point: MixedPoint) -> list[tuple[Mesh, tuple[int, ...]]]:
        """Mesh and shares (sequences of a microbatch by worker; empty: equal) of each pipeline rank."""
        size, cp, ep = self.global_batch // point.microbatches, point.cp, point.ep or (1,) * len(point.kinds)
        workers = self.workers(Shape(point.form, point.kinds, point.tp, point.pp, cp, ep, point.virtual, False))
        if point.form == "replicas":
            dealt = tuple(part for n, t in zip(workers, point.shares, strict=True) for part in deal_out(t, n))
            shares = dealt if len(set(dealt)) > 1 else ()
            return [(Mesh(dp_shard=sum(workers), tp=point.tp[0], cp=cp, ep=ep[0]), shares)] * point.pp
        return [
            (Mesh(dp_shard=n, tp=tp, cp=cp, ep=e), deal_out(size, n) if size % n else ())
            for n, tp, e in zip(workers, point.tp, ep, strict=True)
        ]


def point_of(
    block: MixedBlock, layers: tuple[int, ...], shares: tuple[int, ...], zero: int, schedule: str
) -> MixedPoint:
    """The point of a block with these choices. layers: of each stage; shares: as in `MixedPoint`."""
    shape = block.shape
    return MixedPoint(
        shape.form, shape.kinds, shape.tp, layers, shares, block.microbatches, block.sequence_parallel,
        block.recompute, zero, schedule, shape.cp, shape.ep, block.context, shape.virtual,
    )  # fmt: skip


def divisions(layers: int, ranks: int, virtual: int) -> int:
    """The number of ways to give ranks their layers, where each of a rank's `virtual` stages has at least one."""
    # Compositions of `spare` layers into `ranks` positive parts: C(spare - 1, ranks - 1).
    spare = layers - ranks * (virtual - 1)
    return comb(spare - 1, ranks - 1) if spare >= ranks else 0


@lru_cache(maxsize=1024)
def stages_of_ranks(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Indices of the stages of each pipeline rank, rising."""
    placement = "v" if shape.v_placement else "loop"
    by_rank: list[list[int]] = [[] for _ in range(shape.pp)]
    for stage in range(shape.pp * shape.virtual):
        by_rank[pipeline_rank(stage, shape.pp, placement)].append(stage)
    return tuple(map(tuple, by_rank))


def layers_of_stages(of_ranks: Sequence[Longs], virtual: int, turned: bool) -> Longs:
    """[points, stages] layers of each stage, where each rank divides its layers over its stages as equally as can be.
    of_ranks: for each rank, [points] its layers. turned: V placement."""
    # Round i holds the i-th stage of every rank; a rank with n layers gives its i-th stage ceil((n - i) / virtual).
    rounds = [[(layers + virtual - 1 - i) // virtual for layers in of_ranks] for i in range(virtual)]
    # V placement: odd rounds run backwards over the ranks.
    ordered = [n for i, counts in enumerate(rounds) for n in (reversed(counts) if turned and i % 2 else counts)]
    return np.stack(ordered, axis=1)


def deal_out(total: int, workers: int) -> tuple[int, ...]:
    """Whole sequences of each worker, as equal as can be, the first ones taking one more."""
    share, remainder = divmod(total, workers)
    return tuple(share + (i < remainder) for i in range(workers))


def equal_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage as `Plan` divides them where it does not say."""
    return deal_out(num_layers, pp)


@lru_cache(maxsize=4096)
def shares_of(size: int, workers: tuple[int, ...], equal: bool) -> tuple[tuple[int, ...], ...]:
    """Every way to give kinds their sequences of a microbatch of `size`: for each of a kind's workers at least one, and
    at most LARGEST_SHARE. workers: their number by kind. equal: only that in which all workers have as many."""
    if equal:
        share, rest = divmod(size, sum(workers))
        return () if rest or not 1 <= share <= LARGEST_SHARE else (tuple(share * n for n in workers),)
    if len(workers) == 1:
        return ((size,),) if workers[0] <= size <= LARGEST_SHARE * workers[0] else ()
    # Leave at least one sequence for every worker still to come.
    mine, others = workers[0], workers[1:]
    return tuple(
        (total, *rest)
        for total in range(mine, min(size - sum(others), LARGEST_SHARE * mine) + 1)
        for rest in shares_of(size - total, others, False)
    )


@lru_cache(maxsize=4096)
def _orders(counts: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """The orders of kinds along the pipeline that are tried. counts: (kind, its number of pipeline ranks)."""
    total = sum(count for _, count in counts)
    blocks = tuple((kind,) * count for kind, count in counts)
    # Up to ARRANGED ranks every order of kinds is tried; beyond, the ranks of a kind stay together (orders of blocks).
    if total <= ARRANGED:
        flat = tuple(kind for block in blocks for kind in block)
        return tuple(dict.fromkeys(permutations(flat)))
    return tuple(tuple(kind for block in order for kind in block) for order in permutations(blocks))


def _cut(devices: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Cuts devices into so many runs of equal length."""
    size = len(devices) // parts
    return [devices[i * size : (i + 1) * size] for i in range(parts)]


@lru_cache(maxsize=1024)
def selectors(graph: Graph, layers: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """The selector (`Stage.calls`) of the layers of each stage. layers: how many each has."""
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
    """Lists all choices for a model on heterogeneous devices, less what is fixed, forbidden or beyond the stack.

    fixed: one of OPEN_FIELDS -> its value; `pp` is the number of pipeline ranks. PlanError for other fields, and for
    one that is left without a choice.
    """
    base, kinds = base or Plan(), kinds_of(cluster)
    base = with_dispatcher(base, cluster, stack) if stack is not None else base
    fixed, limits = dict(fixed or {}), list(limits)
    _refuse(cluster, fixed, limits)
    # A dimension of experts must divide by ep in every block that has one.
    experts = expert_ranks(graph, max(len(kind.devices) for kind in kinds))
    if len(experts) == 1 and fixed.get("ep", 1) != 1:
        raise PlanError(f"ep = {fixed['ep']} is asked for, and {graph.name} has no experts to divide; leave it out")
    total = count_layers(graph)
    nodes = sorted({d for kind in kinds for d in divisors(kind.node.count)})
    longest = max(workload.sequence_lengths(), default=1)
    attends = any(block.does("attends") for block in graph.blocks)
    choices: dict[str, tuple[object, ...]] = {
        "tp": tuple(nodes),
        "cp": tuple(n for n in nodes if n == 1 or (attends and longest >= n * CHUNK_TOKENS)),
        "ep": experts,
        "pp": tuple(range(1, min(total, max(MOST_STAGES, *(len(k.devices) for k in kinds))) + 1)),
        "virtual_stages": tuple(range(1, MOST_VIRTUAL + 1)),
        "zero": (3,) if base.optimizer.offload_parameters else (0, 1, 2, 3),
        "recompute": ("none", "selective", "full"),
        "schedule": tuple(order.name for order in orders.every()),
        "sequence_parallel": (False, True),
        "context": ("ring", "all_gather", "ulysses"),
    }
    if "virtual_stages" in fixed:
        virtual = int(str(fixed["virtual_stages"]))
        choices["schedule"] = tuple(order.name for order in orders.every() if order.takes(virtual))
    refuse_divided(base)
    choices = narrowed(
        choices, fixed, [*limits, *(stack_limits(stack, graph, base, nodes) if stack is not None else ())]
    )
    space = MixedSpace(
        graph=graph,
        base=base,
        kinds=kinds,
        global_batch=workload.batch_size,
        num_layers=total,
        all_devices=cluster.num_devices,
        microbatches=divisors(workload.batch_size),
        zero_in_pipeline=(stack.runs.zero_in_pipeline if stack else ()) or (0, 1, 2, 3),
        tied_alike=stack is not None and stack.name == own.NAME and own.has_tied_weights(graph),
        **choices,  # type: ignore[arg-type]
    )
    return _same(space)


@lru_cache(maxsize=4)
def _same(space: MixedSpace) -> MixedSpace:
    """The equal space that was made before, if there is one: its blocks are then listed once for workloads that differ
    only in their lengths."""
    return space


def expert_ranks(graph: Graph, most: int) -> tuple[int, ...]:
    """Numbers of ranks, up to `most`, over which every experts dim of a model divides; 1 alone without experts."""
    sizes = {d.size for b in graph.blocks for d in b.dims if d.name.split(".")[-1] == "experts" and d.size}
    return tuple(e for e in range(1, most + 1) if e == 1 or (sizes and not any(n % e for n in sizes)))


def _refuse(cluster: Cluster, fixed: Mapping[str, object], limits: Iterable[Limit]) -> None:
    """Raises PlanError for a field, fixed or limited, that plans over heterogeneous devices do not have, unless it may
    be 1."""
    wrong = [name for name, value in fixed.items() if name not in OPEN_FIELDS and value != 1]
    wrong += [limit.field for limit in limits if limit.field not in OPEN_FIELDS and limit.forbids(1)]
    if wrong:
        raise PlanError(
            f"{wrong[0]} is asked for, but cluster {cluster.name!r} has devices of {len(kinds_of(cluster))} kinds, "
            f"whose plans are searched by {', '.join(OPEN_FIELDS)}; leave it open, or plan for one kind alone"
        )
