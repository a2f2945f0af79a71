"""Parameters over data-parallel ranks: how many a rank holds, and what is communicated of them and their gradients in
a step.

DDP and ZeRO 0–3 with hybrid sharding, experts over their own data-parallel ranks (`edp`), the tensor-parallel sums
that sequence parallelism and copied key-value heads leave. Returns bytes and collectives of one block. Leaves out
when they run (`lowering`, by the plan's overlap) and buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gnomon.graph import DTYPE_BITS, Number, Tensor, numel
from gnomon.plans import Mesh, Optimizer, Precision
from gnomon.sharding.block import ShardedBlock
from gnomon.sharding.homes import routed_tensors
from gnomon.storage.tables import nf4_bytes
from gnomon.tensors.layout import CollectiveKind, ceil_div

STATE_TENSORS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "adafactor": 0, "lion": 1, "muon": 1}
"""State tensors of a parameter's size by optimizer. Adafactor's second moment is rows and columns
(`matrices.extra_state_bytes`), and it has no first, as in torch and transformers."""

STATE_BLOCKS = {8: 256, 4: 128}
"""Bits of a moment -> moments that share a scale in fp32: bitsandbytes' and torchao's block sizes (bitsandbytes
functional.py create_dynamic_map and optimizer.py, blocksize 256; pytorch/ao torchao/optim/adam.py)."""


def state_width(precision: Precision) -> float:
    """Bytes of one number of optimizer state with its part of a scale: `int8` and `fp4_e2m1` have a scale for each
    block (STATE_BLOCKS), other dtypes none (Transformer Engine's eight-bit floats have one a tensor)."""
    bits = DTYPE_BITS[precision.states]
    block = STATE_BLOCKS.get(bits) if precision.states in ("int8", "fp4_e2m1") else None
    return bits / 8 + (4 / block if block else 0)


def least_state_bytes(optimizer: Optimizer, precision: Precision) -> float:
    """Bytes of optimizer state for each element of a parameter that stay on a device, at least: 0 where their number is
    not fixed (paged states; low-rank projections, whose states have other sizes) or they wait on the host."""
    if optimizer.paged or optimizer.low_rank is not None or optimizer.offload is not None:
        return 0
    return STATE_TENSORS[optimizer.kind] * state_width(precision)


When = Literal["before_forward", "before_backward", "after_backward", "before_step", "after_step"]
"""Moments of a step, in order; `ParameterCollective.when` says what each means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCollective:
    """One communication of parameters or gradients, for all parameters of a block in one group of ranks."""

    kind: CollectiveKind
    """The collective: all_gather, reduce_scatter or all_reduce."""
    axes: tuple[str, ...]
    """The mesh axes whose ranks together are the group, outermost first: `("dp_shard", "cp")`, or `("edp",)` for
    experts."""
    ranks: int
    """The number of ranks in the group."""
    bytes: int
    """Bytes of the whole buffer on one rank: gathered result, what is scattered, what is reduced."""
    when: When
    """The moment. `before_forward` and `before_backward`: each time the block runs, for every microbatch unless
    parameters stay gathered. `after_backward`: gradients, once a step after the last microbatch (under ZeRO 2 and 3,
    where they are divided, every time). `before_step`, `after_step`: around the update."""
    experts: bool = False
    """Whether these are the routed experts' parameters."""

    @property
    def sent_bytes(self) -> Number:
        """Bytes that one rank sends: 2(n-1)/n of the buffer for an all-reduce, (n-1)/n otherwise."""
        return ceil_div(self.bytes * (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1), self.ranks)


def local_elements(sharded: ShardedBlock, *, experts: bool, without: frozenset[str] = frozenset()) -> int:
    """Elements of the block's trained parameters on one rank before ZeRO divides them: those of routed experts, or all
    others. without: names of parameters that do not count."""
    routed = routed_tensors(sharded.block)
    parameters = (t for t in sharded.block.parameters if (t.name in routed) == experts and t.name not in without)
    return sum(_elements(sharded, tensor) for tensor in parameters)


def frozen_bytes(sharded: ShardedBlock, *, experts: bool, only: frozenset[str] | None = None) -> int:
    """Bytes of the block's frozen weights on one rank before ZeRO 3 divides them: those of routed experts, or all
    others. only: the names that count; None for all."""
    routed, total = routed_tensors(sharded.block), 0
    for tensor in sharded.block.frozen:
        if (tensor.name in routed) == experts and (only is None or tensor.name in only):
            total += _stored_bytes(_elements(sharded, tensor), sharded.dtypes.bits(tensor.dtype))
    return total


def whole_bytes(sharded: ShardedBlock, dtype: str) -> int:
    """Bytes of the block's weights before any axis divides them, as a checkpoint has them: all experts, each once.
    dtype: of those that are trained; frozen ones have their own."""
    block = sharded.block
    trained = sum(_whole_elements(tensor) for tensor in block.parameters) * _bytes_of(dtype)
    return trained + sum(_stored_bytes(_whole_elements(t), sharded.dtypes.bits(t.dtype)) for t in block.frozen)


def shard_ranks(mesh: Mesh, *, experts: bool) -> int:
    """Ranks that ZeRO divides a parameter over: dp_shard × cp, or edp for routed experts."""
    return mesh.edp if experts else mesh.dp_shard * mesh.cp


def waiting_bytes(sharded: ShardedBlock, mesh: Mesh, precision: Precision, *, trained: bool = False) -> int:
    """Bytes of a rank's part of the block's parameters under ZeRO 3, in the dtype in which they are stored between
    steps: what is copied from the host where they wait there. trained: without frozen weights."""
    total = 0
    for experts in (False, True):
        size = local_elements(sharded, experts=experts) * _bytes_of(precision.param)
        size += 0 if trained else frozen_bytes(sharded, experts=experts)
        # ceil: the rank with the largest part.
        total += -(-size // shard_ranks(mesh, experts=experts))
    return total


def undivided_bytes(sharded: ShardedBlock, mesh: Mesh, precision: Precision) -> int:
    """Bytes, in the dtype that layers read, of the block's parameters that ZeRO 3 divides over one rank only: where
    they come from the host they are whole without a gather."""
    undivided = [experts for experts in (False, True) if shard_ranks(mesh, experts=experts) == 1]
    sizes = (
        local_elements(sharded, experts=e) * _gather_width(precision) + frozen_bytes(sharded, experts=e)
        for e in undivided
    )
    return sum(sizes)


def parameter_collectives(
    sharded: ShardedBlock,
    mesh: Mesh,
    optimizer: Optimizer,
    precision: Precision,
    *,
    without: frozenset[str] = frozenset(),
) -> tuple[ParameterCollective, ...]:
    """Collectives of one block's parameters and gradients, in order of a step with one microbatch.

    Ψ: parameters; what each rank sends is given for many ranks. ZeRO 0: one all-reduce of gradients (2Ψ). ZeRO 1 and 2:
    a reduce-scatter, and an all-gather of parameters after the update (2Ψ). ZeRO 3: all-gathers before forward and
    before backward, and a reduce-scatter (3Ψ; Rajbhandari et al. 2020, ZeRO, section 7). Hybrid: also an all-reduce of
    the divided gradients over dp_replicate. Parameters are gathered in their compute dtype, or fp8 where the recipe
    says so; gradients are reduced in `precision.reduce`. without: names of parameters that are communicated with
    another block of the same ranks.
    """
    collectives: list[ParameterCollective] = []
    for experts in (False, True):
        elements = local_elements(sharded, experts=experts, without=without)
        frozen = frozen_bytes(sharded, experts=experts) if optimizer.zero == 3 else 0
        if elements or frozen:
            collectives += _of_group(elements, frozen, mesh, optimizer, precision, experts=experts)
    collectives += _tensor_parallel_sums(sharded, mesh, precision)
    collectives += _replica_sums(sharded, mesh, precision, without)
    order: tuple[When, ...] = ("before_forward", "before_backward", "after_backward", "before_step", "after_step")
    # Sorting is stable: collectives of one moment stay as they were listed.
    return tuple(sorted(collectives, key=lambda collective: order.index(collective.when)))


def _of_group(
    elements: int, frozen: int, mesh: Mesh, optimizer: Optimizer, precision: Precision, *, experts: bool
) -> Iterator[ParameterCollective]:
    """Yields the collectives over data-parallel ranks of one group of parameters (`experts`, or all others). elements:
    trained, on a rank before ZeRO divides them; frozen: bytes of weights that are not trained, under ZeRO 3."""
    axes = ("edp",) if experts else ("dp_shard", "cp")
    shard, replicate = shard_ranks(mesh, experts=experts), mesh.dp_replicate
    gathered = elements * _gather_width(precision) + frozen  # weights that are not trained are gathered too
    reduced = elements * _bytes_of(precision.reduce)

    def collective(
        kind: CollectiveKind, group: tuple[str, ...], ranks: int, size: int, when: When
    ) -> ParameterCollective:
        return ParameterCollective(kind=kind, axes=group, ranks=ranks, bytes=size, when=when, experts=experts)

    # Nothing to divide over: gradients are summed over all data-parallel ranks at once.
    if optimizer.zero == 0 or shard == 1:
        if shard * replicate > 1 and elements:
            yield collective("all_reduce", ("dp_replicate", *axes), shard * replicate, reduced, "after_backward")
        return
    if optimizer.zero == 3:
        yield collective("all_gather", axes, shard, gathered, "before_forward")
        # Freed after forward, so it is gathered once more: 3Ψ in place of 2Ψ.
        if optimizer.reshard_after_forward:
            yield collective("all_gather", axes, shard, gathered, "before_backward")
    if not elements:
        return
    yield collective("reduce_scatter", axes, shard, reduced, "after_backward")
    if replicate > 1:
        # Hybrid sharding: each rank sums its shard over the replicas.
        yield collective("all_reduce", ("dp_replicate",), replicate, -(-reduced // shard), "after_backward")
    if optimizer.zero < 3:
        yield collective("all_gather", axes, shard, gathered, "after_step")


def _tensor_parallel_sums(sharded: ShardedBlock, mesh: Mesh, precision: Precision) -> Iterator[ParameterCollective]:
    """Yields the all-reduces over tp of gradients of which each rank has a part of the sum: of parameters whose inputs
    are divided by sequence (norms), and of key-value heads that several ranks hold copies of."""
    width = _bytes_of(precision.reduce)
    partial = [name for name, axes in sharded.partial_grads.items() if "tp" in axes]
    if partial:
        size = sum(_elements(sharded, sharded.block.tensor(name)) for name in partial) * width
        yield ParameterCollective(kind="all_reduce", axes=("tp",), ranks=mesh.tp, bytes=size, when="before_step")
    # One all-reduce for each number of copies: attentions of a block may differ in key-value heads.
    for count in sorted(set(sharded.copies.values())):
        names = [name for name, copies in sharded.copies.items() if copies == count]
        size = sum(_elements(sharded, sharded.block.tensor(name)) for name in names) * width
        yield ParameterCollective(kind="all_reduce", axes=("tp",), ranks=count, bytes=size, when="before_step")


def _replica_sums(
    sharded: ShardedBlock, mesh: Mesh, precision: Precision, without: frozenset[str]
) -> Iterator[ParameterCollective]:
    """Yields the all-reduce over ep of gradients of experts that several of its ranks hold (`shared` of a rank's, on
    the rank with most). Priced as if all ranks of ep held each: an upper bound, since replicas may be on fewer."""
    dispatch = next((op for op in sharded.block.ops if op.does == "dispatches"), None)
    shared, replicas = (0, 0) if dispatch is None else (dispatch.attr("shared", 0), dispatch.attr("replicas", 0))
    assert isinstance(shared, int) and isinstance(replicas, int)
    if dispatch is None or mesh.ep == 1 or not shared:
        return
    sizes = {dim.name: dim.size or 0 for tensor in sharded.block.tensors for dim in tensor.atoms}
    # Slots of experts on a rank, replicas included; `shared` of them are held elsewhere too.
    slots = (sizes[str(dispatch.attr("experts", ""))] + replicas) // mesh.ep
    size = local_elements(sharded, experts=True, without=without) // slots * shared * _bytes_of(precision.reduce)
    yield ParameterCollective(
        kind="all_reduce", axes=("ep",), ranks=mesh.ep, bytes=size, when="before_step", experts=True
    )


def _elements(sharded: ShardedBlock, tensor: Tensor) -> int:
    """Elements of a parameter on one rank before ZeRO divides it."""
    size = sharded.local_elements[tensor.name]
    assert isinstance(size, int), "a parameter has fixed sizes"
    return size


def _whole_elements(tensor: Tensor) -> int:
    """Elements of a parameter on all ranks together, each once."""
    size = numel(tensor.dims, {})
    assert isinstance(size, int), "a parameter has fixed sizes"
    return size


def _stored_bytes(elements: int, bits: int) -> int:
    """Bytes of a frozen weight. NF4 has scales of blocks besides its codes."""
    return nf4_bytes(elements) if bits == 4 else elements * bits // 8


def _bytes_of(dtype: str) -> int:
    """Whole bytes of one number; 0 of `none`."""
    return 0 if dtype == "none" else -(-DTYPE_BITS[dtype] // 8)


def _gather_width(precision: Precision) -> int:
    """Bytes of one gathered parameter: fp8 where the recipe gathers in it, else the compute dtype."""
    if precision.fp8 is not None and precision.fp8.gather:
        return 1
    return _bytes_of(precision.compute)
