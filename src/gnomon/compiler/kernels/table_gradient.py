"""Gradients of embedding tables: one kernel that writes a table's zeros past the caches and adds what was looked up.

A dense gradient is as large as its table, most of it zeros. ATen writes them through the caches, which reads each
line first. A table of MAPPED bytes and more is laid in fresh memory of the system (`large_pages`), which is 0
already: rows that were not looked up are not written, and take no memory until somebody writes to them. `fuse(graph)`
puts a `TableGradient` in place of each `embedding_dense_backward` that is large enough; it is tried like any group.
Rows are added in the order of the indices, so sums are the same with any number of threads. Float32 and bfloat16 on a
CPU. Leaves out gradients that are scaled by how often a row was looked up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.kernels.large_pages import zeros_of_system
from gnomon.compiler.node import Node
from gnomon.compiler.tune.tried import MEMORY, TriedKernel, text_of

aten = torch.ops.aten
LEAST = 1 << 18
"""Numbers of a table from which on it is worth a call: 1 MiB of float32."""
MAPPED = 32 << 20
"""Bytes from which on the system is asked for memory that is 0. glibc gives so much back when it is freed, so it is new
each time anyway: 94 MB, written by ATen, took 49 ms of page faults and zeros a call, and 0.9 so; with a walk that reads
all of it 56 and 7, and one that writes all of it 60 and 19 (one thread, an AMD EPYC of the fourth generation). What is
smaller is mostly given again, in caches: 5 MB took 0.8 ms, and 1.6 so where all was read."""
FORMULA = CPP / "table_gradient.cpp"


class _TableGradientCall(ctypes.Structure):
    """The struct `Call` of cpp/table_gradient.cpp, field by field."""

    _fields_ = [
        (name, ctypes.c_void_p if name in ("index", "grad", "out") else ctypes.c_int64)
        for name in "rows width count skipped wide parallel zeroed index index_step grad grad_row out".split()
    ]


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(text_of(FORMULA, dtype), ctypes.POINTER(_TableGradientCall))


class TableGradient(TriedKernel):
    """Backward of a lookup: from the gradient of its result (..., width) and the indices (...), the table's (rows,
    width)."""

    def __init__(self, rows: int, skipped: int, fixed: bool, dtype: torch.dtype = torch.float32) -> None:
        """Is not tried yet. skipped: the row whose gradient stays 0, -1 where there is none."""
        self.text = text_of(FORMULA, dtype)
        super().__init__("table_gradient", f"{self.text}// {rows} {skipped}", fixed)
        self.rows, self.skipped = rows, skipped

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel on these tensors, or PyTorch's operation where there is none."""
        grad, indices = args
        function = kernel(grad.dtype)
        width = grad.shape[-1]
        if function is None:
            return self.aten(grad, indices)
        grad, indices = grad.reshape(-1, width), indices.reshape(-1)
        # A row is added as a run of memory. A gradient that was expanded has strides of 0.
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        mapped = self.rows * width * grad.dtype.itemsize >= MAPPED
        zeros = zeros_of_system((self.rows, width), grad.dtype) if mapped else None
        out = torch.empty((self.rows, width), dtype=grad.dtype) if zeros is None else zeros
        call = _TableGradientCall(
            rows=self.rows, width=width, count=indices.shape[0], skipped=self.skipped,
            wide=int(indices.dtype == torch.int64), parallel=int(torch.get_num_threads() > 1),
            zeroed=int(zeros is not None), index=indices.data_ptr(), index_step=indices.stride(0),
            grad=grad.data_ptr(), grad_row=grad.stride(0),
            out=out.data_ptr(),
        )  # fmt: skip
        function(call)
        return out

    def aten(self, *args: Tensor) -> Tensor:
        """Runs PyTorch's operation on the same tensors."""
        grad, indices = args
        out: Tensor = aten.embedding_dense_backward.default(grad, indices, self.rows, self.skipped, False)
        return out


def fuse(graph: fx.Graph) -> list[TableGradient]:
    """Puts a `TableGradient` in place of each gradient of a table; returns them."""
    calls = []
    for node in list(graph.nodes):
        if not _taken(node):
            continue
        grad, indices, rows, skipped, _ = node.args
        metas = [grad.meta["val"], indices.meta["val"]]
        fixed = all(isinstance(size, int) for one in metas for size in one.shape)
        call = TableGradient(rows, skipped, fixed, grad.meta["val"].dtype)
        with graph.inserting_before(node):
            new = graph.call_function(call, (grad, indices))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        calls.append(call)
    return calls


def _taken(node: Node) -> bool:
    if node.target is not aten.embedding_dense_backward.default or node.kwargs or len(node.args) != 5:
        return False
    out, grad, indices = (one.meta.get("val") for one in (node, *node.args[:2]))
    if any(one is None or one.device.type != "cpu" or one.layout != torch.strided for one in (out, grad, indices)):
        return False
    if grad.dtype not in MEMORY or grad.is_neg() or indices.dtype not in (torch.int64, torch.int32):
        return False
    rows, skipped, scaled = node.args[2:]
    fixed = type(rows) is int and type(skipped) is int and all(isinstance(size, int) for size in out.shape)
    return fixed and scaled is False and out.numel() >= LEAST
