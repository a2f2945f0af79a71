"""`paged_attention` by torch: a block of every sequence at a time, merged as flash attention merges (Dao 2022).

`torch.ops.gnomon.paged_attention(q, keys, values, table, lengths, causal, window, scale)` is the same for people's
modules, which `gnomon` captures as this kind. Sequences are never copied together: each round reads one block of each.
Shapes: q (B, Q, N, D), keys (blocks, P, K, D), values (blocks, P, K, E), table (B, W) and lengths (B) of integers;
result (B, Q, N, E), the queries being the last Q of a sequence's positions. Leaves out a kernel of its own (`serve`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnomon.runtime.ops.site import Site


def paged(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, causal: bool, window: int, scale: float
) -> Tensor:
    """softmax(scale · q kᵀ) v over each sequence's own keys. window: a query sees that many positions up to its own,
    0 for all. scale 0: 1/√D. In float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    B, Q, N, D = q.shape
    P, K = keys.shape[1:3]
    group = N // K  # neighbouring query heads share a key head
    q_BQKGD = q.to(wide).unflatten(2, (K, group)) * (scale or D**-0.5)
    # of each query: the largest score so far, the sum of exponentials below it, the sum of values by these
    top = torch.full((B, Q, K, group), -math.inf, dtype=wide, device=q.device)
    total = torch.zeros_like(top)
    out = torch.zeros((*top.shape, values.shape[-1]), dtype=wide, device=q.device)
    at_BQ = lengths[:, None] - Q + torch.arange(Q, device=q.device)
    for column in range(table.shape[1]):
        block_B = table[:, column]
        scores = torch.einsum("bqkgd,bpkd->bqkgp", q_BQKGD, keys[block_B].to(wide))
        behind = at_BQ[..., None] - (column * P + torch.arange(P, device=q.device))  # (B, Q, P)
        seen = behind > at_BQ[..., None] - lengths[:, None, None]  # what lies past the sequence's end does not count
        if causal:
            seen = seen & (behind >= 0)
        if window:
            seen = seen & (behind.abs() < window)
        scores = scores.masked_fill(~seen[:, :, None, None, :], -math.inf)
        higher = torch.maximum(top, scores.amax(-1))
        # a query that has seen nothing yet keeps -inf, of which no exponential is taken
        base = torch.where(higher == -math.inf, 0.0, higher)
        kept, weights = (top - base).exp(), (scores - base[..., None]).exp()
        total = total * kept + weights.sum(-1)
        out = out * kept[..., None] + torch.einsum("bqkgp,bpke->bqkge", weights, values[block_B].to(wide))
        top = higher
    some = total > 0  # a row of a batch that is filled up has no keys, and gives zeros
    return (out / torch.where(some, total, 1.0)[..., None]).flatten(2, 3).to(q.dtype)


@torch.library.custom_op("gnomon::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, causal: bool, window: int, scale: float
) -> Tensor:
    return paged(q, keys, values, table, lengths, causal, window, scale)


@_paged_attention.register_fake
def _(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, causal: bool, window: int, scale: float
) -> Tensor:
    return q.new_empty(*q.shape[:-1], values.shape[-1])


def paged_attention(site: Site, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Attention over the blocks that the table names; no gradient passes."""
    with torch.no_grad():
        return paged(
            q,
            keys,
            values,
            table,
            lengths,
            bool(site.attr("causal", False)),
            int(site.attr("window", 0)),
            float(site.attr("scale", 0.0)),
        )
