"""Spans and memory of a Timeline, small enough to stand in a page: columns of whole numbers, repetition in tables.

`span_columns(timeline, until_s)` returns a mapping for JSON. Spans are sorted by lane (worker, stream, row) and time;
`gap` and `lasts` are ticks of `tick_s` since the end of the span before it in its lane. What many spans share (kind,
stage, bytes, FLOPs, path, what they hold and let go) is one entry of `what`. The page's script reads it back.
`cut(timelines, limit)` says how much of long timelines can be shown. Leaves out causes in earlier periods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.timeline import NONE, Timeline
from gnomon.timeline.lanes import rows

TICKS = 10**8
"""Ticks that the shown time is divided into, at least a nanosecond each."""

Longs = NDArray[np.int64]


def window_s(timelines: Sequence[Timeline], limit: int) -> float:
    """Seconds from 0 in which at most `limit` spans of all timelines start; infinite where there are no more."""
    starts = np.concatenate([timeline.spans.start_s for timeline in timelines])
    if len(starts) <= limit:
        return float("inf")
    return float(np.partition(starts, limit)[limit])


def span_columns(timeline: Timeline, until_s: float = float("inf")) -> dict[str, Any]:
    """The spans that start before `until_s`, and the memory that they hold and let go.

    Memory is left out of a repeating timeline that is cut: what its other spans hold would be missing.
    """
    s = timeline.spans
    end_s = min(until_s, max(float(s.end_s.max(initial=0.0)), timeline.step_s))
    tick = max(end_s / TICKS, 1e-9)
    row = rows(timeline)
    shown = np.flatnonzero(s.start_s < until_s)
    # lexsort goes by its last key first: worker, stream, row, then time.
    order = shown[np.lexsort((s.end_s[shown], s.start_s[shown], row[shown], s.stream[shown], s.worker[shown]))]
    lane = np.stack([s.worker[order], s.stream[order], row[order]], 1).astype(np.int64).reshape(-1, 3)
    first = np.append(True, (lane[1:] != lane[:-1]).any(1)) if len(order) else np.zeros(0, bool)
    start, end = (np.rint(t[order] / tick).astype(np.int64) for t in (s.start_s, s.end_s))
    whole = timeline.memory is not None and not (timeline.repeats and len(shown) < s.size)
    effect, effects = _effects(timeline, order) if whole else (np.zeros(len(order), np.int64), [[]])
    what, table = _table(timeline, order, effect)
    heads = np.flatnonzero(first)
    counts = np.diff(np.append(heads, len(order)))
    return {
        "tick_s": tick,
        "end_s": end_s,
        "shown": len(order),
        "total": s.size,
        "cut": len(order) < s.size,
        "lanes": [[*lane[at].tolist(), count] for at, count in zip(heads.tolist(), counts.tolist(), strict=True)],
        "gap": (start - np.where(first, 0, np.append(0, end[:-1]))).tolist() if len(order) else [],
        "lasts": (end - start).tolist(),
        "what": what,
        "unit": s.unit[order].tolist(),
        "step": s.step[order].tolist() if s.step.any() else [],
        "cause": _causes(timeline, order),
        "table": table,
        "effects": effects,
        "resident": _resident(timeline).tolist() if whole else [],
    }


def _causes(timeline: Timeline, order: Longs) -> list[int]:
    """How many places before each span its cause stands (after it: negative); 0 where there is none to show."""
    s = timeline.spans
    place = np.full(s.size + 1, NONE, np.int64)  # the last item is for "none"
    place[order] = np.arange(len(order))
    cause = place[np.where(s.cause_steps == 0, s.cause, NONE)[order]]
    return [int(back) for back in np.where(cause < 0, 0, np.arange(len(order)) - cause)]


def _table(timeline: Timeline, order: Longs, effect: Longs) -> tuple[list[int], list[list[Any]]]:
    """(entry of every span, entries): [kind, role, stage, path, bytes, FLOPs, effect on memory]."""
    s = timeline.spans
    parts = (s.kind, s.role, s.stage, s.path, s.nbytes)
    # FLOPs as the bits of their floats, so that all columns are one array of whole numbers, and come back unchanged.
    whole = np.stack([*(part[order].astype(np.int64) for part in parts), s.flops[order].view(np.int64), effect], 1)
    distinct, what = np.unique(whole, axis=0, return_inverse=True)
    flops = np.ascontiguousarray(distinct[:, 5]).view(np.float64)
    entries = [[*row[:5], flop, row[6]] for row, flop in zip(distinct.tolist(), flops.tolist(), strict=True)]
    return what.reshape(-1).tolist(), entries


def _effects(timeline: Timeline, order: Longs) -> tuple[Longs, list[list[list[float]]]]:
    """(effect of every span, effects): each a list of [class of memory, bytes], held from the span's start where
    positive, let go at its end where negative."""
    memory = timeline.memory
    assert memory is not None
    by_span: dict[int, list[tuple[int, float]]] = {}
    for span, buffer, change in zip(
        memory.span.tolist(), memory.buffer.tolist(), memory.change_bytes.tolist(), strict=True
    ):
        by_span.setdefault(span, []).append((buffer, change))
    known: dict[tuple[tuple[int, float], ...], int] = {(): 0}
    indices = [known.setdefault(tuple(by_span.get(span, ())), len(known)) for span in order.tolist()]
    return np.array(indices, np.int64), [[list(pair) for pair in effect] for effect in known]


def _resident(timeline: Timeline) -> NDArray[np.float64]:
    """[workers, classes] bytes before the first change: in a repeating timeline, with what earlier periods left."""
    memory = timeline.memory
    assert memory is not None
    resident = memory.resident_bytes.copy()
    if timeline.repeats and timeline.step_s:
        periods = np.floor(memory.time_s / timeline.step_s)
        np.subtract.at(resident, (memory.worker, memory.buffer), memory.change_bytes * periods)
    return resident
