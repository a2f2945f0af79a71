"""Attention whose ranks hold parts of every sequence (cp): `ring`, `all_gather` and `ulysses`, as the layout says.

Under `ring` keys and values pass around and under `all_gather` they are gathered; queries attend to pieces of the keys,
and the pieces' results are merged by their log-sum-exp, which is exact (`pieces`). Under `ulysses` positions are
exchanged for heads, and attention is the ordinary one (Jacobs et al. 2023). Communicates what `sharding.strategies`
lists as inside. Leaves out biases on scores.
Shapes: q (B, heads, positions, dim), k and v (B, kv heads, positions, dim), lse (B, heads, positions).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.runtime.data.packing import Packing
from gnomon.runtime.mesh.collectives import all_gather, all_to_all, arrived, pass_on, reduce_scatter
from gnomon.runtime.ops.pieces import Merged, Rule, attend, backward
from gnomon.runtime.ops.site import Axis, Segment, Site

KEYS, GRADIENTS = 0, 1
"""Tags of a ring's messages."""


@dataclass(frozen=True, slots=True)
class _Where:
    """Which positions a call is about."""

    axis: Axis
    rule: Rule
    keep: bool
    """Whether gathered keys and values are kept for backward."""
    packing: Packing | None
    """Documents of the whole rows."""

    def queries(self, q: Tensor) -> tuple[Segment, ...]:
        return self.axis.segments(q.shape[2])

    def keys(self, k: Tensor, index: int) -> tuple[Segment, ...]:
        return self.axis.segments(k.shape[2], index)


def over_context(
    site: Site,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plain: Callable[..., Tensor],
    rule: Rule,
    packing: Packing | None,
) -> Tensor:
    """Attention over cp. plain: attention over whole sequences of fewer heads, (B, heads, positions, dim) each, which
    knows the documents of the rows (packing) too."""
    axis = site.axis("cp")
    if site.strategy == "ulysses":
        return _ulysses(q, k, v, axis, plain)
    width = v.shape[-1]
    if width < q.shape[-1]:  # one kernel for all: columns of zeros add nothing
        v = functional.pad(v, (0, q.shape[-1] - width))
    function = _Ring if site.strategy == "ring" else _Gathered
    out: Tensor = function.apply(q, k, v, _Where(axis, rule, site.keep_gathered, packing))  # type: ignore[no-untyped-call]
    return out[..., :width]


class _Ring(torch.autograd.Function):
    """Ring attention (Liu et al. 2023): step s meets the keys of the rank s places before."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, where: _Where) -> Tensor:
        axis, keys = where.axis, torch.stack((k, v))
        assert axis.group is not None
        merged = Merged()
        for step in range(axis.ranks):
            following = pass_on(keys, axis.group, KEYS) if step + 1 < axis.ranks else None
            theirs = where.keys(k, (axis.index - step) % axis.ranks)
            attend(merged, q, keys[0], keys[1], where.queries(q), theirs, where.rule, where.packing)
            if following is not None:
                keys = arrived(*following)
        out, lse = merged.result(q)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where = where
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        where: _Where = ctx.where
        axis, keys = where.axis, torch.stack((k, v))
        assert axis.group is not None
        dq, terms = torch.zeros_like(q), torch.zeros_like(keys)
        coming = None
        for step in range(axis.ranks):
            following = pass_on(keys, axis.group, KEYS) if step + 1 < axis.ranks else None
            theirs = where.keys(k, (axis.index - step) % axis.ranks)
            mine = torch.zeros_like(keys)
            into = dq, mine[0], mine[1]
            backward(grad, q, keys[0], keys[1], out, lse, where.queries(q), theirs, where.rule, into, where.packing)
            terms = mine if coming is None else arrived(*coming).add_(mine)
            coming = pass_on(terms, axis.group, GRADIENTS)
            if following is not None:
                keys = arrived(*following)
        assert coming is not None
        home = arrived(*coming)
        return dq, home[0], home[1], None


class _Gathered(torch.autograd.Function):
    """Keys and values of all ranks; gathered again in backward unless they are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, where: _Where) -> Tensor:
        whole_k, whole_v = (_whole(x, where.axis) for x in (k, v))
        merged = Merged()
        every = ((0, whole_k.shape[2]),)
        attend(merged, q, whole_k, whole_v, where.queries(q), every, where.rule, where.packing)
        out, lse = merged.result(q)
        ctx.save_for_backward(q, *((whole_k, whole_v) if where.keep else (k, v)), out, lse)
        ctx.where = where
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        where: _Where = ctx.where
        if not where.keep:
            k, v = _whole(k, where.axis), _whole(v, where.axis)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        every, into = ((0, k.shape[2]),), (dq, dk, dv)
        backward(grad, q, k, v, out, lse, where.queries(q), every, where.rule, into, where.packing)
        return dq, _own(dk, where.axis), _own(dv, where.axis), None


def _whole(x: Tensor, axis: Axis) -> Tensor:
    """(B, heads, all positions, dim) in their order."""
    assert axis.group is not None
    first = x.movedim(2, 0).contiguous()
    out = torch.empty((first.shape[0] * axis.ranks, *first.shape[1:]), dtype=x.dtype, device=x.device)
    all_gather(out, first, axis.group)
    return in_order(out, axis).movedim(0, 2)


def _own(x: Tensor, axis: Axis) -> Tensor:
    """This rank's positions of the sum of `x` over ranks."""
    assert axis.group is not None
    first = by_rank(x.movedim(2, 0), axis).contiguous()
    out = torch.empty((first.shape[0] // axis.ranks, *first.shape[1:]), dtype=x.dtype, device=x.device)
    reduce_scatter(out, first, axis.group)
    return out.movedim(0, 2)


def in_order(x: Tensor, axis: Axis) -> Tensor:
    """Rows of all ranks, rank after rank, in the order of their positions."""
    parts = _parts(x.shape[0], axis)
    if axis.order == "contiguous":
        return x
    return torch.cat([x[at : at + length] for _, at, length in sorted(parts)])


def by_rank(x: Tensor, axis: Axis) -> Tensor:
    """Rows in the order of their positions, rank after rank."""
    if axis.order == "contiguous":
        return x
    return torch.cat([x[first : first + length] for first, _, length in _parts(x.shape[0], axis)])


def _parts(rows: int, axis: Axis) -> list[tuple[int, int, int]]:
    """(first position, where it is, how many) of each segment, rank after rank."""
    segments, at = [], 0
    for index in range(axis.ranks):
        for first, length in axis.segments(rows // axis.ranks, index):
            segments.append((first, at, length))
            at += length
    return segments


class _Exchange(torch.autograd.Function):
    """Positions for heads, or back: (B, heads, own positions, dim) <-> (B, own heads, positions, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, to_heads: bool) -> Tensor:
        ctx.axis, ctx.to_heads = axis, to_heads
        return _exchanged(x, axis, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, ctx.axis, not ctx.to_heads), None, None


def _exchanged(x: Tensor, axis: Axis, to_heads: bool) -> Tensor:
    assert axis.group is not None
    if to_heads:  # (ranks, B, heads / ranks, positions, dim), a part for each rank
        parts = x.unflatten(1, (axis.ranks, -1)).movedim(1, 0).contiguous()
    else:
        parts = by_rank(x.movedim(2, 0), axis).unflatten(0, (axis.ranks, -1)).permute(0, 2, 3, 1, 4).contiguous()
    out = torch.empty_like(parts)
    all_to_all(out, parts, axis.group)
    if to_heads:
        return in_order(out.movedim(3, 1).flatten(0, 1), axis).movedim(0, 2)
    return out.movedim(0, 1).flatten(1, 2)


def _ulysses(q: Tensor, k: Tensor, v: Tensor, axis: Axis, plain: Callable[..., Tensor]) -> Tensor:
    if (copies := axis.ranks // k.shape[1]) > 1:  # fewer key-value heads than ranks: each goes to several
        k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    whole = (_Exchange.apply(x, axis, True) for x in (q, k, v))  # type: ignore[no-untyped-call]
    out: Tensor = _Exchange.apply(plain(*whole), axis, False)  # type: ignore[no-untyped-call]
    return out
