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
from gnomon.runtime.data.parts import Part
from gnomon.runtime.mesh.collectives import all_gather, all_to_all, arrived, pass_on, reduce_scatter
from gnomon.runtime.ops.pieces import OnlineSoftmax, Rule, attend, backward
from gnomon.runtime.ops.site import Axis, Segment, Site

KEYS, GRADIENTS = 0, 1
"""Tags of a ring's messages."""


@dataclass(frozen=True, slots=True)
class _Where:
    """The positions that a call of attention is about, and the ranks that hold them."""

    axis: Axis
    rule: Rule
    keep: bool
    """Whether gathered keys and values are kept for backward."""
    packing: Packing | None
    """Documents of the whole rows."""
    ranks: tuple[tuple[Segment, ...], ...] = ()
    """Positions on each rank, where they are said; empty: equal parts of the rows, as the axis has them."""

    def queries(self, q: Tensor) -> tuple[Segment, ...]:
        return self.ranks[self.axis.index] if self.ranks else self.axis.segments(q.shape[2])

    def keys(self, k: Tensor, index: int) -> tuple[Segment, ...]:
        return self.ranks[index] if self.ranks else self.axis.segments(k.shape[2], index)

    def sent(self, x: Tensor) -> Tensor:
        """Own positions as they travel: as many as the rank with most has. (B, heads, positions, dim)."""
        if not self.ranks:
            return x
        most = max(sum(count for _, count in segments) for segments in self.ranks)
        return functional.pad(x, (0, 0, 0, most - x.shape[2])) if x.shape[2] < most else x

    def _places(self, rows: int, device: torch.device) -> Tensor:
        """The place of each position (positions) among the rows that all ranks send, rank after rank."""
        # Ranks send equally many rows, some of them filler behind their own positions; the filler's places are never
        # listed.
        each, found = rows // self.axis.ranks, list[tuple[int, int, int]]()
        for rank, segments in enumerate(self.ranks):
            at = rank * each
            for first, count in segments:
                found.append((first, at, count))
                at += count
        # Sorted by first position: rows as they lie -> rows in order of the sequence.
        return torch.cat([torch.arange(at, at + count, device=device) for _, at, count in sorted(found)])

    def in_order(self, x: Tensor) -> Tensor:
        """Rows that all ranks sent, rank after rank, in the order of their positions."""
        return x[self._places(x.shape[0], x.device)] if self.ranks else in_order(x, self.axis)

    def by_rank(self, x: Tensor) -> Tensor:
        """Rows in the order of their positions, rank after rank as they travel."""
        if not self.ranks:
            return by_rank(x, self.axis)
        most = max(sum(count for _, count in segments) for segments in self.ranks)
        out = x.new_zeros((most * self.axis.ranks, *x.shape[1:]))
        out[self._places(len(out), x.device)] = x
        return out


def over_context(
    site: Site,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plain: Callable[..., Tensor],
    rule: Rule,
    packing: Packing | None,
    part: Part | None = None,
) -> Tensor:
    """Attends over cp. plain: attention over whole sequences of fewer heads, (B, heads, positions, dim) each, which
    knows the documents of the rows (packing) too. part: what the ranks have of one sequence, and in which style they
    attend to it; None: rows in equal parts, in the style of the layout."""
    axis = site.axis("cp")
    where = _Where(axis, rule, site.keep_gathered, packing, () if part is None else part.ranks)
    style = site.strategy if part is None else part.style
    if style == "ulysses":
        return _ulysses(q, k, v, where, plain)
    function = _Ring if style == "ring" else _Gathered
    out: Tensor = function.apply(q, k, v, where)  # type: ignore[no-untyped-call]
    return out[..., : v.shape[-1]]


def as_wide(v: Tensor, q: Tensor) -> Tensor:
    """Values as wide as queries: one kernel for all, and columns of zeros add nothing. They do not travel."""
    missing = q.shape[-1] - v.shape[-1]
    return functional.pad(v, (0, missing)) if missing > 0 else v


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one message, side by side: (B, kv heads, positions, dim of both)."""
    return torch.cat((k, v), dim=-1)


def _apart(joined: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """(keys, values) of such a message, of the width of `k` and the rest."""
    return joined[..., : k.shape[-1]], joined[..., k.shape[-1] :]


class _Ring(torch.autograd.Function):
    """Ring attention (Liu et al. 2023): step s meets the keys of the rank s places before."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, where: _Where) -> Tensor:
        axis, keys = where.axis, where.sent(_joined(k, v))
        assert axis.group is not None
        merged = OnlineSoftmax()
        for step in range(axis.ranks):
            # The next keys travel while these are used.
            following = pass_on(keys, axis.group, KEYS) if step + 1 < axis.ranks else None
            theirs = where.keys(k, (axis.index - step) % axis.ranks)
            their_k, their_v = _apart(keys, k)
            attend(merged, q, their_k, as_wide(their_v, q), where.queries(q), theirs, where.rule, where.packing)
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
        axis, keys = where.axis, where.sent(_joined(k, v))
        assert axis.group is not None
        # Terms of a gradient follow the keys that they are of from rank to rank, and are home after `ranks` passes.
        dq, terms = torch.zeros_like(q), torch.zeros_like(keys)
        coming = None
        for step in range(axis.ranks):
            following = pass_on(keys, axis.group, KEYS) if step + 1 < axis.ranks else None
            theirs = where.keys(k, (axis.index - step) % axis.ranks)
            their_k, narrow = _apart(keys, k)
            their_v = as_wide(narrow, q)
            into = dq, torch.zeros_like(their_k), torch.zeros_like(their_v)
            backward(grad, q, their_k, their_v, out, lse, where.queries(q), theirs, where.rule, into, where.packing)
            mine = _joined(into[1], into[2][..., : narrow.shape[-1]])
            # The keys at hand came from the previous rank, and so do the terms that it has added for them.
            terms = mine if coming is None else arrived(*coming).add_(mine)
            # Sent on in the last step too: the terms are then one rank short of the rank whose keys they are of. Its
            # own tag, since the next keys may be on the same way at the same time.
            coming = pass_on(terms, axis.group, GRADIENTS)
            if following is not None:
                keys = arrived(*following)
        assert coming is not None
        dk, dv = _apart(arrived(*coming)[:, :, : k.shape[2]], k)
        return dq, dk, dv, None


class _Gathered(torch.autograd.Function):
    """Keys and values of all ranks; gathered again in backward unless they are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, where: _Where) -> Tensor:
        whole_k, whole_v = (_whole(x, where) for x in (k, v))
        merged = OnlineSoftmax()
        every = ((0, whole_k.shape[2]),)
        attend(merged, q, whole_k, as_wide(whole_v, q), where.queries(q), every, where.rule, where.packing)
        out, lse = merged.result(q)
        ctx.save_for_backward(q, *((whole_k, whole_v) if where.keep else (k, v)), out, lse)
        ctx.where = where
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        where: _Where = ctx.where
        if not where.keep:
            k, v = _whole(k, where), _whole(v, where)
        wide = as_wide(v, q)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, wide))
        every, into = ((0, k.shape[2]),), (dq, dk, dv)
        backward(grad, q, k, wide, out, lse, where.queries(q), every, where.rule, into, where.packing)
        own = q.shape[2]
        return dq, _own(dk, where)[:, :, :own], _own(dv[..., : v.shape[-1]], where)[:, :, :own], None


def _whole(x: Tensor, where: _Where) -> Tensor:
    """(B, heads, all positions, dim) in their order."""
    axis = where.axis
    assert axis.group is not None
    # Positions first: the collective joins parts along the first dim.
    first = where.sent(x).movedim(2, 0).contiguous()
    out = torch.empty((first.shape[0] * axis.ranks, *first.shape[1:]), dtype=x.dtype, device=x.device)
    all_gather(out, first, axis.group)
    return where.in_order(out).movedim(0, 2)


def _own(x: Tensor, where: _Where) -> Tensor:
    """This rank's positions of the sum of `x` over ranks, as they travel."""
    axis = where.axis
    assert axis.group is not None
    first = where.by_rank(x.movedim(2, 0)).contiguous()
    # Gradients at one key come from queries of all ranks: a reduce-scatter adds them and leaves each rank its part.
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
    def forward(ctx: Any, x: Tensor, where: _Where, to_heads: bool) -> Tensor:
        ctx.where, ctx.to_heads, ctx.own = where, to_heads, x.shape[2]
        return _exchanged(x, where, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = _exchanged(grad, ctx.where, not ctx.to_heads)
        return back[:, :, : ctx.own] if ctx.to_heads else back, None, None


def _exchanged(x: Tensor, where: _Where, to_heads: bool) -> Tensor:
    axis = where.axis
    assert axis.group is not None
    if to_heads:  # (ranks, B, heads / ranks, positions, dim), a part for each rank
        parts = where.sent(x).unflatten(1, (axis.ranks, -1)).movedim(1, 0).contiguous()
    else:
        # (positions, B, own heads, dim) -> (ranks, positions of a rank, B, own heads, dim) -> (ranks, B, own heads,
        # positions of a rank, dim).
        parts = where.by_rank(x.movedim(2, 0)).unflatten(0, (axis.ranks, -1)).permute(0, 2, 3, 1, 4).contiguous()
    out = torch.empty_like(parts)
    all_to_all(out, parts, axis.group)
    if to_heads:
        # Part r holds rank r's positions: (ranks, positions of a rank, B, own heads, dim), joined over the first two,
        # in the order of the sequence.
        return where.in_order(out.movedim(3, 1).flatten(0, 1)).movedim(0, 2)
    # Part r holds rank r's heads: (B, ranks, heads / ranks, own positions, dim), joined over ranks.
    return out.movedim(0, 1).flatten(1, 2)


def _ulysses(q: Tensor, k: Tensor, v: Tensor, where: _Where, plain: Callable[..., Tensor]) -> Tensor:
    if (copies := where.axis.ranks // k.shape[1]) > 1:  # fewer key-value heads than ranks: each goes to several
        # Autograd adds the copies' gradients up, as every copy is read by other query heads.
        k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    whole = (_Exchange.apply(x, where, True) for x in (q, k, v))  # type: ignore[no-untyped-call]
    out: Tensor = _Exchange.apply(plain(*whole), where, False)  # type: ignore[no-untyped-call]
    return out[:, :, : q.shape[2]]
