"""Tokens that go to all ranks of ep, each of which picks those of its own experts: `layout.dispatch = "all_gather"`.

`gathered_routing` gathers which experts all ranks' tokens chose; `gathered_dispatch` gathers the tokens and takes the
rows of this rank's experts; `gathered_combine` weighs them, adds up each token's here, and a reduce-scatter adds up
what all ranks made of it. A token goes once to every rank, whichever experts it has chosen, and no numbers of rows are
exchanged; every rank has the tokens of all for a moment. Ranks must have equally many tokens. Where ranks divide an
expert (etp), they gather each other's as well, and the sums over its slices are the same scatter. Leaves out placed and
copied experts, and rows sent a few experts at a time (`routing`).
Source: Megatron-LM core, token_dispatcher.py, MoEAllGatherTokenDispatcher.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.runtime.mesh.collectives import all_gather, reduce_scatter
from gnomon.runtime.ops.routing import Routing, by_expert, filled, summed_rows
from gnomon.runtime.ops.site import ALONE, Axis


class _FromAll(torch.autograd.Function):
    """Rows of all ranks of a group, one rank after the other; the sum of their gradients goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        assert axis.group is not None
        return _gathered(x, axis.group, axis.ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scattered(grad, ctx.axis.group, ctx.axis.ranks), None


class _ToAll(torch.autograd.Function):
    """The reverse of `_FromAll`: this rank's part of the sum of what all ranks have of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        assert axis.group is not None
        return _scattered(x, axis.group, axis.ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, ctx.axis.group, ctx.axis.ranks), None


def _gathered(x: Tensor, group: ProcessGroup, ranks: int) -> Tensor:
    out = torch.empty((ranks * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    all_gather(out, x.contiguous(), group)
    return out


def _scattered(x: Tensor, group: ProcessGroup, ranks: int) -> Tensor:
    out = torch.empty((x.shape[0] // ranks, *x.shape[1:]), dtype=x.dtype, device=x.device)
    reduce_scatter(out, x.contiguous(), group)
    return out


def _of_everyone(x: Tensor, ep: Axis, etp: Axis) -> Tensor:
    """Rows (tokens, …) of this rank -> those of all ranks of ep, of all ranks of etp."""
    for axis in (ep, etp):
        if axis.group is not None:
            x = _FromAll.apply(x, axis)  # type: ignore[no-untyped-call]
    return x


def gathered_routing(
    indices: Tensor,
    experts: int,
    *,
    ep: Axis,
    etp: Axis = ALONE,
    capacity: float = 0.0,
    padded: bool = False,
    weights: Tensor | None = None,
) -> Routing:
    """Says which rows of all ranks' tokens this rank's experts compute. Arguments as in `routing_of`; a capacity is of
    each rank's tokens, as there."""
    chosen, topk = indices.reshape(-1, indices.shape[-1]), indices.shape[-1]
    if capacity:
        order, _, _ = by_expert(indices, experts, capacity=capacity, padded=False, weights=weights)
        flat = torch.full_like(chosen.reshape(-1), experts)  # no expert: dropped before it is sent
        flat[order] = chosen.reshape(-1)[order]
        chosen = flat.view_as(chosen)
    own = experts // ep.ranks
    local = _of_everyone(chosen, ep, etp).reshape(-1) - ep.index * own
    # Number `own` is "no expert of this rank": sorted last, counted last, and cut off.
    local = local.masked_fill((local < 0) | (local >= own), own)
    order = torch.argsort(local, stable=True)
    counts, real = torch.bincount(local, minlength=own + 1)[:own], None
    order = order[: int(counts.sum())]
    if capacity and padded:
        # The capacity is of each rank's tokens, and here are the tokens of all.
        most = math.ceil(capacity * indices.numel() / experts) * ep.ranks * etp.ranks
        order, real = filled(order, local[order], most - counts)
        counts = torch.full_like(counts, most)
    return Routing(order=order, counts=tuple(counts.tolist()), topk=topk, real=real, gathered=True)


def gathered_dispatch(x: Tensor, routing: Routing, *, ep: Axis, etp: Axis = ALONE) -> Tensor:
    """Rows (rows, width) of this rank's experts, sorted by expert. x: (…, width), this rank's tokens."""
    everyone = _of_everyone(x.reshape(-1, x.shape[-1]), ep, etp)
    rows = everyone.index_select(0, routing.order // routing.topk)
    return rows if routing.real is None else rows * routing.real.unsqueeze(-1)


def gathered_combine(rows: Tensor, weights: Tensor, routing: Routing, *, ep: Axis, etp: Axis = ALONE) -> Tensor:
    """Tokens (…, width) of this rank: of each the sum of its rows by their weights (…, topk), over all ranks."""
    by = _of_everyone(weights.reshape(-1, routing.topk), ep, etp)
    out = summed_rows(rows, by, routing)
    # In reverse of `_of_everyone`: what was gathered last is scattered first, so that each rank gets its own tokens.
    for axis in (etp, ep):
        if axis.group is not None:
            out = _ToAll.apply(out, axis)  # type: ignore[no-untyped-call]
    return out.unflatten(0, weights.shape[:-1])
