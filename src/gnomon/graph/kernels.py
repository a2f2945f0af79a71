"""`lower`: a block in the ops that kernels run, for one choice of kernels; each kind says what it is in steps.

A fused kernel keeps its kind and gains side outputs (a log-sum-exp, a mask); an unfused one becomes the steps that
eager code runs. What backward needs is then among the inputs and outputs of each op, by name. Leaves out which
implementation is fastest, tiles, launch costs (room `prices`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gnomon.graph.types import Block
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import Steps, attrs


@lru_cache(maxsize=256)
def lower(block: Block, kernels: Kernels) -> Block:
    """The same block in the ops that kernels run. Idempotent on ops that have no choice."""
    weighted = _weighted(block) if kernels.expert_weights == "activation" else frozenset()
    low = Steps(block.name, block, block.tensors, weighted)
    for op in block.ops:
        done = len(low.ops)
        op.rules.lower(op, low, kernels)
        # Of an op through which no gradient flows none of its steps has one.
        if op.attr("no_grad", False):
            low.ops[done:] = [
                replace(part, attrs=attrs(**dict(part.attrs) | {"no_grad": True})) for part in low.ops[done:]
            ]
    return replace(block, tensors=tuple(low.tensors), ops=tuple(low.ops))


def _weighted(block: Block) -> frozenset[str]:
    """Paths of the activations whose matmuls are added up as rows of experts."""
    made_by = {name: op for op in block.ops for name in op.outputs}
    ends = (op.inputs[0] for op in block.ops if op.does == "combines")
    last = [made_by[name] for name in ends if name in made_by]
    return frozenset(made_by[op.inputs[0]].path for op in last if op.inputs[0] in made_by)
