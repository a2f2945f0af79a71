"""Attention of runs of queries to runs of keys, piece by piece; results are merged by their log-sum-exp.

Under context parallelism a rank holds segments of positions, and meets the keys of others one rank after the other.
`attend(merged, q, k, v, queries, keys, rule)` adds what queries at some segments see of keys at others; `backward` adds
the gradients, given the merged result. Of a piece, all keys are seen by all queries, or those up to the diagonal:
torch's flash kernel where it has one. Other pieces have a mask and are written out. Leaves out communication
(`context`), and biases.
Shapes: q (B, heads, positions, dim), k and v (B, kv heads, positions, dim), lse (B, heads, positions).
Source: Dao et al. 2022, FlashAttention; merging as in Liu et al. 2023, Ring Attention.
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
    """Whether a query sees no later position."""
    window: int
    """A query at i sees keys from i - window + 1 on, and if not causal up to i + window - 1; 0: no such limit."""
    scale: float
    """What q kᵀ is multiplied by."""
    cap: float
    """Scores become cap · tanh(score / cap); 0: they do not."""


@dataclass(frozen=True, slots=True)
class MeetingRows:
    """Queries and keys of which some see each other."""

    q: slice
    """Rows of the local queries."""
    k: slice
    """Rows of the local keys."""
    diagonal: bool
    """Whether both are the same positions, under a causal mask and nothing else."""
    cut_by_mask: bool
    """Whether another mask cuts through; if neither, every query sees every key, as far as documents go."""
    at: tuple[Segment, Segment]
    """Positions in the sequence of the queries and of the keys."""


class OnlineSoftmax:
    """The attention of queries to the keys so far: an online softmax."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """(first row, end) of local queries -> (out, lse) over the keys so far."""

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges (out, lse) over more keys into the result over the keys so far. A row whose lse is -inf (it sees none
        of the keys) weighs nothing; the first result of a row must be finite, or -inf less -inf makes NaN."""
        key = rows.start, rows.stop
        if key in self.parts:
            # softmax over both sets of keys: each part's share of the whole sum of exponentials is exp(its lse - lse)
            out_before, lse_before = self.parts[key]
            lse, lse_new = torch.logaddexp(lse_before, lse), lse
            out = out_before * (lse_before - lse).exp().unsqueeze(-1) + out * (lse_new - lse).exp().unsqueeze(-1)
        self.parts[key] = out, lse

    def result(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of all rows: out in q's dtype, lse in float32 or wider. out lies in memory as (B,
        positions, heads, dim), as the next matmul reads it."""
        parts = [part for _, part in sorted(self.parts.items())]
        if not parts:  # no queries
            return q, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        out = torch.cat([one.transpose(1, 2) for one, _ in parts], dim=1).to(q.dtype)
        return out.transpose(1, 2), torch.cat([lse for _, lse in parts], dim=2)


def pieces(queries: Sequence[Segment], keys: Sequence[Segment], rule: Rule) -> Iterator[MeetingRows]:
    """Yields the pieces in which segments of queries see segments of keys. Of each segment of queries, the piece in
    which queries meet their own positions comes first: every row sees itself, so that its first result is finite, as
    `OnlineSoftmax.add` needs."""
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
    """Whether a masked piece has the positions of its own queries among its keys."""
    (first, _), (low, count) = piece.at
    return piece.cut_by_mask and low <= first < low + count


def _pieces_of(rows: slice, query: Segment, start: int, key: Segment, rule: Rule) -> Iterator[MeetingRows]:
    """Yields the pieces of one segment of queries and one of keys: none, one, or one before the diagonal and one at it.
    rows: of the local queries; start: row of the first local key."""
    (first, length), (low, count) = query, key
    begin, end = low, low + count
    # Keys that some query of the segment sees: [begin, end). The first query, at `first`, sees the leftmost of a
    # window, and the last, at first + length - 1, the rightmost.
    if rule.window:
        begin = max(begin, first - rule.window + 1)
        end = end if rule.causal else min(end, first + length + rule.window - 1)
    if rule.causal:
        end = min(end, first + length)
    if begin >= end:
        return

    def piece(from_key: int, to_key: int, *, diagonal: bool = False, cut: bool = False) -> MeetingRows:
        keys = slice(start + from_key - low, start + to_key - low)
        return MeetingRows(rows, keys, diagonal, cut, (query, (from_key, to_key - from_key)))

    # The last query still sees the first key: the window cuts nothing off on the left.
    left_is_whole = not rule.window or first + length - rule.window <= begin
    # On the right, every query sees the last key if the first one does.
    if rule.window and not (left_is_whole and (end <= first + 1 if rule.causal else end <= first + rule.window)):
        yield piece(begin, end, cut=True)
    elif not rule.causal or end <= first + 1:
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
    """Yields (piece, mask) but for pieces whose queries and keys have no document in common. The mask (B, 1, queries,
    keys) says whether a query and a key are of one document; None where all are."""
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
    """Adds to `merged` what the queries see of these keys. queries, keys: the positions of the rows of q, and of k and
    v. packing: the documents packed in each sequence, which do not see each other."""
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
    """Adds the gradients of what the queries see of these keys. grad: of `out`. out, lse: merged over all keys. into:
    the gradients of q, k and v, which are added to. Other arguments as in `attend`."""
    dq, dk, dv = into
    for piece, together in _met(queries, keys, rule, packing):
        one, key, value = q[:, :, piece.q], k[:, :, piece.k], v[:, :, piece.k]
        result, statistics, back = out[:, :, piece.q], lse[:, :, piece.q], grad[:, :, piece.q]
        if _flash(q, rule, piece, together):
            # With out and lse over all keys the kernel makes the final probabilities of this piece's keys: the terms of
            # all pieces add up to the gradient.
            grads = _BACKWARD(
                back, one, key, value, result, statistics.contiguous(), 0.0, piece.diagonal, scale=rule.scale
            )
        else:
            grads = _backward_written_out(back, one, key, value, result, statistics, rule, piece, together)
        for total, rows, term in zip((dq, dk, dv), (piece.q, piece.k, piece.k), grads, strict=True):
            total[:, :, rows] += term


def _flash(q: Tensor, rule: Rule, piece: MeetingRows, together: Tensor | None) -> bool:
    """Whether torch's flash kernel computes the piece: on a CPU, without cap, and without a mask but the diagonal."""
    return q.device.type == "cpu" and not rule.cap and not piece.cut_by_mask and together is None


@lru_cache(maxsize=64)
def _seen(query: Segment, key: Segment, rule: Rule, device: torch.device) -> Tensor:
    """A mask (queries, keys): whether a query sees a key."""
    query_at, key_at = (torch.arange(first, first + count, device=device) for first, count in (query, key))
    distance = query_at[:, None] - key_at
    seen = distance >= 0 if rule.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance < rule.window) & (distance > -rule.window) if rule.window else seen


def _scores(
    q: Tensor, k: Tensor, rule: Rule, piece: MeetingRows, together: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(scores, tanh(score / cap) or None without a cap) of (B, heads, queries, keys), in float32 or wider; scores that
    a mask hides are -inf."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) * rule.scale
    bent = torch.tanh(scores / rule.cap) if rule.cap else None
    scores = scores if bent is None else bent * rule.cap
    seen = None
    if piece.diagonal:
        # From 0, not from the piece's own positions, and by a plain rule: one cached mask for all pieces of this
        # length.
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
    # The clamps are for a row that sees nothing here: exp(-inf + 1e30) is 0, and its lse log 0.
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
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
