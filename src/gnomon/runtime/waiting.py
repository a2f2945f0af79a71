"""How long this thread has been ready to run without a core: what other work on the machine took from it.

`waited_s()` is Linux's own account of the scheduler's queue (/proc/thread-self/schedstat), exact and free to read.
Leaves out what does not show there: a core shared with a hyperthread, another virtual machine, a lower clock; and the
threads that torch and gloo start beside this one.
"""

from __future__ import annotations

import math
from pathlib import Path

ACCOUNT = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a core, nanoseconds ready without one, turns; of the thread that reads."""

NOTICED = 0.05
"""Shares of a step from which on it is worth a word."""


def waited_s() -> float | None:
    """Seconds since this thread began; None where the system does not say."""
    try:
        return int(ACCOUNT.read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None


def waited_since(before: float | None) -> float:
    """Seconds since `waited_s` gave `before`; NaN where the system does not say."""
    now = waited_s()
    return math.nan if now is None or before is None else now - before


def without_a_core(rank: int, share: float) -> list[str]:
    """What to say of a step whose rank was ready without a core for this share of it; nothing of a little."""
    if not share >= NOTICED:
        return []
    return [f"rank {rank} was ready without a core for {share:.0%} of this step: other processes had them"]
