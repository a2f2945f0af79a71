"""Messages between stages whose ranks divide a microbatch differently: 3 replicas to 1, uneven shares, context parts.

Rows (sequences of a microbatch, or equal parts of them) are dealt to data-parallel ranks in order; a rank sends each
rank of the next stage the rows that both hold. Returns who sends how many rows to whom. Leaves out bytes a row and
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from gnomon.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank sends another for one microbatch, in forward. Its gradient goes back the same way."""

    source: int
    """Data-parallel rank within the sending stage."""
    target: int
    """Data-parallel rank within the receiving stage."""
    start: Fraction
    """First row, counted over the microbatch."""
    rows: Fraction
    """Rows sent. A fraction if a sequence is cut: 1 sequence over 3 replicas is a third each, by tokens."""


def deal(total: int | Fraction, num_ranks: int, shares: Sequence[int] = ()) -> tuple[Fraction, ...]:
    """Rows of each rank: `shares` in proportion, or equal. They add up to `total`, exactly."""
    weights = tuple(shares) or (1,) * num_ranks
    if len(weights) != num_ranks or sum(weights) <= 0 or min(weights) < 0:
        raise PlanError(f"shares {weights} must give each of {num_ranks} ranks a number >= 0, not all 0")
    # Fractions, so that parts add up to the whole exactly and both sides agree on every border.
    return tuple(Fraction(total) * weight / sum(weights) for weight in weights)


def reshard(source: Sequence[Fraction], target: Sequence[Fraction]) -> tuple[Message, ...]:
    """Messages that turn rows dealt as `source` into rows dealt as `target`, in order of row. Every row travels
    exactly once.

    PlanError unless both deal out equally many rows.
    """
    if sum(source) != sum(target):
        raise PlanError(
            f"the sending stage has {sum(source)} rows of a microbatch, the receiving one {sum(target)}; "
            f"make them equal"
        )
    messages: list[Message] = []
    starts = [Fraction(0), *accumulate(source)]
    ends = [Fraction(0), *accumulate(target)]
    for a, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        for b, (low, high) in enumerate(zip(ends, ends[1:], strict=False)):
            # Both deals are in order of rows, so what a pair shares is one interval.
            start, stop = max(first, low), min(last, high)
            if start < stop:
                messages.append(Message(source=a, target=b, start=start, rows=stop - start))
    return tuple(messages)
