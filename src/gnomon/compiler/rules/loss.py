"""Losses: negative log-likelihood and mean squared error, with their backward.

The element that a target names is a sum of a row in which all others are 0, so that a row of log-softmax and
its loss are one pass. Leaves out class dims other than the last and targets outside the classes, which eager
refuses: there the group reports it and ATen gives its error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnomon.compiler.tiles.body import Tensor, UnfitError
from gnomon.compiler.tiles.lowering import Lowering, axes_in
from gnomon.compiler.tiles.sizes import sizes_of
from gnomon.compiler.tiles.values import Value, is_at, where

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def _classes(node: Lowering, self: Any, target: Any) -> tuple[Value, Any, Value, Value]:
    """(x, its dims, where a class is the row's target, the target)."""
    x, dims = node.whole(self)
    if len(dims) != 2 or len(dims[1]) != 1:
        raise UnfitError("classes that are not the last of two dims")
    classes = node.operand_on(target, (dims[0],))
    return x, dims, is_at(node.body, dims[1][0], classes), classes


def _weight(node: Lowering, weight: Any, dims: Any, hit: Value) -> Value | None:
    if weight is None:
        return None
    return where(hit, node.operand_on(weight, (dims[1],)), 0.0).sum(axes_in(dims, [1]))


def _checked(node: Lowering, classes: Value, ignore_index: int, dims: Any) -> Value:
    """Says which rows count; targets that are no class are reported."""
    counted = classes.ne(ignore_index)
    count = Value(node.body, node.body.extent(dims[1], "L"))
    node.body.emit("check", (classes.ge(0) & classes.lt(count) | ~counted).id, kind="B")
    return counted


def nll_loss(node: Lowering, self: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    x, dims, hit, classes = _classes(node, self, target)
    counted = _checked(node, classes, ignore_index, dims)
    scale = _weight(node, weight, dims, hit)
    # A row has one hit, so the sum picks its number without a gather; and by `where`, as 0 times an infinity is NaN.
    picked = -where(hit, x, 0.0).sum(axes_in(dims, [1]))
    loss = where(counted, picked if scale is None else picked * scale, 0.0)
    if reduction == NONE:
        zero = Value(node.body, node.body.const(0.0, x.kind))
        return node.result(loss, (dims[0],), node.out[0]), node.result(zero, (), node.out[1])
    rows = dims[0]
    total = loss.sum(rows)
    # What the mean divides by, which backward reads again (ATen's total_weight): rows that count, by the weights of
    # their classes.
    count = (counted.to(x.kind) if scale is None else where(counted, scale, 0.0)).sum(rows)
    loss_value = total / count if reduction == MEAN else total
    return node.result(loss_value, (), node.out[0]), node.result(count, (), node.out[1])


def nll_loss_backward(
    node: Lowering,
    grad_output: Any,
    self: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: Any,
) -> Tensor:
    shape = sizes_of(node.out.shape)
    if len(shape) != 2:
        raise UnfitError("classes that are not the last of two dims")
    dims = node.dims_of(shape, [])
    if len(dims[1]) != 1:
        raise UnfitError("classes on several axes")
    classes = node.operand_on(target, (dims[0],))
    counted = _checked(node, classes, ignore_index, dims)
    grad = node.operand_on(grad_output, (dims[0],) if reduction == NONE else ())
    if reduction == MEAN:
        grad = grad / node.operand_on(total_weight, ())
    row = where(counted, -grad, 0.0)
    hit = is_at(node.body, dims[1][0], classes)
    if weight is not None:
        row = row * node.operand_on(weight, (dims[1],))
    return node.result(where(hit, row, 0.0), dims)


def mse_loss(node: Lowering, self: Any, target: Any, reduction: int = MEAN) -> Tensor:
    dims = node.dims_of(node.shape(self), [self, target])
    apart = node.operand(self, dims) - node.operand(target, dims)
    squared = apart * apart
    axes = axes_in(dims, range(len(dims)))
    if reduction == NONE:
        return node.result(squared, dims)
    return node.result(squared.mean(axes) if reduction == MEAN else squared.sum(axes), ())


def mse_loss_backward(node: Lowering, grad_output: Any, self: Any, target: Any, reduction: int) -> Tensor:
    dims = node.dims_of(node.shape(self), [self, target])
    apart = node.operand(self, dims) - node.operand(target, dims)
    grad = node.operand(grad_output, dims)
    by: Any = 2.0
    if reduction == MEAN:
        by = 2.0 / Value(node.body, node.body.extent(axes_in(dims, range(len(dims))), apart.kind))
    return node.result(by * apart * grad, dims)  # as ATen's order: 2e38 is not doubled


RULES: dict[Any, Callable[..., Any]] = {
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
}
