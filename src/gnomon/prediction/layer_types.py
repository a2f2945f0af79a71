"""What the price of a layer depends on, and what it is made of: values only.

`LocalContext` goes into `layer.layer_price`, which returns a `LayerPrice` of `Phase`s and `SavedBytes` tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gnomon.graph import Block, Kernels
from gnomon.hardware import Device
from gnomon.plans import Layout, Mesh, Precision
from gnomon.plans.saving import LayerSaving
from gnomon.prices.attention import Pieces
from gnomon.prices.curves import AttentionKernel, CublasRelease
from gnomon.prices.kernels import Experts, OpPrice
from gnomon.prices.links import AxisLink
from gnomon.sharding import ShardedBlock
from gnomon.software import Stack

SENT_ONCE = ("fused", "hybrid_ep")
"""Of `Layout.dispatch` and `Stack.moe_dispatch`: kernels that send a token once to each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """Facts of a stack on which the price of a layer depends, besides `Kernels`: which libraries, what they fuse and
    what they overlap."""

    attention_kernel: AttentionKernel | None = None
    """Fused attention that the stack prefers; None: not known."""
    cublas: CublasRelease | None = None
    """The library that multiplies, where it is older than that of the curves."""
    cudnn: str | None = None
    """Release of cuDNN whose attention runs, where it is known."""
    transformer_engine: bool = False
    """Layers are Transformer Engine's: norms write eight bits, and tensor-parallel ranks gather in them."""
    fused_casts: bool = False
    """A compiler fuses a cast to eight bits with the kernel before it, unless that is a matmul or attention."""
    cut_hides: float = 1.0
    """As `Stack.cut_hides`."""
    narrow_sums: bool = False
    """Partial sums of the forward are sent in eight bits where matmuls are (`Stack.tp_reduce_dtype`)."""
    dropout_add_fused: bool = False
    """Dropout runs in the kernel of the residual addition that follows it."""
    chunked_loss: bool = False
    """Head and loss run part by part, so that logits and their gradients are never whole."""
    backward_overlap: bool = False
    """A backward's collectives overlap with the matmuls that do not need them."""
    fused_dispatch: bool = False
    """A token goes once to each node that holds one of its experts (`Layout.dispatch`)."""
    gathered_tokens: bool = False
    """Each rank of experts has all tokens of the others, and picks those of its own experts (`Layout.dispatch`)."""
    routing_gathered: bool = False
    """HybridEP: before a forward's dispatch each rank gathers which experts every token of the others chose, and copies
    of tokens are sent with the weights of all experts in the NVLink domain."""
    sorted_rows: bool = False
    """Rows of experts are brought into order in passes of their own (`Stack.moe_rows`)."""
    experts: Experts = "grouped"
    """How matmuls of experts run (`Stack.moe_experts`)."""
    deterministic: bool = False
    """Attention's backward adds in order, and Transformer Engine's outputs are filled before they are written."""
    narrow_hidden: bool = False
    """Hidden states go out to a divided vocabulary in the compute dtype (`Stack.hidden_dtype`)."""
    composed: bool = False
    """Kernels are those of a profile of one layer (`prediction.profiled`)."""

    @staticmethod
    def of(stack: Stack, layout: Layout) -> KernelFacts:
        """What a stack says; what it does not say is taken as not done. layout: of the plan, which may say how tokens
        get to their experts."""
        dispatch = layout.dispatch or stack.experts.moe_dispatch
        return KernelFacts(
            attention_kernel=stack.layers.attention_kernel,
            cublas=stack.layers.cublas,
            cudnn=stack.layers.cudnn,
            transformer_engine=stack.layers.transformer_engine is True,
            fused_casts=stack.launch.launch_mode == "compiled" and stack.layers.transformer_engine is not True,
            narrow_hidden=stack.loss.hidden_dtype == "compute",
            cut_hides=1.0 if stack.layers.cut_hides is None else stack.layers.cut_hides,
            narrow_sums=stack.layers.tp_reduce_dtype == "fp8",
            dropout_add_fused=stack.layers.dropout_add == "fused",
            chunked_loss=stack.loss.cross_entropy == "chunked",
            backward_overlap=stack.layers.backward_overlap is True,
            fused_dispatch=dispatch in SENT_ONCE,
            gathered_tokens=dispatch == "all_gather",
            routing_gathered=dispatch == "hybrid_ep",
            sorted_rows=stack.experts.moe_rows == "sorted",
            experts=stack.experts.moe_experts or "grouped",
            deterministic=stack.layers.deterministic is True,
            composed=stack.launch.composed is True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContext:
    """Everything that the price of a layer depends on."""

    block: Block
    """What it computes."""
    no_grad: tuple[str, ...]
    """Inputs that want no gradient."""
    sizes: tuple[tuple[str, int], ...]
    """Sizes that the workload gives: `batch` of one data-parallel rank's microbatch, `seq` of the whole sequence …"""
    mesh: Mesh
    """Axes of the stage."""
    layout: Layout
    """How tensors lie on them."""
    links: tuple[tuple[str, AxisLink], ...]
    """Axis -> what its collectives run over."""
    saving: LayerSaving
    """What is kept, recomputed or offloaded."""
    whole_recompute: bool
    """The layer's whole forward is run again (as Megatron-LM's full recompute does), not the least that suffices."""
    precision: Precision
    """Its `fp8` is None for a layer that keeps the compute dtype."""
    kernels: Kernels
    """Which ops the stack fuses, and so what their backward reads."""
    facts: KernelFacts
    """What else of the stack the price depends on."""
    device: Device
    """What the rank runs on."""
    expert_overlap: bool = False
    """Dispatch and combine overlap with the computing of another microbatch (`Overlap.experts`)."""
    split_paths: tuple[tuple[str, int], ...] = ()
    """(pattern over op paths, parts): collectives cut into parts that overlap with the op (asynchronous tensor
    parallelism)."""
    load: float = 1.0
    """Busiest over mean tokens of this rank's experts."""
    pieces: Pieces = ()
    """Parts of sequences that its tokens are of; none: `batch` whole sequences of `seq` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Forward, input gradient, weight gradient or recompute of a layer on one rank."""

    compute_s: float = 0.0
    """Device seconds of kernels."""
    attention_s: float = 0.0
    """Of these, attention."""
    opaque_s: float = 0.0
    """Of these, ops without a rule of their own."""
    comm_s: Mapping[str, float] = field(default_factory=dict)
    """Axis -> seconds of collectives that the kernels wait for."""
    kernels: int = 0
    """Launches."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Axis -> launches that are collectives."""
    flops: float = 0.0
    """Matrix FLOPs of the mathematics on this rank."""
    waited_s: float = 0.0
    """Device seconds of kernels that the host waits for, before it launches the rest: those before a loop over experts,
    which asks the device for its rows."""

    def __add__(self, other: Phase) -> Phase:
        axes, counted = {*self.comm_s, *other.comm_s}, {*self.collectives, *other.collectives}
        return Phase(
            compute_s=self.compute_s + other.compute_s,
            attention_s=self.attention_s + other.attention_s,
            opaque_s=self.opaque_s + other.opaque_s,
            comm_s={axis: self.comm_s.get(axis, 0.0) + other.comm_s.get(axis, 0.0) for axis in sorted(axes)},
            kernels=self.kernels + other.kernels,
            collectives={a: self.collectives.get(a, 0) + other.collectives.get(a, 0) for a in sorted(counted)},
            flops=self.flops + other.flops,
            waited_s=self.waited_s + other.waited_s,
        )

    def __mul__(self, times: int) -> Phase:
        return Phase(
            compute_s=self.compute_s * times,
            attention_s=self.attention_s * times,
            opaque_s=self.opaque_s * times,
            comm_s={axis: seconds * times for axis, seconds in self.comm_s.items()},
            kernels=self.kernels * times,
            collectives={axis: count * times for axis, count in self.collectives.items()},
            flops=self.flops * times,
            waited_s=self.waited_s * times,
        )

    @property
    def device_s(self) -> float:
        """Kernels and the collectives they wait for."""
        return self.compute_s + sum(self.comm_s.values())

    @property
    def launches(self) -> int:
        """Launches that are no collectives."""
        return self.kernels - sum(self.collectives.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """A tensor kept between forward and backward."""

    tensor: str
    """Name in the lowered block."""
    is_input: bool
    """It is an input of the layer, so the layer before may hold the same storage."""
    is_logits: bool
    """It has the vocabulary as a dim: logits, their fp32 copy, log-probabilities."""
    bytes: int
    """Bytes on one rank, of one microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPrice:
    """One layer, one microbatch, one rank."""

    forward: Phase
    """The forward."""
    input_grad: Phase
    """The part of the backward that gives gradients of what the layer reads."""
    weight_grad: Phase
    """The part that gives gradients of its parameters."""
    recompute: Phase
    """What is computed again before the backward."""
    saved: tuple[SavedBytes, ...]
    """What stays in device memory between forward and backward."""
    offloaded_bytes: int
    """What leaves device memory and comes back."""
    remade_bytes: int
    """What recomputation makes again: alive while this layer's backward runs."""
    input_away: bool
    """What it reads from the layer before is not kept: recomputed with it (recompute of runs of layers), or
    offloaded."""
    transient_bytes: int
    """Gradients of activations alive at once inside the backward, at most."""
    early_bytes: int
    """The same until its first gradient of a parameter."""
    late_bytes: int
    """The same from then on, less what the backward has let go of the layer's own kept tensors by then; may be less
    than 0."""
    forward_bytes: int
    """Of a captured layer, most bytes at once during its forward, with its inputs and what it keeps; 0 for others."""
    deferred_bytes: int
    """What the weight gradients read: all that is left between the two parts of a backward, where the rest is freed."""
    weight_cast: OpPrice
    """Casting its weights to eight bits, once."""
    input_bytes: int
    """Activations that the layer reads from layers before."""
    output_bytes: int
    """Its outputs, as they lie between layers."""
    sharded: ShardedBlock
    """The layer on the mesh: for its parameters."""
    context: LocalContext
    """What it was priced from; how tensors are saved may be another (`recompute`, `kept`)."""
