"""Changes of a plan that spare memory, the smallest first: what each acts on, how far it can go, and how exact it is.

`OPTIONS` lists them. An option has levels (ways to take it, the least first) and, where it can be taken in part,
amounts (a number of layers, a share). Leaves out what they free and cost, which is predicted (`search.fit.ladder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.methods.galore import with_low_rank
from gnomon.methods.method import Exactness
from gnomon.plans import INPUTS_AWAY, LowRank, Offload, Plan, Saved, SavedRule
from gnomon.prediction import changes
from gnomon.prediction.changes import Single, fully_sharded
from gnomon.search.refinement.choices import BUCKETS, Value, choice
from gnomon.search.space.points import has_disks, repeated_layers
from gnomon.software import Stack, with_facts

Levels = Callable[[Plan, Graph, Cluster], Iterator[Single]]
Part = Callable[[int], Single]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """An option that can be taken in part."""

    most: int
    """Units of the whole."""
    part: Part
    """The change with so many units, from 1 to `most`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One kind of change."""

    name: str
    """In a word, as in JSON."""
    about: str
    """What it does."""
    acts_on: tuple[str, ...]
    """Classes of memory that it can make smaller, as in `RankMemory.by_class`."""
    exactness: Exactness
    """How the results of training compare with those without it."""
    levels: Levels
    """Ways to take it, the least first; none where a plan has no room for it."""
    none: Callable[[Plan], str]
    """Why a plan has no room for it."""
    amounts: Callable[[Plan, Graph], Amounts | None] = lambda plan, graph: None
    """How it can be taken in part; None where it cannot."""
    software: Callable[[Stack], Stack | None] = lambda stack: None
    """The program's record with it, of an option that no plan says; None where the program has it already, or has not
    got it at all. Its levels are the plan as it is."""


def _of_choice(name: str, words: str, values: tuple[Value, ...], after: Callable[[Plan], Plan] = lambda p: p) -> Levels:
    """Levels of a choice beyond the exact search: the first of `values` that it can take and has not."""
    chosen = choice(name)

    def levels(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
        able = chosen.values(plan, graph, cluster)
        for value in values:
            if value in able and chosen.of(plan) != value:
                yield words, after(chosen.make(plan, graph, value))

    return levels


def _bucket(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    now = plan.overlap.bucket_bytes
    if now is None or now > BUCKETS[0]:
        yield from _of_choice("bucket_bytes", "gradient buckets of 25 MiB", BUCKETS[:1])(plan, graph, cluster)


def _layers(plan: Plan, graph: Graph) -> tuple[str, int]:
    """(selector of the repeated layers, how many of them a stage has)."""
    layers, count = repeated_layers(graph)
    return layers, -(-count // plan.num_stages)


def _recompute(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    # A layer whose activations wait on the host is not recomputed too: both spare the same bytes.
    if any(rule.action == "offload" for rule in plan.saved.rules):
        return
    yield from changes.recompute(plan)


def _recompute_part(plan: Plan, graph: Graph) -> Amounts | None:
    calls, count = _layers(plan, graph)
    if plan.saved.rules or plan.saved.preset == "full":
        return None
    where = "layers" if plan.num_stages == 1 else "layers of each stage"

    def part(number: int) -> Single:
        if number == count:
            return "recompute full", replace(plan, saved=Saved(preset="full"))
        rule = SavedRule(calls=calls, first_per_stage=number, preset="full")
        words = f"recompute full in {number} of {count} {where}"
        return words, replace(plan, saved=replace(plan.saved, rules=(rule,)))

    return Amounts(most=count, part=part)


def _inputs(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    """Checkpoints on the host: beside recomputation, all that a layer keeps."""
    if plan.saved == Saved(preset="full"):
        yield "checkpoints on the host", replace(plan, saved=replace(plan.saved, rules=(INPUTS_AWAY,)))


def _activations(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    amounts = _activations_part(plan, graph)
    if amounts is not None:
        yield amounts.part(amounts.most)


def _activations_part(plan: Plan, graph: Graph) -> Amounts | None:
    chosen = choice("activation_offload")
    if plan.saved.preset != "none" or plan.saved.rules:
        return None
    count = _layers(plan, graph)[1]
    where = "layers" if plan.num_stages == 1 else "layers of each stage"

    def part(number: int) -> Single:
        how = f" of {number} of {count} {where}" if number < count else ""
        return f"activations on the host{how}", chosen.make(plan, graph, number)

    return Amounts(most=count, part=part)


PARTS = 20
"""Steps in which optimizer states go to the host: twentieths of them."""


def _states_part(plan: Plan, graph: Graph) -> Amounts | None:
    if plan.optimizer.offload is not None:
        return None

    def part(number: int) -> Single:
        offload = Offload(fraction=number / PARTS)
        words = "optimizer on the host" if number == PARTS else f"{number / PARTS:.0%} of the optimizer on the host"
        return words, replace(plan, optimizer=replace(plan.optimizer, offload=offload))

    return Amounts(most=PARTS, part=part)


def _parameters(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    words = "parameters on the host" if plan.optimizer.zero == 3 else "parameters on the host (ZeRO 3)"
    yield from _of_choice("parameter_offload", words, (True,), fully_sharded)(plan, graph, cluster)


def _disk(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    """Offers the disk where every node says how fast its own is."""
    chosen = choice("parameter_disk")
    if has_disks(cluster) and not chosen.of(plan):
        words = "parameters on a disk" if plan.optimizer.zero == 3 else "parameters on a disk (ZeRO 3)"
        yield words, fully_sharded(chosen.make(plan, graph, True))


def _tensor_parallel(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    """Offers tensor parallelism inside a node."""
    node = min(group.node.count for group in cluster.groups)
    yield from changes.tensor_parallel(plan, max(node // plan.stage_mesh(0).tp, 1))


def _context(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    """Half, then a quarter of the data-parallel ranks for context parallelism."""
    if plan.stages or not any(block.does("attends") for block in graph.blocks):
        return
    mesh = plan.mesh
    for ways in (2, 4):
        if mesh.dp_shard % ways == 0:
            yield (
                f"cp {mesh.cp} -> {mesh.cp * ways}",
                replace(plan, mesh=replace(mesh, dp_shard=mesh.dp_shard // ways, cp=mesh.cp * ways)),
            )


def _chunked_loss(stack: Stack) -> Stack | None:
    """Head and loss together, part by part, where the program has such a kernel."""
    if "chunked_loss" not in stack.runs.choices or stack.loss.cross_entropy == "chunked":
        return None
    return with_facts(stack, "asked by fit", "2026-11-29", cross_entropy="chunked")


def _as_it_is(words: str) -> Levels:
    """Leaves the plan as it is, for an option of the program."""
    return lambda plan, graph, cluster: iter(((words, plan),))


def _eight_bit(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    """States of a byte each, on the device; the update of a CPU has none."""
    narrow = plan.precision.states in ("int8", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
    if plan.optimizer.kind not in ("adamw", "adam", "lion", "momentum") or plan.optimizer.offload or narrow:
        return
    states = replace(plan.precision, states="int8", wide_tables=True)
    yield "8-bit optimizer states", replace(plan, precision=states)


def _four_bit(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    """States of half a byte each (torchao's AdamW4bit)."""
    optimizer = plan.optimizer
    plain = optimizer.offload is None and optimizer.low_rank is None and not optimizer.paged
    if optimizer.kind == "adamw" and plain and plan.precision.states != "fp4_e2m1":
        narrow = replace(plan.precision, states="fp4_e2m1", wide_tables=False)
        yield "4-bit optimizer states", replace(plan, precision=narrow)


def _paged(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    """States in memory that device and host share: bitsandbytes', of 32 or of eight bits."""
    optimizer, precision = plan.optimizer, plan.precision
    if optimizer.kind != "adamw" or optimizer.offload or optimizer.paged or optimizer.low_rank is not None:
        return
    if precision.states == "fp4_e2m1":
        return
    wide = precision if precision.states == "int8" else replace(precision, states="fp32")
    yield "paged optimizer states", replace(plan, optimizer=replace(optimizer, paged=True), precision=wide)


def _low_rank(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    """Gradients projected before moments are kept of them, where each rank has whole ones."""
    if plan.optimizer.paged or plan.precision.states == "fp4_e2m1":
        return
    for name, adapters in (
        ("APOLLO", LowRank(method="apollo", projection="random")),
        ("GaLore", LowRank(method="galore")),
    ):
        for low_rank_plan in with_low_rank(plan, adapters):
            yield f"{name} of rank {adapters.rank}", low_rank_plan


def _no_low_rank(plan: Plan) -> str:
    if plan.optimizer.low_rank is not None:
        return "the plan has it already"
    return "only of Adam by replicas: sharded gradients and a host's update have no whole matrices"


def _no_narrow(plan: Plan) -> str:
    if plan.optimizer.offload is not None:
        return "the update on the host has no such states"
    return "its states are so already, or it is no AdamW"


def _no_eight_bit(plan: Plan) -> str:
    if plan.optimizer.offload is not None:
        return "the update on the host has no states in eight bits"
    return "its states are narrow already" if plan.precision.states != "fp32" else "it is no Adam and no Lion"


def _cpu_offload(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[Single]:
    optimizer = plan.optimizer
    if optimizer.zero == 3 and not optimizer.offload_parameters and optimizer.offload is None:
        away = replace(optimizer, offload=Offload(), offload_parameters=True)
        yield "parameters, gradients and states on the host", replace(plan, optimizer=away)


def _no_shards(plan: Plan) -> str:
    if plan.optimizer.zero == 3:
        return "it is ZeRO 3 already"
    return "no data-parallel ranks to divide over"


def _no_ranks(plan: Plan) -> str:
    return "no data-parallel ranks are left that it could take"


def _not_sharded(plan: Plan) -> str:
    return "only under ZeRO 3" if plan.optimizer.zero < 3 else "the plan has it already"


def _of_plan(function: Callable[[Plan], Iterator[Single]]) -> Levels:
    return lambda plan, _, __: function(plan)


OPTIONS: tuple[Option, ...] = (
    Option(
        name="bucket_bytes",
        about="smaller buffers to reduce gradients through",
        acts_on=("gradients", "communication"),
        exactness="up to the order of sums",
        levels=_bucket,
        none=lambda plan: "only below ZeRO 3, where reductions overlap with the backward",
    ),
    Option(
        name="prefetch",
        about="parameters gathered when a layer is reached, not ahead",
        acts_on=("parameters",),
        exactness="bitwise",
        levels=_of_choice("prefetch", "no prefetch of parameters", (0,)),
        none=_not_sharded,
    ),
    Option(
        name="reshard_after_forward",
        about="gathered parameters freed after the forward",
        acts_on=("parameters",),
        exactness="bitwise",
        levels=_of_choice("reshard_after_forward", "reshard after forward", (True,)),
        none=_not_sharded,
    ),
    Option(
        name="micro_batch_size",
        about="smaller microbatches, more of them: the same global batch",
        acts_on=("activations", "logits", "temporary"),
        exactness="up to the order of sums",
        levels=_of_plan(changes.micro_batch),
        none=lambda plan: (
            "the microbatch cannot be halved: it is "
            + (f"{plan.schedule.micro_batch_size} sequence" if plan.schedule.micro_batch_size else "the smallest")
        ),
    ),
    Option(
        name="recompute",
        about="activations computed again in the backward (activation checkpointing)",
        acts_on=("activations",),
        exactness="bitwise",
        levels=_recompute,
        none=lambda plan: f"recompute is {'set by layer' if plan.saved.rules else plan.saved.preset} already",
        amounts=_recompute_part,
    ),
    Option(
        name="input_offload",
        about="what each recomputed layer reads, copied to the host after the forward and back before the backward",
        acts_on=("activations",),
        exactness="bitwise",
        levels=_inputs,
        none=lambda plan: (
            "only where whole layers are recomputed" if plan.saved.preset != "full" else "they are on the host already"
        ),
    ),
    Option(
        name="sequence_parallel",
        about="activations between tensor-parallel regions divided over tp",
        acts_on=("activations", "temporary"),
        exactness="up to the order of sums",
        levels=_of_plan(changes.sequence_parallel),
        none=lambda plan: "only with tp" if plan.stage_mesh(0).tp == 1 else "the plan has it already",
    ),
    Option(
        name="activation_offload",
        about="activations copied to the host after the forward, and back before the backward",
        acts_on=("activations",),
        exactness="bitwise",
        levels=_activations,
        none=lambda plan: "only where nothing is recomputed" if plan.saved.preset != "none" else "set by layer already",
        amounts=_activations_part,
    ),
    Option(
        name="zero",
        about="optimizer states (1), gradients (2), parameters (3) divided over data-parallel ranks",
        acts_on=("states", "master", "gradients", "parameters"),
        exactness="up to the order of sums",
        levels=_of_plan(changes.zero),
        none=_no_shards,
    ),
    Option(
        name="chunked_loss",
        about="head and loss computed together in chunks, so that logits are never whole (Liger, CCE)",
        acts_on=("logits", "temporary"),
        exactness="up to the order of sums",
        levels=_as_it_is("fused linear cross-entropy"),
        none=lambda plan: "the program has it already, or has no such loss",
        software=_chunked_loss,
    ),
    Option(
        name="eight_bit_states",
        about="optimizer states of a byte each, with a scale for a block of them (bitsandbytes)",
        acts_on=("states",),
        exactness="statistical",
        levels=_eight_bit,
        none=_no_eight_bit,
    ),
    Option(
        name="paged_states",
        about="optimizer states on the host where the device has no room for them, copied in for the update (paged)",
        acts_on=("states",),
        exactness="bitwise",
        levels=_paged,
        none=_no_narrow,
    ),
    Option(
        name="low_rank",
        about="moments of gradients that are projected to few dimensions (APOLLO, GaLore)",
        acts_on=("states",),
        exactness="statistical",
        levels=_low_rank,
        none=_no_low_rank,
    ),
    Option(
        name="four_bit_states",
        about="optimizer states of half a byte each, with a scale for a block of them (torchao)",
        acts_on=("states",),
        exactness="statistical",
        levels=_four_bit,
        none=_no_narrow,
    ),
    Option(
        name="optimizer_offload",
        about="optimizer states and the update on the host (ZeRO-Offload)",
        acts_on=("states", "master", "gradients"),
        exactness="up to the order of sums",
        levels=_of_plan(changes.offload),
        none=lambda plan: "the optimizer is on the host already",
        amounts=_states_part,
    ),
    Option(
        name="parameter_offload",
        about="parameters on the host, copied in before each layer (ZeRO-Infinity)",
        acts_on=("parameters",),
        exactness="bitwise",
        levels=_parameters,
        none=lambda plan: (
            "the parameters are on the host already" if choice("parameter_offload").of(plan) else "only under ZeRO 3"
        ),
    ),
    Option(
        name="cpu_offload",
        about="parameters, gradients, states and the update on the host together (FSDP's CPUOffload)",
        acts_on=("parameters", "gradients", "states", "master"),
        exactness="up to the order of sums",
        levels=_cpu_offload,
        none=lambda plan: "some of them are there already" if plan.optimizer.zero == 3 else "only under ZeRO 3",
    ),
    Option(
        name="parameter_disk",
        about="parameters in files on a disk, read ahead of each layer (ZeRO-Infinity)",
        acts_on=("parameters",),
        exactness="bitwise",
        levels=_disk,
        none=lambda plan: (
            "the parameters are on a disk already"
            if plan.optimizer.parameter_tier == "disk"
            else "no node says how fast its disk is"
        ),
    ),
    Option(
        name="tp",
        about="tensor parallelism in place of data parallelism",
        acts_on=("parameters", "gradients", "states", "master", "activations", "logits"),
        exactness="up to the order of sums",
        levels=_tensor_parallel,
        none=_no_ranks,
    ),
    Option(
        name="pp",
        about="pipeline stages in place of data parallelism",
        acts_on=("parameters", "gradients", "states", "master"),
        exactness="up to the order of sums",
        levels=_of_plan(changes.pipeline_parallel),
        none=_no_ranks,
    ),
    Option(
        name="cp",
        about="sequences divided over ranks that were data-parallel",
        acts_on=("activations", "logits", "temporary"),
        exactness="up to the order of sums",
        levels=_context,
        none=_no_ranks,
    ),
)
"""The smallest change first: what only the memory allocator sees, then what is computed again, moved, divided, and at
last another division of the job over its ranks."""

ORDER = ("tp", "pp", "cp", "zero", "parameter_offload", "parameter_disk", "micro_batch_size")
"""Options that others depend on: in a combination they are made first."""

BY_NAME = ("cpu_offload", "eight_bit_states", "four_bit_states", "paged_states", "low_rank", "input_offload")
"""Options that only programs have which name them (`Runs.choices`)."""

ADAPTED = frozenset({"adapters", "adapters_nf4", "some_layers"})
"""Another job: the network frozen, with adapters beside its linears or but for its last layers, as programs' terms may
have them."""

OF_PROGRAM = ("chunked_loss",)
"""Options that change what the program does, and not the plan."""
