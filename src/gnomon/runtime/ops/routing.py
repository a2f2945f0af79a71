"""Mixtures of experts: `router`, `dispatch`, `grouped_linear`, `combine`.

Between dispatch and combine rows are sorted by expert: a tensor of (rows, width) and a `Routing`, which says whose they
are; no token is dropped. Attributes of a router: `fn` (softmax, sigmoid), `groups` and `groups_per_token`,
`normalised`, `routed_scale`, `group_top`. Leaves out capacity and ranks that divide experts (ep).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.runtime.ops.site import Operand, Site
from gnomon.runtime.parameters import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which rows belong to whom."""

    order: Tensor
    """(rows): place of each sorted row among (tokens × topk)."""
    counts: tuple[int, ...]
    """Rows of each expert."""
    topk: int
    """Experts of a token."""


def router(site: Site, logits: Tensor, bias: Operand | None = None) -> tuple[Tensor, Tensor]:
    """(weights, indices), (…, topk) each. bias: added to the scores that choose, and to nothing else."""
    topk = site.block.tensor(site.op.outputs[0]).dims[-1].size
    assert topk is not None
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if site.attr("fn", "softmax") == "sigmoid" else wide.softmax(-1)
    with torch.no_grad():
        chosen = scores.detach()
        if bias is not None:
            chosen = chosen + (bias if isinstance(bias, Tensor) else bias.value).to(chosen.dtype)
        if (groups := site.attr("groups", 1)) > 1:
            grouped = chosen.unflatten(-1, (groups, -1))
            best = grouped.topk(site.attr("group_top", 2), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept.scatter_(-1, best.topk(site.attr("groups_per_token", 1), dim=-1, sorted=False).indices, True)
            chosen = grouped.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(-2)
        indices = chosen.topk(topk, dim=-1).indices
    weights = scores.gather(-1, indices)
    if site.attr("normalised", True):
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if site.attr("fn", "") == "sigmoid" else 0.0))
    return (weights * site.attr("routed_scale", 1.0)).to(logits.dtype), indices


def routing_of(indices: Tensor, experts: int) -> Routing:
    """Of the chosen experts (…, topk)."""
    flat = indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts).tolist()
    return Routing(order=order, counts=tuple(counts), topk=indices.shape[-1])


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """(…, width) -> (rows, width): a row for each token and each of its experts, sorted by expert."""
    return x.reshape(-1, x.shape[-1]).index_select(0, routing.order // routing.topk)


def combine(rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """(rows, width), (…, topk) -> (…, width): the sum of a token's rows by their weights."""
    by_row = weights.reshape(-1).index_select(0, routing.order).unsqueeze(-1).to(rows.dtype)
    tokens = weights.shape[:-1]
    out = torch.zeros((tokens.numel(), rows.shape[-1]), dtype=rows.dtype, device=rows.device)
    return out.index_add(0, routing.order // routing.topk, rows * by_row).unflatten(0, tokens)


class _Biased(torch.autograd.Function):
    """Each row plus the bias (experts, out) of its own expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Weight, counts: Sequence[int]) -> Tensor:
        ctx.bias, ctx.counts = bias, list(counts)
        parts = zip(rows.split(ctx.counts), bias.value, strict=True)
        return torch.cat([part + own for part, own in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias: Weight = ctx.bias
        terms = torch.stack([part.sum(0) for part in grad.split(ctx.counts)])
        bias.tape.run(lambda: bias.add(terms), terms)
        return grad, None, None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Weight, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.counts = weight, list(counts)
        return torch.cat([part @ w.T for part, w in zip(rows.split(ctx.counts), weight.value, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.saved_tensors[0].detach()
        weight: Weight = ctx.weight
        parts = grad.split(ctx.counts)
        dx = torch.cat([part @ w for part, w in zip(parts, weight.value, strict=True)])

        def weight_grad() -> None:
            weight.add(torch.stack([g.T @ x for g, x in zip(parts, rows.split(ctx.counts), strict=True)]))

        weight.tape.run(weight_grad, rows, grad)
        return dx, None, None


def grouped_linear(rows: Tensor, weight: Weight, routing: Routing, bias: Weight | None = None) -> Tensor:
    """(rows, in) -> (rows, out), each by the weight (out, in) of its own expert, plus that one's bias."""
    out: Tensor = _Experts.apply(rows, weight, routing.counts)  # type: ignore[no-untyped-call]
    if bias is not None:
        out = _Biased.apply(out, bias, routing.counts)  # type: ignore[no-untyped-call]
    return out
