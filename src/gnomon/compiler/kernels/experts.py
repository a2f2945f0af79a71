"""Products of experts: `aten._grouped_mm` by a kernel that takes each expert's rows where they lie.

A router sorts a step's tokens by expert and copies them into that order, and PyTorch multiplies stretches of the copy
one after another. `fuse(graph)` puts a `Grouped` in place of the product and of the copy that it alone reads: rows are
gathered as the kernel (`gathered`) packs its tiles, by places and ends that are data of the call. It is tried like any
operation. Bfloat16, which is all that PyTorch's takes, on processors with its instructions; weights as they lie, k
beside each other. Leaves out gradients (products of two grouped sides) and scaled products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.kernels import gathered
from gnomon.compiler.node import Node
from gnomon.compiler.tune.tried import TriedKernel

aten = torch.ops.aten
PRODUCTS = (aten._grouped_mm.default,)


class Grouped(TriedKernel):
    """Rows of x (any, k), the weights (experts, k, n) and the ends of the experts' rows, int32 (experts,), and the
    place of each row in x where they are gathered: (rows, n)."""

    checked = False
    """Ends and places are of the router's making; others would be refused."""

    def __init__(self, dtype: torch.dtype, fixed: bool, gathers: bool) -> None:
        self.text = gathered.text(dtype)
        super().__init__("experts", f"{self.text}// experts {gathers}", fixed)
        self.gathers = gathers

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel on these tensors, or PyTorch where it cannot, as for an end or a place that is not there."""
        x, weights, ends, *places = args
        # The kernel reads weights as (experts, n, k), a view of (experts, k, n).
        out = gathered.gathered_matmul(x, weights.transpose(1, 2), ends=ends, rows=places[0] if places else None)
        return self.aten(*args) if out is None else out

    def aten(self, *args: Tensor) -> Tensor:
        """Computes the same by PyTorch."""
        x, weights, ends, *places = args
        rows = aten.index.Tensor(x, [places[0]]) if places else x
        out: Tensor = torch._grouped_mm(rows, weights, offs=ends)
        return out


def fuse(graph: fx.Graph) -> list[Grouped]:
    """Puts our operation in place of each product of experts that the kernel knows; returns them."""
    calls: list[Grouped] = []
    for node in list(graph.nodes):
        tensors = _tensors(node)
        if tensors is None:
            continue
        x, weights, ends = tensors
        copy = _copy(x)
        inputs = [x, weights, ends] if copy is None else [copy[0], weights, ends, copy[1]]
        values: list[Any] = [one.meta["val"] for one in inputs]
        fixed = all(isinstance(size, int) for one in values for size in one.shape)
        call = Grouped(values[0].dtype, fixed, copy is not None)
        with graph.inserting_before(node):
            new = graph.call_function(call, tuple(inputs))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        for one in (node, *([] if copy is None else [x])):
            graph.erase_node(one)
        calls.append(call)
    return calls


def _tensors(node: Node) -> tuple[Node, Node, Node] | None:
    """(rows, weights, ends) of a product that the kernel knows."""
    if node.op != "call_function" or node.target not in PRODUCTS or len(node.args) > 3:
        return None
    named = dict(zip(("self", "mat2", "offs"), node.args, strict=False)) | dict(node.kwargs)
    # Without ends there are no groups of rows: that is a batched product.
    if named.get("bias") is not None or named.get("out_dtype") is not None or named.get("offs") is None:
        return None
    tensors = named["self"], named["mat2"], named["offs"]
    values = [_plain(one) for one in tensors]
    if any(value is None for value in values):
        return None
    x, weights, ends = values
    if (x.dim(), weights.dim(), ends.dim()) != (2, 3, 1) or ends.dtype != torch.int32:  # type: ignore[union-attr]
        return None
    fits = x.dtype == weights.dtype and x.dtype in gathered.dtypes()  # type: ignore[union-attr]
    return tensors if fits else None


def _copy(rows: Node) -> tuple[Node, Node] | None:
    """(tensor, places) that rows were copied from, where nobody else reads the copy."""
    if rows.op != "call_function" or rows.target is not aten.index.Tensor or len(rows.users) != 1:
        return None
    x, places = rows.args
    if len(places) != 1 or places[0] is None:
        return None
    values = [_plain(one) for one in (x, places[0])]
    if any(value is None for value in values) or values[0].dim() != 2:  # type: ignore[union-attr]
        return None
    return (x, places[0]) if (values[1].dtype, values[1].dim()) == (torch.int64, 1) else None  # type: ignore[union-attr]


def _plain(node: Any) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return None
    return None if value.is_neg() else value
