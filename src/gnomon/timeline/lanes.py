"""Lanes to draw a Timeline in: one a worker and stream, with further rows where spans of a stream overlap.

Predicted streams never overlap themselves; measured ones do when several communications are under way. `rows` gives
each span the first row of its lane that is free when it starts. Leaves out drawing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gnomon.timeline.types import Timeline


def rows(timeline: Timeline) -> NDArray[np.int64]:
    """[spans] row of each span within its worker's stream, from 0; spans of one row do not overlap."""
    s = timeline.spans
    out = np.zeros(s.size, np.int64)
    lane = s.worker.astype(np.int64) * len(timeline.streams) + s.stream
    order = np.lexsort((s.end_s, s.start_s, lane))
    first = np.flatnonzero(np.append(True, lane[order][1:] != lane[order][:-1]))
    for part in np.split(order, first[1:]):
        start, end = s.start_s[part], s.end_s[part]
        if (start[1:] < np.maximum.accumulate(end)[:-1]).any():
            out[part] = _rows(start.tolist(), end.tolist())
    return out


def _rows(start: list[float], end: list[float]) -> list[int]:
    """Row of each span, by start."""
    free: list[float] = []
    out = []
    for begin, finish in zip(start, end, strict=True):
        row = next((i for i, at in enumerate(free) if at <= begin), len(free))
        if row == len(free):
            free.append(finish)
        free[row] = finish
        out.append(row)
    return out
