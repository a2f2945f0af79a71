"""Rows of experts on their way before their number is known: `speculated`, for `experts.speculate` (Brainstorm).

A dispatch sends to each rank as many rows as the last one of its layer did, and some more, at once with the numbers
that there really are. Once these have come, every rank knows whether any rank guessed too few; what is left is then
sent in a second exchange. So the wait for the numbers, a round trip in each layer, is spent sending; the rows that
experts get are the same, in the same order, whatever was guessed, and gradients go back in one exchange. Left out:
guesses by the experts of the layer before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.plans.replicas import Placement
from gnomon.runtime.mesh.collectives import all_gather, all_to_all
from gnomon.runtime.ops.routing import Routing, by_expert, by_slot, move_rows, routing_with, rows_of
from gnomon.runtime.ops.site import ALONE, Axis

SHARE, FLOOR = 8, 8
"""What is sent beyond the last number: an eighth of it, and so many rows; numbers of choices that are drawn anew from
the same shares differ by less from some hundred rows on."""


class Guess:
    """A guess of one layer's dispatch: rows from each rank to each."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        """(from, to); None before the first."""
        self.guesses = self.missed = 0
        """Dispatches, and those with a second exchange."""

    def learn(self, rows: Tensor, *, missed: bool) -> None:
        """Learns the next guess. rows: those that there were, (from, to)."""
        self.rows = rows + rows // SHARE + FLOOR
        self.guesses += 1
        self.missed += missed


def speculated(
    x: Tensor,
    indices: Tensor,
    experts: int,
    guess: Guess,
    *,
    ep: Axis,
    etp: Axis = ALONE,
    capacity: float = 0.0,
    padded: bool = False,
    weights: Tensor | None = None,
    placement: Placement | None = None,
) -> tuple[Routing, Tensor]:
    """(routing, rows that came from the ranks of ep) as `routing_of` and the exchange after it make them. All ranks of
    ep come here with the same guess."""
    assert ep.group is not None, "rows are sent ahead to other ranks"
    order, counts, real = by_expert(indices, experts, capacity=capacity, padded=padded, weights=weights)
    order, sent, real = by_slot(order, counts, ep, placement, real)
    rows = rows_of(x, order, indices.shape[-1], real)
    came, got = _Sent.apply(rows, sent, guess, ep)  # type: ignore[no-untyped-call]
    return routing_with(order, sent, got, topk=indices.shape[-1], etp=etp, real=real), came


class _Sent(torch.autograd.Function):
    """Rows to other ranks by a guess, and what it missed; gradients the other way by the true numbers."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Tensor, guess: Guess, ep: Axis) -> tuple[Tensor, Tensor]:
        group, me = ep.group, ep.index
        assert group is not None
        # sent: (ranks, slots) rows that go to each rank for each of its slots of experts.
        everyone = torch.empty((ep.ranks * sent.shape[0], sent.shape[1]), dtype=sent.dtype, device=sent.device)
        numbers = all_gather(everyone, sent.contiguous(), group, wait=False)
        begun = None
        if guess.rows is not None:
            begun = _Begun(rows, sent.sum(1).tolist(), guess.rows[me].tolist(), guess.rows[:, me].tolist(), group)
        if numbers is not None:
            numbers.wait()
        table = everyone.view(ep.ranks, ep.ranks, -1)  # (from, to, slot)
        between = table.sum(2).cpu()
        going, coming = between[me].tolist(), between[:, me].tolist()
        # All ranks see the same table and the same guess, so all agree on whether there is a second exchange: a
        # collective that only some enter would hang.
        missed = guess.rows is None or bool((between > guess.rows).any())
        came = move_rows(rows, group, coming, going) if begun is None else begun.finish(coming, missed=missed)
        guess.learn(between, missed=missed)
        ctx.way = group, going, coming
        # (from, slot): what this rank's experts got, and from whom.
        got = table[:, me].contiguous()
        ctx.mark_non_differentiable(got)
        return came, got

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return move_rows(grad, *ctx.way), None, None, None


class _Begun:
    """The first exchange, under way."""

    def __init__(
        self, rows: Tensor, going: Sequence[int], ahead: Sequence[int], behind: Sequence[int], group: ProcessGroup
    ) -> None:
        """Takes the rows that are going to each rank (going), and those that are guessed to go to each (ahead) and to
        come from each (behind)."""
        self.group, self.ahead, self.behind = group, ahead, behind
        self.parts = rows.split(list(going))
        shape = rows.shape[1:]
        self.out = rows.new_zeros((sum(ahead), *shape))
        for room, part in zip(self.out.split(list(ahead)), self.parts, strict=True):
            some = min(len(part), len(room))
            # Where fewer rows go than were guessed, zeros fill the rest of the message; the receiver cuts them off by
            # the true numbers.
            room[:some] = part[:some]
        self.room = rows.new_empty((sum(behind), *shape))
        self.work = all_to_all(self.room, self.out, group, behind, ahead, wait=False)

    def finish(self, coming: Sequence[int], *, missed: bool) -> Tensor:
        """The rows from each rank, in order. missed: whether any rank has more for another than was guessed."""
        if self.work is not None:
            self.work.wait()
        first = [room[:count] for room, count in zip(self.room.split(list(self.behind)), coming, strict=True)]
        if not missed:
            return torch.cat(first)
        late = [part[count:] for part, count in zip(self.parts, self.ahead, strict=True)]
        rest = [max(0, count - guessed) for count, guessed in zip(coming, self.behind, strict=True)]
        later_rows = move_rows(torch.cat(late), self.group, rest, [len(part) for part in late]).split(rest)
        # Rank after rank, what was guessed before what was late: the order in which one exchange would bring them.
        return torch.cat([part for pair in zip(first, later_rows, strict=True) for part in pair])
