"""Steps that a program composes from a profile of one layer (`Stack.composed`): what the profile adds and lacks.

`profiled_forward(…)` returns the prices that differ forward, `unprofiled(…)` the ops whose gradients nobody timed. Only
what runs between the marks of embedding, layers, head and loss is put into a step: hidden states change between
(sequence, token) and (token, sequence) before and after the profiled layer, which is the whole model's stack of them;
the norm before the head and the gradient of the loss lie between no marks. Its loss takes the tokens of a sequence for
classes, so that its softmax walks the logits across rows, three times, and writes them once.
Source: VIA-Research/vTrain f8dda84 src/model/gpt_modeling.py ShardedGptTransformer.forward, src/model/gpt_model.py
ShardedGptModel.forward, src/trainer.py modify_functions, src/predictor.py parse_traces, create_nodes; read 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gnomon.graph import Block, Op, Setting, nbytes
from gnomon.hardware import Device
from gnomon.prices.curves import Curves
from gnomon.prices.kernels import FREE, OpPrice
from gnomon.prices.stream import stream_seconds

TURNED = ":turned"
"""Of a layer's first path: the entry of its two copies between the orders of its dims."""

LOSS_KERNELS = 3
"""Softmax, the loss of each token, their mean."""


def unprofiled(op: Op, block: Block) -> bool:
    """Whether no mark of the profile is around an op: the norm before a head."""
    return op.does == "normalises" and _is_head(block)


def profiled_forward(
    block: Block, setting: Callable[[str], Setting], device: Device, curves: Curves
) -> dict[str, OpPrice]:
    """Path -> price of what is not as in a layer that is trained."""
    if _is_head(block):
        return {
            op.path: FREE if unprofiled(op, block) else _loss(op, block, setting(op.path), device, curves)
            for op in block.ops
            if op.does in ("normalises", "compares labels")
        }
    first = block.ops[0].path
    sizes, dtypes = setting(first).sizes, setting(first).dtypes
    if not any(op.does in ("attends", "weighs") for op in block.ops) or np.max(sizes["batch"]) == 1:
        return {}  # one sequence lies alike either way
    hidden = nbytes(block.tensor(block.inputs[0]), sizes, dtypes)
    seconds = stream_seconds(2 * hidden, 2 * hidden, device, curves, kernels=2)
    return {first + TURNED: OpPrice(device_s=seconds, kernels=2)}


def _loss(op: Op, block: Block, setting: Setting, device: Device, curves: Curves) -> OpPrice:
    logits = nbytes(block.tensor(op.inputs[0]), setting.sizes, setting.dtypes)
    seconds = stream_seconds(3 * logits, logits, device, curves, kernels=LOSS_KERNELS, kind="reduce")
    return OpPrice(device_s=seconds, kernels=LOSS_KERNELS)


def _is_head(block: Block) -> bool:
    return block.does("compares labels")
