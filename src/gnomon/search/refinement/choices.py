"""Decisions that the exact search leaves at those of its base plan: offload, buckets, prefetch, order of axes,
precision, split collectives. Each is a `Choice`: what it can be in a plan, and the plan with it.

`CHOICES` lists them; `fixed_base` puts what the user fixes into the base plan; `allowed` leaves out what a stack does
not run or the user forbids. Leaves out trying them: that is `search.refinement.refine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, get_args, get_type_hints

from gnomon.errors import PlanError, nearest
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.methods import Method
from gnomon.plans import Dispatch, Fp8, Offload, Plan, RouterLoad, SavedRule, Split
from gnomon.plans.expert_rows import has_rows, taken_apart
from gnomon.plans.experts import routers, under
from gnomon.plans.mesh import DENSE_AXES
from gnomon.search.expert_placement import for_load
from gnomon.search.refinement.bucket_cuts import Grain, cut_of, with_grain
from gnomon.search.refinement.bucket_sizes import bucket_sizes
from gnomon.search.space.dispatchers import dispatchers, has_dispatcher
from gnomon.search.space.points import DISPATCH, Limit, has_disks, repeated_layers
from gnomon.software import Stack, own
from gnomon.units import parse_bytes, show_bytes

Value = bool | int | str
"""The value of a choice: yes or no, a number, or a word."""

Make = Callable[[Plan, Graph, Value], Plan]
Values = Callable[[Plan, Graph, Cluster], tuple[Value, ...]]

BUCKETS = (25 * 2**20, 100 * 2**20, 400 * 2**20, 2**30)
"""Sizes of gradient buckets that are tried: 25 MiB is that of torch's DistributedDataParallel, Megatron-LM's of 40 M
elements and DeepSpeed's of 500 M lie between and above the others."""

MOST_AHEAD = 3
"""The number of blocks gathered ahead, at most."""

PIPELINE_INSIDE = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
"""Megatron-LM's order with `--use-tp-pp-dp-mapping`: stages next to each other, replicas far apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision that refinement may change."""

    name: str
    """The name, as in `--fix prefetch=2`."""
    says: str
    """The words that say what it is."""
    values: Values
    """What it can be in a plan, its own value not left out; empty where it means nothing."""
    of: Callable[[Plan], Value]
    """Reads its value from a plan."""
    make: Make
    """Makes the plan with a value."""
    on_request: bool = False
    """Whether it is tried only where the user allows it, since it changes what is computed."""
    searched: bool = True
    """Whether a value can be fixed in the base plan, so that the exact search has it too. Not where it follows from
    other fields: parts of tp, layers of a stage."""
    rewrites: bool = False
    """Whether it is a published method, which rewrites the plan's Program."""


def _sharded(plan: Plan) -> bool:
    optimizer = plan.optimizer
    return optimizer.zero == 3 and (plan.mesh.dp_shard * plan.mesh.cp > 1 or optimizer.offload_parameters)


def _reshard(plan: Plan, _: Graph, value: Value) -> Plan:
    return replace(plan, optimizer=replace(plan.optimizer, reshard_after_forward=bool(value)))


def _prefetch(plan: Plan, _: Graph, value: Value) -> Plan:
    return replace(plan, overlap=replace(plan.overlap, prefetch=int(value)))


def _buckets(plan: Plan, graph: Graph) -> tuple[Value, ...]:
    """The sizes of buckets: a block's, usual sizes, and sizes between them that cut this plan's layers otherwise."""
    if plan.optimizer.zero == 3 or not plan.overlap.grad_reduce:
        return ()
    return tuple(dict.fromkeys((0, *BUCKETS, *bucket_sizes(graph, plan))))


def _bucket(plan: Plan, _: Graph, value: Value) -> Plan:
    return replace(plan, overlap=replace(plan.overlap, bucket_bytes=int(value) or None, buckets=(), fused=()))


def _grain(plan: Plan, _: Graph, value: Value) -> Plan:
    """Sets the cuts of buckets and actions. value: layers of each bucket and, after a stroke, of each action, as
    `3,2,1/1,2,2,1`; either may be left out."""
    buckets, _stroke, fused = str(value).partition("/")
    counts = [[word.strip() for word in words.split(",") if word.strip()] for words in (buckets, fused)]
    if not all(word.isdigit() for words in counts for word in words):
        raise PlanError(f"buckets are numbers of layers, as 3,2,1 or 3,2,1/1,2,2,1; not {str(value)[:40]!r}")
    first, second = (tuple(map(int, words)) for words in counts)
    # Counts of layers replace a size in bytes; both at once would be two answers to one question.
    size = None if first or second else plan.overlap.bucket_bytes
    return replace(plan, overlap=replace(plan.overlap, bucket_bytes=size, buckets=first, fused=second))


def _grains(plan: Plan, graph: Graph) -> tuple[Value, ...]:
    """Its own cuts, and buckets of the usual size of which each is one action."""
    sized = replace(plan, overlap=replace(plan.overlap, bucket_bytes=BUCKETS[0], buckets=(), fused=()))
    try:
        cut = cut_of(sized, graph)
    except PlanError:
        return ()
    return tuple(dict.fromkeys((shown_grain(plan), shown_grain(with_grain(plan, Grain(cut, cut))))))


def shown_grain(plan: Plan) -> str:
    """The cuts as `--fix buckets=` takes them; empty where the plan says nothing of it."""
    listed = [",".join(map(str, counts)) for counts in (plan.overlap.buckets, plan.overlap.fused)]
    return listed[0] + (f"/{listed[1]}" if listed[1] else "")


def _offload(plan: Plan, _: Graph, value: Value) -> Plan:
    return replace(plan, optimizer=replace(plan.optimizer, offload=Offload() if value else None))


def _away(tier: Literal["host", "disk"]) -> Make:
    """Makes the choice of parameters on a tier, or, of a plan that has them there, back on the device."""

    def make(plan: Plan, _: Graph, value: Value) -> Plan:
        optimizer = plan.optimizer
        if value:
            moved = replace(optimizer, zero=3, offload_parameters=True, parameter_tier=tier)
        elif optimizer.offload_parameters and optimizer.parameter_tier == tier:
            moved = replace(optimizer, offload_parameters=False, parameter_tier="host")
        else:
            return plan
        return replace(plan, optimizer=moved)

    return make


def _is_away(tier: Literal["host", "disk"]) -> Callable[[Plan], Value]:
    return lambda plan: plan.optimizer.offload_parameters and plan.optimizer.parameter_tier == tier


def _may_go_away(plan: Plan) -> tuple[Value, ...]:
    return (False, True) if _sharded(plan) or plan.mesh.dp_shard * plan.mesh.cp == 1 else ()


USUAL = "default"
"""How tokens get to their experts where a plan leaves it to the program."""


def _dispatch_of(plan: Plan) -> Value:
    return plan.layout.dispatch or USUAL


def _replica_values(plan: Plan, graph: Graph, _: Cluster) -> tuple[Value, ...]:
    """None, and one, two and four more experts on each rank, as far as there are so many others; none where the plan
    says itself which experts lie where."""
    ep = max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
    counts = [router.experts for router in routers(graph)]
    if ep == 1 or not counts or (plan.experts.placement and not plan.experts.replicas):
        return ()
    # A rank holds max(counts) // ep experts of its own; copies can only be of the others.
    most = min(counts) - max(counts) // ep
    return (0, *(multiple * ep for multiple in (1, 2, 4) if multiple <= most))


def _whole_layers(plan: Plan) -> Plan:
    """The plan with layers of experts whole, as those are that it places."""
    return replace(plan, overlap=replace(plan.overlap, experts=False)) if plan.overlap.experts else plan


def _replicas(plan: Plan, _: Graph, value: Value) -> Plan:
    changed = replace(plan, experts=replace(plan.experts, replicas=int(value), placement=()))
    return _whole_layers(changed) if value else changed


def _is_placed(plan: Plan) -> bool:
    return bool(plan.experts.placement) and not plan.experts.replicas


def with_load(choices: Sequence[Choice], router: RouterLoad) -> tuple[Choice, ...]:
    """The choices with that of experts' places, which follows from the load; without it where experts are alike."""

    def values(plan: Plan, graph: Graph, _: Cluster) -> tuple[Value, ...]:
        ep = max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
        free = not (plan.experts.placement or plan.experts.replicas)
        return (False, True) if ep > 1 and free and routers(graph) else ()

    def make(plan: Plan, graph: Graph, value: Value) -> Plan:
        if not value:
            return replace(plan, experts=replace(plan.experts, placement=())) if _is_placed(plan) else plan
        ep = max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
        rows = for_load(router, tuple(one.experts for one in routers(graph)), ep)
        return _whole_layers(replace(plan, experts=replace(plan.experts, placement=rows)))

    return tuple(
        replace(one, values=values, make=make) if one.name == "expert_placement" else one
        for one in choices
        if one.name != "expert_placement" or router.kind != "balanced"
    )


def _dispatch(plan: Plan, _: Graph, value: Value) -> Plan:
    return replace(plan, layout=replace(plan.layout, dispatch=None if value == USUAL else value))  # type: ignore[arg-type]


def _dispatch_values(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[Value, ...]:
    """Its own, and what may be faster on the machines: DeepEP's kernels, or both an all-to-all and a gather."""
    if plan.mesh.ep == 1 or not any(block.does("dispatches") for block in graph.blocks):
        return ()
    ways = dispatchers(cluster)
    return tuple(dict.fromkeys((_dispatch_of(plan), *(ways[:1] if ways[0] == "fused" else ways))))


def _order(plan: Plan, _: Graph, value: Value) -> Plan:
    return replace(plan, mesh=replace(plan.mesh, order=tuple(str(value).split(","))))


def _orders(plan: Plan, _: Graph, __: Cluster) -> tuple[Value, ...]:
    """The orders of axes with two axes of several ranks exchanged."""
    order, mesh = plan.mesh.order, plan.mesh
    # Axes of one rank may stand anywhere: exchanging them changes no link.
    active = [i for i, axis in enumerate(order) if getattr(mesh, axis) > 1]
    values = [",".join(order)]
    for a, b in combinations(active, 2):
        changed = list(order)
        changed[a], changed[b] = changed[b], changed[a]
        values.append(",".join(changed))
    if mesh.pp > 1 and mesh.data_ranks > 1:
        values.append(",".join(PIPELINE_INSIDE))
    return tuple(dict.fromkeys(values)) if len(values) > 1 else ()


def _kept_on_host(plan: Plan) -> int:
    """Layers of a stage whose activations are offloaded."""
    return max((r.first_per_stage or 0 for r in plan.saved.rules if r.action == "offload"), default=0)


def _activations(plan: Plan, graph: Graph, value: Value) -> Plan:
    rules = tuple(rule for rule in plan.saved.rules if rule.action != "offload")
    if value:
        rules += (SavedRule(calls=repeated_layers(graph)[0], action="offload", first_per_stage=int(value)),)
    return replace(plan, saved=replace(plan.saved, rules=rules))


def _activation_values(plan: Plan, graph: Graph, _: Cluster) -> tuple[Value, ...]:
    # Offload is combined with no recomputation only: what is recomputed need not be kept anywhere.
    if plan.saved.preset != "none":
        return ()
    per_stage = -(-repeated_layers(graph)[1] // plan.num_stages)
    return tuple(dict.fromkeys((0, max(1, per_stage // 4), max(1, per_stage // 2), per_stage)))


def _low(plan: Plan) -> Value:
    return "none" if plan.precision.fp8 is None else plan.precision.fp8.recipe


def _fp8(plan: Plan, _: Graph, value: Value) -> Plan:
    low = None if value == "none" else Fp8(recipe=value)  # type: ignore[arg-type]
    return replace(plan, precision=replace(plan.precision, fp8=low))


def _fp8_values(_: Plan, __: Graph, cluster: Cluster) -> tuple[Value, ...]:
    has = all(group.node.device.dense_peak.fp8 is not None for group in cluster.groups)
    return ("none", "tensorwise") if has else ()


def _split(plan: Plan, _: Graph, value: Value) -> Plan:
    splits = (Split(op="*", dim="seq", parts=plan.mesh.tp),) if value else ()
    return replace(plan, overlap=replace(plan.overlap, splits=splits))


CHOICES: tuple[Choice, ...] = (
    Choice(
        name="reshard_after_forward",
        says="free gathered parameters after forward (ZeRO 3)",
        values=lambda plan, _, __: (True, False) if _sharded(plan) else (),
        of=lambda plan: plan.optimizer.reshard_after_forward,
        make=_reshard,
    ),
    Choice(
        name="prefetch",
        says="blocks whose parameters are gathered ahead (ZeRO 3)",
        values=lambda plan, _, __: tuple(range(MOST_AHEAD + 1)) if _sharded(plan) and plan.overlap.param_gather else (),
        of=lambda plan: plan.overlap.prefetch,
        make=_prefetch,
    ),
    Choice(
        name="bucket_bytes",
        says="bytes of gradients reduced together (ZeRO 0 to 2); 0: a block's",
        values=lambda plan, graph, _: _buckets(plan, graph),
        of=lambda plan: plan.overlap.bucket_bytes or 0,
        make=_bucket,
    ),
    Choice(
        name="buckets",
        says="layers of each gradient bucket / of each action, in place of bytes; searched last, on the best plan",
        values=lambda plan, graph, _: _grains(plan, graph) if _buckets(plan, graph) else (),
        of=shown_grain,
        make=_grain,
        searched=False,
    ),
    Choice(
        name="order",
        says="axes from ranks far apart to neighbours: which runs over which link",
        values=_orders,
        of=lambda plan: ",".join(plan.mesh.order),
        make=_order,
    ),
    Choice(
        name=DISPATCH,
        says="how tokens get to their experts (ep > 1); fused: DeepEP's kernels",
        values=_dispatch_values,
        of=_dispatch_of,
        make=_dispatch,
    ),
    Choice(
        name="experts",
        says="exchanges of experts (ep > 1) beside the computing of another microbatch",
        values=lambda plan, graph, _: (False, True) if _taken_apart(_overlap_experts(plan, graph, True), graph) else (),
        of=lambda plan: plan.overlap.experts,
        make=lambda plan, graph, value: _overlap_experts(plan, graph, value),
        searched=False,
    ),
    Choice(
        name="expert_replicas",
        says="copies of experts on further ranks of ep, under the workload's router load (FlexMoE)",
        values=_replica_values,
        of=lambda plan: plan.experts.replicas,
        make=_replicas,
        searched=False,
    ),
    Choice(
        name="expert_placement",
        says="experts on ranks of ep by the workload's router load, as an integer programme (Brainstorm)",
        values=lambda plan, _, __: (),
        of=_is_placed,
        make=lambda plan, _, __: plan,
        searched=False,
    ),
    Choice(
        name="async_tp",
        says="async tensor parallelism: TP matmuls are chunked so that collectives overlap with them",
        values=lambda plan, _, __: (False, True) if plan.mesh.tp > 1 and plan.layout.sequence_parallel else (),
        of=lambda plan: bool(plan.overlap.splits),
        make=_split,
        searched=False,
    ),
    Choice(
        name="activation_offload",
        says="layers of each stage whose kept activations wait on the host",
        values=_activation_values,
        of=_kept_on_host,
        make=_activations,
        searched=False,
    ),
    Choice(
        name="optimizer_offload",
        says="optimizer states and update on the host; tried with --no-clip",
        values=lambda plan, _, __: () if plan.optimizer.clip else (False, True),
        of=lambda plan: plan.optimizer.offload is not None,
        make=_offload,
    ),
    Choice(
        name="parameter_offload",
        says="parameters on the host, copied in before each gather (ZeRO 3)",
        values=lambda plan, _, __: _may_go_away(plan),
        of=_is_away("host"),
        make=_away("host"),
    ),
    Choice(
        name="parameter_disk",
        says="parameters in files on a disk of the node, read ahead of each layer (ZeRO 3); where its speed is known",
        values=lambda plan, _, cluster: _may_go_away(plan) if has_disks(cluster) else (),
        of=_is_away("disk"),
        make=_away("disk"),
    ),
    Choice(
        name="fp8",
        says="recipe of eight-bit products; only with --allow fp8",
        values=_fp8_values,
        of=_low,
        make=_fp8,
        on_request=True,
    ),
)
"""In the order in which they are tried."""

NAMES = tuple(choice.name for choice in CHOICES)

WORDS = {"fp8": ("none", *get_args(get_type_hints(Fp8)["recipe"])), DISPATCH: (USUAL, *get_args(Dispatch))}
"""Choices with few words as values."""


def _overlap_experts(plan: Plan, _: Graph, value: Value) -> Plan:
    """Whether exchanges of experts are rows of their own, or inside forwards and backwards."""
    return replace(plan, overlap=replace(plan.overlap, experts=bool(value)))


def _taken_apart(plan: Plan, graph: Graph) -> bool:
    """Whether the model's layers of experts are taken apart so, where the plan asks for it and divides experts."""
    if not has_rows(plan):
        return False
    try:
        taken_apart(plan, under(graph, plan))
    except PlanError:
        return False
    return True


def of_method(method: Method) -> Choice:
    """A method that `schedule.passes` or a field turns on, as a choice: off, or its first variant of a plan that this
    model can have."""

    def first(plan: Plan, graph: Graph) -> Plan | None:
        able = (one for one in method.variants(plan) if not has_rows(one) or _taken_apart(one, graph))
        return None if method.used(plan) else next(able, None)

    def make(plan: Plan, graph: Graph, value: Value) -> Plan:
        return (first(plan, graph) if value else None) or plan

    def values(plan: Plan, graph: Graph, _: Cluster) -> tuple[Value, ...]:
        return () if first(plan, graph) is None else (True,)

    return Choice(
        name=method.name, says=method.about, values=values, of=method.used, make=make, searched=False, rewrites=True
    )


def choices_of(plan: Plan) -> tuple[tuple[Choice, Value], ...]:
    """Choices that a plan makes otherwise than a plan of defaults, with their values."""
    usual = Plan()
    return tuple((option, option.of(plan)) for option in CHOICES if option.of(plan) != option.of(usual))


def described(plan: Plan) -> tuple[str, ...]:
    """Those choices in words, less fp8, which a plan's precision says."""
    return tuple(f"{of.name} {show_value(of, value, plan)}" for of, value in choices_of(plan) if of.name != "fp8")


def choice(name: str) -> Choice:
    """The choice of that name. PlanError with the nearest otherwise."""
    for option in CHOICES:
        if option.name == name.replace("-", "_"):
            return option
    raise PlanError(f"no choice is called {name[:40]!r}{nearest(name, NAMES)}; there are {', '.join(NAMES)}")


def read_value(of: Choice, text: str) -> Value:
    """A value from text: `yes`, `no`, a number, a size, a word. PlanError for what the choice cannot be."""
    word = text.strip().lower()
    default = of.of(Plan())
    if isinstance(default, bool):
        if word not in ("yes", "no", "true", "false"):
            raise PlanError(f"{of.name} is yes or no, not {text[:20]!r}")
        return word in ("yes", "true")
    if of.name == "bucket_bytes":
        return 0 if word in ("0", "none") else parse_bytes(text)
    if isinstance(default, int):
        if not word.isdigit():
            raise PlanError(f"{of.name} is a whole number, not {text[:20]!r}")
        return int(word)
    if of.name in WORDS and word not in WORDS[of.name]:
        raise PlanError(f"{of.name} is one of {', '.join(WORDS[of.name])}, not {text[:20]!r}")
    return word


def show_value(of: Choice, value: Value, plan: Plan | None = None) -> str:
    """The value for people; of an order of axes those that have several ranks in the plan."""
    if of.name == "order" and plan is not None:
        return " ".join(axis for axis in str(value).split(",") if getattr(plan.mesh, axis) > 1) or "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if of.name == "bucket_bytes":
        return show_bytes(int(value)) if value else "a block"
    if of.name == "buckets":
        return f"layers {value}" if value else "by bytes"
    return str(value)


def fixed_base(base: Plan, graph: Graph, fixed: Mapping[str, Value]) -> Plan:
    """The base plan with what is fixed, as far as the exact search can have it there. PlanError for what cannot be."""
    for name, value in fixed.items():
        of = choice(name)
        if of.searched:
            base = of.make(base, graph, value)
    return base


def allowed(stack: Stack, *, allow: Iterable[str], forbid: Iterable[Limit], fixed: Iterable[str]) -> tuple[Choice, ...]:
    """Choices that are open: run by the stack, not fixed, and allowed where they change what is computed."""
    fixed_names, allowed_names = {*fixed}, {*allow}
    for name in allowed_names:
        choice(name)
    shut = {limit.field for limit in forbid if not limit.op}
    return tuple(
        option
        for option in CHOICES
        if option.name not in fixed_names | shut
        and (not option.on_request or option.name in allowed_names)
        and runs(stack, option.name)
    )


def runs(stack: Stack, name: str) -> bool:
    """Whether a program is known to carry out a choice; of the unstated one everything is taken for granted."""
    if stack.name == own.NAME:
        return name not in own.REFUSED_CHOICES
    if stack.is_unstated:
        return True
    if name == DISPATCH:
        return bool(stack.runs.dispatches)
    return name in stack.runs.choices or name in stack.runs.overlaps


def runs_plan(stack: Stack, plan: Plan) -> bool:
    """Whether Gnomon's runtime carries out all that the plan decides; of other programs `runs` says it."""
    return stack.name != own.NAME or not own.lacking(plan)


def runs_value(stack: Stack, of: Choice, value: Value) -> bool:
    """Whether a program that runs a choice has this value of it; of orders, those of Megatron-LM are on record."""
    if of.name == "buckets":
        return stack.name == own.NAME or not value
    if of.name == DISPATCH:
        return value == USUAL or has_dispatcher(stack, value)
    if of.name != "order" or (stack.is_unstated or stack.name == own.NAME):
        return True
    return value in (",".join(DENSE_AXES), ",".join(PIPELINE_INSIDE))


def parse_choice_limit(text: str) -> Limit | None:
    """A limit on a choice, as in `prefetch>1` or `optimizer_offload` (never); None for what is no choice's."""
    op = next((op for op in (">=", "<=", "!=", ">", "<", "=") if op in text), "")
    name, _, value = (part.strip() for part in text.partition(op)) if op else (text.strip(), "", "")
    name = name.replace("-", "_")
    if name not in NAMES:
        return None
    if not op:
        return Limit(field=name, op="", value="")
    read = read_value(choice(name), value)
    if op not in ("=", "!=") and (isinstance(read, bool) or not isinstance(read, int)):
        raise PlanError(f"limit {text[:40]!r}: {name} has no order; use = or !=")
    return Limit(field=name, op=op, value=str(read) if isinstance(read, bool) else read)
