"""Totals of one block, for tests that hold single blocks against closed forms; the package adds up whole graphs."""

from __future__ import annotations

from gnomon.graph import (
    BackwardBlock,
    Block,
    Kernels,
    Number,
    Policy,
    Setting,
    Work,
    backward,
    forward_work,
    nbytes,
    saved,
)
from gnomon.graph.totals import BlockWork, backward_work


def block_work(block: Block, kernels: Kernels, setting: Setting, *, no_grad_inputs: tuple[str, ...] = ()) -> BlockWork:
    """Work of one run of a block and of its backward."""
    return backward_work(backward(block, kernels, setting.dtypes, no_grad_inputs=no_grad_inputs), setting)


def saved_bytes(back: BackwardBlock, setting: Setting, policy: Policy) -> Number:
    """Bytes that one run of a block keeps in device memory until its backward: inputs, internals, and outputs it needs.

    Offloaded tensors are not counted; `saved` lists them.
    """
    total: Number = 0
    for entry in saved(back, policy, setting.dtypes).on_device:
        total = total + nbytes(entry.tensor, setting.sizes, setting.dtypes)
    return total


def recompute_work(back: BackwardBlock, setting: Setting, policy: Policy) -> Work:
    """Work of making again what `policy` marks recompute: only the ops that it takes.

    A checkpointed region of a framework may run more: Megatron-LM runs the whole region again, its last op included.
    """
    again = set(saved(back, policy, setting.dtypes).recompute_ops)
    return sum((forward_work(op, back.forward, setting) for op in back.forward.ops if op.path in again), Work())
