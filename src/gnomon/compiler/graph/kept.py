"""What the forward saves so that the backward compares a row's maximum with the elements that it was chosen from.

The gradient of a row's maximum asks which elements are equal to it; that of `logsumexp` raises e to each element less
the row's number. The forward saves that number, and AOTAutograd's partitioner may have the backward recompute the
elements: by a kernel where the forward's were ATen's, or the other way round. Their last bits differ (a GELU, an
exponential, a sum), so no element is the maximum and its gradient is 0 / 0, or the exponential of what should be 0 is
infinite. `keep(graph)` marks, in the joint graph before it is partitioned, the operations nearest to such a choice
whose bits differ: their results are saved, and all between them and the choice is recomputed to the same bits.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import get_default_op_list, must_recompute
from torch.utils.checkpoint import CheckpointPolicy

from gnomon.compiler.node import Node
from gnomon.compiler.rules import RULES
from gnomon.compiler.rules.join import JOINS
from gnomon.compiler.rules.lookup import RULES as LOOKUPS
from gnomon.compiler.rules.views import VIEWS

aten = torch.ops.aten
CHOICES = frozenset({
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.max.dim, aten.min.dim,
    aten.aminmax.default, aten.logsumexp.default, aten.logcumsumexp.default, aten.linalg_vector_norm.default,
    aten.topk.default, aten.kthvalue.default, aten.sort.default, aten.sort.stable, aten.median.default, aten.median.dim,
    aten.nanmedian.default, aten.nanmedian.dim, aten.mode.default, aten.cummax.default, aten.cummin.default,
})  # fmt: skip
"""Operations that give one of the numbers of a row, or one beyond which none lies."""

SAME_BITS = frozenset({
    aten.neg.default, aten.abs.default, aten.sign.default, aten.square.default, aten.sqrt.default,
    aten.reciprocal.default, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor,
    aten.rsub.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.addcmul.default,
    aten.addcdiv.default, aten.lerp.Scalar, aten.lerp.Tensor, aten.floor.default, aten.ceil.default, aten.trunc.default,
    aten.round.default, aten.relu.default, aten.leaky_relu.default, aten.hardtanh.default, aten.clamp.default,
    aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default, aten.maximum.default, aten.minimum.default,
    aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.clone.default, aten._to_copy.default,
    torch.ops.prims.convert_element_type.default, aten.logical_and.default, aten.logical_or.default,
    aten.logical_xor.default, aten.logical_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor, aten.bitwise_not.default, aten.isnan.default, aten.isinf.default,
    *(getattr(getattr(aten, op), of) for op in ("lt", "gt", "le", "ge", "eq", "ne") for of in ("Tensor", "Scalar")),
})  # fmt: skip
"""Pointwise operations whose results our kernels and ATen's round to the same bits."""
PASSED = frozenset({
    *SAME_BITS, *VIEWS, *JOINS, *LOOKUPS, operator.getitem, aten.amax.default, aten.amin.default, aten.any.default,
    aten.any.dim, aten.all.default, aten.all.dim, aten.full.default, aten.full_like.default, aten.arange.default,
})  # fmt: skip
"""Of the operations that have a rule, those that give the same bits of the same operands."""


def keep(graph: fx.Graph) -> int:
    """Marks what the forward saves, in the joint graph of forward and backward; returns how many nodes it marked."""
    never_again = get_default_op_list()
    waiting = [node for choice in graph.nodes if chooses(choice) for node in choice.all_input_nodes[:1]]
    seen: set[Node] = set()
    marked = 0
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in RULES and not same_bits(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            marked += 1
        elif not (never_again.is_compute_intensive(node) or never_again.is_random(node)):
            waiting += node.all_input_nodes
    return marked


def chooses(node: Node) -> bool:
    """Whether an operation is one of CHOICES whose result the forward saves; a norm is where it is the largest size, or
    the least."""
    # A choice that is recomputed itself (torch.utils.checkpoint) is of recomputed elements.
    if must_recompute(node):
        return False
    order = node.args[1] if node.target is aten.linalg_vector_norm.default and len(node.args) > 1 else math.inf
    return node.target in CHOICES and order in (math.inf, -math.inf)


def same_bits(node: Node) -> bool:
    """Whether a kernel and ATen give the same bits of the same operands."""
    if node.target not in PASSED:
        return False
    value: Any = node.meta.get("val")
    # Of bfloat16 ATen rounds the product with alpha once more where its vectors end.
    narrow = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return not narrow or (node.kwargs.get("alpha", 1) == 1 and len(node.args) < 3 or node.target not in SCALED)


SCALED = frozenset({
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
})  # fmt: skip
"""What takes an `alpha`."""
