"""Products with weights and of activations: `linear`, `matmul`.

A product of m×k by k×n is 2·m·k·n FLOPs. Weights are (out …, in …) as in torch, or (in …, out …). Leaves out products
of experts (`moe`) and convolutions (`conv`).
"""

from __future__ import annotations

from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import contracted_dims, saves_operands


def _dims(op: Op, block: Tensors) -> Problem:
    weight = block.tensor(op.inputs[1])
    if problem := contracted_dims(op, block):
        return problem
    if weight.kind == "activation":
        return f"linear needs a weight, {weight.name!r} is {weight.kind}; use matmul"
    return None


LINEAR = OpKind(
    name="linear",
    signature="x, weight[, bias] -> x · weightᵀ + bias",
    contracts=True,
    dims=_dims,
    memory="own",
    saves=saves_operands,
    weight_grad="apart",
    ungraded=(),
    decay=(1,),
    runs="engine",
)

MATMUL = OpKind(
    name="matmul",
    signature="a, b -> a · b, batched over the dims that both and the result have",
    contracts=True,
    dims=contracted_dims,
    memory="own",
    saves=saves_operands,
    weight_grad="together",
    ungraded=(),
    decay="matrices",
    runs="lowered",
)

KINDS = (LINEAR, MATMUL)
