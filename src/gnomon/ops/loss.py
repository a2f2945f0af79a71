"""Losses: `cross_entropy` of logits and labels, `mse` of two tensors.

Over a vocabulary that is divided over tp, ranks exchange each token's statistics, or gather the logits. Leaves out
the weights of several losses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.curve import Curve, once
from gnomon.ops.divided import own_collective, row_elements
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import Op, Problem, RuledCall, Steps, Tensors, attrs
from gnomon.ops.rules import cannot_write, per_element, per_element_back, saves_inputs
from gnomon.ops.strategy import Division, Strategy
from gnomon.tensors.names import is_sequence
from gnomon.tensors.tensor import Tensor


def _dims(op: Op, block: Tensors) -> Problem:
    """A problem unless logits (…, vocab) and integer labels (…) give one number (reduction) or one for each label."""
    logits, labels, out = (block.tensor(name) for name in (*op.inputs[:2], op.outputs[0]))
    fits = not labels.is_float and logits.dims[:-1] == labels.dims and out.dims in ((), labels.dims)
    return None if fits else cannot_write(op, block)


def _mse_dims(op: Op, block: Tensors) -> Problem:
    """A problem unless prediction and target have the same dims and the loss is one number."""
    prediction, target, out = (block.tensor(name) for name in (*op.inputs[:2], op.outputs[0]))
    return None if prediction.dims == target.dims and out.dims == () else cannot_write(op, block)


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Backward reads the logits, the labels and, where a kernel writes it, the log-sum-exp of each row."""
    return (*op.inputs[:2], *op.outputs[1:])


def _steps(op: Op, low: Steps, kernels: Kernels) -> None:
    """Lowers cross-entropy to what the stack's kernels do (`Kernels.cross_entropy`): one fused kernel that also writes
    each row's log-sum-exp; or logits copied to fp32, their log-softmax, and the loss of what the labels choose.
    `in_place`: the log-softmax overwrites the copy, so that only one fp32 tensor of the logits' size is held."""
    how = kernels.cross_entropy
    logits = low.block.tensor(op.inputs[0])
    if how == "fused":
        low.emit(op, Tensor(name=f"{op.path}:lse", dims=logits.dims[:-1], dtype="fp32"))
        return
    wide = replace(logits, name="wide", dtype="fp32")
    copy = low.step(op, "fp32", "cast", (logits.name,), wide)
    in_place = {"in_place": True} if how == "in_place" else {}
    logp = low.step(op, "log_probs", "softmax", (copy,), wide, attrs=attrs(fn="log", **in_place))
    low.ops.append(replace(op, inputs=(logp, *op.inputs[1:]), attrs=attrs(nll=True)))


def _price(op: Op) -> Curve:
    """The curve of the loss: a reduction over logits, or after a log-softmax (`nll`) a look-up of one number a
    label."""
    return "labels" if op.attr("nll", False) else once("reduce")


def _loss(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Strategies of the loss. Over a vocabulary that is divided over tp, as in Megatron-LM: three all-reduces in the
    forward, of each token's maximum, target logit and sum of exponentials in fp32, and none in the backward. Without
    `loss_parallel` the logits are gathered instead."""
    vocab = plain.inputs[0].dim_of("tp")
    if vocab is None or is_sequence(vocab):
        return (plain,)
    # The loss is whole on tp either way: every rank knows every token's loss.
    outputs = tuple(sharding.without("tp") for sharding in plain.outputs)
    if not setting.layout.loss_parallel:
        inputs = tuple(sharding.without("tp") for sharding in plain.inputs)
        return (Strategy(name="gathered", inputs=inputs, outputs=outputs, grad_partial=plain.grad_partial),)
    # Bytes of each all-reduce: one fp32 number a token.
    size = row_elements(op, setting, plain.inputs[0], vocab) * 4
    inside = tuple(own_collective(op, setting, "all_reduce", "tp", size, "forward", op.outputs[0]) for _ in range(3))
    return (
        Strategy(
            name="vocab_parallel", inputs=plain.inputs, outputs=outputs, grad_partial=plain.grad_partial, inside=inside
        ),
    )


CROSS_ENTROPY = replace(
    MOVES_BYTES,
    name="cross_entropy",
    signature="logits, labels -> loss; reduction, loss_weight, nll (of the logits' log-softmax)",
    dims=_dims,
    saves=_saves,
    forward=per_element(5),
    backward=per_element_back(3),
    steps=_steps,
    fused_by="cross_entropy",
    price=_price,
    grad_price=once("reduce"),
    calibrated="rows read",
    strategies=_loss,
    sums=True,
    does="compares labels",
    served="apart",
    calls=(RuledCall(function="cross_entropy", rule="cross_entropy"),),
    zeros="unknown",
    torch="lookup:cross_entropy",
)

MSE = replace(
    MOVES_BYTES,
    name="mse",
    signature="prediction, target -> mean of squared differences",
    dims=_mse_dims,
    saves=saves_inputs,
    forward=per_element(3),
    backward=per_element_back(2),
    price=once("reduce"),
    grad_price=once("reduce"),
    sums=True,
    does="compares",
    served="apart",
    zeros="unknown",
    torch="image:mse",
)

KINDS = (CROSS_ENTROPY, MSE)
