"""Products of chosen pairs of vectors, as the interactions of a recommender: one kernel for a batched product of small
matrices, the numbers of it that are looked up, and what they are joined to.

DLRM multiplies all its embeddings by each other and keeps the lower half: `bmm`, `index`, `cat`. `fuse(graph)` puts a
`Pairs` in their place, whose kernel (cpp/pairs.cpp) makes the products of a sample in the first cache and writes only
those that are asked for. It is tried like any group. An index outside is found by the kernel, and ATen gives its own
error. Float32 and bfloat16 on a CPU; gradients are of `pairs_backward`.
Source: Naumov et al., DLRM (2019).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.node import Node
from gnomon.compiler.tune.tried import MEMORY, TriedKernel, text_of

aten = torch.ops.aten
LARGEST = 128
"""Rows and columns of a sample's matrix up to which its products stay in cache."""
PARALLEL = 1 << 18
"""Products from which on threads share the samples."""
SAME = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.slice.Tensor)
"""What gives the same tensor where it gives one of the same shape."""
WHOLE = (torch.int64,)
FORMULA = CPP / "pairs.cpp"


class PairsCall(ctypes.Structure):
    """The struct `Call` of cpp/pairs.h, field by field."""

    _fields_ = [
        (name, ctypes.c_void_p if name in ("x", "y", "i", "j", "first", "out") else ctypes.c_int64)
        for name in (
            "batch rows columns depth count before parallel x x_b x_r x_d y y_b y_d y_c i i_step j j_step "
            "first first_row out"
        ).split()
    ]


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(text_of(FORMULA, dtype), ctypes.POINTER(PairsCall))


class Pairs(TriedKernel):
    """Chosen dot products of x (batch, rows, depth), y (batch, depth, columns), and the pairs' rows and columns:
    (batch, pairs), after the columns of a third tensor where there is one."""

    def __init__(self, joined: bool, fixed: bool, dtype: torch.dtype = torch.float32) -> None:
        self.text = text_of(FORMULA, dtype)
        super().__init__("pairs", f"{self.text}// {joined}", fixed)
        self.joined = joined

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel on these tensors, or PyTorch's operations where it cannot."""
        x, y, i, j, *first = args
        function = kernel(x.dtype)
        (batch, rows, depth), columns, count = x.shape, y.shape[2], i.shape[0]
        before = first[0].shape[1] if first else 0
        if function is None or not (first == [] or first[0].stride(1) == 1 or before == 1) or not batch:
            return self.aten(*args)
        out = torch.empty((batch, before + count), dtype=x.dtype)
        call = PairsCall(
            batch=batch, rows=rows, columns=columns, depth=depth, count=count, before=before,
            parallel=int(torch.get_num_threads() > 1 and batch * rows * columns * depth >= PARALLEL),
            x=x.data_ptr(), y=y.data_ptr(), i=i.data_ptr(), i_step=i.stride(0), j=j.data_ptr(), j_step=j.stride(0),
            first=first[0].data_ptr() if first else None, first_row=first[0].stride(0) if first else 0,
            out=out.data_ptr(),
        )  # fmt: skip
        call.x_b, call.x_r, call.x_d = x.stride()
        call.y_b, call.y_d, call.y_c = y.stride()
        return self.aten(*args) if function(call) else out

    def aten(self, *args: Tensor) -> Tensor:
        """Runs PyTorch's operations, one after another."""
        x, y, i, j, *first = args
        out: Tensor = aten.index.Tensor(torch.bmm(x, y), [None, i, j])
        return torch.cat([*first, out], 1) if first else out


def fuse(graph: fx.Graph) -> list[Pairs]:
    """Puts a `Pairs` in place of each product that is only looked up; returns them."""
    calls = []
    for node in list(graph.nodes):
        found = _pairs(node)
        if found is None:
            continue
        tensors, gone = found
        user = next(iter(node.users)) if len(node.users) == 1 else None
        first = None if user is None else _joined(user, node)
        last: Any = node if first is None else user
        fixed = all(isinstance(size, int) for one in tensors for size in one.meta["val"].shape)
        call = Pairs(first is not None, fixed, node.meta["val"].dtype)
        with graph.inserting_before(last):
            new = graph.call_function(call, (*tensors, *([] if first is None else [first])))
        new.meta.update(last.meta)
        last.replace_all_uses_with(new)
        for one in [*([] if first is None else [last]), *gone]:
            graph.erase_node(one)
        calls.append(call)
    return calls


def value_of(node: Any, dims: int, dtypes: Container[torch.dtype] = MEMORY) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return None
    return value if value.dtype in dtypes and value.dim() == dims and not value.is_neg() else None


def _pairs(node: Node) -> tuple[list[Node], list[Node]] | None:
    """(x, y, rows, columns), and the nodes that are gone, the last first."""
    if node.target is not aten.index.Tensor or node.kwargs or len(node.args[1]) != 3 or node.args[1][0] is not None:
        return None
    source: Any = node.args[0]
    _, i, j = node.args[1]
    gone = [node]
    while isinstance(source, fx.Node) and len(source.users) == 1:
        gone.append(source)
        # The product itself, and every view on the way to it, is read by nobody else.
        if source.target is aten.bmm.default:
            break
        inner: Any = source.args[0] if source.target in SAME else None
        if inner is None or value_of(inner, 3) is None or inner.meta["val"].shape != source.meta["val"].shape:
            return None
        source = inner
    else:
        return None
    x, y = (itself(part) for part in source.args)
    one, other = value_of(x, 3), value_of(y, 3)
    rows, columns = value_of(i, 1, WHOLE), value_of(j, 1, WHOLE)
    if one is None or other is None or rows is None or columns is None:
        return None
    sizes = [one.shape[1], one.shape[2], other.shape[2], rows.shape[0], columns.shape[0]]
    fixed = all(isinstance(size, int) and size > 0 for size in sizes)
    if not fixed or max(sizes[0], sizes[2]) > LARGEST or sizes[3] != sizes[4]:
        return None
    return [x, y, i, j], gone


def itself(node: Any) -> Any:
    """The tensor that a node is, behind views that change nothing."""
    while isinstance(node, fx.Node) and node.target in (*SAME, aten.expand.default):
        here, inner = value_of(node, 3), value_of(node.args[0], 3)
        if here is None or inner is None or here.shape != inner.shape or here.stride() != inner.stride():
            break
        node = node.args[0]
    return node


def _joined(node: Any, part: Any) -> Any:
    """What is joined before `part` by a `cat` of the two."""
    if node.target is not aten.cat.default or node.kwargs or len(node.args) != 2 or node.args[1] not in (1, -1):
        return None
    parts: Any = node.args[0]
    if len(parts) != 2 or parts[1] is not part or parts[0] is part:
        return None
    if value_of(parts[0], 2, (part.meta["val"].dtype,)) is None:
        return None
    return parts[0]
