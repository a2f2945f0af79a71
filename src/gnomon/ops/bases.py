"""What most kinds of a sort share, as two values to begin from: `MOVES_BYTES` and `CONTRACTION`.

A kind is `replace(BASE, …)` with what is its own. What every kind must say for itself (dims, what backward keeps, work,
torch function) is `UNSAID` here: the registry refuses a kind that leaves it so. Leaves out the kinds.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.ops.curve import Matmul, once
from gnomon.ops.op import UNSAID, OpKind
from gnomon.ops.rules import multiplied, multiplied_back, saves_operands

MOVES_BYTES = OpKind(
    name=UNSAID,
    signature=UNSAID,
    contracts=False,
    dims=UNSAID,
    memory="own",
    saves=UNSAID,
    forward=UNSAID,
    backward=UNSAID,
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price=once(),
    grad_price=once(),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    strategies="plain",
    sums=False,
    together=(),
    does="computes",
    served="kernel",
    calls="none",
    documents=False,
    zeros=UNSAID,
    torch=UNSAID,
)
"""An op without matmuls: one kernel that reads its inputs and writes its outputs, and one for all its gradients."""

CONTRACTION = replace(
    MOVES_BYTES,
    contracts=True,
    saves=saves_operands,
    forward=multiplied,
    backward=multiplied_back,
    weight_grad="apart",
    decay=(1,),
    price=Matmul("tokens", narrow=True),
    grad_price=Matmul("tokens", narrow=True),
    does="multiplies",
    served="apart",
    zeros="unknown",
)
"""Activations times a weight: a matmul forward and one for each operand's gradient, that of the weight a step of its
own which a schedule can delay."""
