"""Mixtures of experts: `router`, `dispatch`, `grouped_linear`, `combine`.

Between dispatch and combine rows are sorted by expert: a tensor of (rows, width) and a `Routing`, which says whose they
are. Where ranks divide experts (ep), rows go to the ranks of their experts and come back, each rank as many as its
tokens chose; where ranks divide an expert (etp), all slices of it get them, and the parts of the result are added up.
What exceeds an expert's capacity is dropped, the last tokens first or those of least weight, and what is missing may be
filled up with rows of zeros. Experts that a plan places lie on the ranks that it says, some on several
(`plans.replicas`). Attributes of a router: `fn` (softmax, sigmoid), `groups` and `groups_per_token`,
`normalised`, `least_sum`, `routed_scale`, `group_top`, `threshold`, `assignment`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.plans.replicas import Placement, on_ranks, sent_rows
from gnomon.runtime.mesh.collectives import all_gather, all_to_all
from gnomon.runtime.ops.site import ALONE, ANCHOR, Axis, Operand, Site
from gnomon.runtime.parameters.parameters import Weight


class Terms:
    """Gradients of experts' weights that come a few experts at a time, and are added when all are there, as if they had
    come at once."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.of: dict[int, dict[int, Tensor]] = {}
        """By weight, and by the first expert of each part."""

    def add(self, weight: Weight, first: int, terms: Tensor) -> None:
        """Adds gradients of some experts' weights. terms: of the experts from the first on."""
        mine = self.of.setdefault(id(weight), {})
        mine[first] = terms
        if len(mine) == self.parts:
            weight.add(torch.cat([mine[at] for at in sorted(mine)]))
            del self.of[id(weight)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShare:
    """Some of the experts of each rank, where rows go to a few at a time."""

    first: int
    """The first of this rank's."""
    rows: Tensor
    """Places of their rows among all sorted ones of this rank's tokens."""
    terms: Terms
    """Of all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The assignment of rows to experts and ranks, as a dispatch sends them."""

    order: Tensor
    """(rows): place of each sorted row among (tokens × topk)."""
    counts: tuple[int, ...]
    """Rows of each expert of this rank, those of other ranks' tokens included."""
    topk: int
    """Experts of a token."""
    sent: tuple[int, ...] = ()
    """Rows to each rank of ep."""
    received: tuple[int, ...] = ()
    """Rows from each rank of ep."""
    slices: tuple[int, ...] = ()
    """Rows that each rank of etp received, all of which all slices of an expert compute."""
    sorting: Tensor | None = None
    """Place of each row sorted by expert among those that came."""
    real: Tensor | None = None
    """(rows): whether a sorted row is a token's; None: all are."""
    by_slot: tuple[Tensor, Tensor] | None = None
    """(ranks of ep, experts of a rank) each: rows to every expert, rows that came from each rank for those of this one;
    None: of one rank."""
    share: ExpertsShare | None = None
    """Of some experts only."""
    gathered: bool = False
    """Rows are of the tokens of all ranks, which each has (`gathered`)."""
    home: bool = False
    """Rows have come back to the ranks of their tokens, in the order in which they were sent."""


def router(site: Site, logits: Tensor, bias: Operand | None = None) -> tuple[Tensor, Tensor]:
    """(weights, indices), (…, topk) each. bias: added to the scores that choose, and to nothing else."""
    topk = site.block.tensor(site.op.outputs[0]).dims[-1].size
    assert topk is not None
    # Softmax in fp32 at least: in bf16 close scores tie, and ties are broken by chance.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if site.attr("assignment", "top_k") == "sinkhorn":
        weights, indices = _evenly(wide, topk)
        return weights.to(logits.dtype), indices
    scores = wide.sigmoid() if site.attr("fn", "softmax") == "sigmoid" else wide.softmax(-1)
    with torch.no_grad():
        chosen = scores.detach()
        if bias is not None:
            chosen = chosen + (bias if isinstance(bias, Tensor) else bias.value).to(chosen.dtype)
        if (groups := site.attr("groups", 1)) > 1:
            grouped = chosen.unflatten(-1, (groups, -1))
            # A group's score is the sum of its best experts: of two in DeepSeek-V3, of one in V2.
            best = grouped.topk(site.attr("group_top", 2), dim=-1).values.sum(-1)
            allowed = torch.zeros_like(best, dtype=torch.bool)
            allowed.scatter_(-1, best.topk(site.attr("groups_per_token", 1), dim=-1, sorted=False).indices, True)
            # 0 and not -inf, as in transformers' DeepSeek models: with a negative bias an expert of another group may
            # still be chosen there, and so here.
            chosen = grouped.masked_fill(~allowed.unsqueeze(-1), 0.0).flatten(-2)
        indices = chosen.topk(topk, dim=-1).indices
    # Of the scores without the bias: it steers the choice and must not scale the output.
    weights = scores.gather(-1, indices)
    if (threshold := site.attr("threshold", 1.0)) < 1.0:  # of two: the second is left out, as if one had been chosen
        is_sure = (weights[..., :1] - weights[..., 1:]).detach() > threshold
        first = torch.tensor([False, True], device=logits.device)
        indices = indices.masked_fill(is_sure & first, logits.shape[-1])  # no expert
        weights = weights.masked_fill(is_sure & first, 0.0)
    if site.attr("normalised", True):
        total = weights.sum(-1, keepdim=True).clamp(min=site.attr("least_sum", 0.0))
        # Sigmoids may all be 0; a softmax's largest cannot.
        weights = weights / (total + (1e-20 if site.attr("fn", "") == "sigmoid" else 0.0))
    return (weights * site.attr("routed_scale", 1.0)).to(logits.dtype), indices


SINKHORN_TOLERANCE, SINKHORN_LEAST = 1e-4, 1e-8
"""Mean change of the experts' factors at which iterations end, and what is added to sums that are divided by
(Megatron-LM's)."""


def _evenly(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(weights, indices) where the largest are chosen once sums over tokens are equal for all experts. In training and
    outside alike: the choice is that of the tokens that come together."""
    with torch.no_grad():
        indices = sinkhorn(logits.flatten(0, -2)).topk(topk, dim=-1).indices.unflatten(0, logits.shape[:-1])
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    return scores.gather(-1, indices), indices


def sinkhorn(logits: Tensor) -> Tensor:
    """(tokens, experts) -> the same: exponentials times a factor for each token and one for each expert, such that each
    token's sum is 1 / tokens and each expert's 1 / experts. Source: Sinkhorn and Knopp 1967, as Megatron-LM's
    moe_utils.py stops it."""
    exponentials = logits.exp()
    tokens, experts = exponentials.shape
    by_expert = exponentials.new_ones(experts)
    while True:
        by_token = 1 / tokens / (exponentials @ by_expert + SINKHORN_LEAST)
        before, by_expert = by_expert, 1 / experts / (by_token @ exponentials + SINKHORN_LEAST)
        if not (before - by_expert).abs().mean() > SINKHORN_TOLERANCE:  # also where logits are not finite
            return by_expert * exponentials * by_token.unsqueeze(1)


def routing_of(
    indices: Tensor,
    experts: int,
    *,
    ep: Axis = ALONE,
    etp: Axis = ALONE,
    capacity: float = 0.0,
    padded: bool = False,
    weights: Tensor | None = None,
    placement: Placement | None = None,
) -> Routing:
    """Routes rows to the chosen experts (…, topk), of which some may be none (`experts`). capacity: rows that an expert
    takes of this rank's tokens, over the mean; 0 for all. padded: whether it always computes so many. weights: of the
    same shape, where tokens of least weight are dropped first; None: the last ones. placement: the expert in each slot,
    rank after rank of ep; None: in their order. With several ranks they tell each other how many rows there are, so all
    must come here."""
    order, counts, real = by_expert(indices, experts, capacity=capacity, padded=padded, weights=weights)
    topk = indices.shape[-1]
    if ep.ranks * etp.ranks == 1:
        return Routing(order=order, counts=tuple(counts.tolist()), topk=topk, real=real)
    if placement is not None and len(placement) > experts:
        order, sent, got, real = _to_placed(order, counts, ep, placement, real)
    else:
        order, sent, real = by_slot(order, counts, ep, placement, real)
        got = _exchanged_counts(sent, ep)  # (ranks of ep, experts of this rank)
    return routing_with(order, sent, got, topk=topk, etp=etp, real=real)


def by_expert(
    indices: Tensor, experts: int, *, capacity: float, padded: bool, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(order, rows of each expert, real) of this rank's tokens, sorted by expert; as in `routing_of`."""
    flat = indices.reshape(-1)
    if weights is None:
        # Stable: rows of an expert stay in the order of tokens, so which exceed its capacity is defined.
        order = torch.argsort(flat, stable=True)
    else:
        order = torch.argsort(weights.detach().reshape(-1), stable=True, descending=True)
        # Two stable sorts: by expert, and within one by falling weight.
        order = order[torch.argsort(flat[order], stable=True)]
    counts, real = torch.bincount(flat, minlength=experts)[:experts], None
    order = order[: int(counts.sum())]  # those without an expert come last
    if capacity:
        most = math.ceil(capacity * flat.numel() / experts)
        # Place of each row within its expert's run.
        within = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[flat[order]]
        order, counts = order[within < most], counts.clamp(max=most)
        if padded:
            order, real = filled(order, flat[order], most - counts)
            counts = torch.full_like(counts, most)
    return order, counts, real


def filled(order: Tensor, experts: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """Places (order, of rows sorted by expert) with as many more behind each expert's as are missing (experts), which
    stand for rows of zeros; and which of them are real. experts: of the rows."""
    fill_experts = torch.arange(len(missing), device=order.device).repeat_interleave(missing)
    # Stable: real rows of an expert stay before those that fill it up.
    place = torch.argsort(torch.cat((experts, fill_experts)), stable=True)
    # What fills up points at row 0; `real` says that it is none, and its numbers are set to zero.
    return torch.cat((order, torch.zeros_like(fill_experts)))[place], place < len(order)


def by_slot(
    order: Tensor, counts: Tensor, ep: Axis, placement: Placement | None, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(order, rows to each rank's slots, real) where each expert is in one slot. order: by expert; returned by slot."""
    if placement is None:
        return order, counts.view(ep.ranks, -1), real
    slot = torch.empty(len(placement), dtype=torch.int64)
    # The inverse permutation: slot of each expert.
    slot[list(placement)] = torch.arange(len(placement))
    moved = torch.argsort(slot.to(order.device).repeat_interleave(counts), stable=True)
    sent = counts[list(placement)].view(ep.ranks, -1)
    return order[moved], sent, None if real is None else real[moved]


def routing_with(
    order: Tensor, sent: Tensor, got: Tensor, *, topk: int, etp: Axis = ALONE, real: Tensor | None = None
) -> Routing:
    """Makes a routing from counts. sent: (ranks of ep, slots of a rank) of this rank's rows. got: the same of what
    comes, from each rank."""
    parts = _gathered_counts(got, etp)  # (ranks of etp, ranks of ep, experts of this rank)
    # The expert of each row that came: ranks of etp, ranks of ep, experts, in this order. A stable sort by expert keeps
    # the order of ranks within each.
    mine = (
        torch.arange(sent.shape[1], device=sent.device).expand_as(parts).reshape(-1).repeat_interleave(parts.flatten())
    )
    return Routing(
        order=order,
        counts=tuple(parts.sum((0, 1)).tolist()),
        topk=topk,
        sent=tuple(sent.sum(1).tolist()),
        received=tuple(got.sum(1).tolist()),
        slices=tuple(parts.sum((1, 2)).tolist()),
        sorting=torch.argsort(mine, stable=True),
        real=real,
        by_slot=(sent, got),
    )


def shared_out(routing: Routing, parts: int) -> tuple[Routing, ...]:
    """The same in parts, each of some of the experts of every rank: all rows of an expert are in one."""
    assert routing.by_slot is not None, "rows of one rank go nowhere"
    sent, got = routing.by_slot
    # slot, by: the slot of each row that this rank sends, and of each that comes: numbers (ranks of ep, slots),
    # repeated by counts of rows, in the order in which rows lie.
    slots = torch.arange(sent.shape[1], device=sent.device)
    slot, terms, outputs = slots.expand_as(sent).flatten().repeat_interleave(sent.flatten()), Terms(parts), []
    for part in range(parts):
        low, high = (at * sent.shape[1] // parts for at in (part, part + 1))
        here, came = sent[:, low:high], got[:, low:high]
        by = slots[low:high].expand_as(came).flatten().repeat_interleave(came.flatten())
        rows = torch.nonzero((slot >= low) & (slot < high)).flatten()
        outputs.append(
            replace(
                routing,
                order=routing.order[rows],
                counts=routing.counts[low:high],
                sent=tuple(here.sum(1).tolist()),
                received=tuple(came.sum(1).tolist()),
                sorting=torch.argsort(by, stable=True),
                share=ExpertsShare(first=low, rows=rows, terms=terms),
            )
        )
    return tuple(outputs)


def _to_placed(
    order: Tensor, counts: Tensor, ep: Axis, placement: Placement, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(order, rows sent to each rank's slots, rows that come from each rank for this one's slots, real) where experts
    lie as placed: every rank knows all counts and shares rows out alike. order: by expert; returned by rank, slot."""
    # (ranks of ep, experts). rows below: (from, expert, to).
    everyone = _gathered_counts(counts.unsqueeze(0), ep)[:, 0].cpu().numpy()
    rows = sent_rows(everyone, placement)
    slots = on_ranks(placement, ep.ranks)
    sent = torch.tensor([[int(rows[ep.index, e, to]) for e in own] for to, own in enumerate(slots)])
    got = torch.tensor([[int(rows[by, e, ep.index]) for e in slots[ep.index]] for by in range(ep.ranks)])
    mine = torch.from_numpy(rows[ep.index])  # (experts, ranks): of an expert's rows the first go to the first rank
    place = torch.zeros_like(mine)
    for to, own in enumerate(slots):
        place[list(own), to] = to * len(own) + torch.arange(len(own))
    # Rows are by expert, and of one the first mine[e, 0] go to rank 0 and so on: the key of each is the slot that it
    # goes to.
    key = place.flatten().repeat_interleave(mine.flatten()).to(order.device)
    by_slot = torch.argsort(key, stable=True)
    return order[by_slot], sent.to(order.device), got.to(order.device), None if real is None else real[by_slot]


def _exchanged_counts(sent: Tensor, ep: Axis) -> Tensor:
    if ep.group is None:
        return sent
    got = torch.empty_like(sent)
    all_to_all(got, sent.contiguous(), ep.group)
    return got


def _gathered_counts(got: Tensor, etp: Axis) -> Tensor:
    if etp.group is None:
        return got.unsqueeze(0)
    whole = torch.empty((etp.ranks * got.shape[0], got.shape[1]), dtype=got.dtype, device=got.device)
    all_gather(whole, got.contiguous(), etp.group)
    return whole.unflatten(0, (etp.ranks, -1))


class _Moved(torch.autograd.Function):
    """Rows to other ranks, so many to each; gradients the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        ctx.way = group, sent, received
        return move_rows(x, group, received, sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return move_rows(grad, *ctx.way), None, None, None


def move_rows(x: Tensor, group: ProcessGroup, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    """Rows to other ranks, so many to each; returns those that come."""
    out = torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype, device=x.device)
    all_to_all(out, x.contiguous(), group, received, sent)
    return out


class _ToSlices(torch.autograd.Function):
    """Rows of all ranks that hold slices of an expert, to each of them; the sum of their gradients goes back. Parts are
    uneven, so both are all-to-alls of as many bytes as a gather and a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, etp: Axis, slices: Sequence[int]) -> Tensor:
        ctx.etp, ctx.slices = etp, slices
        return _to_slices(x, etp, slices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _from_slices(grad, ctx.etp, ctx.slices), None, None


class _FromSlices(torch.autograd.Function):
    """The reverse of `_ToSlices`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, etp: Axis, slices: Sequence[int]) -> Tensor:
        ctx.etp, ctx.slices = etp, slices
        return _from_slices(x, etp, slices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _to_slices(grad, ctx.etp, ctx.slices), None, None


def _to_slices(x: Tensor, etp: Axis, slices: Sequence[int]) -> Tensor:
    assert etp.group is not None
    # The same rows to every rank of etp.
    return move_rows(x.repeat(etp.ranks, 1), etp.group, slices, [x.shape[0]] * etp.ranks)


def _from_slices(x: Tensor, etp: Axis, slices: Sequence[int]) -> Tensor:
    assert etp.group is not None
    own = slices[etp.index]
    return move_rows(x, etp.group, [own] * etp.ranks, slices).unflatten(0, (etp.ranks, own)).sum(0)


def rows_of(x: Tensor, order: Tensor, topk: int, real: Tensor | None) -> Tensor:
    """(…, width) -> (rows, width): a row for each token and each of its experts, in this order."""
    # Row t · topk + k is the k-th expert's of token t.
    rows = x.reshape(-1, x.shape[-1]).index_select(0, order // topk)
    return rows if real is None else rows * real.unsqueeze(-1)


def to_experts(rows: Tensor, routing: Routing, group: ProcessGroup) -> Tensor:
    """Rows to the ranks of their experts, where they are sorted by expert. Without gradients: those of `to_tokens`."""
    assert routing.sorting is not None
    return move_rows(rows, group, routing.received, routing.sent).index_select(0, routing.sorting)


def to_tokens(rows: Tensor, routing: Routing, group: ProcessGroup) -> Tensor:
    """The reverse of `to_experts`."""
    assert routing.sorting is not None
    return move_rows(rows.index_select(0, torch.argsort(routing.sorting)), group, routing.sent, routing.received)


def dispatch(x: Tensor, routing: Routing, *, ep: Axis = ALONE, etp: Axis = ALONE, came: Tensor | None = None) -> Tensor:
    """(…, width) -> (rows, width): a row for each token and each of its experts, sorted by expert, on the ranks that
    hold the expert. came: the rows that ranks of ep have sent already."""
    rows = rows_of(x, routing.order, routing.topk, routing.real) if came is None else came
    if ep.group is not None and came is None:
        rows = _Moved.apply(rows, ep.group, routing.received, routing.sent)  # type: ignore[no-untyped-call]
    if etp.group is not None:
        rows = _ToSlices.apply(rows, etp, routing.slices)  # type: ignore[no-untyped-call]
    return rows if routing.sorting is None else rows.index_select(0, routing.sorting)


def returned(rows: Tensor, routing: Routing, *, ep: Axis = ALONE, etp: Axis = ALONE) -> Tensor:
    """What experts made of this rank's rows, in the order in which they were sent."""
    if routing.home:
        return rows
    if routing.sorting is not None:
        # argsort of a permutation is its inverse.
        rows = rows.index_select(0, torch.argsort(routing.sorting))
    if etp.group is not None:
        rows = _FromSlices.apply(rows, etp, routing.slices)  # type: ignore[no-untyped-call]
    if ep.group is not None:
        rows = _Moved.apply(rows, ep.group, routing.sent, routing.received)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Tensor, weights: Tensor, routing: Routing, *, ep: Axis = ALONE, etp: Axis = ALONE) -> Tensor:
    """(rows, width), (…, topk) -> (…, width): the sum of a token's rows by their weights."""
    rows = returned(rows, routing, ep=ep, etp=etp)
    return summed_rows(rows, weights.reshape(-1, routing.topk), routing).unflatten(0, weights.shape[:-1])


def summed_rows(rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """Returns (tokens, width): for each token the sum of its rows (rows, width), by their weights (tokens, topk)."""
    by_row = weights.reshape(-1).index_select(0, routing.order).unsqueeze(-1).to(rows.dtype)
    if routing.real is not None:
        by_row = by_row * routing.real.unsqueeze(-1)
    out: Tensor = _Summed.apply(rows, by_row, routing.order // routing.topk, len(weights))  # type: ignore[no-untyped-call]
    return out


class _Summed(torch.autograd.Function):
    """The sum of each token's rows times their weights; keeps the rows, and not their products (torch's `index_add`
    does)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, by_row: Tensor, index: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(rows, by_row, index)
        out = torch.zeros((tokens, rows.shape[-1]), dtype=rows.dtype, device=rows.device)
        # One product at a time lives here; autograd of `index_add` would keep all of them.
        return out.index_add_(0, index, rows * by_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, by_row, index = ctx.saved_tensors
        of_rows = grad.index_select(0, index)
        return of_rows * by_row, (of_rows * rows).sum(-1, keepdim=True), None, None


def _of_share(value: Tensor, routing: Routing) -> Tensor:
    """What of all experts' weights the rows meet."""
    if routing.share is None:
        return value
    return value[routing.share.first : routing.share.first + len(routing.counts)]


def _add(weight: Weight, terms: Tensor, share: ExpertsShare | None) -> None:
    if share is None:
        weight.add(terms)
    else:
        share.terms.add(weight, share.first, terms)


class _Biased(torch.autograd.Function):
    """Each row plus the bias (experts, out) of its own expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Weight, routing: Routing, anchor: Tensor | None) -> Tensor:
        ctx.bias, ctx.counts, ctx.share = bias, list(routing.counts), routing.share
        parts = zip(rows.split(ctx.counts), _of_share(bias.value, routing), strict=True)
        return torch.cat([part + own for part, own in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias: Weight = ctx.bias
        # An expert without a row has a gradient of zeros, so that every rank adds as many terms.
        terms = torch.stack([part.sum(0) for part in grad.split(ctx.counts)])
        bias.tape.run(lambda: _add(bias, terms, ctx.share), terms)
        return grad, None, None, None


def _expert_matmuls(rows: Tensor, counts: Sequence[int], matrices: Tensor) -> Tensor:
    """Returns rows (rows, out): each expert's, of which there are so many, times its matrix (in, out). Written side by
    side: joining what each made would copy all of it."""
    out = rows.new_empty(len(rows), matrices.shape[2])
    for part, matrix, into in zip(rows.split(counts), matrices, out.split(counts), strict=True):
        torch.mm(part, matrix, out=into)
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Weight, routing: Routing, anchor: Tensor | None, inner_first: bool
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.routing, ctx.inner_first = weight, routing, inner_first
        ctx.counts = list(routing.counts)
        value = _of_share(weight.value, routing)
        matrices = value if inner_first else value.transpose(1, 2)
        return _expert_matmuls(rows, ctx.counts, matrices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.saved_tensors[0].detach()
        weight: Weight = ctx.weight
        first, counts = ctx.inner_first, ctx.counts
        value, share = _of_share(weight.value, ctx.routing), ctx.routing.share
        matrices = value.transpose(1, 2) if first else value
        dx = _expert_matmuls(grad, counts, matrices)

        def weight_grad() -> None:
            each = zip(grad.split(counts), rows.split(counts), strict=True)
            pairs = [(x.T, g) if first else (g.T, x) for g, x in each]
            if share is None:
                weight.add_matmuls(pairs)
            else:
                share.terms.add(weight, share.first, torch.stack([grad_rows @ right for grad_rows, right in pairs]))

        weight.tape.run(weight_grad, rows, grad)
        return dx, None, None, None, None


def grouped_linear(
    rows: Tensor, weight: Weight, routing: Routing, bias: Weight | None = None, *, inner_first: bool = False
) -> Tensor:
    """(rows, in) -> (rows, out), each by the weight (out, in) of its own expert, plus that one's bias. inner_first: the
    weight is (in, out)."""
    anchor = ANCHOR if weight.trained else None
    out: Tensor = _Experts.apply(rows, weight, routing, anchor, inner_first)  # type: ignore[no-untyped-call]
    if bias is not None:
        out = _Biased.apply(out, bias, routing, anchor)  # type: ignore[no-untyped-call]
    return out
