"""Losses that keep experts evenly loaded: `expert_load`, what a layer's router did, and `balance_loss` of all of them.

Leaves out losses of a layer by itself, z-losses, and biases that are moved in place of a loss.
Source: Fedus et al. 2021 (Switch Transformer), equations 4 to 6, as transformers joins all layers in one loss.
"""

from __future__ import annotations

from gnomon.ops.curve import once, passes
from gnomon.ops.divided import with_inside
from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import cannot_write, per_element, per_element_back, saves_inputs
from gnomon.ops.strategy import Division, Strategy


def _load_dims(op: Op, block: Tensors) -> Problem:
    """(rows, tokens, experts) -> (rows, 2, experts)."""
    logits, load = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    alike = len(load) == 3 and (load[0], load[2]) == (logits[0], logits[-1]) and load[1].size == 2
    return None if alike else cannot_write(op, block)


def _balance_dims(op: Op, block: Tensors) -> Problem:
    return cannot_write(op, block) if block.tensor(op.outputs[0]).dims else None


def _balance(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Ranks with parts of the tokens have the whole load, and each weighs the loss by its own labels: a term of the
    loss, and of the load's gradient."""
    divided = tuple(axis for axis in ("cp", "tp") if plain.inputs[1].dim_of(axis) is not None)
    weighed = with_inside(plain, plain.name, ())
    return (Strategy(name=weighed.name, inputs=weighed.inputs, outputs=weighed.outputs, grad_partial=(divided, ())),)


EXPERT_LOAD = OpKind(
    name="expert_load",
    signature="logits -> of each row the sum of its tokens' probabilities, and how many chose each expert; topk",
    contracts=False,
    dims=_load_dims,
    memory="own",
    saves=saves_inputs,
    forward=per_element(5),
    backward=per_element_back(4),
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price=passes(4, 3.0, "reduce"),  # softmax, top-k, counts, sum over tokens
    grad_price=passes(2, 3.0, "reduce"),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    strategies="plain",
    sums=True,
    together=(),
    does="computes",
    calls="none",
    documents=False,
    torch="balance:expert_load",
)

BALANCE_LOSS = OpKind(
    name="balance_loss",
    signature="load, labels -> loss, once for each label that is learnt; coefficient, topk",
    contracts=False,
    dims=_balance_dims,
    memory="own",
    saves=saves_inputs,
    forward=per_element(4),
    backward=per_element_back(2),
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price=once("reduce"),
    grad_price=once("reduce"),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    strategies=_balance,
    sums=True,
    together=(),
    does="balances",
    calls="none",
    documents=False,
    torch="balance:balance_loss",
)

KINDS = (EXPERT_LOAD, BALANCE_LOSS)
