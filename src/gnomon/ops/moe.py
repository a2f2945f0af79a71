"""Mixtures of experts: `router`, `dispatch`, `grouped_linear`, `combine`.

Tokens choose experts; each (token, chosen expert) is a row, rows meet the weight of their own expert, and the results
of a token are added up. Leaves out losses that balance the load.
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import cannot_write, contracted_dims, saves_operands


def _grouped_dims(op: Op, block: Tensors) -> Problem:
    """A row meets the weight of its own expert only."""
    return contracted_dims(op, block, without=(str(op.attr("groups", "experts")),))


def _dispatch_dims(op: Op, block: Tensors) -> Problem:
    x, indices, out = block.tensor(op.inputs[0]), block.tensor(op.inputs[1]), block.tensor(op.outputs[0])
    return None if out.dims == (*indices.dims, x.dims[-1]) else cannot_write(op, block)


def _saves_router(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    return (op.inputs[0], *op.outputs)


def _saves_indices(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    return op.inputs[1:]


def _saves_combine(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """`weighted`: its rows have their weights, which only their order undoes."""
    return op.inputs[1:] if op.attr("weighted", False) else op.inputs


ROUTER = OpKind(
    name="router",
    signature="logits[, bias] -> weights, indices; fn: softmax | sigmoid; groups, normalised",
    contracts=False,
    dims="open",
    memory="own",
    saves=_saves_router,
    weight_grad="together",
    ungraded=(1,),  # a bias only shifts which experts are chosen, and moves by its own rule (DeepSeek-V3, 2.1.2)
    decay="none",
    runs="function",
)

DISPATCH = OpKind(
    name="dispatch",
    signature="x, indices -> one row for each (token, chosen expert); experts",
    contracts=False,
    dims=_dispatch_dims,
    memory="own",
    saves=_saves_indices,
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="engine",
)

GROUPED_LINEAR = OpKind(
    name="grouped_linear",
    signature="rows, weight (experts, out, in)[, bias] -> each row times the weight of its own expert; groups",
    contracts=True,
    dims=_grouped_dims,
    memory="own",
    saves=saves_operands,
    weight_grad="apart",
    ungraded=(),
    decay=(1,),
    runs="engine",
)

COMBINE = OpKind(
    name="combine",
    signature="rows, weights, indices -> tokens; weighted",
    contracts=False,
    dims="open",
    memory="own",
    saves=_saves_combine,
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="engine",
)

KINDS = (ROUTER, DISPATCH, GROUPED_LINEAR, COMBINE)
