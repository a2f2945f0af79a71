"""Attention of some positions to some others, piece by piece: pieces' results merged by their log-sum-exp.

`attend(merged, q, k, v, queries, keys, rule)` adds what queries at some segments of positions see of keys at others;
`backward` adds the gradients, given the merged result. A piece that a mask cuts through, other than at its diagonal, is
written out; others are torch's flash kernel where it has one. Leaves out communication (`context`), and biases.
Shapes: q (B, heads, positions, dim), k and v (B, kv heads, positions, dim), lse (B, heads, positions).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gnomon.runtime.data.packing import Packing
from gnomon.runtime.ops.site import Segment

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The keys that a query sees, and how scores are computed."""

    causal: bool
    window: int
    """Positions that a query sees, itself included (without causality on both sides); 0 for all."""
    scale: float
    cap: float
    """Scores are cut to ±cap by tanh; 0: they are not."""


@dataclass(frozen=True, slots=True)
class MeetingRows:
    """Queries and keys that meet: ranges of local rows."""

    q: slice
    k: slice
    diagonal: bool
    """They are the same positions under a causal mask."""
    cut_by_mask: bool
    """A mask cuts through otherwise; if neither, every query sees every key, as far as documents go."""
    at: tuple[Segment, Segment]
    """Positions of queries and keys."""


class OnlineSoftmax:
    """The attention of queries to the keys so far, by range of rows: an online softmax."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges the result over more keys into that of the keys so far."""
        key = rows.start, rows.stop
        if key in self.parts:
            # softmax over both sets of keys: each part's share of the whole sum of exponentials is exp(its lse - lse)
            before, so_far = self.parts[key]
            lse, lse_new = torch.logaddexp(so_far, lse), lse
            out = before * (so_far - lse).exp().unsqueeze(-1) + out * (lse_new - lse).exp().unsqueeze(-1)
        self.parts[key] = out, lse

    def result(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of all rows, in q's dtype and a dtype of statistics. out lies as the next matmul reads it,
        position after position."""
        parts = [part for _, part in sorted(self.parts.items())]
        if not parts:  # no queries
            return q, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        out = torch.cat([one.transpose(1, 2) for one, _ in parts], dim=1).to(q.dtype)
        return out.transpose(1, 2), torch.cat([lse for _, lse in parts], dim=2)


def pieces(queries: Sequence[Segment], keys: Sequence[Segment], rule: Rule) -> Iterator[MeetingRows]:
    """Yields what of the keys each segment of queries sees; its diagonal first, so that every row has a result to add
    to."""
    at = 0
    for first, length in queries:
        rows, start = slice(at, at + length), 0
        visible = list[MeetingRows]()
        for low, count in keys:
            visible += _pieces_of(rows, (first, length), start, (low, count), rule)
            start += count
        yield from sorted(visible, key=lambda piece: not (piece.diagonal or _meets_itself(piece)))
        at += length


def _meets_itself(piece: MeetingRows) -> bool:
    (first, _), (low, count) = piece.at
    return piece.cut_by_mask and low <= first < low + count


def _pieces_of(rows: slice, query: Segment, start: int, key: Segment, rule: Rule) -> Iterator[MeetingRows]:
    (first, length), (low, count) = query, key
    begin, end = low, low + count
    # keys that some query of the segment sees: [begin, end)
    if rule.window:
        begin = max(begin, first - rule.window + 1)
        end = end if rule.causal else min(end, first + length + rule.window - 1)
    if rule.causal:
        end = min(end, first + length)
    # No query of the segment sees a key of these.
    if begin >= end:
        return

    def piece(one: int, other: int, *, diagonal: bool = False, cut: bool = False) -> MeetingRows:
        keys = slice(start + one - low, start + other - low)
        return MeetingRows(rows, keys, diagonal, cut, (query, (one, other - one)))

    # the last query still sees the first key: the window cuts nothing off on the left
    whole = not rule.window or first + length - rule.window <= begin
    if rule.window and not (whole and (end <= first + 1 if rule.causal else end <= first + rule.window)):
        yield piece(begin, end, cut=True)
    elif not rule.causal or end <= first + 1:  # the first query sees all of them, and so do the others
        yield piece(begin, end)
    else:
        # Keys before the segment are seen by all of its queries; those within it up to the diagonal.
        if begin < first:
            yield piece(begin, first)
        if begin <= first and end == first + length:
            yield piece(first, end, diagonal=True)
        else:
            yield piece(max(begin, first), end, cut=True)


def _met(
    queries: Sequence[Segment], keys: Sequence[Segment], rule: Rule, packing: Packing | None
) -> Iterator[tuple[MeetingRows, Tensor | None]]:
    """Yields pieces, but for those whose queries and keys have no document in common; and where they have several,
    (rows, 1, queries, keys): whether a query's is the key's."""
    for piece in pieces(queries, keys, rule):
        together = packing.together(*piece.at) if packing is not None else True
        if together is not False:
            yield piece, None if together is True else together


def attend(
    merged: OnlineSoftmax,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    rule: Rule,
    packing: Packing | None = None,
) -> None:
    """Adds what the queries see of these keys. packing: documents of the whole rows, which do not see each other."""
    for piece, together in _met(queries, keys, rule, packing):
        one, key, value = q[:, :, piece.q], k[:, :, piece.k], v[:, :, piece.k]
        if _flash(q, rule, piece, together):
            out, lse = _FORWARD(one, key, value, 0.0, piece.diagonal, scale=rule.scale)
        else:
            out, lse = _written_out(one, key, value, rule, piece, together)
        merged.add(piece.q, out, lse)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    rule: Rule,
    into: tuple[Tensor, Tensor, Tensor],
    packing: Packing | None = None,
) -> None:
    """Adds the gradients of what the queries see of these keys. out, lse: merged over all keys. into: of q, k, v.
    packing: as in `attend`."""
    dq, dk, dv = into
    for piece, together in _met(queries, keys, rule, packing):
        one, key, value = q[:, :, piece.q], k[:, :, piece.k], v[:, :, piece.k]
        result, statistics, back = out[:, :, piece.q], lse[:, :, piece.q], grad[:, :, piece.q]
        if _flash(q, rule, piece, together):
            grads = _BACKWARD(
                back, one, key, value, result, statistics.contiguous(), 0.0, piece.diagonal, scale=rule.scale
            )
        else:
            grads = _backward_written_out(back, one, key, value, result, statistics, rule, piece, together)
        for total, rows, term in zip((dq, dk, dv), (piece.q, piece.k, piece.k), grads, strict=True):
            total[:, :, rows] += term


def _flash(q: Tensor, rule: Rule, piece: MeetingRows, together: Tensor | None) -> bool:
    return q.device.type == "cpu" and not rule.cap and not piece.cut_by_mask and together is None


@lru_cache(maxsize=64)
def _seen(query: Segment, key: Segment, rule: Rule, device: torch.device) -> Tensor:
    """A mask (queries, keys): whether a query sees a key."""
    at, to = (torch.arange(first, first + count, device=device) for first, count in (query, key))
    distance = at[:, None] - to
    seen = distance >= 0 if rule.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance < rule.window) & (distance > -rule.window) if rule.window else seen


def _scores(
    q: Tensor, k: Tensor, rule: Rule, piece: MeetingRows, together: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(scores, their tanh where they are cut), in a dtype of statistics."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) * rule.scale
    bent = torch.tanh(scores / rule.cap) if rule.cap else None
    scores = scores if bent is None else bent * rule.cap
    seen = None
    if piece.diagonal:
        seen = _seen((0, q.shape[2]), (0, q.shape[2]), Rule(causal=True, window=0, scale=1.0, cap=0.0), q.device)
    elif piece.cut_by_mask:
        seen = _seen(*piece.at, rule, q.device)
    if together is not None:
        seen = together if seen is None else together & seen
    return scores if seen is None else scores.masked_fill(~seen, -math.inf), bent


def _grouped(k: Tensor, q: Tensor) -> Tensor:
    """Repeats each key head for the query heads that share it."""
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, dim=1) if groups > 1 else k


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, piece: MeetingRows, together: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attends to one piece in plain torch; returns (out, lse). A row that sees no key here has lse -inf, which
    `OnlineSoftmax.add` weighs with 0."""
    k, v = _grouped(k, q), _grouped(v, q)
    scores, _ = _scores(q, k, rule, piece, together)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)  # a row that sees nothing here
    exp = (scores - top).exp_()
    total = exp.sum(-1, keepdim=True)
    out = (exp / total.clamp(min=1e-30)).to(v.dtype) @ v
    return out, (top + total.log()).squeeze(-1)


def _backward_written_out(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: Rule,
    piece: MeetingRows,
    together: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one piece, from `out` and `lse` over all keys: FlashAttention's backward (Dao et al. 2022).

    With P = exp(S - lse): dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP - rowsum(dO ∘ O)), dQ = dS K, dK = dSᵀ Q. Under a cap,
    S = cap · tanh(x / cap), whose derivative is 1 - tanh².
    """
    heads, (k, v) = k.shape[1], (_grouped(k, q), _grouped(v, q))
    scores, bent = _scores(q, k, rule, piece, together)
    # With the log-sum-exp over all keys these are the final probabilities, so pieces need no further scaling.
    p = (scores - lse.unsqueeze(-1)).exp()
    dp = (grad @ v.transpose(-2, -1)).to(p.dtype)
    ds = p * (dp - (grad * out).to(p.dtype).sum(-1, keepdim=True))
    if bent is not None:
        ds = ds * (1 - bent.square())
    ds = (ds * rule.scale).to(q.dtype)
    grads = ds @ k, ds.transpose(-2, -1) @ q, p.to(grad.dtype).transpose(-2, -1) @ grad
    if heads == q.shape[1]:
        return grads
    dq, dk, dv = grads  # a key head's gradient is the sum over the query heads that share it
    return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)
