"""`opaque`: what no other kind says, as the ATen ops of one call that were captured.

What it keeps, costs and can be divided along was found when it was captured (`Captured`). Leaves out views of captured
models (`views`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import Op, Steps, Tensors
from gnomon.ops.rules import bytes_of
from gnomon.ops.work import GradOp, Setting, Work, nbytes
from gnomon.tensors.captured import BACKWARD, Cost, Size, amount
from gnomon.tensors.captured import reads as node_reads
from gnomon.tensors.dims import Number, Sizes


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Saves what autograd kept when the op was captured."""
    assert op.captured is not None, "checked by Op"
    return op.captured.keeps


def captured_matmuls(op: Op, sizes: Sizes) -> list[tuple[Number, Number, Number, Number, int]]:
    """(batch, rows, columns, depth, operands that want a gradient) of each matmul of a captured op."""
    assert op.captured is not None, "of captured ops only"
    known: Mapping[str, Any] = sizes
    matmuls = []
    for node in op.captured.nodes:
        for shape in node.matmuls:
            b, m, n, k = (size.value(known) if isinstance(size, Size) else size for size in shape)
            matmuls.append((b, m, n, k, node.grads))
    return matmuls


def _captured_bytes(op: Op, block: Tensors, setting: Setting) -> tuple[Number, Number]:
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


def _captured_work(op: Op, block: Tensors, setting: Setting, grad: GradOp | None) -> Work:
    """A backward reads what was kept and gradients, and writes gradients; inside it does so once for each ATen op."""
    shapes = captured_matmuls(op, setting.sizes)
    read, written = _captured_bytes(op, block, setting)
    costed = costed_flops(op, setting.sizes, backward=grad is not None)
    if grad is None:
        flops = sum((2 * b * m * n * k for b, m, n, k, _ in shapes), start=0)
        return Work(matmul_flops=flops + costed, read_bytes=read, write_bytes=written)
    flops = sum((2 * b * m * n * k * num_grads for b, m, n, k, num_grads in shapes), start=0) + costed
    saved_bytes = bytes_of(grad.reads, block, setting)
    costs = [node.cost for node in op.captured.nodes if node.cost is not None] if op.captured is not None else []
    if costs and op.captured is not None and op.captured.is_priced and all(c.bytes or c.backward_bytes for c in costs):
        moved = sum((backward_bytes(cost, setting.sizes) for cost in costs), start=0)
        return Work(matmul_flops=flops, read_bytes=moved)
    return Work(
        matmul_flops=flops, read_bytes=written + saved_bytes, write_bytes=bytes_of(grad.grads_out, block, setting)
    )


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


def _work(op: Op, block: Tensors, setting: Setting) -> Work:
    return _captured_work(op, block, setting, None)


def _work_back(op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
    return _captured_work(op, block, setting, grad)


def _steps(op: Op, low: Steps, kernels: Kernels) -> None:
    """Lowers the op with the tensors that autograd keeps inside it."""
    assert op.captured is not None, "checked by Op"
    low.emit(op, *(t for t in op.captured.tensors if t.name in op.captured.keeps))


OPAQUE = replace(
    MOVES_BYTES,
    name="opaque",
    signature="as its ATen ops say",
    dims="open",
    saves=_saves,
    forward=_work,
    backward=_work_back,
    steps=_steps,
    decay="matrices",
    price="aten",
    grad_price="aten",
    zeros="unknown",
    torch="captured",
)

KINDS = (OPAQUE,)
