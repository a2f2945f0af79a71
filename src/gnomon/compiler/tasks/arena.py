"""One block of memory for what lives within a call: each buffer's place, by when it is first written and last read.

`offsets(buffers)` places the largest first, each at the lowest offset where nothing lies that lives at the same time
(greedy by size; Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference, 2020). Leaves out who
writes them (`steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LINE = 64
"""Bytes of a line of a cache: no two buffers share one, and vectors are aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """`size_bytes` from step `first` to step `last`, both included: a kernel may write before it has read all."""

    size_bytes: int
    """Its bytes."""
    first: int
    """The first step that needs it."""
    last: int
    """The last step that needs it."""


def offsets(
    buffers: Sequence[Buffer], live_together: Callable[[int, int], bool] | None = None
) -> tuple[list[int], int]:
    """Bytes from the start to each buffer, and of all together. live_together: whether two buffers may live at the same
    time; without it, by their steps, which come one after another."""
    out = [0] * len(buffers)
    placed: list[int] = []
    whole = 0
    # The largest first: small ones then fill the gaps between them. Among equals the earliest, so that the result
    # depends on nothing else.
    for n in sorted(range(len(buffers)), key=lambda n: (-buffers[n].size_bytes, buffers[n].first)):
        one, at = buffers[n], 0
        # Whole lines, so that two threads never write to one line of different buffers.
        size = -(-one.size_bytes // LINE) * LINE
        if live_together is None:
            overlapping = [m for m in placed if buffers[m].first <= one.last and one.first <= buffers[m].last]
        else:
            overlapping = [m for m in placed if live_together(m, n)]
        # From the lowest on, to the first gap that is large enough. Those placed may overlap each other in bytes (they
        # live at the same time as this one, not as each other), hence the maximum.
        for m in sorted(overlapping, key=lambda m: out[m]):
            if at + size <= out[m]:
                break
            at = max(at, out[m] + -(-buffers[m].size_bytes // LINE) * LINE)
        out[n] = at
        placed.append(n)
        whole = max(whole, at + size)
    return out, whole
