"""Attention and what tells it where tokens stand: `attention`, `rotary`, `alibi`, and its `softmax` in steps.

Dims of q, k and v are (…, seq, heads, dim); k and v share all but the last, and heads may be a multiple of theirs.
Leaves out attention over a cache.
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import first_dims, saves_output


def _dims(op: Op, block: Tensors) -> Problem:
    q, k, v = (block.tensor(n) for n in op.inputs[:3])
    out = block.tensor(op.outputs[0])
    if min(len(t.dims) for t in (q, k, v)) < 3 or q.dims[-1] != k.dims[-1] or k.dims[:-1] != v.dims[:-1]:
        return f"attention of {q}, {k}, {v}: dims are (…, seq, heads, dim); k and v share the first two"
    if q.dims[:-3] != k.dims[:-3] or out.dims != (*q.dims[:-1], v.dims[-1]):
        return f"attention of {q}, {k}, {v} cannot write {out}"
    heads, kv_heads = q.dims[-2].size, k.dims[-2].size
    if heads and kv_heads and heads % kv_heads:
        return f"{heads} query heads are not a multiple of {kv_heads} key heads"
    return None


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Everything that it read and wrote, the log-sum-exp of each row included (Dao 2022)."""
    return (*op.inputs, *op.outputs)


ATTENTION = OpKind(
    name="attention",
    signature="q, k, v[, bias or sinks] -> softmax(q kᵀ · scale) v; causal, window, scale, softcap, dropout, sinks",
    contracts=False,
    dims=_dims,
    memory="own",
    saves=_saves,
    weight_grad="together",
    ungraded=(),
    decay="matrices",
    runs="function",
)

SOFTMAX = OpKind(
    name="softmax",
    signature="x -> softmax over its last dim; fn: log for its logarithm; causal, in_place",
    contracts=False,
    dims=first_dims,
    memory="own",
    saves=saves_output,
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="lowered",
)

ROTARY = OpKind(
    name="rotary",
    signature="x[, positions] -> x turned by its position; base, scaling",
    contracts=False,
    dims="open",
    memory="own",
    saves="nothing",  # sines and cosines are tables
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="function",
)

ALIBI = OpKind(
    name="alibi",
    signature="positions -> bias (positions, positions, heads): linear biases in place of positions",
    contracts=False,
    dims="open",
    memory="own",
    saves="nothing",
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="function",
)

KINDS = (ATTENTION, SOFTMAX, ROTARY, ALIBI)
