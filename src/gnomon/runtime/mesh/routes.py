"""Who sends which rows of a microbatch to whom, where stages divide it among other ranks or in other shares.

`rows_of(plan, stage, size)` says which sequences each data-parallel rank of a stage takes, `routes` what one stage's
ranks send another's so that all have theirs. Where both divide alike, that is one message, to the rank of the same
data-parallel index. A tensor-parallel rank receives from the sender's rank of the same index, modulo the sender's tp; a
context-parallel one from the rank of its own part of the sequence.
Left out: sequences cut in parts, and stages that divide a sequence differently; both are PlanErrors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from gnomon.errors import PlanError
from gnomon.plans import Plan
from gnomon.sharding import deal, reshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A message of one microbatch."""

    source: int
    """Rank of the job that sends."""
    target: int
    """Rank that receives."""
    out: int
    """First of its rows in what the sender holds."""
    into: int
    """First of its rows in what the receiver gets together."""
    rows: int
    """Sequences."""


class Waits(Protocol):
    """What is started and waited for, as torch's `Work`."""

    def wait(self) -> Any:
        """Waits until it is over."""

    def is_completed(self) -> bool:
        """Whether it is over."""


@dataclass(frozen=True, slots=True)
class Together:
    """Several messages, waited for as one."""

    parts: tuple[Waits, ...]

    def wait(self) -> None:
        """Waits until all are over."""
        for part in self.parts:
            part.wait()

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(part.is_completed() for part in self.parts)


def member_work(work: Waits | None) -> Waits:
    """The work that was started; a rank starts something only in groups of which it is a member."""
    assert work is not None, "a rank that is no member of a group neither sends nor receives in it"
    return work


def rows_of(plan: Plan, stage: int, size: int) -> tuple[tuple[int, int], ...]:
    """(first, count) of the sequences of a microbatch of `size` that each data-parallel rank takes."""
    dealt = deal(size, plan.stage_mesh(stage).data_ranks, plan.stages[stage].shares if plan.stages else ())
    if any(part.denominator > 1 or part < 1 for part in dealt):
        dealt_text = " ".join(str(part) for part in dealt[:8])
        raise PlanError(
            f"stage {stage} deals {size} sequences of a microbatch to its data-parallel ranks as {dealt_text}; give it "
            f"shares in whole sequences, at least one each"
        )
    counts = [int(part) for part in dealt]
    return tuple((sum(counts[:i]), count) for i, count in enumerate(counts))


def routes(plan: Plan, source: int, target: int, size: int) -> tuple[Route, ...]:
    """Messages from the ranks of stage `source` to those of stage `target`, for one microbatch, by sender."""
    ends = [rows_of(plan, stage, size) for stage in (source, target)]
    # Dealt again by the whole counts of `rows_of`: both ends as shares of one microbatch, which `reshard` compares.
    sends, gets = (deal(size, len(end), [count for _, count in end]) for end in ends)
    senders, receivers = _places(plan, source), _places(plan, target)
    ways = plan.stage_mesh(source).tp
    messages = []
    for message in reshard(sends, gets):
        first, rows = int(message.start), int(message.rows)
        for part, index in product(range(plan.stage_mesh(target).cp), range(plan.stage_mesh(target).tp)):
            messages.append(
                Route(
                    source=senders[message.source, part, index % ways],
                    target=receivers[message.target, part, index],
                    # `first` counts rows of the microbatch, `out` and `into` those of the share that each end holds.
                    out=first - ends[0][message.source][0],
                    into=first - ends[1][message.target][0],
                    rows=rows,
                )
            )
    return tuple(sorted(messages, key=lambda route: (route.source, route.target)))


def of_rank(messages: Sequence[Route], rank: int) -> tuple[Route, ...]:
    """Those that a rank sends or receives."""
    return tuple(route for route in messages if rank in (route.source, route.target))


def _places(plan: Plan, stage: int) -> dict[tuple[int, ...], int]:
    """(data-parallel, context-parallel, tensor-parallel) -> rank of the job."""
    view, ranks = plan.stage_mesh(stage).dense, plan.stage_ranks[stage]
    return {tuple(view.coordinate(i, axis) for axis in ("dp", "cp", "tp")): rank for i, rank in enumerate(ranks)}
