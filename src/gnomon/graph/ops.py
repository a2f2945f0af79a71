"""One rule for each op kind: work of the forward, of the input gradient and of the weight gradient.

Rules apply to lowered blocks (`kernels.lower`). A matrix product of m×k by k×n is 2·m·k·n FLOPs. `matmul_flops` are
those of the mathematics, as model FLOPs and MFU count them; `extra_matmul_flops` are what the chosen kernel does beyond
(flash attention's QKᵀ again, masked-out scores of an unfused kernel). `vector_flops` are rough (a few an element): they
matter only where bytes do not, so no total of FLOPs includes them. Bytes: each distinct tensor read or written once.
Leaves out: caches, tiles, time (room `prices`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import numpy as np

from gnomon.errors import GraphError
from gnomon.graph.kernels import kv_dim
from gnomon.graph.types import Block
from gnomon.ops.op import Op
from gnomon.ops.state_space import scan_flops
from gnomon.tensors.captured import BACKWARD, Cost, Size, amount
from gnomon.tensors.captured import reads as node_reads
from gnomon.tensors.dims import Dim, Dtypes, Number, Sizes, numel, size_of
from gnomon.tensors.tensor import Tensor

CausalFlops: TypeAlias = Literal["full", "half"]
"""How causal attention counts: full, as if nothing were masked (Megatron's formula), or half (as flash kernels do)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an op asks of a device. Adds up and scales like a number."""

    matmul_flops: Number = 0
    """FLOPs of matrix products and convolutions that the mathematics needs."""
    extra_matmul_flops: Number = 0
    """Further matrix FLOPs that the kernel executes; can be negative where a kernel skips masked work that counts."""
    vector_flops: Number = 0
    """Elementwise and reduction FLOPs, rough."""
    read_bytes: Number = 0
    """Bytes read from device memory."""
    write_bytes: Number = 0
    """Bytes written to device memory."""

    def __add__(self, other: Work) -> Work:
        return Work(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: int) -> Work:
        return Work(**{f.name: getattr(self, f.name) * times for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What turns rules into numbers."""

    sizes: Sizes
    """Sizes of symbolic dims, and local sizes that replace a dim's own."""
    dtypes: Dtypes
    """What `compute` and `param` are."""
    causal_flops: CausalFlops
    """The convention for causal attention; windows count what they let through under `half` only."""


def nbytes(tensor: Tensor, sizes: Sizes, dtypes: Dtypes) -> Number:
    """Bytes of one tensor; 4-bit elements are packed and the last byte filled up."""
    bits = numel(tensor.dims, sizes) * dtypes.bits(tensor.dtype)
    if isinstance(bits, int):
        return -(-bits // 8)
    return np.asarray(np.ceil(bits / 8), dtype=np.float64)


def attention_pairs_x2(q: Number, kv: Number, *, causal: bool, window: int, convention: CausalFlops) -> Number:
    """Twice the number of (query, key) pairs that count; twice, so that half of an odd square stays an integer.

    q: queries, the last q of kv positions. Full: q·kv. Half: a query at position t sees min(t, window) keys,
    integrated over t from kv−q to kv, so a causal square counts q²/2 (not q(q+1)/2). window 0: none.
    Raises GraphError if q > kv under a causal mask.
    """
    if not causal and not window or convention == "full":
        return 2 * q * kv
    if not causal:
        return 2 * q * np.minimum(2 * window, kv) if isinstance(kv, np.ndarray) else 2 * q * min(2 * window, kv)
    if np.any(np.asarray(q) > np.asarray(kv)):
        raise GraphError(f"causal attention of {q} queries over {kv} keys: keys include the queries' own positions")
    if not window:
        return kv * kv - (kv - q) * (kv - q)
    limit: int = window
    if isinstance(kv, int) and isinstance(q, int):
        low, high = min(kv - q, limit), min(kv, limit)
        return high * high - low * low + 2 * limit * (max(kv, limit) - max(kv - q, limit))
    low_a, high_a = np.minimum(kv - q, limit), np.minimum(kv, limit)
    return np.asarray(high_a**2 - low_a**2 + 2 * limit * (np.maximum(kv, limit) - np.maximum(kv - q, limit)))


VECTOR_FLOPS: Mapping[str, tuple[int, int]] = {
    "attention": (0, 0),
    "state_space": (0, 0),
    "softmax": (5, 4),
    "norm": (6, 9),
    "row_stats": (2, 2),
    "activation": (8, 10),
    "glu": (9, 14),
    "add": (1, 0),
    "mul": (1, 2),
    "rotary": (3, 3),
    "cross_entropy": (5, 3),
    "mse": (3, 2),
    "dropout": (2, 1),
    "router": (6, 5),
    "combine": (2, 4),
    "scale": (1, 1),
    "modulate": (2, 4),
    "softcap": (5, 3),
    "upsample": (0, 1),
    "pool": (1, 1),
}
"""Rough vector FLOPs for each element of the first input: (forward, backward). Kinds not here do none."""

_MIXERS = ("attention", "state_space")
"""Kinds that mix positions by matrix products of their own."""


def _attention_dims(op: Op, block: Block) -> tuple[Dim, Dim]:
    q, k = block.tensor(op.inputs[0]), block.tensor(op.inputs[1])
    return q.dims[-3], kv_dim(k.dims[-3])


def _pairs_x2(op: Op, q: Number, kv: Number, convention: CausalFlops) -> Number:
    window = op.attr("window", 0)
    assert isinstance(window, int)
    return attention_pairs_x2(q, kv, causal=bool(op.attr("causal", False)), window=window, convention=convention)


def _matmul(op: Op, block: Block, setting: Setting) -> tuple[Number, Number]:
    """(model FLOPs, extra FLOPs) of one product of a contraction, or of the forward of flash attention or a scan."""
    sizes = setting.sizes
    if op.kind == "state_space":
        return scan_flops(op, block, sizes, whole=setting.causal_flops == "full"), 0
    if op.kind == "attention":
        q, v = block.tensor(op.inputs[0]), block.tensor(op.inputs[2])
        q_dim, kv = _attention_dims(op, block)
        pairs_x2 = _pairs_x2(op, size_of(q_dim, sizes), size_of(kv, sizes), setting.causal_flops)
        rows = numel((*q.dims[:-3], q.dims[-2]), sizes)
        width = size_of(q.dims[-1], sizes) + size_of(v.dims[-1], sizes)
        return rows * width * pairs_x2, 0
    out = block.tensor(op.outputs[0])
    inner = {a.name: a for t in op.inputs[:2] for a in block.tensor(t).atoms}
    full = 2 * numel(out.dims, sizes) * numel((inner[name] for name in op.contracts), sizes)
    q_name, kv_name = op.attr("q_dim", ""), op.attr("kv_dim", "")
    if op.kind != "matmul" or not q_name:
        return full, 0
    dims = {d.name: d for t in (*op.inputs, *op.outputs) for d in block.tensor(t).dims}
    q_len, kv_len = size_of(dims[str(q_name)], sizes), size_of(dims[str(kv_name)], sizes)
    counted = full // (2 * q_len * kv_len) * _pairs_x2(op, q_len, kv_len, setting.causal_flops)
    return counted, full - counted


def _bytes(names: Collection[str], block: Block, setting: Setting) -> Number:
    total: Number = 0
    for name in dict.fromkeys(names):
        total = total + nbytes(block.tensor(name), setting.sizes, setting.dtypes)
    return total


def _vector(op: Op, block: Block, setting: Setting, phase: int) -> Number:
    per_element = VECTOR_FLOPS.get(op.kind, (0, 0))[phase]
    return numel(block.tensor(op.inputs[0]).dims, setting.sizes) * per_element if per_element else 0


def is_inner_first(op: Op, weight: Sequence[Dim]) -> bool:
    """Whether a linear's weight has its contracted dims before its outputs, as `x @ weight` wants them."""
    return op.kind == "linear" and bool(weight) and weight[0].atoms[0].name in op.contracts


def matrix_rows(op: Op, weight: Sequence[Dim]) -> int:
    """How many leading dims of a contraction's weight are rows of its matrix: outputs, or the contracted dims of one
    that has them first."""
    first = is_inner_first(op, weight)
    return sum(1 for dim in weight if (dim.atoms[0].name in op.contracts) is first)


def captured_products(op: Op, sizes: Sizes) -> list[tuple[Number, Number, Number, Number, int]]:
    """(batch, rows, columns, depth, operands that want a gradient) of each matrix product of a captured op."""
    assert op.captured is not None, "of captured ops only"
    known: Mapping[str, Any] = sizes
    products = []
    for node in op.captured.nodes:
        for shape in node.products:
            b, m, n, k = (size.value(known) if isinstance(size, Size) else size for size in shape)
            products.append((b, m, n, k, node.grads))
    return products


def _captured_bytes(op: Op, block: Block, setting: Setting) -> tuple[Number, Number]:
    """(read, written) by the ATen ops of a captured op, each by itself."""
    assert op.captured is not None, "of captured ops only"
    inner = {tensor.name: tensor for tensor in op.captured.tensors}
    read: Number = 0
    written: Number = 0
    for node in op.captured.nodes:
        if node.view:
            continue
        if node.cost is not None and node.cost.bytes:
            read = read + amount(node.cost.bytes, setting.sizes)
            continue
        for name in node_reads(node):
            read = read + nbytes(inner.get(name) or block.tensor(name), setting.sizes, setting.dtypes)
        for name in filter(None, node.outputs):
            written = written + nbytes(inner.get(name) or block.tensor(name), setting.sizes, setting.dtypes)
    return read, written


def _captured_work(op: Op, block: Block, setting: Setting, grad: GradOp | None) -> Work:
    """A backward reads what was kept and gradients, and writes gradients; inside it does so once for each ATen op."""
    shapes = captured_products(op, setting.sizes)
    read, written = _captured_bytes(op, block, setting)
    costed = costed_flops(op, setting.sizes, backward=grad is not None)
    if grad is None:
        flops = sum((2 * b * m * n * k for b, m, n, k, _ in shapes), start=0)
        return Work(matmul_flops=flops + costed, read_bytes=read, write_bytes=written)
    flops = sum((2 * b * m * n * k * wanted for b, m, n, k, wanted in shapes), start=0) + costed
    kept = _bytes(grad.reads, block, setting)
    costs = [node.cost for node in op.captured.nodes if node.cost is not None] if op.captured is not None else []
    if costs and op.captured is not None and op.captured.is_priced and all(c.bytes or c.backward_bytes for c in costs):
        moved = sum((backward_bytes(cost, setting.sizes) for cost in costs), start=0)
        return Work(matmul_flops=flops, read_bytes=moved)
    return Work(matmul_flops=flops, read_bytes=written + kept, write_bytes=_bytes(grad.grads_out, block, setting))


def costed_flops(op: Op, sizes: Sizes, *, backward: bool) -> Number:
    """What the authors of custom ops in a captured op say of their FLOPs."""
    assert op.captured is not None, "of captured ops only"
    total: Number = 0
    for cost in (node.cost for node in op.captured.nodes if node.cost is not None):
        if backward and not cost.backward_flops:
            total = total + BACKWARD * amount(cost.flops, sizes)
        else:
            total = total + amount(cost.backward_flops if backward else cost.flops, sizes)
    return total


def backward_bytes(cost: Cost, sizes: Sizes) -> Number:
    """What a custom op's backward reads and writes."""
    return amount(cost.backward_bytes, sizes) if cost.backward_bytes else BACKWARD * amount(cost.bytes, sizes)


def forward_work(op: Op, block: Block, setting: Setting) -> Work:
    """Work of running a lowered op once. Views are free."""
    if op.rules.is_view:
        return Work()
    if op.captured is not None:
        return _captured_work(op, block, setting, None)
    flops, extra = _matmul(op, block, setting) if op.contracts or op.kind in _MIXERS else (0, 0)
    reads: Number = _bytes(op.inputs, block, setting)
    if op.kind == "embedding":  # only the chosen rows are read
        out = block.tensor(op.outputs[0])
        table = block.tensor(op.inputs[1])
        bits = setting.dtypes.bits(table.dtype)
        reads = _bytes(op.inputs[:1], block, setting) + numel(out.dims, setting.sizes) * bits // 8
    return Work(
        matmul_flops=flops,
        extra_matmul_flops=extra,
        vector_flops=_vector(op, block, setting, 0),
        read_bytes=reads,
        write_bytes=_bytes(op.outputs, block, setting),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradOp:
    """One step of a derived backward."""

    phase: Literal["input_grad", "weight_grad", "accumulate"]
    """accumulate: add up the gradients that several readers of one tensor send back."""
    path: str
    """Path of the forward op; of an accumulate, the tensor's name."""
    reads: tuple[str, ...]
    """Saved tensors and parameters read, beside the gradients of `grads_in`."""
    grads_in: tuple[str, ...]
    """Tensors whose gradients are read."""
    grads_out: tuple[str, ...]
    """Tensors whose gradients are written."""


def grad_work(grad: GradOp, block: Block, setting: Setting) -> Work:
    """Work of one step of the backward of a lowered block. A gradient has the dims and dtype of its tensor."""
    reads = _bytes(grad.grads_in, block, setting)
    writes = _bytes(grad.grads_out, block, setting)
    if grad.phase == "accumulate":
        tensor = block.tensor(grad.path)
        added = numel(tensor.dims, setting.sizes) * (len(grad.reads) - 1)
        read = writes * len(grad.reads)
        return Work(vector_flops=added, read_bytes=read, write_bytes=writes)
    op = block.op(grad.path)
    if op.rules.is_view or op.kind == "add":  # the gradient is the incoming one; sums of several are `accumulate`
        narrow = [
            n for n in grad.grads_out if op.kind == "add" and block.tensor(n).dims != block.tensor(op.outputs[0]).dims
        ]
        return Work(read_bytes=reads, write_bytes=_bytes(narrow, block, setting)) if narrow else Work()
    if op.captured is not None:
        return _captured_work(op, block, setting, grad)
    reads = reads + _bytes(grad.reads, block, setting)
    multiplies = op.kind in _MIXERS or (bool(op.contracts) and bool(grad.reads))
    flops, extra = _matmul(op, block, setting) if multiplies else (0, 0)
    if op.kind == "attention":  # dV, dP, dQ, dK: twice the forward; P is recomputed from q and k
        q, v = block.tensor(op.inputs[0]), block.tensor(op.inputs[2])
        d_k, d_v = size_of(q.dims[-1], setting.sizes), size_of(v.dims[-1], setting.sizes)
        flops, extra = 2 * flops, flops * d_k // (d_k + d_v)
    elif op.kind == "state_space":
        flops = 2 * flops
    elif op.kind == "matmul":
        flops, extra = flops * len(grad.grads_out), extra * len(grad.grads_out)
    return Work(
        matmul_flops=flops,
        extra_matmul_flops=extra,
        vector_flops=_vector(op, block, setting, 1) if grad.phase == "input_grad" else 0,
        read_bytes=reads,
        write_bytes=writes,
    )
