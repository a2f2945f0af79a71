"""Dropout as random numbers and plain arithmetic, so that scaling, mask and what follows join a group.

`split(graph)` replaces `native_dropout` and its backward, as AOTAutograd traces dropout, by `bernoulli` and elementwise
arithmetic, all of them ATen's, which its partitioner knows. The random numbers stay PyTorch's and are drawn in the same
order: with one seed a compiled model drops what eager drops. Leaves out who draws them, which is decided later and in
our own graph (`mersenne`), and dropout on a GPU, whose numbers eager draws by another kernel.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from gnomon.compiler.node import Node

aten = torch.ops.aten


def split(graph: fx.Graph) -> int:
    """Rewrites the graph of a forward, or of forward and backward; returns how many it found."""
    found = [node for node in graph.nodes if node.target is aten.native_dropout.default and _fits(node)]
    for node in found:
        x, p = node.args[:2]
        with graph.inserting_before(node):
            # 1 - p is the probability that a number stays.
            mask = call(graph, aten.ne.Scalar, _drawn(graph, x, 1 - p), 0)
            results = (_scaled(graph, x, mask, _one_by(x.meta["val"].dtype, 1 - p)), mask)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        for user in list(mask.users):
            if user.target is aten.native_dropout_backward.default:
                grad, _, scale = user.args
                with graph.inserting_before(user):
                    user.replace_all_uses_with(_scaled(graph, grad, mask, scale))
                graph.erase_node(user)
    return len(found)


def _fits(node: Node) -> bool:
    x, p, train = (*node.args, True)[:3]
    known = isinstance(x, fx.Node) and isinstance(p, float) and 0 < p < 1 and train in (True, None)
    on_cpu = known and x.meta["val"].device.type == "cpu"
    return on_cpu and all(user.target is operator.getitem for user in node.users)


def _drawn(graph: fx.Graph, x: Node, p: float) -> Node:
    """Ones and zeros drawn as eager draws them: into memory that lies as x does, while `bernoulli` of x gives memory
    that is contiguous."""
    order = _order(x.meta["val"])
    if order == list(range(len(order))) or not _in_order_of_memory():
        return call(graph, aten.bernoulli.p, x, p)
    # Drawn over dims in the order of memory and turned back, so that numbers fall on the same elements as in eager
    # mode.
    drawn = call(graph, aten.bernoulli.p, call(graph, aten.permute.default, x, order), p)
    return call(graph, aten.permute.default, drawn, [order.index(dim) for dim in range(len(order))])


def _order(x: Any) -> list[int]:
    """Dims from the outermost in the memory of a tensor that is made like x."""
    like = torch.empty_like(x)
    strides = [stride if isinstance(stride, int) else stride.node.hint for stride in like.stride()]
    return sorted(range(like.dim()), key=lambda dim: -strides[dim])


@cache
def _in_order_of_memory() -> bool:
    """Whether ATen fills a turned tensor in the order of its memory; with MKL it does so in the order of its dims."""
    with _disable_current_modes():
        plain, turned = torch.empty(15), torch.empty(5, 3).t()
        plain.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
        turned.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
        return bool(torch.equal(plain, turned.t().flatten()))


def _scaled(graph: fx.Graph, x: Node, mask: Node, scale: float) -> Node:
    """Multiplies x by the mask, which is multiplied by a number first, as eager does it."""
    wide = call(graph, aten._to_copy.default, mask, dtype=x.meta["val"].dtype)
    return call(graph, aten.mul.Tensor, x, call(graph, aten.mul.Tensor, wide, scale))


def _one_by(dtype: torch.dtype, p: float) -> float:
    """Computes 1/p as ATen divides a mask's ones: in double for doubles, else in single precision."""
    with _disable_current_modes():
        return float(torch.ones((), dtype=dtype if dtype == torch.float64 else torch.float32) / p)


def call(graph: fx.Graph, target: Any, *args: Any, **named: Any) -> Node:
    """Adds a node for an operation, with the fake tensor that it gives."""
    node = graph.call_function(target, args, named)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args), **named)
    return node
