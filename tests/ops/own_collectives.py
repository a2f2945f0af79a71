"""Collectives that autograd goes through, for oracles of what ranks divide: sums, exchanges, rows of neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnomon.runtime.mesh import collectives
from gnomon.runtime.ops.site import Axis


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad, ctx.axis), None


def _sum(x: Tensor, axis: Axis) -> Tensor:
    x = x.clone()
    assert axis.group is not None
    collectives.all_reduce(x, axis.group)
    return x


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks; a rank's loss reads it too, so gradients are added up as well."""
    out: Tensor = _Summed.apply(x, axis)  # type: ignore[no-untyped-call]
    return out


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, give: int, take: int) -> Tensor:
        ctx.way = axis, take, give
        return _exchange(x, axis, give, take)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, *ctx.way), None, None, None


def _exchange(x: Tensor, axis: Axis, give: int, take: int) -> Tensor:
    assert axis.group is not None
    parts = torch.stack(x.chunk(axis.ranks, dim=give)).contiguous()
    out = torch.empty_like(parts)
    collectives.all_to_all(out, parts, axis.group)
    return torch.cat(list(out), dim=take)


def exchanged(x: Tensor, axis: Axis, *, give: int, take: int) -> Tensor:
    """Parts along dim `give` to the ranks, for all of dim `take`."""
    out: Tensor = _Exchanged.apply(x, axis, give, take)  # type: ignore[no-untyped-call]
    return out


class _Neighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, last: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
        ctx.axis = axis
        before, after = _both_ways(last, first, axis)
        return _edge(before, axis.index == 0), _edge(after, axis.index == axis.ranks - 1)

    @staticmethod
    def backward(ctx: Any, above: Tensor, below: Tensor) -> tuple[Tensor | None, ...]:
        axis: Axis = ctx.axis
        above, below = _edge(above, axis.index == 0), _edge(below, axis.index == axis.ranks - 1)
        of_last, of_first = _both_ways(above, below, axis)
        return of_first, of_last, None


def _edge(x: Tensor, outside: bool) -> Tensor:
    return torch.zeros_like(x) if outside else x


def _both_ways(on: Tensor, back: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """(what the rank before sends on, what the rank after sends back), all the way round."""
    assert axis.group is not None
    assert axis.ranks == 2, "two ranks are each other's neighbours on both sides, so that passing on goes either way"
    before = collectives.arrived(*collectives.pass_on(on, axis.group, 0))
    after = collectives.arrived(*collectives.pass_on(back, axis.group, 1))
    return before, after


def neighbours(first: Tensor, last: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """(last row of the rank before, first row of the rank after); zeros outside the image."""
    above, below = _Neighbours.apply(first, last, axis)  # type: ignore[no-untyped-call]
    return above, below
