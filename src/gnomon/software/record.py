"""Stack: what the software that will run a plan does, as an input to prediction and not a decision.

Two programs given the same plan keep different tensors, launch different kernels and overlap different things. A
`Stack` says which, and for every field that is set where that is known from. Returns values only: the records of real
stacks, and how prices read them, are elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from gnomon.errors import PlanError, nearest
from gnomon.plans import Dispatch

Fusion = Literal["fused", "unfused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """The source from which one field of a stack is known."""

    field: str
    """The field, as in `attention`."""
    source: str
    """Document, or repository, version and path, with the line or function."""
    date: str
    """When it was read, as in `2026-11-21`."""
    note: str = ""
    """Conditions, as in `from 0.9 on`."""

    def __post_init__(self) -> None:
        if not self.source or not self.date:
            raise PlanError(f"fact on {self.field!r} needs a source and a date")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNumber:
    """One number fitted to a user's own runs."""

    name: str
    """As in `gnomon.prices.fitted`: `compute`, `host_kernel_s`, `exposed` …"""
    value: float
    """Seconds, or a ratio."""
    arch: str = ""
    """Generation of devices that it holds for; empty for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRuns:
    """What a user's own runs say of a stack: `gnomon calibrate --from RUNS.csv` writes it."""

    numbers: tuple[OwnNumber, ...]
    """In place of those on record."""
    runs: int
    """Runs that they were fitted to."""
    data: str
    """Which runs."""
    date: str
    """When they were fitted, YYYY-MM-DD."""
    error: str
    """How far predictions of the same runs are off, before and after."""
    range: str
    """Devices and sizes of the runs."""
    machine: str = ""
    """The one machine that they ran on: its name, and when it was calibrated; empty where that is not known."""

    def __post_init__(self) -> None:
        if self.runs < 1 or not (self.data and self.date and self.error and self.range):
            raise PlanError("numbers of own runs need at least one run, and data, date, error and range")
        keys = [(number.name, number.arch) for number in self.numbers]
        if len(set(keys)) != len(keys):
            raise PlanError("numbers of own runs: each number once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The kernels that run a layer, and what its backward keeps and overlaps."""

    attention: Literal["flash", "memory_efficient", "unfused", "unfused_fp32_softmax"] | None = None
    """Attention kernel: `flash` keeps q, k, v, output and the logarithms of row sums; `unfused` keeps scores and
    probabilities; `unfused_fp32_softmax` the latter in fp32 too."""
    attention_kernel: Literal["flash1", "flash2", "flash3", "cudnn", "triton"] | None = None
    """Which fused kernel `flash` is, where the device has it; FlashAttention-2 where it has not."""
    cublas: Literal["12.1"] | None = None
    """Which cuBLAS multiplies, where it is an older one than the curves are of."""
    cudnn: str | None = None
    """Release of cuDNN whose attention runs, as in `9.13`, where `attention_kernel` is cuDNN's and it is known."""
    norm: Fusion | None = None
    """Norm in one kernel, keeping its input and the row statistics, or op by op."""
    activation: Fusion | None = None
    """Activation (and the product of a gated one) in one kernel."""
    dropout_add: Fusion | None = None
    """Bias, dropout and residual addition in one kernel."""
    transformer_engine: bool | None = None
    """Linear layers are Transformer Engine's, which has a workspace of its own."""
    tp_reduce_dtype: Literal["compute", "fp32", "fp8"] | None = None
    """Dtype in which tensor-parallel partial sums travel. `fp8`: those of narrow matmuls' forward, under sequence
    parallelism; others in the compute dtype."""
    backward_overlap: bool | None = None
    """In the backward of a column-parallel matmul, its input is gathered again alongside the input gradient's matmul,
    and input gradients are summed over ranks alongside the weight gradient's."""
    cut_hides: float | None = None
    """Share of what a cut matmul (`Overlap.splits`) could hide of its collective that it does hide. Left out: all of
    it, which is all parts but one."""
    scan_recomputed: bool | None = None
    """A state-space scan keeps its input alone, and runs once more in backward; otherwise what it wrote before the gate
    too, as mamba_ssm's kernels do."""
    recompute_stops: bool | None = None
    """Under preset `full` a layer's forward is run again up to the last tensor that its backward reads, as torch's
    checkpoints without reentry do since 2.1; else to its end."""
    recompute_by_tensor: bool | None = None
    """Of a layer under preset `full` of which rules name single tensors, the ops are run again that make what is
    missing; else all."""
    deterministic: bool | None = None
    """Every sum is in the same order each time (`torch.use_deterministic_algorithms`): attention's backward waits its
    turn, and memory that kernels are to write is filled before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How kernels and collectives get from the host to the device."""

    launch_mode: Literal["eager", "compiled", "cuda_graph"] | None = None
    """How kernels get to the device: one host call each, generated and fused, or replayed."""
    composed: bool | None = None
    """A simulator puts times of single layers one behind the other: each takes its kernels or their launches, whichever
    is longer, then its collectives, which no host issues; embedding and head have none. What one layer's profile has
    besides the layer: `prediction.profiled`."""
    forward_launches: float | None = None
    """Host time of a launch forward over that of one backward, read where times are `composed`. Left out: 1."""
    checked_collectives: bool | None = None
    """Before each collective its ranks agree over TCP that all make the same one, and the host waits for them
    (`TORCH_DISTRIBUTED_DEBUG=DETAIL`)."""
    held_launches: int | None = None
    """Launches for each tensor that a collective inside a layer holds until the device has run it, because c10d marked
    it for NCCL's stream. Left out: none is held (PyTorch from 2.8, or `TORCH_NCCL_AVOID_RECORD_STREAMS`), or it is not
    known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How the loss is computed from logits, and what is held meanwhile."""

    cross_entropy: Literal["fused", "unfused", "in_place", "chunked"] | None = None
    """Loss in one kernel; op by op in fp32; the same written over one fp32 copy of the logits; or with the head, part
    by part, so that logits are never whole."""
    loss_metrics: int | None = None
    """Times that the loss of a microbatch is computed again, op by op in fp32 and without gradients, for metrics. Time
    counts it; memory does not, though two copies of the logits in fp32 live meanwhile."""
    logits_dtype: Literal["compute", "fp32"] | None = None
    """Dtype in which logits reach the loss."""
    hidden_dtype: Literal["compute", "fp32"] | None = None
    """Dtype in which hidden states go out to pipeline ranks that divide the vocabulary (`Schedule.vocabulary`), with a
    number a token for the loss before where it is fp32, as None is taken to be."""
    divided_loss_copies: int | None = None
    """Copies of a rank's logits in fp32 that the backward of an unfused loss holds at once where tp divides the
    vocabulary. None: three, as where nothing divides it."""
    outputs_held: bool | None = None
    """The loop that trains holds what the model returned, its logits among it, until the backward is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The places of gradients, how they add up and when they are reduced."""

    grad_buffers: Literal["contiguous", "per_parameter"] | None = None
    """Gradients in buffers that live for the whole job, or allocated when first written."""
    grad_accumulation_fused: bool | None = None
    """The weight-gradient matmul adds into the gradient buffer itself."""
    bucketed: bool | None = None
    """Gradients are reduced and parameters gathered part by part, overlapped with compute, which is assumed where it
    is not known. False: those of a pipeline stage (under ZeRO 3: of a layer) at once, from a buffer that lives for
    the whole job below ZeRO 2, and under ZeRO 2 and 3 from the first gradient until it is reduced."""
    reducer_buckets: bool | None = None
    """Gradients are reduced in buckets of torch's DistributedDataParallel, alongside those that are accumulated."""
    whole_gradients: bool | None = None
    """ZeRO 1 sums the accumulated gradients on every rank, in one all-reduce after the last backward, though a rank
    updates only its part of the parameters."""
    split_backward_frees: bool | None = None
    """A backward in two parts keeps between them only what weight gradients read, not all that the forward kept."""
    kept_gradients: bool | None = None
    """Gradients as backward makes them, in the parameters' dtype, stay next to those accumulated in a wider one."""
    freed_each_step: bool | None = None
    """Gradients are freed after the update, and made layer by layer in the first backward of a step
    (`zero_grad(set_to_none=True)`): one microbatch holds all of its activations before any of them. Counted where no
    reducer has buckets for them all: on one rank, and under ZeRO 3. Left out: they stay from step to step."""
    gradient_hook_s: float | None = None
    """Host seconds of what Python runs when the gradient of one parameter is there, under ZeRO 2 and 3. Left out: none
    is known."""
    reduce_bucket_elements: int | None = None
    """ZeRO 1 and 2 reduce gradients through one buffer of so many, and update a rank's part as one flat tensor."""
    unsharded_accumulation: bool | None = None
    """Under ZeRO 3, gradients stay whole, in the dtype of computing, from one microbatch to the next and are reduced
    once, as in FSDP's no_sync. Memory counts them; time still counts a reduction for every microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """How the optimizer goes over parameters, gradients and states."""

    optimizer_step: Literal["fused", "foreach", "single"] | None = None
    """One kernel for many parameters with the whole update, one for each arithmetic step, or parameter by parameter."""
    sliced_gather: bool | None = None
    """After a ZeRO 1 update, what each rank has updated of each tensor is copied into place by itself: as many launches
    as ranks times tensors."""
    update_elements: int | None = None
    """ZeRO 3 updates a rank's part in flat tensors of so many, one after the other."""
    update_in_passes: bool | None = None
    """Around an update with master weights, passes of their own: gradients of 16 bits copied to fp32, those of fp16
    unscaled, updated masters copied to the parameters. Time counts them; memory does not count the copy."""
    update_frees_gradients: bool | None = None
    """The update under ZeRO 1 and 2 joins a rank's gradients, copies them to fp32 and lets them go before it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How tokens get to their experts, and how experts run."""

    moe_dispatch: Dispatch | None = None
    """How tokens get to their experts when ep > 1, unless the plan says it (`Layout.dispatch`). `fused`: DeepEP's
    kernels, which send a token once to each node that holds one of its experts. `hybrid_ep`: HybridEP's, which do too,
    with the routing of all tokens to every rank. `all_gather`: all tokens to every rank, and sums scattered back.
    `all_to_all`: one copy an expert."""
    moe_experts: Literal["grouped", "looped", "fused", "sequential", "eager", "stacked"] | None = None
    """How experts run. `grouped`: a grouped matmul, the activation, another matmul. `looped`: the same, matmuls of
    one expert after those of another. `fused`: in eight bits and fewer, activation and casts are in the epilogues of
    the matmuls, both ways. `sequential`: modules one after another over rows that are sorted by expert, each matmul
    and activation launched from Python (Megatron Core's SequentialMLP). `eager`: a loop in Python over experts that
    are modules, each of which looks for its rows, copies them out, computes and adds up. `stacked`: such a loop over
    slices of one tensor, whose gradient each expert makes whole. Left out: grouped."""
    expert_gather_s: float | None = None
    """Host seconds of gathering one weight of one expert under ZeRO 3, where experts are modules (`eager`) that are
    gathered when they run, in an order that nothing foretells. Left out: experts are gathered with their layer."""
    moe_weights: Literal["output", "activation"] | None = None
    """Where the router's weights multiply: what experts put out, or their activation, so that nothing of the output is
    kept for backward. Left out: the output."""
    moe_rows: Literal["sorted"] | None = None
    """How rows get into the order of experts and back. `sorted`: tokens are copied once for each of their experts, and
    all copies are then put into order; of what experts put out too, before it is added up. Left out: in one pass with
    the copying and the adding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Activations and gradients from one pipeline stage to the next."""

    p2p_poll_s: float | None = None
    """Seconds that the host sleeps between looks whether a tensor's description has gone to another stage or come from
    it; there are two for each tensor. Left out: it does not sleep."""
    p2p_partitioned: bool | None = None
    """Ranks of a tp group that hold the same activation each send their part of it, and the receivers gather it."""
    p2p_bytes_per_s: float | None = None
    """Bytes of a message a second, whatever it runs over, as a simulator has them. Left out: those of the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Device memory besides tensors: the allocator, libraries, the CUDA context."""

    allocator: Literal["caching", "expandable_segments", "graph_pool"] | None = None
    """How device memory is handed out."""
    device_overhead_bytes: int | None = None
    """Device memory taken outside the allocator: context, libraries, communication buffers."""
    preloaded_kernels: bool | None = None
    """The CUDA context holds the code of every kernel from the start, as before CUDA 11.7; later releases load a kernel
    when it first runs."""
    loads: Literal["each_rank", "first_rank", "by_file"] | None = None
    """How a pretrained model comes through the host's memory: whole on each rank before it is divided, whole on one
    rank of a node, or a file at a time on each. Left out: it is not known."""
    cublas_workspace_bytes: int | None = None
    """A cuBLAS workspace where the job sets it (`CUBLAS_WORKSPACE_CONFIG`). Left out: the device's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What it can run: schedules, ZeRO stages, context parallelism, further choices. Empty while unknown."""

    schedules: tuple[str, ...] = ()
    """Schedules it can run."""
    zero: tuple[Literal[0, 1, 2, 3], ...] = ()
    """ZeRO stages it can run; empty while unknown."""
    zero_in_pipeline: tuple[Literal[0, 1, 2, 3], ...] = ()
    """The same with more than one pipeline rank, where those are fewer."""
    contexts: tuple[Literal["ring", "all_gather", "ulysses", "none"], ...] = ()
    """How it exchanges context with cp > 1; `none`: it has no context parallelism. Empty while unknown."""
    axes: tuple[Literal["dp_replicate", "tp", "cp", "pp", "ep"], ...] = ()
    """Axes of the mesh over which it divides ranks, besides dp_shard. Empty while unknown."""
    sequence_parallel: tuple[bool, ...] = ()
    """Whether it divides sequences between its tensor-parallel regions, where tp > 1: both where that is a choice."""
    keep_gathered: tuple[bool, ...] = ()
    """Whether it keeps what was gathered for the backward, or gathers again; both where that is a choice."""
    overlapped: tuple[bool, ...] = ()
    """Whether gradients are reduced and parameters gathered, overlapped with compute; both where that is a choice."""
    gathers_ahead: tuple[Literal[1, 2, 3], ...] = ()
    """ZeRO stages at which parameter gathers overlap with compute, where those are not all."""
    recompute: tuple[Literal["none", "selective", "full", "offload"], ...] = ()
    """What it can recompute, by the presets of a plan. Empty while unknown."""
    recompute_unit: Literal["stage", "block", "none"] | None = None
    """How finely it recomputes: so many layers of each stage; as many in every stage; all layers alike or none. Left
    out: as `none`."""
    own_cut: bool | None = None
    """It divides layers among stages by a rule of its own."""
    dispatches: tuple[Dispatch, ...] = ()
    """How tokens can get to their experts, as options of the program. Empty: in one way only, or not known."""
    overlaps: tuple[str, ...] = ()
    """Fields of `Overlap` that it honours."""
    choices: tuple[str, ...] = ()
    """Further decisions that it carries out, by the names of `gnomon.search.refinement.choices`:
    `reshard_after_forward`, `optimizer_offload`, `parameter_offload`, `activation_offload`, `async_tp`, `order`,
    `fp8`; `parameter_disk`; and those of `gnomon.search.fit.options`: `chunked_loss`, `eight_bit_states`,
    `four_bit_states`, `paged_states`, `low_rank`, `input_offload`, and `cpu_offload`, which takes parameters and
    optimizer to the host together."""


UNSTATED = "unstated"
"""Name of the record of no program in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What one version of one program does."""

    SCHEMA: ClassVar[str] = "gnomon.stack/2"

    name: str
    """As in `megatron-lm`, `torchtitan`, `gnomon`."""
    version: str
    """Release or commit."""
    layers: Layers = Layers()
    """Which kernels run a layer, and what its backward keeps and overlaps."""
    launch: Launch = Launch()
    """How kernels and collectives get from the host to the device."""
    loss: Loss = Loss()
    """How the loss is computed from logits, and what is held meanwhile."""
    gradients: Gradients = Gradients()
    """Where gradients are kept, how they add up and when they are reduced."""
    update: Update = Update()
    """How the optimizer goes over parameters, gradients and states."""
    experts: Experts = Experts()
    """How tokens get to their experts, and how experts run."""
    messages: Messages = Messages()
    """Activations and gradients from one pipeline stage to the next."""
    workspace: Workspace = Workspace()
    """Device memory besides tensors: the allocator, libraries, the CUDA context."""
    runs: Runs = Runs()
    """What it can run: schedules, ZeRO stages, context parallelism, further choices. Empty while unknown."""
    nearest: bool | None = None
    """The program is another one, of which this record is the nearest: what was fitted to runs of this one is used, and
    the band of 80 % is as wide as on devices without such runs."""
    facts: tuple[Fact, ...] = ()
    """One or more for each field that is set."""
    own: OwnRuns | None = None
    """Numbers of the user's own runs, which go before those on record."""

    def __post_init__(self) -> None:
        if "none" in self.runs.contexts and len(self.runs.contexts) > 1:
            raise PlanError(f"stack {self.name!r}: contexts has 'none' beside others; leave it out")
        if self.layers.cudnn is not None and not re.fullmatch(r"\d+(\.\d+)+", self.layers.cudnn):
            raise PlanError(f"stack {self.name!r}: cudnn = {self.layers.cudnn!r} is no release; write it as in '9.13'")
        proven = {fact.field for fact in self.facts}
        if wrong := sorted(proven - GROUPS.keys()):
            raise PlanError(
                f"stack {self.name!r} has a fact on {wrong[0]!r}, which is no field{nearest(wrong[0], GROUPS)}"
            )
        if missing := sorted(name for name in self.settings() if name not in proven):
            raise PlanError(f"stack {self.name!r} sets {', '.join(missing)} without a source; add a fact for each")

    @property
    def is_unstated(self) -> bool:
        """Whether nobody said which program runs the plan."""
        return self.name == UNSTATED

    def settings(self) -> dict[str, object]:
        """Field -> value, of those that are set, in whatever group they are."""
        values = {name: getattr(getattr(self, group) if group else self, name) for name, group in GROUPS.items()}
        # False is known of a program as well as True is; None and () are what nobody knows.
        return {name: value for name, value in values.items() if value not in (None, ())}

    def with_values(self, facts: tuple[Fact, ...] | None = None, **values: object) -> Stack:
        """The record with other values of fields, in whatever group they are, and with other facts where given."""
        if unknown := sorted(values.keys() - GROUPS.keys()):
            raise PlanError(f"stack {self.name!r} has no field {unknown[0]!r}{nearest(unknown[0], GROUPS)}")
        parts = {group: getattr(self, group) for group in {GROUPS[name] for name in values} if group}
        for group, part in parts.items():
            parts[group] = replace(part, **{name: value for name, value in values.items() if GROUPS[name] == group})
        own = {name: value for name, value in values.items() if not GROUPS[name]}
        return replace(self, **parts, **own, facts=self.facts if facts is None else facts)  # type: ignore[arg-type]


_GROUPS = (Layers, Launch, Loss, Gradients, Update, Experts, Messages, Workspace, Runs)

GROUPS: Mapping[str, str] = {f.name: kind.__name__.lower() for kind in _GROUPS for f in fields(kind)} | {"nearest": ""}
"""Field -> the group that it is in; each name is in one. Empty: it is the record's own."""


def with_facts(stack: Stack, source: str, date: str, **values: object) -> Stack:
    """The record with fields that `source` sets, as read on `date`. None leaves a field as it is."""
    changes = {name: value for name, value in values.items() if value is not None}
    other_facts = tuple(fact for fact in stack.facts if fact.field not in changes)
    return stack.with_values(
        (*other_facts, *(Fact(field=name, source=source, date=date) for name in changes)), **changes
    )
