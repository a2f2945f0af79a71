"""Work of an op and of a step of a backward, by the rules of their kinds; they apply to lowered blocks.

What is common to all kinds is here: views are free, and gradients of several readers are added up. Leaves out totals.
"""

from __future__ import annotations

from gnomon.graph.types import Block
from gnomon.ops.op import Op
from gnomon.ops.rules import bytes_of
from gnomon.ops.work import GradOp, Setting, Work
from gnomon.tensors.dims import numel


def forward_work(op: Op, block: Block, setting: Setting) -> Work:
    """Work of running a lowered op once."""
    return op.rules.forward(op, block, setting)


def grad_work(grad: GradOp, block: Block, setting: Setting) -> Work:
    """Work of one step of the backward of a lowered block. A gradient has the dims and dtype of its tensor."""
    if grad.phase != "accumulate":
        op = block.op(grad.path)
        return op.rules.backward_work(op, block, setting, grad)
    writes = bytes_of(grad.grads_out, block, setting)
    added = numel(block.tensor(grad.path).dims, setting.sizes) * (len(grad.reads) - 1)
    return Work(vector_flops=added, read_bytes=writes * len(grad.reads), write_bytes=writes)
