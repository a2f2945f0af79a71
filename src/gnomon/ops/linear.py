"""Matmuls with weights and of activations: `linear`, `matmul`.

A matmul of m×k by k×n is 2·m·k·n FLOPs. Weights are (out …, in …) as in torch, or (in …, out …). Leaves out matmuls
of experts (`moe`) and convolutions (`conv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gnomon.ops.attention import pairs_of
from gnomon.ops.bases import CONTRACTION
from gnomon.ops.curve import Matmul
from gnomon.ops.op import Op, Problem, RuledCall, Tensors
from gnomon.ops.rules import (
    Flops,
    contracted_dims,
    elementwise_work,
    flops_of_matmul,
    moved_back,
)
from gnomon.ops.work import GradOp, Setting, Work
from gnomon.tensors.dims import Dim, size_of


def _dims(op: Op, block: Tensors) -> Problem:
    weight = block.tensor(op.inputs[1])
    if problem := contracted_dims(op, block):
        return problem
    if weight.is_activation:
        return f"linear needs a weight, {weight.name!r} is {weight.kind}; use matmul"
    return None


def _matmul_flops(op: Op, block: Tensors, setting: Setting) -> Flops:
    """Scores of attention in steps: what a mask lets through counts, the kernel computes all of it."""
    sizes, full = setting.sizes, flops_of_matmul(op, block, setting)
    q_name, kv_name = op.attr("q_dim", ""), op.attr("kv_dim", "")
    if not q_name:
        return full, 0
    dims = {d.name: d for t in (*op.inputs, *op.outputs) for d in block.tensor(t).dims}
    q_len, kv_len = size_of(dims[str(q_name)], sizes), size_of(dims[str(kv_name)], sizes)
    # `pairs_of` gives twice the pairs that count, and all pairs twice are 2 q kv, which divides the FLOPs.
    counted = full // (2 * q_len * kv_len) * pairs_of(op, q_len, kv_len, setting.causal_flops)
    return counted, full - counted


def _matmul_work(op: Op, block: Tensors, setting: Setting) -> Work:
    return elementwise_work(op, block, setting, flops=_matmul_flops(op, block, setting))


def _matmul_work_back(op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
    """A matmul for each operand that wants a gradient."""
    flops, extra = _matmul_flops(op, block, setting) if grad.reads else (0, 0)
    times = len(grad.grads_out)
    return moved_back(op, block, setting, grad, flops=(flops * times, extra * times))


def is_inner_first(op: Op, weight: Sequence[Dim]) -> bool:
    """Whether a linear's weight has its contracted dims before its outputs, as `x @ weight` wants them."""
    return bool(weight) and weight[0].atoms[0].name in op.contracts


def matrix_rows(op: Op, weight: Sequence[Dim]) -> int:
    """How many leading dims of a contraction's weight are rows of its matrix: outputs, or the contracted dims of one
    that has them first."""
    first = is_inner_first(op, weight)
    return sum(1 for dim in weight if (dim.atoms[0].name in op.contracts) is first)


LINEAR = replace(
    CONTRACTION,
    name="linear",
    signature="x, weight[, bias] -> x · weightᵀ + bias",
    dims=_dims,
    weight_sum="in place",
    calls=(
        RuledCall(function="linear", rule="linear"),
        RuledCall(function="addmm", rule="addmm"),
        *(RuledCall(function=name, rule="matmul") for name in ("mm", "matmul", "__matmul__")),
    ),
    zeros="of the matrix",
    torch="engine",
)

MATMUL = replace(
    CONTRACTION,
    name="matmul",
    signature="a, b -> a · b, batched over the dims that both and the result have",
    dims=contracted_dims,
    forward=_matmul_work,
    backward=_matmul_work_back,
    weight_grad="together",
    decay="matrices",
    price=Matmul("batch", narrow=False),
    grad_price=Matmul("batch", narrow=False),
    does="multiplies activations",
    served="kernel",
    torch="lowered",
)

KINDS = (LINEAR, MATMUL)
