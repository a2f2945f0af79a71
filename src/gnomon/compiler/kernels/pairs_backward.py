"""The backward of products of chosen pairs of a sample's vectors (`pairs`) as one kernel.

AOTAutograd gives it as zeros, an `index_put` of the pairs' gradients, two batched products with what was multiplied,
and their sum, the second turned. `fuse(graph)` puts a `PairsBackward` in their place, whose kernel
(cpp/pairs_backward.cpp) has a sample's gradients in cache; where both sides of the products are the same vectors, as in
DLRM, one product is enough: with G (rows, rows) zero but for the gradients of the pairs, R (rows, depth) the right side
and L (depth, rows) the left one, turned, the gradient is G R + (L G)ᵀ, which is (G + Gᵀ) R where L is Rᵀ. It is tried
like any group. Float32 and bfloat16 on a CPU. Leaves out products of two
different sets, whose gradients are not added to each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.kernels.pairs import LARGEST, PARALLEL, SAME, WHOLE, itself, value_of
from gnomon.compiler.node import Node
from gnomon.compiler.tune.tried import TriedKernel, text_of

aten = torch.ops.aten
TURNS: dict[Any, tuple[tuple[Any, ...], ...]] = {
    aten.transpose.int: ((1, 2), (2, 1), (-1, -2), (-2, -1)),
    aten.permute.default: (([0, 2, 1],),),
}
"""What exchanges rows and columns of every sample's matrix, with its arguments."""
ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.full.default)
ERASED = {aten.add.Tensor, aten.bmm.default, aten.index_put.default, *TURNS, *SAME, *ZEROS}
FORMULA = CPP / "pairs_backward.cpp"


class _PairsBackwardCall(ctypes.Structure):
    """The struct `Call` of cpp/pairs_backward.cpp, field by field."""

    _fields_ = [
        (name, ctypes.c_void_p if name in ("grad", "i", "j", "right", "left", "out") else ctypes.c_int64)
        for name in (
            "batch rows depth count parallel grad grad_b grad_k i i_step j j_step right right_b right_r "
            "left left_b left_r out"
        ).split()
    ]


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(text_of(FORMULA, dtype), ctypes.POINTER(_PairsBackwardCall))


class PairsBackward(TriedKernel):
    """Computes the backward of `Pairs`. From the pairs' gradients (batch, pairs), the pairs' rows and columns, the
    right side's vectors (batch, rows, depth) and the left side's, turned (batch, depth, rows): the vectors' gradient
    (batch, rows, depth)."""

    def __init__(self, fixed: bool, dtype: torch.dtype = torch.float32) -> None:
        self.text = text_of(FORMULA, dtype)
        super().__init__("pairs_backward", self.text, fixed)

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel on these tensors, or PyTorch's operations where it cannot."""
        grad, i, j, right, lhs = args
        lhs, function = lhs.mT, kernel(grad.dtype)
        (batch, rows, depth), count = right.shape, i.shape[0]
        if function is None or not batch:
            return self.aten(*args)
        right, lhs = (one if one.stride(2) == 1 else one.contiguous() for one in (right, lhs))
        out = torch.empty((batch, rows, depth), dtype=grad.dtype)
        call = _PairsBackwardCall(
            batch=batch, rows=rows, depth=depth, count=count,
            parallel=int(torch.get_num_threads() > 1 and batch * rows * rows * depth >= PARALLEL),
            grad=grad.data_ptr(), i=i.data_ptr(), i_step=i.stride(0), j=j.data_ptr(), j_step=j.stride(0),
            right=right.data_ptr(), left=lhs.data_ptr(), out=out.data_ptr(),
        )  # fmt: skip
        call.grad_b, call.grad_k = grad.stride()
        call.right_b, call.right_r = right.stride()[:2]
        call.left_b, call.left_r = lhs.stride()[:2]
        return self.aten(*args) if function(call) else out

    def aten(self, *args: Tensor) -> Tensor:
        """Runs PyTorch's operations, one after another."""
        grad, i, j, right, lhs = args
        rows = right.shape[1]
        zeros = grad.new_zeros((grad.shape[0], rows, rows))
        # Accumulated, as one pair may stand in the list several times.
        whole = aten.index_put.default(zeros, [None, i, j], grad, True)
        return torch.bmm(whole, right) + torch.bmm(lhs, whole).mT


def fuse(graph: fx.Graph) -> list[PairsBackward]:
    """Puts a `PairsBackward` in place of each sum of both sides' gradients; returns them."""
    calls = []
    for node in list(graph.nodes):
        tensors = _found(node)
        if tensors is None:
            continue
        fixed = all(isinstance(size, int) for one in tensors for size in one.meta["val"].shape)
        call = PairsBackward(fixed, node.meta["val"].dtype)
        with graph.inserting_before(node):
            new = graph.call_function(call, tuple(tensors))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        _erase(graph, node)
        calls.append(call)
    return calls


def _erase(graph: fx.Graph, node: Node) -> None:
    """Removes what nobody reads any more."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.target in ERASED and not one.users:
            above = one.all_input_nodes
            graph.erase_node(one)
            waiting += above


def _found(node: Node) -> list[Node] | None:
    """(gradients, rows, columns, right, left) of a sum of two products with the same gradients of pairs."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 or value_of(node, 3) is None:
        return None
    for one, other in (node.args, node.args[::-1]):
        turned = _turned(other)
        plain, second = _batched_matmul(one), None if turned is None else _batched_matmul(turned)
        if plain is None or second is None:
            continue
        whole, right = plain
        lhs, same = second
        pairs = _put(whole)
        if pairs is None or same is not whole:
            continue
        values = [value_of(side, 3) for side in (right, lhs)]
        if any(value is None for value in values) or values[0].shape != values[1].mT.shape:  # type: ignore[union-attr]
            continue
        batch, rows, depth = values[0].shape  # type: ignore[union-attr]
        if isinstance(depth, int) and isinstance(rows, int) and 0 < rows <= LARGEST and depth > 0:
            return [*pairs, right, lhs] if node.meta["val"].is_contiguous() else None
    return None


def _batched_matmul(node: Any) -> tuple[Node, Node] | None:
    """Both sides of a batched product that one node reads, behind views that change nothing."""
    node = _alone(node)
    if node is None or node.target is not aten.bmm.default or len(node.users) != 1:
        return None
    one, other = (itself(side) for side in node.args)
    return one, other


def _alone(node: Any) -> Node | None:
    """A node behind views that change nothing, where nobody else reads it."""
    while isinstance(node, fx.Node) and len(node.users) == 1 and node.target in SAME:
        here, inner = value_of(node, 3), value_of(node.args[0], 3)
        if here is None or inner is None or here.shape != inner.shape:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _turned(node: Any) -> Node | None:
    node = _alone(node)
    if node is None or len(node.users) != 1 or tuple(node.args[1:]) not in TURNS.get(node.target, ()):
        return None
    return node.args[0]


def _put(node: Node) -> list[Node] | None:
    """(gradients, rows, columns) of gradients that are put into zeros."""
    if node.target is not aten.index_put.default or node.kwargs or len(node.args) != 4 or node.args[3] is not True:
        return None
    zeros, where, grad, _ = node.args
    # `full` is of any number, the others of zeros.
    zeroed = zeros.target in ZEROS and (zeros.target is not aten.full.default or zeros.args[1] == 0)
    if not zeroed or len(where) != 3 or where[0] is not None or value_of(grad, 2) is None:
        return None
    i, j = where[1:]
    if any(value_of(one, 1, WHOLE) is None for one in (i, j)):
        return None
    shape, put = grad.meta["val"].shape, node.meta["val"].shape
    fits = put[1] == put[2] and put[0] == shape[0] and i.meta["val"].shape == j.meta["val"].shape == shape[1:]
    return [grad, i, j] if fits else None
