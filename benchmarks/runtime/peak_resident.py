"""Peak resident memory that a side of a comparison takes, in a process of its own.

Large blocks come from the system one by one (`mallopt`), so that what is freed leaves the process: the peak is the
program's, not the allocator's. Linux with glibc.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    """Bytes of this process now ("VmRSS"), or at most since the mark was cleared ("VmHWM")."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def taken_by(build: Callable[[], Any], step: Callable[[Any], object], steps: int = 4) -> int:
    """Bytes that building and some steps add at most to what is resident before. Done twice, and the second time is
    watched: what is imported or cached at first use is not counted."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 65536)
    libc.mallopt(M_TRIM_THRESHOLD, 65536)
    before = 0
    for _ in range(2):
        gc.collect()
        CLEAR.write_text("5")
        before = resident("VmRSS")
        state = build()
        for _ in range(steps):
            step(state)
        del state
    return resident("VmHWM") - before
