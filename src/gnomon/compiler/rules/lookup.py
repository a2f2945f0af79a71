"""Rows of a table chosen by numbers: `embedding`, and positions made by `arange`.

A row is read where it lies, inside whatever consumes it. A number outside the table is reported by the group
and ATen gives its error. Leaves out gradients of tables (scatter-add), which stay ATen's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnomon.compiler.tiles.body import Input, Tensor, UnfitError, kind_of
from gnomon.compiler.tiles.lowering import Lowering
from gnomon.compiler.tiles.sizes import equal, sizes_of
from gnomon.compiler.tiles.values import Value, index

aten = torch.ops.aten


def embedding(node: Lowering, weight: Any, indices: Any, *_: Any, **__: Any) -> Tensor:
    if node.made(weight) is not None:
        raise UnfitError("a table made in the group")
    table = node.external(weight)
    shape = sizes_of(node.out.shape)
    rank = len(shape) - 1
    chosen = node.made(indices)
    # The result has the dims of the indices, then the row's own.
    known: list[Any] = [*(chosen.dims if chosen is not None else [None] * rank), None]
    dims = node.body.place(shape, [dim or None for dim in known])
    if len(dims[-1]) != 1:
        raise UnfitError("rows on several axes")
    at = node.operand_on(indices, dims[:-1]).to("L")
    if dims[-1][0] in at.axes:
        raise UnfitError("an index along the row")
    slot = node.body.slot(
        Input(
            node=table.node,
            dtype=table.dtype,
            strides={} if equal(table.strides[1], 0) else {dims[-1][0]: table.strides[1]},
            offset=table.offset,
            index=at.id,
            index_stride=table.strides[0],
            rows=table.sizes[0],
        )
    )
    value = node.body.emit("take", at.id, kind=kind_of(table.dtype), axes={*at.axes, *dims[-1]}, attr=slot)
    return node.result(Value(node.body, value), dims)


def arange(node: Lowering, *_: Any, **__: Any) -> Tensor:
    bounds: tuple[Any, ...] = node.node.args if node.node.target is aten.arange.start_step else (0, 0)
    start, step = bounds[0], bounds[2] if len(bounds) > 2 else 1
    if not (isinstance(start, int) and isinstance(step, int)) or node.out.dtype != torch.int64:
        raise UnfitError("positions that are not whole")
    dims = node.dims_of(sizes_of(node.out.shape), [])
    if len(dims) != 1 or len(dims[0]) != 1:
        raise UnfitError("positions on several axes")
    return node.result(index(node.body, dims[0][0]) * step + start, dims)


RULES: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: embedding,
    aten.arange.default: arange,
    aten.arange.start_step: arange,
}
