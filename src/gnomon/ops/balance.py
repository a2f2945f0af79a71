"""Losses that keep experts evenly loaded: `expert_load`, what a layer's router did, and `balance_loss` of all of them.

`layer_balance` is the loss of one layer by itself, with a z-loss; then `balance_loss` only adds layers up. `step_load`
is what the routers of all data-parallel ranks did in the step's microbatches so far. Leaves out biases that are moved
in place of a loss.
Sources: Fedus et al. 2021 (Switch Transformer), equations 4 to 6, as transformers joins all layers in one loss;
Megatron-LM core, moe_utils.py, for layers by themselves; Zoph et al. 2022 (ST-MoE), equation 5, for the z-loss;
DeepSeek-V3, equations 17 to 20, for sequences by themselves; Qiu et al. 2025 (arXiv 2501.11873), section 3, for shares
of a global batch.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.ops.curve import once, passes
from gnomon.ops.divided import own_collective, with_inside
from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import cannot_write, per_element, per_element_back, saves_inputs
from gnomon.ops.strategy import Division, Strategy

DATA = "dp_replicate+dp_shard+cp"
"""Axes over which ranks have other tokens, as groups of several axes are named."""


def _load_dims(op: Op, block: Tensors) -> Problem:
    """(rows, tokens, experts) -> (rows, 2 or 3, experts)."""
    logits, load = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    sums = 3 if op.attr("z_loss", False) else 2
    alike = len(load) == 3 and (load[0], load[2]) == (logits[0], logits[-1]) and load[1].size == sums
    return None if alike else cannot_write(op, block)


def _layer_dims(op: Op, block: Tensors) -> Problem:
    """(rows, 2 or 3, experts)[, (experts)] -> (rows, 1)."""
    load, losses = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    alike = len(load) == 3 and len(losses) == 2 and losses[0] == load[0] and losses[1].size == 1
    counts = all(block.tensor(name).dims == load[2:] for name in op.inputs[1:])
    return None if alike and counts else cannot_write(op, block)


def _step_dims(op: Op, block: Tensors) -> Problem:
    """(rows, 2 or 3, experts) -> (experts)."""
    load, counts = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    return None if len(load) == 3 and counts == load[2:] else cannot_write(op, block)


def _step_load(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """One all-reduce of a number for each expert over the ranks with other tokens. Those of cp have added theirs up
    before, and are in its groups again: that counts each choice as often, and the shares are the same."""
    if setting.scene.ranks(DATA) == 1:
        return (plain,)
    size = setting.bytes(op.outputs[0], plain.outputs[0])
    summed = own_collective(op, setting, "all_reduce", DATA, size, "forward", op.outputs[0])
    return (with_inside(plain, plain.name, (summed,)),)


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
    signature="logits -> of each row the sum of its tokens' probabilities, and how many chose each expert, and with "
    "z_loss their log-sum-exps squared; topk, fn, z_loss",
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
    served="free",
    calls="none",
    documents=False,
    zeros="unknown",
    torch="balance:expert_load",
)

BALANCE_LOSS = OpKind(
    name="balance_loss",
    signature="load, labels -> loss, once for each label that is learnt; coefficient, topk; layers: they are losses",
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
    served="free",
    calls="none",
    documents=False,
    zeros="unknown",
    torch="balance:balance_loss",
)

LAYER_BALANCE = replace(
    BALANCE_LOSS,
    name="layer_balance",
    signature="load[, counts of the step] -> of each row its part of the layer's loss; per: layer | sequence | global, "
    "coefficient, z_loss, topk",
    dims=_layer_dims,
    strategies="plain",
    does="computes",
    torch="balance:layer_balance",
)

STEP_LOAD = replace(
    EXPERT_LOAD,
    name="step_load",
    signature="load -> how many tokens of all ranks chose each expert in the step's microbatches so far",
    dims=_step_dims,
    saves="nothing",
    forward=per_element(1),
    backward="no gradient",
    gradient="none",
    price=once("reduce"),
    sums=False,
    strategies=_step_load,
    does="counts the step",
    torch="balance:step_load",
)

KINDS = (EXPERT_LOAD, BALANCE_LOSS, LAYER_BALANCE, STEP_LOAD)
