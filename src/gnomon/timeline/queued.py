"""What a measured Timeline says of cores that other processes had: written by whoever measures, read by a report.

`without_a_core` is the assumption that goes with a Timeline, `share_without_a_core` the largest share that a Timeline's
assumptions name. Leaves out measuring it (`runtime.watch.waiting`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NOTICED = 0.05
"""Shares of a step from which on it is worth a word."""
_SAID = re.compile(r"rank \d+ was ready without a core for (\d+)% of this step: other processes had them")


def without_a_core(rank: int, share: float) -> list[str]:
    """What to say of a step whose rank was ready without a core for this share of it; nothing of a little."""
    if not share >= NOTICED:
        return []
    return [f"rank {rank} was ready without a core for {share:.0%} of this step: other processes had them"]


def share_without_a_core(assumptions: Iterable[str]) -> float:
    """The largest share that `without_a_core` said; 0 where it said nothing."""
    return max((int(found[1]) / 100 for one in assumptions if (found := _SAID.fullmatch(one))), default=0.0)
