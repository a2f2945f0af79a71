"""The space of plans that a search covers: choices for every field, and the points that they span.

`Space` lists the choices; `make_space` fills in what is left open for a model, a cluster and a batch. A `Point` is one
combination, `Space.plan` its Plan. `canonical` maps points that mean the same run to one of them, and says so with a
proof. Leaves out what a plan costs, and fields of the plan that the space does not vary: they are those of `base`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from gnomon import orders
from gnomon.errors import PlanError, UnpricedError, nearest
from gnomon.graph import Dtypes, Graph
from gnomon.hardware import Cluster
from gnomon.hardware.kinds import is_mixed, kinds_of
from gnomon.plans import Mesh, Plan, Saved, SavedRule, Schedule, Split, Workload
from gnomon.plans.select import place
from gnomon.prices.collectives import copy_seconds
from gnomon.search.space.dispatchers import routes_by_kind, with_dispatcher
from gnomon.sharding import shard_graph
from gnomon.sharding.context import whole_sequence_reason
from gnomon.software import Stack, own

Recompute = Literal["none", "selective", "full", "offload"]
"""What happens to activations between forward and backward: a preset of recomputation, or `offload`, which recomputes
nothing and has them wait on the host. (Selective recomputation with offload is left out: with flash attention it makes
the sums of rows again, at the price of all of attention.)"""
Context = Literal["ring", "all_gather", "ulysses"]

DISPATCH = "dispatch"
"""The choice of how tokens go to their experts."""
EXTRA_CHOICES = (
    DISPATCH,
    "async_tp",
    "activation_offload",
    "optimizer_offload",
    "parameter_offload",
    "parameter_disk",
)
"""The choices of `search.refinement.choices` that the exact search can have too."""

MOST_VIRTUAL_STAGES = 8
"""Virtual stages of a pipeline rank that are tried, at most; more only where they are fixed. Each adds messages whose
launches and waits predictions see too little of: no run on record has more than six."""

WAYS = ("none", "selective", "full", "offload")
"""The ways of treating activations between forward and backward."""

CHUNK_TOKENS = 2048
"""The fewest tokens in a piece of a sequence over cp, unless the user fixes cp."""


class Point(NamedTuple):
    """One plan of a space."""

    tp: int
    """Tensor-parallel ranks."""
    cp: int
    """Context-parallel ranks, which divide each sequence."""
    ep: int
    """Expert-parallel ranks: of the ranks that dp, cp and tp have already, so no factor of the number of devices."""
    pp: int
    """Pipeline ranks."""
    dp_replicate: int
    """Data-parallel groups that hold a copy of the parameters each."""
    dp_shard: int
    """Data-parallel ranks of such a group, over which ZeRO divides."""
    schedule: str
    """Name of the pipeline schedule (`orders`); without meaning at pp = 1."""
    virtual_stages: int
    """Stages on each pipeline rank."""
    micro_batch_size: int
    """Sequences of a microbatch on each data-parallel rank."""
    sequence_parallel: bool
    """Whether sequences are divided over tp between the tensor-parallel regions."""
    keep_gathered: bool
    """Whether a tensor gathered over tp or cp is kept for backward, in place of this rank's part of it."""
    context: Context
    """How attention sees a whole sequence over cp; without meaning at cp = 1."""
    recompute: Recompute
    """What becomes of activations between forward and backward."""
    zero: int
    """ZeRO stage, 0 to 3."""
    overlap: bool
    """Whether reductions of gradients and gathers of parameters overlap with computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A condition that a point must not meet, as `pp>1`."""

    field: str
    """The name of a field of Point."""
    op: str
    """The comparison: `>`, `<`, `>=`, `<=`, `=` or `!=`."""
    value: int | str
    """What the field is compared with."""
    why: str = ""
    """Who forbids it, where it is not the user."""

    def forbids(self, value: object) -> bool:
        """Whether a value of the field meets the condition."""
        if self.op in ("=", "!="):
            return (str(value).lower() == str(self.value).lower()) == (self.op == "=")
        assert isinstance(value, int) and isinstance(self.value, int)
        return {
            ">": value > self.value, "<": value < self.value, ">=": value >= self.value, "<=": value <= self.value,
        }[self.op]  # fmt: skip


_WORDS = ("schedule", "recompute", "context")
_FLAGS = ("sequence_parallel", "keep_gathered", "overlap")


def parse_limit(text: str) -> Limit:
    """A limit from text such as `pp>1`, `zero=3` or `schedule=gpipe`; PlanError with the nearest field otherwise."""
    op = next((op for op in (">=", "<=", "!=", ">", "<", "=") if op in text), None)
    if op is None:
        raise PlanError(f"limit {text[:40]!r} has no comparison; write FIELD>N, FIELD<N, FIELD=VALUE, as in 'pp>1'")
    name, _, value = (part.strip() for part in text.partition(op))
    name = {"vpp": "virtual_stages", "dp-shard": "dp_shard", "dp-replicate": "dp_replicate"}.get(name, name)
    name = name.replace("-", "_")
    if name not in Point._fields:
        raise PlanError(f"limit on {name[:40]!r}, which no plan has{nearest(name, Point._fields)}; fields are "
                        f"{', '.join(Point._fields)}")  # fmt: skip
    if name in _WORDS + _FLAGS:
        if op not in ("=", "!="):
            raise PlanError(f"limit {text[:40]!r}: {name} has no order; use = or !=")
        return Limit(field=name, op=op, value=value)
    if not value.isdigit():
        raise PlanError(f"limit {text[:40]!r}: {name} is a whole number, not {value[:20]!r}")
    return Limit(field=name, op=op, value=int(value))


@dataclass(frozen=True, kw_only=True)
class Space:
    """Choices for each field; all their combinations that make `devices` ranks are points."""

    base: Plan
    """The plan whose precision, optimizer and order of axes every point takes over."""
    devices: int
    """The number of ranks of every point."""
    global_batch: int
    """Sequences of a step."""
    num_layers: int
    """The number of layers that a pipeline divides, so of stages at most."""
    experts: bool
    """Whether the model has routed experts."""
    tp: tuple[int, ...]
    """Numbers of tensor-parallel ranks."""
    cp: tuple[int, ...]
    """Numbers of context-parallel ranks."""
    ep: tuple[int, ...]
    """Numbers of expert-parallel ranks."""
    pp: tuple[int, ...]
    """Numbers of pipeline ranks."""
    dp_replicate: tuple[int, ...]
    """Numbers of data-parallel groups with a copy of the parameters each."""
    dp_shard: tuple[int, ...]
    """Numbers of ranks over which ZeRO divides."""
    schedule: tuple[str, ...]
    """Names of pipeline schedules; the first that runs one stage stands for all at pp = 1."""
    virtual_stages: tuple[int, ...]
    """Numbers of virtual stages, for schedules that take several."""
    micro_batch_size: tuple[int, ...]
    """Sequences of a microbatch on a data-parallel rank."""
    sequence_parallel: tuple[bool, ...]
    """Whether sequences are divided over tp between the tensor-parallel regions."""
    keep_gathered: tuple[bool, ...]
    """Whether gathered tensors are kept for backward."""
    context: tuple[Context, ...]
    """How attention sees a whole sequence over cp; only the first is a choice at cp = 1."""
    recompute: tuple[Recompute, ...]
    """What becomes of activations between forward and backward."""
    zero: tuple[int, ...]
    """ZeRO stages."""
    overlap: tuple[bool, ...]
    """Whether reductions of gradients and gathers of parameters overlap with computing."""
    zero_in_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that the stack runs with several pipeline ranks."""

    gathers_ahead: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages at which the stack overlaps gathers of parameters with computing, where a point overlaps."""

    cut: int = 0
    """Tensor-parallel ranks, at most, whose matmuls are chunked so that collectives overlap (async tensor parallelism),
    wherever sequences are divided among these ranks too. See `splits`."""

    repeated: tuple[str, int] = ("", 0)
    """(selector, how many) of the layers whose activations may wait on the host."""

    def runs(self, pp: int, zero: int) -> bool:
        """Whether the stack runs a ZeRO stage over several ranks with so many pipeline ranks."""
        return pp == 1 or zero in self.zero_in_pipeline

    def plan(self, point: Point) -> Plan:
        """Builds the point's Plan."""
        base = self.base
        schedule = Schedule(
            name=point.schedule,
            micro_batch_size=point.micro_batch_size,
            virtual_stages=point.virtual_stages,
            placement=orders.find(point.schedule).placement,
            passes=base.schedule.passes,
        )
        names = ("tp", "cp", "ep", "pp", "dp_replicate", "dp_shard")
        return replace(
            base,
            mesh=replace(base.mesh, **{name: getattr(point, name) for name in names}),
            schedule=schedule,
            layout=replace(
                base.layout,
                sequence_parallel=point.sequence_parallel,
                keep_gathered=point.keep_gathered,
                context=point.context,
                # Every expert-parallel point takes the base plan's dispatcher; without ep there is nothing to dispatch.
                dispatch=base.layout.dispatch if point.ep > 1 else None,
            ),
            saved=self.saved(point.recompute, point.pp * point.virtual_stages),
            optimizer=replace(base.optimizer, zero=point.zero),  # type: ignore[arg-type]
            overlap=replace(
                base.overlap,
                grad_reduce=point.overlap,
                param_gather=point.overlap and point.zero in self.gathers_ahead,
                splits=self.splits(point.tp, sequence_parallel=point.sequence_parallel),
            ),
        )

    def saved(self, recompute: str, stages: int = 1) -> Saved:
        """What a way of saving is in a plan of so many stages."""
        base = self.base.saved
        if recompute != "offload":
            return replace(base, preset=recompute)  # type: ignore[arg-type]
        # The rule names the layers on the host by their place in a stage, so their number depends on the number of
        # stages.
        layers, count = self.repeated
        per_stage = -(-count // stages) if count == self.num_layers else count  # at least those of any stage
        rule = SavedRule(calls=layers, action="offload", first_per_stage=per_stage)
        return replace(base, preset="none", rules=(*base.rules, rule))

    def splits(self, tp: int, *, sequence_parallel: bool) -> tuple[Split, ...]:
        """Ops that are cut.

        Plans with matmuls left whole are not looked at where cut ones may be: a cut matmul takes as long, keeps the
        same tensors and sends the same bytes, and of the seconds t that a collective takes next to a matmul of b
        seconds, max(t / n, t - b (n - 1) / n) are waited for, never more than t (`prediction.layer`). A step is no
        shorter for longer actions, which all bounds rest on, so the same plan with products left whole is not faster.
        Under ZeRO 3 two rounds of losses to collectives (`prediction.contention`) come on top, which are not proved to
        be as monotone: there `tests/search/test_beyond.py` looks.
        """
        if not (1 < tp <= self.cut and sequence_parallel):
            return self.base.overlap.splits
        return (Split(op="*", dim="seq", parts=tp),)

    def axes(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(tp, cp, ep, pp, dp) with tp x cp x pp x dp = devices."""
        # ep divides the ranks that dp, cp and tp already have, so it is no factor of the product.
        for tp in self.tp:
            for cp in self.cp:
                for pp in self.pp:
                    if self.devices % (tp * cp * pp) == 0:
                        for ep in self.ep:
                            yield tp, cp, ep, pp, self.devices // (tp * cp * pp)

    def shardings(self, dp: int) -> tuple[tuple[int, int], ...]:
        """(dp_replicate, dp_shard) of so many data-parallel ranks, the fewest replicas first."""
        pairs = [(r, dp // r) for r in self.dp_replicate if dp % r == 0 and dp // r in self._shards]
        return tuple(pairs)

    @cached_property
    def _shards(self) -> frozenset[int]:
        return frozenset(self.dp_shard)

    def pipelines(self, pp: int) -> tuple[tuple[str, int], ...]:
        """(schedule, virtual stages) on so many pipeline ranks. One rank has nothing to schedule: microbatches follow
        each other, under the first name that there is."""
        if pp == 1:
            return tuple((name, 1) for name in self.schedule if orders.find(name).takes(1))[:1]
        pairs: list[tuple[str, int]] = []
        for order in map(orders.find, self.schedule):
            counts = self.virtual_stages if order.looped else order.stages[:1]
            fits = [v for v in counts if v == 1 or pp * v <= self.num_layers]
            pairs += [(order.name, v) for v in fits if order.stages_reason(pp, v) is None]
        return tuple(pairs)

    def layouts(self, cp: int) -> tuple[tuple[bool, bool, Context], ...]:
        """(sequence parallel, keep gathered, context) with so many context-parallel ranks."""
        contexts = self.context if cp > 1 else self.context[:1]
        return tuple((s, k, c) for s in self.sequence_parallel for k in self.keep_gathered for c in contexts)

    @cached_property
    def leaves(self) -> int:
        """Points of one sharding of one pipeline, layout and microbatch size: ZeRO x overlap."""
        return len(self.zero) * len(self.overlap)

    @cached_property
    def size(self) -> int:
        """Counts the points of all axes."""
        total = 0
        for _, cp, _, pp, dp in self.axes():
            points = len(self.shardings(dp)) * len(self.pipelines(pp)) * len(self.layouts(cp))
            total += points * len(self.micro_batch_size) * len(self.recompute) * self.leaves
        return total

    def points(self) -> Iterator[Point]:
        """All points, legal or not, in the order in which ties are decided."""
        for tp, cp, ep, pp, dp in self.axes():
            for schedule, virtual in self.pipelines(pp):
                for micro in self.micro_batch_size:
                    for sequence, keep, context in self.layouts(cp):
                        for recompute in self.recompute:
                            for replicas, shards in self.shardings(dp):
                                for zero in self.zero:
                                    for overlap in self.overlap:
                                        yield Point(
                                            tp, cp, ep, pp, replicas, shards, schedule, virtual, micro, sequence, keep,
                                            context, recompute, zero, overlap,
                                        )  # fmt: skip

    def canonical(self, point: Point) -> Point:
        """The point of the same space that stands for it; itself, if none does.

        Points with one representative are the same run: at tp = 1 there is no region to divide a sequence in, and
        nothing gathered to keep; at cp = 1 no context to exchange; ZeRO over groups of one rank divides nothing; at
        ZeRO 0 all data-parallel ranks hold replicas, whatever they are called (experts have groups of their own, which
        the two axes divide otherwise); without a reduction nothing overlaps.
        Only what has a representative among the choices is replaced by it.
        """
        changes: dict[str, object] = {}
        # The order of the rules matters: later ones look at what earlier ones have changed (`sequence`, `zero`).
        sequence = point.sequence_parallel
        if point.tp == 1 and sequence and False in self.sequence_parallel:
            changes["sequence_parallel"] = sequence = False
        if point.keep_gathered and not (sequence and point.tp > 1) and point.cp == 1 and False in self.keep_gathered:
            changes["keep_gathered"] = False
        zero = point.zero
        buckets = zero == 2 and self.base.overlap.in_buckets
        if zero and point.dp_shard * point.cp == 1 and not self.experts and not buckets and 0 in self.zero:
            changes["zero"] = zero = 0
        # The split with the fewest replicas stands for every split of the same data-parallel ranks at ZeRO 0.
        whole = self.shardings(point.dp_replicate * point.dp_shard)[0]
        if zero == 0 and (point.dp_replicate, point.dp_shard) != whole and not self.experts:
            changes |= {"dp_replicate": whole[0], "dp_shard": whole[1]}
        one_replica = point.dp_replicate * point.dp_shard * point.cp == 1 and not self.experts
        one_replica = one_replica and not self.base.optimizer.offload_parameters
        if one_replica and not point.overlap and True in self.overlap:
            changes["overlap"] = True
        return point._replace(**changes) if changes else point  # type: ignore[arg-type]


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def make_space(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    *,
    base: Plan | None = None,
    fixed: Mapping[str, object] | None = None,
    limits: Iterable[Limit] = (),
    stack: Stack | None = None,
    extra_choices: Container[str] = (),
) -> Space:
    """All choices that make sense for a model on a cluster, less what is fixed, forbidden or beyond the stack.

    base: what does not vary. fixed: field of Point -> its one value. extra_choices: those of `EXTRA_CHOICES` that the
    space has too, where the base plan leaves them open. PlanError when a field is left without a choice.
    """
    if is_mixed(cluster):
        names = " and ".join(kind.name for kind in kinds_of(cluster))
        raise PlanError(
            f"cluster {cluster.name!r} has {names}; this search is for devices of one kind. For the fastest plan over "
            f"several use gnomon.search.plan_mixed, or `gnomon plan`"
        )
    base = base or Plan()
    if DISPATCH in extra_choices and stack is not None and routes_by_kind(graph):
        base = with_dispatcher(base, cluster, stack)
    if stack is not None and stack.name == own.NAME:
        _check_own(graph, base)
    num_layers = count_layers(graph)
    experts = {d.size for b in graph.blocks for d in b.dims if d.name.split(".")[-1] == "experts" and d.size}
    ranks = divisors(cluster.num_devices)
    longest = max(workload.sequence_lengths(), default=1)
    ways: tuple[Recompute, ...] = ("none", "selective", "full")
    if "activation_offload" in extra_choices and base.saved == Saved() and _copies(cluster):
        ways += ("offload",)
    attends = any(block.does("attends") for block in graph.blocks)
    choices: dict[str, tuple[object, ...]] = {
        "tp": ranks,
        # A piece of context shorter than CHUNK_TOKENS costs more in exchanges than it saves; heads without attention
        # need none.
        "cp": tuple(c for c in ranks if c == 1 or (attends and longest >= c * CHUNK_TOKENS)),
        "ep": tuple(e for e in ranks if e == 1 or any(n % e == 0 for n in experts)),
        "pp": tuple(p for p in ranks if p <= num_layers),
        "dp_replicate": ranks,
        "dp_shard": ranks,
        "schedule": tuple(order.name for order in orders.every()),
        "virtual_stages": tuple(range(1, MOST_VIRTUAL_STAGES + 1)),
        "micro_batch_size": divisors(workload.batch_size),
        "sequence_parallel": (False, True),
        "keep_gathered": (False, True),
        "context": ("ring", "all_gather", "ulysses"),
        "recompute": ways,
        "zero": (3,) if base.optimizer.offload_parameters else (0, 1, 2, 3),
        "overlap": (True, False),
    }
    if "virtual_stages" in (fixed or {}):
        virtual = int(str((fixed or {})["virtual_stages"]))
        able = tuple(order.name for order in orders.every() if order.takes(virtual))
        choices["schedule"] = able or choices["schedule"]
    refuse_divided(base)
    if base.optimizer.parameter_tier == "disk" and not has_disks(cluster):
        raise PlanError(
            f"parameter_disk is asked for, but a node of {cluster.name!r} does not say how fast its disk is; `gnomon "
            "calibrate` measures this machine's, a cluster file gives disk_read_bytes_per_s and disk_write_bytes_per_s"
        )
    every = [*limits, *(stack_limits(stack, graph, base, ranks) if stack is not None else ())]
    choices = narrowed(choices, fixed or {}, every)
    space = Space(
        base=base,
        devices=cluster.num_devices,
        global_batch=workload.batch_size,
        num_layers=num_layers,
        experts=bool(experts),
        zero_in_pipeline=(stack.runs.zero_in_pipeline if stack else ()) or (0, 1, 2, 3),
        gathers_ahead=(stack.runs.gathers_ahead if stack else ()) or (0, 1, 2, 3),
        cut=cut_ranks(cluster, base.mesh) if "async_tp" in extra_choices and not base.overlap.splits else 0,
        repeated=repeated_layers(graph),
        **choices,  # type: ignore[arg-type]
    )
    if not space.size:
        raise PlanError(_no_axes(choices, cluster.num_devices))
    return space


def saving_of(saved: Saved) -> str:
    """The way of saving that a plan has, layers that differ left out."""
    away = saved.preset == "none" and any(rule.action == "offload" for rule in saved.rules)
    return "offload" if away else saved.preset


def repeated_layers(graph: Graph) -> tuple[str, int]:
    """(selector, how many) of the layers that are repeated most. Those whose numbers have gaps, as where blocks of
    another kind lie between, are selected by their name alone."""
    places = [place(layer) for layer in graph.layers() if layer.call.first is not None]
    # Layers of the block that is called most often are the repeated ones.
    counts = Counter(name for name, _ in places)
    name, count = counts.most_common(1)[0] if counts else (graph.layers()[0].call.name, 1)
    gaps = bool(counts) and sorted(index for known, index in places if known == name) != list(range(count))
    return name if gaps else f"{name}[0:{count}]", count


def cut_ranks(cluster: Cluster, mesh: Mesh) -> int:
    """Tensor-parallel ranks between which matmuls are cut, at most: those of a node, as programs that cut them write
    into each other's memory over its links (Transformer Engine's userbuffers, torch's symmetric memory)."""
    return min(group.node.count for group in cluster.groups) if mesh.order[-1] == "tp" else 0


def _copies(cluster: Cluster) -> bool:
    """Whether copies between every device and its host have a price."""
    try:
        return all(copy_seconds(1, group.node) > 0 for group in cluster.groups)
    except UnpricedError:
        return False


def has_disks(cluster: Cluster) -> bool:
    """Whether every node says how fast its disk is."""
    nodes = [group.node for group in cluster.groups]
    return all(node.disk_read_bytes_per_s and node.disk_write_bytes_per_s for node in nodes)


def refuse_divided(base: Plan) -> None:
    """PlanError for a base plan whose vocabulary is divided over the pipeline, which is predicted, not searched."""
    if base.schedule.vocabulary != "ends":
        raise PlanError(
            f"schedule vocabulary = {base.schedule.vocabulary!r} is not among what the search tries: leave it out "
            f"here, set it in the plan that is found, and predict that"
        )


def narrowed(
    choices: Mapping[str, tuple[object, ...]], fixed: Mapping[str, object], limits: Sequence[Limit]
) -> dict[str, tuple[object, ...]]:
    """Choices of each field less what is fixed or forbidden; of fields that there are. PlanError where none is left."""
    # A fixed field has one choice, which a limit may still take away: then the limit is named.
    remaining = {name: (fixed[name],) if name in fixed else values for name, values in choices.items()}
    for limit in limits:
        if limit.field in remaining:
            remaining[limit.field] = tuple(value for value in remaining[limit.field] if not limit.forbids(value))
    for name, values in remaining.items():
        if not values:
            raise PlanError(_none_left(name, limits, fixed))
    return remaining


def count_layers(graph: Graph) -> int:
    """Layers that a pipeline divides: those of repeated calls."""
    layers = graph.layers()
    return sum(1 for layer in layers if layer.call.first is not None) or len(layers)


def _none_left(name: str, limits: Iterable[Limit], fixed: Mapping[str, object]) -> str:
    """Says which limits leave a field without a choice, and whose they are."""
    of_field = [limit for limit in limits if limit.field == name]
    own = [f"{limit.field}{limit.op}{limit.value}" for limit in of_field if not limit.why]
    reasons = "; ".join(sorted({limit.why for limit in of_field if limit.why}))
    problem, but = f"no choice of {name} is left", ":"
    if name in fixed:
        problem, but = f"{name} = {fixed[name]} is asked for", ", but"
    if not own:
        return f"{problem}{but} {reasons}; ask for another {name}"
    return f"{problem}{but} forbidden are {', '.join(own[:6])}{f', and {reasons}' if reasons else ''}; drop one of them"


def _no_axes(choices: Mapping[str, tuple[object, ...]], devices: int) -> str:
    named = [f"{n} = {choices[n][0]}" for n in ("tp", "cp", "pp", "dp_replicate", "dp_shard") if len(choices[n]) == 1]
    axes_text = " and ".join(named) or "these limits"
    near = max((d for d in divisors(devices)), key=lambda d: d)
    return (
        f"no plan has {devices} ranks with {axes_text}: their product must divide {devices} and the other axes "
        "take the "
        f"rest; use divisors of {devices} ({', '.join(map(str, divisors(near)[:8]))} …), or leave one open"
    )


def stack_limits(stack: Stack, graph: Graph, base: Plan, ranks: Iterable[int] = ()) -> tuple[Limit, ...]:
    """What a program does not run, as limits: Gnomon's own runtime by `software.own`, other stacks by the schedules,
    ZeRO stages and ways to exchange context that their records name. base: what does not vary. ranks: numbers of
    tensor-parallel ranks that are open. PlanError for what the search has no bounds of."""
    if stack.messages.p2p_poll_s is not None or stack.launch.checked_collectives:
        raise PlanError(
            f"stack {stack.name!r} polls messages or checks collectives (p2p_poll_s, checked_collectives), of which "
            f"the search has no bounds; leave both out to plan, and predict the plan with them"
        )
    if stack.launch.composed:
        raise PlanError(f"stack {stack.name!r} is a simulator, which runs nothing; plan for the program it stands for")
    limits = []
    if stack.name == own.NAME:
        limits += _own_limits(graph, base, ranks)
    if stack.runs.schedules:
        why = f"stack {stack.name} runs only {', '.join(stack.runs.schedules)}"
        names = [name for name in orders.names() if name not in stack.runs.schedules]
        limits += [Limit(field="schedule", op="=", value=name, why=why) for name in names]
    return (*limits, *_of_record(stack))


def _of_record(stack: Stack) -> list[Limit]:
    """What a stack's record does not name, where it names any: axes, ZeRO stages, ways to exchange context, to divide
    sequences, to overlap and to recompute."""
    limits, runs = list[Limit](), stack.runs
    if runs.axes:
        why = f"stack {stack.name} divides ranks over dp_shard, {', '.join(runs.axes)} only"
        lacks_axes = [axis for axis in ("dp_replicate", "tp", "cp", "pp", "ep") if axis not in runs.axes]
        limits += [Limit(field=axis, op=">", value=1, why=why) for axis in lacks_axes]
    for field, able in (
        ("sequence_parallel", runs.sequence_parallel),
        ("keep_gathered", runs.keep_gathered),
        ("overlap", runs.overlapped),
    ):
        if len(able) == 1:
            why = f"under stack {stack.name} {field} is always {str(able[0]).lower()}"
            limits.append(Limit(field=field, op="=", value=not able[0], why=why))
    if runs.recompute:
        why = f"stack {stack.name} recomputes {' or '.join(runs.recompute)}"
        limits += [Limit(field="recompute", op="=", value=way, why=why) for way in WAYS if way not in runs.recompute]
    if stack.runs.zero:
        why = f"stack {stack.name} runs only ZeRO {', '.join(map(str, stack.runs.zero))}"
        lacks = [stage for stage in (0, 1, 2, 3) if stage not in stack.runs.zero]
        limits += [Limit(field="zero", op="=", value=stage, why=why) for stage in lacks]
    if stack.runs.contexts == ("none",):
        why = f"stack {stack.name} has no context parallelism"
        limits.append(Limit(field="cp", op=">", value=1, why=why))
    elif stack.runs.contexts:
        why = f"stack {stack.name} exchanges context only by {', '.join(stack.runs.contexts)}"
        lacks_context = [name for name in get_args(Context) if name not in stack.runs.contexts]
        limits += [Limit(field="context", op="=", value=name, why=why) for name in lacks_context]
    return limits


def _check_own(graph: Graph, base: Plan) -> None:
    """PlanError for a model, a precision or a decision that Gnomon's own runtime does not run, which no choice of axes
    helps."""
    if reason := own.model_reason(graph) or own.precision_reason(base.precision) or own.search_reason(base):
        raise PlanError(f"{reason}, or plan for another program with --stack (gnomon catalogue stacks)")


def _own_limits(graph: Graph, base: Plan, ranks: Iterable[int]) -> list[Limit]:
    """What the runtime does not run of this model and base plan, as limits."""
    limits = [Limit(field=name, op="=", value=value, why=why) for name, value, why in own.limits(graph, base, ranks)]
    if own.has_scan(graph):
        limits.append(Limit(field="cp", op=">", value=1, why=own.WHOLE_SCANS))
        return limits
    mesh, sizes = Mesh(cp=2), {dim.name: 4 for block in graph.blocks for dim in block.dims if dim.size is None}
    sharded = shard_graph(graph, base.layout, mesh, sizes | {"batch": 1}, Dtypes(param="fp32", compute="fp32"))
    if why := whole_sequence_reason(graph, sharded):
        limits.append(Limit(field="cp", op=">", value=1, why=f"{why}, which the runtime does not divide"))
    return limits
