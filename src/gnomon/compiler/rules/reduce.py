"""Reductions along dims: sums, means, extremes, variances, norms.

Each gives the tensor of its result; variances take two passes over a row that lies in cache, which is exact
where the one-pass formula cancels, in double as ATen's: squares of 1e37 and of 1e-25 are floats no more. Leaves out
reductions with positions (argmax, sort).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnomon.compiler.tiles.body import Tensor, UnfitError
from gnomon.compiler.tiles.lowering import Dims, Lowering, as_type, axes_in, dims_over
from gnomon.compiler.tiles.sizes import equal
from gnomon.compiler.tiles.values import Value, exp, log, maximum, one, real, sqrt, where

aten = torch.ops.aten


def _of(node: Lowering, self: Any, dim: Any) -> tuple[Value, Dims, tuple[int, ...], tuple[int, ...]]:
    x, dims = node.whole(self)
    over = dims_over(dim, len(dims))
    return x, dims, over, axes_in(dims, over)


def _sum(node: Lowering, self: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    x, dims, over, axes = _of(node, self, dim)
    return node.result(_summed(as_type(x, node.out.dtype), axes), node.reduced_dims(dims, over, keepdim))


def _summed(x: Value, axes: tuple[int, ...]) -> Value:
    """The sum along axes. ATen begins at 0, so that one number alone that is -0 gives 0, whose reciprocal is +inf."""
    return x.sum(axes) if axes or x.kind not in "FD" else x + 0.0


def mean(node: Lowering, self: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    x, dims, over, axes = _of(node, self, dim)
    average = real(x).mean(axes) if axes else _summed(real(x), axes)
    return node.result(average, node.reduced_dims(dims, over, keepdim))


def extreme(op: str) -> Any:
    def rule(node: Lowering, self: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
        x, dims, over, axes = _of(node, self, dim)
        return node.result(
            x.to("L").reduce(op, axes) if x.kind == "B" else x.reduce(op, axes), node.reduced_dims(dims, over, keepdim)
        )

    return rule


def truth(op: str) -> Any:
    def rule(node: Lowering, self: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
        x, dims, over, axes = _of(node, self, dim)
        if node.out.dtype != torch.bool:
            raise UnfitError("any and all of bytes")
        return node.result(x.to("B").reduce(op, axes), node.reduced_dims(dims, over, keepdim))

    return rule


def variance_of(x: Value, axes: tuple[int, ...], correction: Any) -> tuple[Value, Value]:
    """Returns (variance, mean) along axes, in two passes: subtracting first keeps digits that E[x²] - E[x]² loses."""
    average = x.mean(axes)
    apart = x - average
    total = (apart * apart).sum(axes)
    count = Value(x.body, x.body.extent(axes, total.kind))
    by = 1.0 if correction is None else float(correction)
    # Too few numbers for the correction divide by 0, never by less, as ATen has it: one number gives NaN.
    return total / maximum(count - by, 0.0), average


def var(node: Lowering, self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    x, dims, over, axes = _of(node, self, dim)
    return node.result(variance_of(x.to("D"), axes, correction)[0], node.reduced_dims(dims, over, keepdim))


def std(node: Lowering, self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    x, dims, over, axes = _of(node, self, dim)
    return node.result(sqrt(variance_of(x.to("D"), axes, correction)[0]), node.reduced_dims(dims, over, keepdim))


def var_mean(node: Lowering, self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    x, dims, over, axes = _of(node, self, dim)
    # ATen adds variances up in double precision, whatever the tensor's.
    spread, average = variance_of(x.to("D"), axes, correction)
    reduced = node.reduced_dims(dims, over, keepdim)
    return node.result(spread, reduced, node.out[0]), node.result(average, reduced, node.out[1])


def logsumexp(node: Lowering, self: Any, dim: Any, keepdim: bool = False) -> Tensor:
    x, dims, over, axes = _of(node, self, dim)
    top = real(x).max(axes)
    # Nothing is taken out of a row whose largest is infinite: inf - inf would be NaN where -inf, or inf, is the answer.
    top = where(one("abs", top).eq(float("inf")), 0.0, top)
    return node.result(log(exp(x - top).sum(axes)) + top, node.reduced_dims(dims, over, keepdim))


def vector_norm(node: Lowering, self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    x, dims, over, axes = _of(node, self, dim)
    if ord not in (1, 2):
        raise UnfitError("a rare norm")
    sizes = node.shape(self)
    if all(equal(sizes[dim], 1) for dim in over):  # ATen squares nothing, so 1e20 does not overflow
        norm = one("abs", x)
    else:
        norm = sqrt((x * x).sum(axes)) if ord == 2 else one("abs", x).sum(axes)
    return node.result(norm, node.reduced_dims(dims, over, keepdim))


RULES: dict[Any, Callable[..., Any]] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: mean,
    aten.mean.default: mean,
    aten.amax.default: extreme("max"),
    aten.amin.default: extreme("min"),
    aten.max.default: extreme("max"),
    aten.min.default: extreme("min"),
    aten.any.dim: truth("any"),
    aten.all.dim: truth("all"),
    aten.any.default: truth("any"),
    aten.all.default: truth("all"),
    aten.var.correction: var,
    aten.std.correction: std,
    aten.var_mean.correction: var_mean,
    aten.logsumexp.default: logsumexp,
    aten.linalg_vector_norm.default: vector_norm,
}
