"""How long this thread has been ready to run without a core: what other work on the machine took from it.

`waited_s()` is Linux's own account of the scheduler's queue (/proc/thread-self/schedstat), exact and free to read.
The process's own other threads, which torch, gloo and a disk's reader are, are taken off. Leaves out what does not show
there: a core shared with a hyperthread, another virtual machine, a lower clock; and what those threads waited.
"""

from __future__ import annotations

import math
from pathlib import Path
from time import process_time, thread_time
from typing import NamedTuple

ACCOUNT = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a core, nanoseconds ready without one, turns; of the thread that reads."""


class Queued(NamedTuple):
    """Seconds since the beginning."""

    waited_s: float
    """In which this thread was ready without a core."""
    other_threads_s: float
    """Which the process's other threads computed: those that carry messages, read a disk or update on the host."""


def waited_s() -> Queued | None:
    """Seconds that this process has waited for a processor until now; None where the system does not say."""
    try:
        waited = int(ACCOUNT.read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None
    return Queued(waited_s=waited, other_threads_s=process_time() - thread_time())


def waited_since(before: Queued | None) -> float:
    """Seconds, at least, in which this thread waited for a core that other processes had, since `waited_s` gave
    `before`: without what the process's own threads computed meanwhile, for whose cores it may have waited too. NaN
    where the system does not say."""
    now = waited_s()
    if now is None or before is None:
        return math.nan
    return max(now.waited_s - before.waited_s - max(now.other_threads_s - before.other_threads_s, 0.0), 0.0)
