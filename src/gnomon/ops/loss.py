"""Losses: `cross_entropy` of logits and labels, `mse` of two tensors.

A loss over a divided vocabulary adds up its statistics over the ranks. Leaves out weights of several losses.
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import cannot_write, saves_inputs


def _dims(op: Op, block: Tensors) -> Problem:
    logits, labels = block.tensor(op.inputs[0]), block.tensor(op.inputs[1])
    return None if not labels.is_float and logits.dims[:-1] == labels.dims else cannot_write(op, block)


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Logits, labels and the log-sum-exp of each row."""
    return (*op.inputs[:2], *op.outputs[1:])


CROSS_ENTROPY = OpKind(
    name="cross_entropy",
    signature="logits, labels -> loss; reduction, loss_weight, nll (of the logits' log-softmax)",
    contracts=False,
    dims=_dims,
    memory="own",
    saves=_saves,
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="function",
)

MSE = OpKind(
    name="mse",
    signature="prediction, target -> mean of squared differences",
    contracts=False,
    dims="open",
    memory="own",
    saves=saves_inputs,
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="function",
)

KINDS = (CROSS_ENTROPY, MSE)
