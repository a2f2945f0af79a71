"""The parts of a Plan: stage, schedule, what is saved, layout, overlap, optimizer, precision.

Each is a frozen value whose defaults are the plain choice, so that a plan file lists only what differs. A part checks
what it can know alone; what needs the graph, the cluster or the workload is in `check`. Leaves out everything that is
not a decision: speeds, sizes, what the software can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gnomon import orders
from gnomon.errors import PlanError
from gnomon.orders import DEFAULT, Placement, Vocabulary
from gnomon.plans.mesh import Mesh
from gnomon.plans.select import parse_ranks
from gnomon.schema import Known, typed
from gnomon.units import Bytes

DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "fp4_e2m1"]
MasterDType = Literal[DType, "none"]
Action = Literal["keep", "recompute", "offload"]
Preset = Literal["none", "selective", "full"]
Scalar = bool | int | float | str

INPUT = "input"
"""What a `SavedRule` calls that which a layer reads from the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the graph on a group of ranks. Stages of one plan may differ in every field."""

    calls: tuple[str, ...]
    """Selectors of the layers it computes, as in `embedding`, `layers[0:8]`, `layers[31]`."""
    mesh: Mesh = Mesh()
    """Axes of its ranks; pp is 1."""
    devices: str = ""
    """Its ranks as half-open ranges, `0:8` or `0:4,12:16`. Empty: the ranks that follow those of the stage before.
    Two stages may name the same ranks: they are virtual stages of one pipeline rank."""
    shares: tuple[int, ...] = ()
    """Sequences of each microbatch that each data-parallel rank takes (Whale's uneven batches). Empty: equal."""
    inputs: tuple[int, ...] | None = None
    """Earlier stages, by number, that send to this one. Left out: those that hold what it reads. A value of a stage
    that is not listed is sent through one that is."""

    @typed
    def __post_init__(self) -> None:
        if not self.calls:
            raise PlanError("a stage selects no layers; give calls, as in calls = ['layers[0:8]']")
        if self.mesh.pp != 1:
            raise PlanError(f"a stage's mesh has pp = {self.mesh.pp}, but pp counts stages; use 1 and list more stages")
        ranks = parse_ranks(self.devices)
        if ranks and len(ranks) != self.mesh.world_size:
            raise PlanError(
                f"stage of {', '.join(self.calls)} has devices {self.devices!r}, {len(ranks)} ranks, but its mesh "
                f"{self.mesh.describe()} needs {self.mesh.world_size}"
            )
        if self.shares and (len(self.shares) != self.mesh.data_ranks or min(self.shares) < 0 or sum(self.shares) == 0):
            raise PlanError(
                f"shares {self.shares} must give each of the {self.mesh.data_ranks} data-parallel ranks "
                f"(dp_replicate x dp_shard) a number of sequences >= 0, not all 0"
            )
        if self.inputs is not None and len(set(self.inputs)) != len(self.inputs):
            raise PlanError(f"stage inputs {self.inputs} name a stage twice")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that `devices` names; empty while it is left to the plan."""
        return parse_ranks(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A rewriting of the schedule by a published method, with its parameters."""

    name: str
    """The method: `mario`, `chunkflow`, `dapple_warmup`, `bamboo` … `methods` refuses a name that it does not
    know."""
    params: tuple[tuple[str, Scalar], ...] = ()
    """(parameter, value) pairs, as in `["policy", "2p"]`."""

    @typed
    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise PlanError(f"pass name {self.name!r} must be an identifier, as in 'mario'")
        if len({key for key, _ in self.params}) != len(self.params):
            raise PlanError(f"pass {self.name} is given a parameter twice: {self.params}")


def pass_numbers(schedule: Schedule, name: str, known: object) -> dict[str, int] | None:
    """What a schedule asks of a pass, by the fields that `known` has too; None where it has no such pass."""
    method = next((method for method in schedule.passes if method.name == name), None)
    if method is None:
        return None
    return {name: value for name, value in method.params if isinstance(value, int) and hasattr(known, name)}


CHUNKFLOW, SKRULL, PACKING = "chunkflow", "skrull", "packing"
GROUP_BY_LENGTH, PADDING = "group_by_length", "padding"
OWN_UNITS = (CHUNKFLOW, SKRULL, PACKING)
"""Methods that make microbatches of a batch's sequences by their lengths, and no equal numbers of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of forwards and backwards in a step."""

    name: Annotated[str, Known(orders.find)] = DEFAULT
    """One of `gnomon.orders`, by its paper's name; with one stage it is plain gradient accumulation."""
    micro_batch_size: int | None = None
    """Sequences in a microbatch on one data-parallel rank. Give this or num_microbatches; the other follows from the
    batch."""
    num_microbatches: int | None = None
    """Microbatches in a step, each split over the data-parallel ranks."""
    virtual_stages: int = 1
    """Stages on each pipeline rank."""
    placement: Placement = "loop"
    """Where stage s sits on p ranks. `loop`: rank s mod p. `v`: 0 … p-1 and back again, turning at each end, so that
    for two virtual stages the last stage shares rank 0 with the first."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of the uniform split, stage by stage; embedding and head are not counted. Empty: as equal as possible,
    the first stages taking one more."""
    vocabulary: Vocabulary = "ends"
    """Where the embedding and the head are. `ends`: on the first and the last stage. Otherwise divided by vocabulary
    over all pipeline ranks: `vocab_1` and `vocab_2` compute the head between a stage's forwards and backwards, with two
    or one exchanges between ranks before its gradient is known (algorithms 1 and 2 of Yeung et al. 2024, "Balancing
    pipeline parallelism with vocabulary parallelism"); under `interlaced` all ranks stop and compute it together (Lin
    et al. 2024, nnScaler)."""
    passes: tuple[Pass, ...] = ()
    """Methods applied to the schedule, in order."""
    rounds: int = 1
    """Parts of a step's microbatches that go through the pipeline one after the other, each from its first forward to
    its last backward: programs that accumulate gradients around a schedule (torch.distributed.pipelining, once for each
    local batch) fill and empty the pipeline for each."""

    @property
    def makes_units(self) -> bool:
        """Whether a method makes its microbatches, so that their number does not follow from the batch's."""
        return any(method.name in OWN_UNITS for method in self.passes)

    @typed
    def __post_init__(self) -> None:
        orders.find(self.name)
        for field in ("micro_batch_size", "num_microbatches", "virtual_stages", "rounds"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise PlanError(f"schedule {field} = {value} must be at least 1")
        if self.layers_per_stage and min(self.layers_per_stage) < 0:
            raise PlanError(f"schedule layers_per_stage {self.layers_per_stage} must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How tokens come to a mixture's experts, and how these are kept evenly loaded, where its config says nothing of
    it."""

    balance: Literal["none", "layer", "sequence", "global"] = "none"
    """Loss of each layer with a router, by the tokens of a microbatch on one data-parallel rank (`layer`: Switch
    Transformer, Megatron-LM's aux_loss), of each sequence by itself (`sequence`: DeepSeek-V3, Megatron-LM's
    seq_aux_loss), or with shares of choices that are those of all ranks and of the step's microbatches so far
    (`global`: Qiu et al. 2025, Megatron-LM's global_aux_loss). `none`: that of the model's config, if it has one."""
    coefficient: float = 0.0
    """Of that loss."""
    z_loss: float = 0.0
    """Coefficient of the mean of squared log-sum-exps of each router's logits (ST-MoE); 0 for none."""
    assignment: Literal["top_k", "sinkhorn"] = "top_k"
    """How a token's experts follow from its logits: the largest (`top_k`), or the largest once Sinkhorn's iterations
    have made all experts' sums over a microbatch's tokens equal (`sinkhorn`: Clark et al. 2022, Megatron-LM). Weights
    are then plain probabilities, a sigmoid's for one expert a token, a softmax's for several."""
    router_dtype: Literal["model", "fp32", "fp64"] = "model"
    """In what a router's logits are computed (Megatron-LM's moe_router_dtype): `model` is that of the activations. What
    is narrower than the activations changes nothing."""
    bias_rate: float = 0.0
    """What the bias of a router moves by after each step, up for experts that fewer tokens than the mean chose, down
    for the others (DeepSeek-V3's noaux_tc); 0: it stays."""

    drop: Literal["position", "probs"] = "position"
    """Which of an expert's tokens are dropped where the workload gives it a capacity: those that come last, or those
    whose weights are least (Megatron-LM's token_drop_policy)."""
    threshold: float = 1.0
    """A token whose first expert is more probable than its second by more than this goes to the first alone (adaptive
    gating, Li et al. 2023; routers that choose two by softmax): at 0 every token, at 1 none."""
    replicas: int = 0
    """Copies of a layer's experts beside the first of each, on all ranks of ep together (FlexMoE, Nie et al. 2023):
    tokens of an expert that several ranks hold are shared out so that the busiest rank has least."""
    placement: tuple[tuple[int, ...], ...] = ()
    """The expert in each slot, rank after rank of ep: one row for each layer with experts, or one for all. Empty: the
    usual order without replicas; with them what the controller makes of the workload's router load."""
    speculate: bool = False
    """Rows go to their experts' ranks at once, as many as went there before, while their numbers are exchanged; what
    there is more of follows (Brainstorm's speculative routing, Cui et al. 2023). Changes no result."""
    rebalance_every: int = 0
    """Steps between two looks of the controller at the tokens that experts get, after which it moves experts where that
    pays; 0: they stay where they are."""

    @typed
    def __post_init__(self) -> None:
        if self.replicas < 0 or self.rebalance_every < 0:
            raise PlanError(
                f"experts.replicas = {self.replicas} and rebalance_every = {self.rebalance_every} must be at least 0"
            )
        if not 0.0 <= self.threshold <= 1.0:
            raise PlanError(f"experts.threshold = {self.threshold} is a difference of probabilities, from 0 to 1")
        if self.assignment == "sinkhorn":
            for name in ("balance", "bias_rate"):
                if (value := getattr(self, name)) not in ("none", 0.0):
                    raise PlanError(
                        f"experts.assignment = 'sinkhorn' balances experts by itself, and experts.{name} = {value!r} "
                        f"would too; leave one of the two out"
                    )
            if self.threshold < 1.0:
                raise PlanError(
                    f"experts.threshold = {self.threshold} is of experts that a softmax chooses, and "
                    f"experts.assignment = 'sinkhorn' chooses otherwise; leave one of the two out"
                )
        for name in ("coefficient", "z_loss", "bias_rate"):
            if not 0.0 <= (value := getattr(self, name)) < float("inf"):
                raise PlanError(f"experts.{name} = {value} must be a finite number of at least 0")
        if (self.balance == "none") != (self.coefficient == 0.0):
            raise PlanError(
                f"experts.balance = {self.balance!r} with coefficient = {self.coefficient}; give both, or neither"
            )

    @property
    def has_loss(self) -> bool:
        """Whether layers have losses of their own."""
        return self.balance != "none" or self.z_loss > 0.0

    @property
    def counts_the_step(self) -> str:
        """The field that asks for all ranks' choices of experts in a step; empty for none."""
        return "experts.bias_rate" if self.bias_rate else "experts.balance" if self.balance == "global" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRule:
    """What happens to some tensors that backward needs, in some layers."""

    calls: str = "*"
    """Selector of layers, as in `layers[0:8]`; `*` for all."""
    tensors: tuple[str, ...] = ("*",)
    """Patterns over tensor names and op paths within the block, with `*` for any text, as in `attention.*` or
    `mlp.gate_proj`; the word `input` is what a layer reads from the one before, which can be kept or offloaded."""
    action: Action = "keep"
    """`keep` in device memory, `recompute` from what is kept before it, or `offload` to the host until backward."""
    first_per_stage: int | None = None
    """Apply to the first n matching layers of each stage only (Megatron-LM's `block` recompute). Left out: to all."""
    stages: tuple[int, ...] = ()
    """Apply in these stages only, virtual ones counted. Empty: in all."""
    preset: Preset | None = None
    """Treat the layers as this preset does, in place of tensors and action; rules before it do not count for them.
    Repeated layers only, as presets are: an embedding or a head is not counted among the first."""

    @typed
    def __post_init__(self) -> None:
        if self.preset is not None and (self.tensors != ("*",) or self.action != "keep"):
            raise PlanError(
                f"saved rule for {self.calls} has preset {self.preset!r} and tensors or an action too; give one of both"
            )
        if self.stages and (min(self.stages) < 0 or len(set(self.stages)) != len(self.stages)):
            raise PlanError(f"saved rule for {self.calls} has stages {self.stages}; list each once, from 0 on")
        if not self.tensors:
            raise PlanError(f"saved rule for {self.calls} names no tensors; give patterns, or '*' for all")
        if self.action == "recompute" and INPUT in self.tensors:
            raise PlanError(
                f"saved rule for {self.calls} recomputes {INPUT!r}, from which everything else is recomputed; offload "
                "it, or keep fewer with preset 'full' and every = 2 or more"
            )
        if self.first_per_stage is not None and self.first_per_stage < 0:
            raise PlanError(f"saved rule first_per_stage = {self.first_per_stage} must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What is kept between forward and backward: a preset, then rules that change it; the last rule that matches
    decides."""

    preset: Preset = "none"
    """What is recomputed. `none`: nothing. `selective`: the inside of attention, i.e. scores, probabilities and their
    dropout (Korthikanti et al. 2022). `full`: everything but the input of each layer, or of each run of `every`
    layers."""
    every: int = 1
    """Layers between two kept inputs under `full` (Megatron-LM's `uniform` recompute with that many layers)."""
    rules: tuple[SavedRule, ...] = ()
    """Exceptions and additions, in order."""

    @typed
    def __post_init__(self) -> None:
        if self.every < 1 or (self.every > 1 and self.preset != "full"):
            raise PlanError(
                f"saved every = {self.every} with preset {self.preset!r}: at least 1, and above 1 only with 'full'"
            )


INPUTS_AWAY = SavedRule(tensors=(INPUT,), action="offload")
"""What each layer reads waits on the host: with preset `full`, all that is kept of it."""

Dispatch = Literal["all_to_all", "all_gather", "fused", "hybrid_ep"]
"""How tokens get to experts of other ranks: one copy for each expert by all-to-all; all tokens to all ranks; kernels
that send a token once to each node that holds one of its experts, DeepEP's (`fused`) or HybridEP's."""


Context = Literal["ring", "all_gather", "ulysses"]
"""How ranks of cp attend to a sequence that they divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRule:
    """A dim on chosen axes, in place of the usual ones."""

    dim: str
    """The dim, by its full name in the graph."""
    axes: tuple[str, ...] = ()
    """Axes that divide it, outermost first, of `cp tp ep etp`. Empty: none, the dim is whole on every rank."""
    region: str = "*"
    """Pattern over names of blocks where this holds, as in `head`. A dim of tensors between blocks needs `*`."""

    @typed
    def __post_init__(self) -> None:
        known = ("cp", "tp", "ep", "etp")
        if wrong := [axis for axis in self.axes if axis not in known]:
            raise PlanError(f"layout rule on {self.dim!r} names axis {wrong[0]!r}; tensors lie on {', '.join(known)}")
        if len(set(self.axes)) != len(self.axes):
            raise PlanError(f"layout rule on {self.dim!r} names an axis twice: {self.axes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How tensors lie on the axes. The usual layout needs no rules: batch over dp, seq over cp, heads, ffn and vocab
    over tp, experts over ep."""

    sequence_parallel: bool = False
    """Divide seq over tp between the tensor-parallel regions (norms, residuals); all-reduces become gather and
    scatter."""
    context: Context = "ring"
    """How attention sees the whole sequence when cp > 1: keys and values pass around, are gathered, or heads are
    exchanged for sequence by all-to-all (DeepSpeed-Ulysses)."""
    context_order: Literal["contiguous", "zigzag"] = "zigzag"
    """Which part a rank holds: the r-th of cp, or the r-th and the r-th from the end of 2·cp, which evens out a
    causal mask."""
    dispatch: Dispatch | None = None
    """How tokens get to their experts when ep > 1. Left out: as the program that runs the plan does by default."""
    vocab_parallel: bool = True
    """Divide the embedding and the head by vocabulary over tp."""
    loss_parallel: bool = True
    """Compute the loss on logits divided by vocabulary; otherwise they are gathered first."""
    keep_gathered: bool = False
    """Keep a tensor that was gathered over tp or cp for backward, instead of keeping this rank's part and gathering
    it again."""
    rules: tuple[LayoutRule, ...] = ()
    """Dims that lie otherwise; the last rule that matches decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An op split into chunks, so that the collective of one chunk overlaps with the computing of another."""

    op: str
    """Pattern over op paths, as in `mlp.down` or `*.combine`."""
    dim: str
    """The dim that is cut."""
    parts: int
    """Number of parts."""

    @typed
    def __post_init__(self) -> None:
        if self.parts < 2:
            raise PlanError(f"split of {self.op} into {self.parts} parts; use 2 or more, or leave the split out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What is issued before it is needed, or while something else is computed."""

    grad_reduce: bool = True
    """Reduce gradients while backward goes on. Otherwise all of them after the last backward."""
    param_gather: bool = True
    """Gather parameters ahead: under ZeRO 3 the next blocks', under ZeRO 1 and 2 while the next step's forward
    begins."""
    prefetch: int = 1
    """Blocks whose parameters are gathered ahead under ZeRO 3; 0 gathers a block when it is reached."""
    bucket_bytes: Bytes | None = None
    """Gradient bytes reduced together. Left out: one bucket for each block."""
    buckets: tuple[int, ...] = ()
    """Layers whose gradients are reduced together, in place of bucket_bytes: so many of the first ones of the model, so
    many of the next … Embedding and head are counted; no bucket reaches over two stages. Empty: by bytes."""
    fused: tuple[int, ...] = ()
    """Neighbouring layers that one forward and one backward compute, counted as `buckets` are. There are fewer actions
    and updates, and gradients of a group are whole together. Buckets hold whole groups; without `buckets` and
    `bucket_bytes` each group is one. Empty: with buckets each layer by itself, without whole stages."""
    pipeline_sends: bool = True
    """Send and receive between stages while computing. Otherwise the stage waits for its send."""
    optimizer: bool = False
    """Update parameters bucket by bucket during backward."""
    experts: bool = False
    """Dispatch and combine are rows, and overlap with the computing of another microbatch: a backward takes turns with
    the forward after it, each computing while the tokens of the other travel."""
    priority: tuple[str, ...] = ()
    """Collectives first in line when several wait for one link, most urgent first: `all_to_all`, `all_gather`,
    `reduce_scatter`, `all_reduce`, `send`. Empty: in the order of issue. The pass `lina` puts all-to-alls first by
    itself."""
    splits: tuple[Split, ...] = ()
    """Ops cut for overlap: asynchronous tensor parallelism, chunked loss. Exchanges of experts are cut by the pass
    `lina`."""

    @typed
    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise PlanError(f"overlap prefetch = {self.prefetch} must be at least 0")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise PlanError(
                f"overlap bucket_bytes = {self.bucket_bytes} must be at least 1; leave it out for one bucket a block"
            )
        if self.buckets and (self.bucket_bytes is not None or min(self.buckets) < 1):
            raise PlanError(
                f"overlap buckets = {list(self.buckets)}: layers of each bucket, at least 1, and without bucket_bytes"
            )
        if self.fused and min(self.fused) < 1:
            raise PlanError(f"overlap fused = {list(self.fused)}: layers of each group, at least 1")

    @property
    def in_buckets(self) -> bool:
        """Whether it is said which gradients are reduced together."""
        return self.bucket_bytes is not None or bool(self.buckets or self.fused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Optimizer states and the update on the host (ZeRO-Offload)."""

    fraction: float = 1.0
    """Share of the layers whose states are there; the others, whose gradients are complete last, stay on the device
    (Twin-Flow)."""
    tiles: int | None = None
    """Pieces in which parameters are updated and come back, so that transfers overlap with the update. Left out: one
    for each layer."""
    accumulate: Literal["host", "device"] = "host"
    """Where gradients of several microbatches are added up. `host`: each goes down as it is made, so that a device
    holds those of a layer or two. `device`: they go down after the last microbatch, which moves less."""

    @typed
    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0 or (self.tiles is not None and self.tiles < 1):
            raise PlanError(
                f"optimizer offload with fraction {self.fraction} and {self.tiles} tiles: 0 < fraction <= 1, tiles >= 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Moments of gradients that are projected to few dimensions, of the matrices of layers; every other parameter has
    its own as before."""

    method: Literal["galore", "apollo"]
    """`galore`: the update is made of the projected gradient and projected back (Zhao et al. 2024). `apollo`: it is the
    gradient itself, scaled by row or column as the projected one's update is (Zhu et al. 2024)."""
    rank: int = 128
    """Dimensions that are left of the shorter side of each matrix."""
    every: int = 200
    """Steps between two projections."""
    projection: Literal["svd", "random"] = "svd"
    """From the gradient's singular vectors, or of random numbers."""
    targets: tuple[str, ...] = ("*",)
    """Patterns over names of parameters within their block, as in `self_attn.*` or `lm_head.weight`, of whose matrices
    gradients are projected; `*` means those of layers."""

    @typed
    def __post_init__(self) -> None:
        if self.rank < 1 or self.every < 1:
            raise PlanError(f"optimizer.low_rank: rank = {self.rank} and every = {self.every} must be at least 1")
        if not self.targets:
            raise PlanError("optimizer.low_rank.targets names no parameters; give patterns, or '*' for all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The update, and how its states, the gradients and the parameters are divided among data-parallel ranks."""

    kind: Literal["adamw", "adam", "sgd", "momentum", "adafactor", "lion", "muon"] = "adamw"
    """The update rule, which fixes the number of state tensors: two for Adam, one for momentum, Lion and Muon, none
    for SGD."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage over dp_shard × cp: 1 divides optimizer states, 2 also gradients, 3 also parameters (FSDP). With
    dp_replicate > 1 it is hybrid: gradients are then reduced over the replicas too."""
    reshard_after_forward: bool = True
    """Under ZeRO 3, free gathered parameters after forward and gather them again for backward; otherwise keep them."""
    keep_last_block: bool = True
    """Under ZeRO 3, do not free the block that backward needs first."""
    offload: Offload | None = None
    """Update on the host. Left out: on the device."""
    offload_parameters: bool = False
    """Under ZeRO 3, a rank's part of the parameters waits in host memory: it is copied to the device before each gather
    of a block, and back after an update on the device (ZeRO-Infinity's `offload_param`, FSDP's CPU offload). With one
    rank to divide over, whole blocks are copied."""
    parameter_tier: Literal["host", "disk"] = "host"
    """Where they wait with `offload_parameters`: in host memory, or in files on a disk of the node, from which each is
    read ahead of its gather (ZeRO-Infinity's NVMe)."""
    delay: Literal[0, 1] = 0
    """Steps by which the update lags (ZeRO-Offload's delayed update). 1 changes the mathematics."""
    delay_after: int = 40
    """With `delay`, the updates that do not lag yet: parameters change fast at first. Predictions are of the others."""
    low_rank: LowRank | None = None
    """Gradients projected to few dimensions before moments are kept of them. Left out: moments of whole gradients."""
    paged: bool = False
    """States lie in memory that host and device share: what has no room on the device waits on the host, and comes for
    the update (bitsandbytes' paged optimizers)."""
    clip: bool = True
    """Clip by the global gradient norm: one small all-reduce over all ranks, and a wait for it, before the update."""

    @typed
    def __post_init__(self) -> None:
        if self.delay_after < 0:
            raise PlanError(f"optimizer delay_after = {self.delay_after} must be at least 0")
        if self.low_rank is not None and self.kind not in ("adamw", "adam", "adafactor"):
            raise PlanError(f"optimizer.low_rank keeps moments of Adam, and kind is {self.kind!r}; use kind = 'adamw'")
        if self.paged and self.offload is not None:
            raise PlanError("optimizer.paged and optimizer.offload both put states on the host; leave one of them out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """Eight-bit matrix products (the compute dtype stays for everything else)."""

    recipe: Literal["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"]
    """How scales are found: a scale per tensor now or from earlier steps, per row, per 128-block, per 32 values; nvfp4
    has four bits and a scale per 16 values."""
    calls: tuple[str, ...] = ("*",)
    """Layers that use it."""
    except_ops: tuple[str, ...] = ()
    """Patterns over op paths that stay in the compute dtype, as in `head`."""
    gather: bool = False
    """Gather parameters in eight bits under ZeRO 3."""
    attention: bool = False
    """Fused attention multiplies in eight bits too."""
    fixed: bool = False
    """Scales of weights and activations are constants. Gradients are searched for their maxima, and cast once for each
    of their two products, by row and by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a plan. The default is mixed precision with 18 bytes a parameter: 2 + 4 (gradient) + 4 + 4 + 4; with
    grad = bf16 it is ZeRO's 16."""

    param: DType = "bf16"
    """Parameters that forward reads, as they are stored between steps."""
    compute: DType = "bf16"
    """Matrix products and the activations between them."""
    grad: DType = "fp32"
    """Gradients as they are accumulated over microbatches."""
    reduce: DType = "fp32"
    """Dtype in which gradients are reduced."""
    master: MasterDType = "fp32"
    """The optimizer's own copy of the parameters; `none` when `param` is that copy."""
    states: DType = "fp32"
    """Moments of the optimizer. Of a byte (`int8`) or four bits (`fp4_e2m1`: codes of a table) they have a scale in
    fp32 for each block of them."""
    wide_tables: bool = False
    """Moments of tables that rows are looked up in stay in fp32 where `states` is narrower."""
    fp8: Fp8 | None = None
    """Eight-bit matrix products. Left out: none."""
