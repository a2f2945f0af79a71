"""A log-softmax of which only a loss is asked: forward and backward share two numbers a row, not an array of its size.

AOTAutograd's partitioner keeps the result of `_log_softmax` for the backward. `split(graph)` writes it and its
backward, before the two are divided, as a maximum, sums and arithmetic, which the partitioner may do twice: it keeps
the row's numbers, and the kernel that needs the result makes it again from the logits. Leaves out a log-softmax that
anything but a loss reads, more than two dims, and GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from gnomon.compiler.graph.dropout import call
from gnomon.compiler.node import Node

aten = torch.ops.aten
LOSS, LOSS_BACKWARD, BACKWARD = (
    aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten._log_softmax_backward_data.default,
)  # fmt: skip
SAME = (aten.detach.default, aten.alias.default)


def split(graph: fx.Graph) -> int:
    """Rewrites the graph of forward and backward; returns how many it found."""
    found = [node for node in graph.nodes if node.target is aten._log_softmax.default and _fits(node)]
    for node in found:
        x = node.args[0]
        dtype = x.meta["val"].dtype
        with graph.inserting_before(node):
            wide = _wide(graph, x)
            # The largest is taken out first, so that no exponential overflows.
            shifted = call(graph, aten.sub.Tensor, wide, call(graph, aten.amax.default, wide, [-1], True))
            total = call(graph, aten.sum.dim_IntList, call(graph, aten.exp.default, shifted), [-1], True)
            difference = _narrow(
                graph, call(graph, aten.sub.Tensor, shifted, call(graph, aten.log.default, total)), dtype
            )
        for reader in list(_readers(node)):
            if reader.target is LOSS_BACKWARD:  # it asks for the shape alone
                reader.args = (reader.args[0], x, *reader.args[2:])
            elif reader.target is BACKWARD:
                with graph.inserting_before(reader):
                    reader.replace_all_uses_with(_backward(graph, reader.args[0], difference, dtype))
                graph.erase_node(reader)
        node.replace_all_uses_with(difference)
        graph.erase_node(node)
    return len(found)


def _backward(graph: fx.Graph, grad: Node, y: Node, dtype: torch.dtype) -> Node:
    g = _wide(graph, grad)
    total = call(graph, aten.sum.dim_IntList, g, [-1], True)
    # dx = g - softmax(x) sum(g), where softmax(x) is the exponential of the result.
    share = call(graph, aten.mul.Tensor, call(graph, aten.exp.default, _wide(graph, y)), total)
    return _narrow(graph, call(graph, aten.sub.Tensor, g, share), dtype)


def _wide(graph: fx.Graph, x: Node) -> Node:
    """Arithmetic is in floats, as in ATen's own kernels."""
    return _narrow(graph, x, torch.float32)


def _narrow(graph: fx.Graph, x: Node, dtype: torch.dtype) -> Node:
    return x if x.meta["val"].dtype == dtype else call(graph, aten._to_copy.default, x, dtype=dtype)


def _fits(node: Node) -> bool:
    x, dim, half_to_float = node.args
    tensor = x.meta["val"]
    last = tensor.dim() == 2 and dim in (-1, 1) and not half_to_float and tensor.shape[1] != 0
    kind = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)
    readers: list[Any] = [reader.target for reader in _readers(node)]
    return last and kind and BACKWARD in readers and set(readers) <= {LOSS, LOSS_BACKWARD, BACKWARD}


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.target in SAME:
            yield from _readers(user)
        else:
            yield user
