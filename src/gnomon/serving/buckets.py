"""Runtimes for texts of several lengths, each padded to a length of its own, and how many workers take which (Arlo).

`best_lengths(counts, seconds, most)` cuts a distribution of lengths into at most so many runtimes, exactly;
`assign(rates, seconds, workers)` says how many workers hold each, exactly by `expected`, which is a formula of queues:
it orders what the replay (`serving.dispatch`) then decides. Times are seconds, rates texts a second, lengths tokens.
Leaves out which worker a text goes to.
Source: Tan, Li, Yang, Li and Xu 2024 (Arlo): its runtime scheduler. Its programme is not public: the formula is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gnomon.errors import InputError

CONGESTED = 0.85
"""Share of its time that a level of workers is busy before what comes goes on to the next longer one."""


def best_lengths(
    counts: Mapping[int, int], seconds: Callable[[int], float], most: int, step: int = 1
) -> tuple[int, ...]:
    """Lengths of at most `most` runtimes, rising, that take the fewest seconds for all texts together.

    counts: tokens of a text -> how many such. seconds: of a text padded to so many tokens, never falling. step: lengths
    are whole numbers of it. By dynamic programming over the lengths that there are: O(lengths^2 · most).
    """
    if most < 1 or step < 1:
        raise InputError(f"{most} runtimes in steps of {step} tokens serve nobody; give at least 1 of each")
    if not counts or min(counts) < 1:
        raise InputError("runtimes are cut from the lengths of texts: give some, of at least 1 token")
    rounded: dict[int, int] = {}
    for length, count in counts.items():
        top = -(-length // step) * step
        rounded[top] = rounded.get(top, 0) + count
    tops = sorted(rounded)
    price = [seconds(top) for top in tops]
    before = [0]
    for top in tops:
        before.append(before[-1] + rounded[top])
    # best[j]: (seconds, lengths) of the first j tops with the runtimes so far
    none: tuple[float, tuple[int, ...]] = (math.inf, ())
    best = [(0.0, none[1]), *[none] * len(tops)]
    answer = none
    for _ in range(min(most, len(tops))):
        best = [
            min(
                # Texts of tops i … j - 1 are all padded to the last of these.
                ((best[i][0] + (before[j] - before[i]) * price[j - 1], (*best[i][1], tops[j - 1])) for i in range(j)),
                default=none,
            )
            for j in range(len(tops) + 1)
        ]
        answer = min(answer, best[-1], key=lambda one: one[0])
    return answer[1]


@dataclass(frozen=True, slots=True, order=True)
class ExpectedCost:
    """What an assignment comes to; the smaller, the better."""

    overload: float
    """Texts a second that nobody has time for."""
    waiting: float
    """Texts in the system on average: rate times latency, which Little's law makes texts."""


def _erlang_c(workers: int, offered: float) -> float:
    """Chance that a text waits: M/M/n with so much work at a time (Erlang 1917)."""
    # Erlang's B by its recursion over the number of workers; C follows from it.
    blocked = 1.0
    for n in range(1, workers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    busy = offered / workers
    return blocked / (1.0 - busy * (1.0 - blocked))


def _level(comes: float, seconds: float, workers: int, *, last: bool) -> tuple[float, ExpectedCost]:
    """(texts a second that go on to the next level, what this one comes to)."""
    if not workers:
        return (0.0, ExpectedCost(comes, 0.0)) if last else (comes, ExpectedCost(0.0, 0.0))
    served_rate = min(comes, CONGESTED * workers / seconds)
    over = 0.0
    if last:  # nobody is longer: it takes all that it has time for
        most = workers / seconds
        over = max(0.0, comes - most)
        # Just under all of its time, where the formula of a queue has no end; overload counts before waiting anyway.
        served_rate = min(comes, most * (1 - 1e-9))
    offered = served_rate * seconds
    # service takes the same time each time, so a text waits half as long as Erlang's C says (M/D/n)
    wait_s = 0.5 * _erlang_c(workers, offered) * seconds / (workers - offered) if served_rate else 0.0
    return (0.0 if last else comes - served_rate), ExpectedCost(over, served_rate * (seconds + wait_s))


def expected(rates: Sequence[float], seconds: Sequence[float], workers: Sequence[int]) -> ExpectedCost:
    """Expected cost of workers by level. rates: texts a second whose shortest fitting runtime is that of the level.
    seconds: of a text there. What a level has no time for, by `CONGESTED`, goes on to the next longer one and takes
    that one's seconds."""
    comes = over = waiting = 0.0
    for level, (rate, each, count) in enumerate(zip(rates, seconds, workers, strict=True)):
        comes, level_cost = _level(comes + rate, each, count, last=level == len(rates) - 1)
        over, waiting = over + level_cost.overload, waiting + level_cost.waiting
    return ExpectedCost(over, waiting)


def assign(rates: Sequence[float], seconds: Sequence[float], workers: int) -> tuple[int, ...]:
    """Workers of each level, the best by `expected`; the longest has at least one, so that every text fits somewhere.

    Level by level, keeping for each number of workers used those beginnings that no other beats both in what goes on
    and in what they come to: the rest of an assignment is never better for more that goes on, so none of the best is
    lost. Ties are the one with more workers at the longer levels.
    """
    if workers < 1:
        raise InputError(f"{workers} workers serve nobody; give at least 1")
    if not rates or len(rates) != len(seconds):
        raise InputError(f"{len(rates)} rates and {len(seconds)} times do not describe the same runtimes")
    labels: dict[int, list[tuple[float, ExpectedCost, tuple[int, ...]]]] = {0: [(0.0, ExpectedCost(0.0, 0.0), ())]}
    for level, (rate, each) in enumerate(zip(rates, seconds, strict=True)):
        last, grown = level == len(rates) - 1, dict[int, list[tuple[float, ExpectedCost, tuple[int, ...]]]]()
        for used, before in labels.items():
            counts = [workers - used] if last else range(workers - used)
            for count in counts:
                for comes, so_far, chosen in before:
                    goes, level_cost = _level(comes + rate, each, count, last=last)
                    total = ExpectedCost(so_far.overload + level_cost.overload, so_far.waiting + level_cost.waiting)
                    grown.setdefault(used + count, []).append((goes, total, (*chosen, count)))
        labels = {used: _unbeaten(found) for used, found in grown.items()}
    return min(labels[workers], key=lambda one: (one[1], one[2]))[2]


def _unbeaten(
    found: Sequence[tuple[float, ExpectedCost, tuple[int, ...]]],
) -> list[tuple[float, ExpectedCost, tuple[int, ...]]]:
    # In order of what goes on: one that passes on more must come to less than all before it.
    unbeaten: list[tuple[float, ExpectedCost, tuple[int, ...]]] = []
    for one in sorted(found):
        if not unbeaten or one[1] < unbeaten[-1][1]:
            unbeaten.append(one)
    return unbeaten
