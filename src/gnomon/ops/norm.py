"""Normalisation: `norm`, and the `row_stats` that an RMSNorm in steps has.

`fn` is rms, layer or group; statistics are fp32. Leaves out scales that no statistics belong to (`elementwise`).
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.op import Op, OpKind, Tensors
from gnomon.ops.rules import first_dims


def _saves_norm(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Input, weight and statistics."""
    return (*op.inputs[:2], *op.outputs[1:])


def _saves_stats(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    return (op.inputs[0], op.outputs[0])


NORM = OpKind(
    name="norm",
    signature="x[, weight][, bias] -> x; fn: rms | layer | group; over, groups, eps",
    contracts=False,
    dims=first_dims,
    memory="own",
    saves=_saves_norm,
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="function",
)

ROW_STATS = OpKind(
    name="row_stats",
    signature="x -> one number a row: mean of squares, then rsqrt",
    contracts=False,
    dims="open",
    memory="own",
    saves=_saves_stats,
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="lowered",
)

KINDS = (NORM, ROW_STATS)
