"""What Gnomon's own runtime can run: the one list that runtime, search, methods and command line read.

A decision that it learns is one line less of `LACKS`, a dtype one word more of `DTYPES`; every op kind has a torch
function (`tests/runtime/test_op_kinds.py`). `plan_reason`, `precision_reason` and `model_reason` say why it does not
run something; `limits` says what a search must leave out. Leaves out what depends on local sizes or on the process
groups at hand: `gnomon.runtime` checks that where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gnomon import orders
from gnomon.graph import Block, Graph
from gnomon.orders.one_f_one_b import DAPPLE
from gnomon.plans import Mesh, Plan, Precision
from gnomon.plans.expert_rows import has_rows

NAME = "gnomon"
"""Its stack record, and what it is called in plan files."""

DTYPES = ("fp64", "fp32", "bf16", "fp16")
"""What it stores and computes in."""

WHOLE_SCANS = "the runtime does not divide the sequence of a state-space scan"
"""Why there is no context parallelism for Mamba-2."""

WHOLE_MATRIX_OPTIMIZERS = ("adafactor", "muon")
"""Update rules that look at whole matrices, of which other ranks may have parts."""

WHOLE_DIMS = ("heads", "kv_heads", "ffn", "shared_ffn", "vocab")
"""Dims that a layout rule may keep whole on every rank, or divide over tp where another one keeps them whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """A decision of a plan that is not carried out."""

    name: str
    """As a plan file writes it, where fields of `{plan}` are filled in."""
    applies: Callable[[Plan], bool]
    """Whether the plan decides so."""
    choice: str = ""
    """The choice of `gnomon plan --refine` that would decide so."""


LACKS = (
    Lack(
        name="schedule.vocabulary with gradient buckets",
        applies=lambda plan: plan.schedule.vocabulary != "ends" and plan.overlap.in_buckets,
    ),
    Lack(
        name=f"layout.rules other than those that keep {', '.join(WHOLE_DIMS)} whole, or divide them over tp",
        applies=lambda plan: any(
            rule.axes not in ((), ("tp",)) or rule.dim.split(".")[-1] not in WHOLE_DIMS for rule in plan.layout.rules
        ),
    ),
    Lack(
        name="layout.rules of ffn beside etp, which may divide that of experts",
        applies=lambda plan: plan.mesh.etp > 1 and any(rule.dim.endswith("ffn") for rule in plan.layout.rules),
    ),
    Lack(
        name="overlap.splits other than of seq into as many parts as tp ranks, under layout.sequence_parallel",
        applies=lambda plan: (
            bool(plan.overlap.splits)
            and (
                not plan.layout.sequence_parallel
                or any(plan.stage_mesh(stage).tp == 1 for stage in range(plan.num_stages))
                or any(
                    split.dim != "seq" or split.parts != plan.stage_mesh(stage).tp
                    for split in plan.overlap.splits
                    for stage in range(plan.num_stages)
                )
            )
        ),
    ),
    Lack(
        name=f"overlap.bucket_bytes, buckets or fused with schedule.passes other than {DAPPLE}, or a schedule whose "
        "rows hold several actions",
        applies=lambda plan: (
            plan.overlap.in_buckets
            and (
                any(given.name != DAPPLE for given in plan.schedule.passes) or orders.find(plan.schedule.name).composite
            )
        ),
    ),
    Lack(
        name="overlap.experts with experts.drop = 'probs', whose weights another part of the layer makes",
        applies=lambda plan: has_rows(plan) and plan.experts.drop == "probs",
    ),
    Lack(
        name="experts.bias_rate with optimizer.offload, whose update is on the host",
        applies=lambda plan: plan.experts.bias_rate > 0 and plan.optimizer.offload is not None,
    ),
    Lack(
        name="experts.speculate with experts.replicas, whose rows go where the numbers of all ranks say",
        applies=lambda plan: plan.experts.speculate and plan.experts.replicas > 0,
    ),
    Lack(
        name="experts.speculate, replicas or placement with overlap.experts, whose exchanges are rows of their own",
        # Such a row sends what its part of the layer says, and no other part knows where experts are now.
        applies=lambda plan: plan.overlap.experts and (plan.experts.speculate or places_experts(plan)),
    ),
    Lack(
        name="experts.replicas, placement or rebalance_every with optimizer.zero beside edp > 1, which cuts experts "
        "into shards (use ep as large as their data-parallel ranks)",
        applies=lambda plan: (
            places_experts(plan)
            and plan.optimizer.zero > 0
            and any(plan.stage_mesh(stage).edp > 1 for stage in range(plan.num_stages))
        ),
    ),
    Lack(
        name="experts.replicas, placement or rebalance_every with optimizer.offload or optimizer.offload_parameters",
        applies=lambda plan: (
            places_experts(plan) and (plan.optimizer.offload is not None or plan.optimizer.offload_parameters)
        ),
    ),
    Lack(
        name="experts.replicas, placement or rebalance_every with optimizer.kind = {plan.optimizer.kind!r}, which "
        "looks at all matrices of a parameter together",
        applies=lambda plan: places_experts(plan) and needs_whole_matrices(plan),
    ),
    Lack(
        name="optimizer.delay with optimizer.offload_parameters, which a late update would change under the step",
        applies=lambda plan: plan.optimizer.delay > 0 and plan.optimizer.offload_parameters,
    ),
    Lack(
        name="optimizer.delay without optimizer.offload, or with that of some layers beside clipping or fp16",
        applies=lambda plan: (
            plan.optimizer.delay > 0
            and (
                plan.optimizer.offload is None
                or (plan.optimizer.offload.fraction < 1 and followed(plan).optimizer.clip)
            )
        ),
    ),
    Lack(
        name="optimizer.kind = {plan.optimizer.kind!r}, which looks at whole matrices, "
        "late (optimizer.delay) with zero or tp that divide them",
        applies=lambda plan: plan.optimizer.delay > 0 and needs_whole_matrices(plan) and divides_matrices(plan),
    ),
    Lack(
        name="layout.dispatch = {plan.layout.dispatch!r} (DeepEP's kernels between GPUs: predicted only; it runs "
        "all_to_all and all_gather)",
        applies=lambda plan: plan.layout.dispatch not in (None, "all_to_all", "all_gather"),
    ),
    Lack(
        name="layout.dispatch = 'all_gather', which gathers as many tokens of each rank, with overlap.experts, "
        "experts.replicas, placement or speculate, or uneven shares (use all_to_all)",
        applies=lambda plan: (
            plan.layout.dispatch == "all_gather"
            and (
                plan.overlap.experts
                or plan.experts.speculate
                or places_experts(plan)
                or any(len(set(stage.shares)) > 1 for stage in plan.stages)
            )
        ),
    ),
    Lack(name="precision.fp8", applies=lambda plan: plan.precision.fp8 is not None, choice="fp8"),
    Lack(
        name="optimizer.low_rank, whose projections are other programs'",
        applies=lambda plan: plan.optimizer.low_rank is not None,
    ),
    Lack(
        name="optimizer.paged (states lie on the device, or on the host with optimizer.offload)",
        applies=lambda plan: plan.optimizer.paged,
    ),
    Lack(
        name="overlap.optimizer (updates follow the backward)",
        applies=lambda plan: plan.overlap.optimizer,
    ),
    Lack(
        name="saved.every with a row for each layer (ZeRO 3, gradient buckets) but for overlap.fused",
        applies=lambda plan: (
            plan.saved.every > 1 and (plan.optimizer.zero == 3 or by_layer(plan)) and not plan.overlap.fused
        ),
    ),
    Lack(
        name="placement that leaves devices out, for which it starts no process",
        applies=lambda plan: (
            plan.num_devices == plan.world_size and sorted(plan.device_of) != [*range(plan.world_size)]
        ),
    ),
)
"""Decisions that are refused, so that none is ignored."""

UNSEARCHED = ("activation_offload", "optimizer_offload", "parameter_offload", "async_tp")
"""Choices that run where a plan makes them, and that no search for it makes: on processors host and device are one
memory, and messages take the cores that matmuls are to run on meanwhile, so nothing is gained."""

REFUSED_CHOICES = frozenset((*UNSEARCHED, *(lack.choice for lack in LACKS))) - {""}
"""Choices of `gnomon plan --refine` that are left out for it."""


def lacking(plan: Plan) -> tuple[str, ...]:
    """What the plan decides and is not carried out."""
    return tuple(lack.name.format(plan=plan) for lack in LACKS if lack.applies(plan))


def followed(plan: Plan) -> Plan:
    """The plan by whose rows it runs: in fp16 the global norm is measured where nothing is clipped too, since it says
    on every rank whether gradients overflowed."""
    # The loss scale must go down on all ranks at once, and the norm is the one number that all of them have.
    if plan.precision.compute == "fp16" and not plan.optimizer.clip:
        return replace(plan, optimizer=replace(plan.optimizer, clip=True))
    return plan


def by_layer(plan: Plan) -> bool:
    """Whether it runs the plan by a row for each layer where a whole stage would do (`lower`): for gradient buckets,
    and for exchanges of experts beside other computing."""
    return plan.overlap.in_buckets or has_rows(plan)


def places_experts(plan: Plan) -> bool:
    """Whether the plan says which ranks hold which experts."""
    return bool(plan.experts.replicas or plan.experts.placement or plan.experts.rebalance_every)


def search_reason(base: Plan) -> str | None:
    """Why no search for it starts from the plan; None where one does."""
    if base.overlap.in_buckets and not lacking(base):
        return (
            "a search for the runtime takes a stage's gradients as reduced at once, and the plan says which "
            "are reduced together; leave overlap.bucket_bytes and overlap.buckets out, and set one in the plan that is "
            "found"
        )
    return plan_reason(base)


def plan_reason(plan: Plan) -> str | None:
    """Why it does not run the plan, and what to change; None where nothing is refused."""
    if missing := lacking(plan):
        return f"the runtime does not carry out {', '.join(missing)} yet; leave it out of the plan"
    return None


def precision_reason(precision: Precision) -> str | None:
    """Why it does not compute so; None where it does."""
    p = precision
    named = {"param": p.param, "grad": p.grad, "states": p.states, "compute": p.compute, "reduce": p.reduce}
    for field, name in (*named.items(), ("master", p.master)):
        if name not in DTYPES and name != "none":
            return f"the runtime has no {name} for precision.{field}; use one of {', '.join(DTYPES)}"
    # Casting parameters for compute, or gradients for a reduction, is a copy that the runtime has no buffer for.
    if p.param != p.compute or p.reduce != p.grad:
        return (
            f"the runtime computes in the dtype that parameters have and reduces gradients as they add up, but compute "
            f"is {p.compute} with param {p.param}, reduce {p.reduce} with grad {p.grad}; make each pair alike"
        )
    return None


def model_reason(graph: Graph) -> str | None:
    """Why it does not run the model under any plan: its Graph leaves some of its mathematics out, or has an op that
    is a step of others as kernels run them. None otherwise."""
    why = graph.left_out or next((reason for block in graph.blocks if (reason := block_reason(block))), None)
    return f"{graph.name} cannot be run: {why}" if why else None


def block_reason(block: Block) -> str | None:
    """Why it does not run a block; None where it does."""
    for op in block.ops:
        if op.rules.runs == "lowered":
            return (
                f"{block.name}/{op.path} is of kind {op.kind!r}, which the runtime has no function for; it is a step "
                f"of other kinds"
            )
    return None


def tensor_parallel_reason(graph: Graph, tp: int) -> str | None:
    """Why it does not divide the model over so many ranks; None where it does."""
    groups = {dim.size for block in graph.blocks for dim in block.dims if dim.name == "ssm_groups" and dim.size}
    # A group of heads shares its B and C (Mamba-2), so that it cannot be cut.
    if undivided := [size for size in groups if size % tp]:
        return (
            f"{graph.name}: ranks have whole groups of a state-space scan's heads, and tp = {tp} does not divide "
            f"{undivided[0]} of them"
        )
    vocabularies = {
        dim.size for block in graph.blocks for dim in block.dims if dim.name.split(".")[-1] == "vocab" and dim.size
    }
    # Other programs pad the table, which changes shapes that checkpoints and weights of the Hub have.
    if uneven := [size for size in vocabularies if size % tp]:
        return f"the runtime does not pad the vocabulary, and tp = {tp} does not divide {uneven[0]}"
    return None


def has_scan(graph: Graph) -> bool:
    """Whether it has state-space scans, which run over whole rows and all heads of a rank's sequences."""
    return any(block.does("scans") for block in graph.blocks)


def has_tied_weights(graph: Graph) -> bool:
    """Whether a parameter belongs to more than one layer, which it runs with stages of equal meshes only."""
    names = [
        name
        for layer in graph.layers()
        for name in {layer.call.parameter_name(t.name, layer.index) for t in graph.block(layer.call.block).parameters}
    ]
    return len(set(names)) < len(names)


def limits(graph: Graph, base: Plan, ranks: Iterable[int] = ()) -> Iterator[tuple[str, int, str]]:
    """(axis or `zero`, value, reason) that no plan made from `base` may have. ranks: values of tp that are open."""
    # What the base plan itself has refused is said of that plan, not of each axis.
    known = {*lacking(base)}
    for tp in ranks:
        reason = tensor_parallel_reason(graph, tp)
        # Only what this axis adds: a search leaves out the axis, not the plan.
        added = [name for name in lacking(replace(base, mesh=Mesh(tp=tp))) if name not in known]
        if reason or added:
            yield "tp", tp, reason or f"the runtime does not carry out {added[0]}"
    for zero in (0, 1, 2, 3):
        # Two ranks are enough for a stage of ZeRO to divide something: what is refused does not depend on how many they
        # are.
        plan = replace(base, mesh=Mesh(dp_shard=2), optimizer=replace(base.optimizer, zero=zero))
        added = [name for name in lacking(plan) if name not in known]
        if added:
            yield "zero", zero, f"the runtime does not carry out {added[0]}"


def divides_matrices(plan: Plan) -> bool:
    """Whether a rank updates parts of matrices."""
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    if any(mesh.tp * mesh.etp > 1 for mesh in meshes):
        return True
    return plan.optimizer.zero > 0 and any(mesh.dp_shard * mesh.cp > 1 for mesh in meshes)


def needs_whole_matrices(plan: Plan) -> bool:
    """Whether the plan's update rule looks at whole matrices."""
    return plan.optimizer.kind in WHOLE_MATRIX_OPTIMIZERS
