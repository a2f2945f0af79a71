"""Changes of a tensor's layout between ops, forward and back: the collectives that `sharding` derived, and no others.

A `Move` acts on a torch tensor with one dim for each dim of the graph's; `move_through(x, there, back)` is
differentiable. A move on axes of one rank does nothing and costs nothing. Leaves out which moves
are needed (`sharding.block`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.runtime.mesh.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from gnomon.runtime.ops.site import Axis
from gnomon.tensors.layout import Hop, Sharding, hops


@dataclass(frozen=True, slots=True)
class Move:
    """A hop on this rank."""

    kind: str
    axis: Axis
    dim: int
    """Of the torch tensor; -1 for an all-reduce."""
    outer: tuple[str, ...] = ()
    """The graph's dims that stand before its own in this torch dim, as where a module flattens batch and positions."""
    to: int = -1
    """Of an exchange: the torch dim that is divided after it."""


def steps(
    source: Sharding,
    target: Sharding,
    dims: Sequence[tuple[str, ...]],
    axes: Mapping[str, Axis],
    *,
    sized: bool = False,
) -> tuple[Move, ...]:
    """Plans the collectives that bring a tensor from one layout to another. dims: for each torch dim the names of the
    graph's dims in it, outermost first. sized: whether `run` is told the sizes of dims. PlanError where an axis divides
    a dim that is not the outermost of its torch dim, and those before it have no known size."""
    moves = []
    for hop in hops(source, target):
        axis = axes.get(hop.axis)
        if axis is None or axis.ranks == 1:
            continue
        place = _place(hop, dims)
        outer = () if place < 0 else dims[place][: dims[place].index(str(hop.dim))]
        to = next((i for i, names in enumerate(dims) if hop.to is not None and names[:1] == (hop.to,)), -1)
        if hop.kind == "all_to_all" and (outer or to < 0 or axis.order != "contiguous"):
            raise PlanError(
                f"the runtime does not exchange {hop.dim} for {hop.to} over {hop.axis} yet; use {hop.axis} = 1"
            )
        if outer and (not sized or any(side.axes_of(name) for side in (source, target) for name in outer)):
            raise PlanError(f"{hop.axis} divides {hop.dim}, which is not the outermost of {' x '.join(dims[place])}")
        moves.append(Move(kind=hop.kind, axis=axis, dim=place, outer=outer, to=to))
    return tuple(moves)


def _place(hop: Hop, dims: Sequence[tuple[str, ...]]) -> int:
    if hop.dim is None:
        return -1
    return next(i for i, names in enumerate(dims) if hop.dim in names)


def run(x: Tensor, todo: Sequence[Move], *, own: bool = False, sizes: Mapping[str, int] | None = None) -> Tensor:
    """The tensor after these steps. own: it is nobody else's, so that sums may be made in place. sizes: of the dims
    that `Move.outer` names."""
    for step in todo:
        if step.outer:
            assert sizes is not None, "steps made with `sized` want sizes"
            apart = x.unflatten(step.dim, (prod(sizes[name] for name in step.outer), -1))
            x = run(apart, (replace(step, dim=step.dim + 1, outer=()),)).flatten(step.dim, step.dim + 1)
            own = True
            continue
        group, n = step.axis.group, step.axis.ranks
        assert group is not None
        if step.kind == "part":
            x, own = x.index_select(step.dim, step.axis.positions(x.shape[step.dim] // n, x.device)), True
        elif step.kind == "all_reduce":
            x = x if own and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
            all_reduce(x, group)
            own = True
        elif step.kind == "all_to_all":
            x, own = _exchanged(x, step), True
        else:
            first = x.movedim(step.dim, 0).contiguous()
            gathers = step.kind == "all_gather"
            rows = first.shape[0] * n if gathers else first.shape[0] // n
            # Positions that ranks hold, rank after rank (None where they lie so already). A gather brings them in this
            # order and is sorted back; what is scattered is first put into it. The smaller of the two numbers of rows
            # is a rank's own.
            positions = (
                None if step.axis.order == "contiguous" else step.axis.all_positions(min(rows, len(first)), x.device)
            )
            first = first if gathers or positions is None else first[positions]
            out = torch.empty((rows, *first.shape[1:]), dtype=x.dtype, device=x.device)
            (all_gather if gathers else reduce_scatter)(out, first, group)
            out = out if not gathers or positions is None else out[positions.argsort()]
            x, own = out.movedim(0, step.dim), True
    return x


def _exchanged(x: Tensor, step: Move) -> Tensor:
    """Parts along `to` go to the ranks that hold them, from each a part along `dim`."""
    assert step.axis.group is not None
    parts = torch.stack(x.chunk(step.axis.ranks, step.to))
    out = torch.empty_like(parts)
    all_to_all(out, parts, step.axis.group)
    return torch.cat(out.unbind(0), step.dim)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: tuple[Move, ...], back: tuple[Move, ...], sizes: Mapping[str, int] | None
    ) -> Tensor:
        ctx.back, ctx.sizes = back, sizes
        return run(x, there, sizes=sizes) if there else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return run(grad, ctx.back, sizes=ctx.sizes), None, None, None


def move_through(
    x: Tensor, there: tuple[Move, ...], back: tuple[Move, ...], sizes: Mapping[str, int] | None = None
) -> Tensor:
    """Returns x after `there`; its gradient comes home by `back`. sizes: as of `run`."""
    if not there and not back:
        return x
    out: Tensor = _Moved.apply(x, there, back, sizes)  # type: ignore[no-untyped-call]
    return out
