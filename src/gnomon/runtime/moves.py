"""Changes of a tensor's layout between ops, forward and back: the collectives that `sharding` derived, and no others.

`Move(site axes, dims, forward hops, backward hops)` acts on a torch tensor with one dim for each dim of the graph's;
`moved(x, move)` is differentiable. A move on axes of one rank does nothing and costs nothing. Leaves out exchanges of
one dim for another (all-to-all of context parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.runtime.collectives import all_gather, all_reduce, reduce_scatter
from gnomon.runtime.ops.site import Axis
from gnomon.sharding.layout import Hop, Sharding, hops


@dataclass(frozen=True, slots=True)
class Step:
    """A hop on this rank."""

    kind: str
    axis: Axis
    dim: int
    """Of the torch tensor; -1 for an all-reduce."""


def steps(
    source: Sharding, target: Sharding, dims: Sequence[tuple[str, ...]], axes: Mapping[str, Axis]
) -> tuple[Step, ...]:
    """From one layout to another. dims: for each torch dim the names of the graph's dims in it, outermost first.
    PlanError where an axis divides a dim that is not the outermost of its torch dim."""
    moves = []
    for hop in hops(source, target):
        axis = axes.get(hop.axis)
        if axis is None or axis.ranks == 1:
            continue
        moves.append(Step(kind=hop.kind, axis=axis, dim=_place(hop, dims)))
    return tuple(moves)


def _place(hop: Hop, dims: Sequence[tuple[str, ...]]) -> int:
    if hop.kind == "all_to_all":
        raise PlanError(f"the runtime does not exchange {hop.dim} for {hop.to} over {hop.axis} yet; use {hop.axis} = 1")
    if hop.dim is None:
        return -1
    place = next(i for i, names in enumerate(dims) if hop.dim in names)
    if dims[place][0] != hop.dim:
        raise PlanError(f"{hop.axis} divides {hop.dim}, which is not the outermost of {' x '.join(dims[place])}")
    return place


def run(x: Tensor, todo: Sequence[Step], *, own: bool = False) -> Tensor:
    """The tensor after these steps. own: it is nobody else's, so that sums may be made in place."""
    for step in todo:
        group, n = step.axis.group, step.axis.ranks
        assert group is not None
        if step.kind == "part":
            x, own = x.chunk(n, dim=step.dim)[step.axis.index].contiguous(), True
        elif step.kind == "all_reduce":
            x = x if own and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
            all_reduce(x, group)
            own = True
        else:
            first = x.movedim(step.dim, 0).contiguous()
            gathers = step.kind == "all_gather"
            rows = first.shape[0] * n if gathers else first.shape[0] // n
            out = torch.empty((rows, *first.shape[1:]), dtype=x.dtype, device=x.device)
            (all_gather if gathers else reduce_scatter)(out, first, group)
            x, own = out.movedim(0, step.dim), True
    return x


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: tuple[Step, ...], back: tuple[Step, ...]) -> Tensor:
        ctx.back = back
        return run(x, there) if there else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return run(grad, ctx.back), None, None


def moved(x: Tensor, there: tuple[Step, ...], back: tuple[Step, ...]) -> Tensor:
    """x after `there`; its gradient comes home by `back`."""
    if not there and not back:
        return x
    out: Tensor = _Moved.apply(x, there, back)  # type: ignore[no-untyped-call]
    return out
