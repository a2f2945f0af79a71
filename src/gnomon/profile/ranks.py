"""The ranks of one job next to each other, without a common clock.

A collective ends for all its ranks at once, and each rank's own event begins when that rank arrives. So the rank whose
event is the shortest arrived last, and the others waited for it: `match_ranks` matches the k-th collective of each
kind and group in a step, and adds up by how much each rank was the last (Holistic Trace Analysis finds stragglers so).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.profile.account import Account, collective_events
from gnomon.profile.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """One rank in a step of a job."""

    rank: int
    """The rank."""
    waited_s: float
    """Seconds that it waited in collectives for ranks which came later."""
    last: int
    """Collectives that it came last to."""
    matched: int
    """Collectives that could be matched with the other ranks'."""


def match_ranks(traces: Sequence[Trace], accounts: Sequence[Account]) -> tuple[Lateness, ...]:
    """How late each rank reaches the collectives that it shares, in the order of `traces`; empty for fewer than two, or
    where no collective is seen by two ranks."""
    seen: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for place, (trace, account) in enumerate(zip(traces, accounts, strict=True)):
        counts: Counter[tuple[str, str]] = Counter()
        for kind, group, seconds in collective_events(trace, account.step):
            # The n-th collective of this kind and group on one rank is the n-th on every other.
            seen[kind, group, counts[kind, group]][place] = seconds
            counts[kind, group] += 1
    waited, last, matched = ([0.0] * len(traces), [0] * len(traces), [0] * len(traces))
    for durations in seen.values():
        if len(durations) < 2:
            continue
        # All ranks leave a collective together. So the shortest event is that of whoever came last, and what another's
        # is longer by is what it waited.
        shortest = min(durations.values())
        for place, seconds in durations.items():
            waited[place] += seconds - shortest
            matched[place] += 1
            last[place] += seconds == shortest
    if not any(matched):
        return ()
    return tuple(
        Lateness(rank=account.rank, waited_s=waited[i], last=last[i], matched=matched[i])
        for i, account in enumerate(accounts)
    )
