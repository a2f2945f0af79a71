"""Timelines as a trace that ui.perfetto.dev and chrome://tracing open: the Trace Event Format in JSON.

`perfetto_trace(timelines)` returns the JSON object. Workers are processes, streams threads (a second thread where spans
of one stream overlap), spans complete events with what is known of them, memory a counter by class, and arrows (flows)
lead from a cause on another stream or rank, or from a send to its receive. A predicted and a measured timeline stand
one after the other in one file. Times are in microseconds, to the nanosecond. Leaves out spans of other steps that a
repeating timeline implies, and the wait itself, which is the gap.
Format: "Trace Event Format", Duca and Sinclair, 2016-10, and Perfetto's page on external formats (v54).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.timeline import NONE, ROLES, Timeline, memory_curve
from gnomon.timeline.lanes import rows

MESSAGES: Mapping[str, tuple[str, int]] = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
"""Kind that sends -> (kind that receives, how many stages further)."""

_US = 1000
"""Nanoseconds a microsecond."""

Longs = NDArray[np.int64]
Event = dict[str, Any]


def perfetto_trace(timelines: Sequence[Timeline], *, title: str = "") -> dict[str, Any]:
    """The trace of one or more timelines, as a mapping for `json.dump`.

    Each timeline's workers are processes of their own, named `predicted class 0 (16 ranks)`. Events are in order of
    time, names first.
    """
    names: list[Event] = []
    events: list[Event] = []
    first = 1
    flow = 0
    for timeline in timelines:
        pids = first + np.arange(len(timeline.workers))
        threads = _Threads(timeline)
        names += _names(timeline, pids, threads)
        events += _spans(timeline, pids, threads)
        events += _memory(timeline, pids)
        arrows = _flows(timeline, pids, threads, flow)
        flow += len(arrows) // 2
        events += arrows
        first += len(timeline.workers)
    events.sort(key=lambda event: (event["ts"], _ORDER[event["ph"]]))
    about = {"writer": "gnomon", "title": title, "assumptions": [list(t.assumptions) for t in timelines]}
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": about}


_ORDER = {"X": 0, "C": 1, "s": 2, "f": 3}
"""At one instant a slice comes before the arrows that start or end in it."""


class _Threads:
    """Times in whole nanoseconds, and the thread of every span: its stream, apart where spans overlap."""

    def __init__(self, timeline: Timeline) -> None:
        spans = timeline.spans
        # Both ends are rounded, not the duration: what touched before touches after, so slices still nest.
        self.start = np.rint(spans.start_s * 1e9).astype(np.int64)
        self.end = np.rint(spans.end_s * 1e9).astype(np.int64)
        row = rows(timeline)
        deep = int(row.max(initial=0)) + 1
        # The rows of a stream follow each other. Thread 0 is the worker's own, for its name and its counters.
        self.tid: Longs = spans.stream.astype(np.int64) * deep + row + 1
        self.names = {
            s * deep + r + 1: name + (f" ({r + 1})" if r else "")
            for s, name in enumerate(timeline.streams)
            for r in range(deep)
        }


def _names(timeline: Timeline, pids: Longs, threads: _Threads) -> Iterator[Event]:
    for index, worker in enumerate(timeline.workers):
        pid = int(pids[index])
        ranks = f" ({worker.count} ranks)" if worker.count > 1 else ""
        yield _named("process_name", pid, 0, {"name": f"{timeline.clock} {worker.name}{ranks}"})
        yield _named("process_sort_index", pid, 0, {"sort_index": pid})
        for tid in np.unique(threads.tid[timeline.spans.worker == index]).tolist():
            yield _named("thread_name", pid, tid, {"name": threads.names[tid]})
            yield _named("thread_sort_index", pid, tid, {"sort_index": tid})


def _named(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _spans(timeline: Timeline, pids: Longs, threads: _Threads) -> Iterator[Event]:
    s = timeline.spans
    pid = pids[s.worker].tolist()
    columns = zip(threads.start.tolist(), (threads.end - threads.start).tolist(), threads.tid.tolist(), strict=True)
    for span, (start, lasts, tid) in enumerate(columns):
        yield {
            "ph": "X",
            "name": timeline.action(span),
            "cat": ROLES[s.role[span]],
            "pid": pid[span],
            "tid": tid,
            "ts": start / _US,
            "dur": lasts / _US,
            "args": _args(timeline, span),
        }


def _args(timeline: Timeline, span: int) -> Event:
    """What is known of a span."""
    s = timeline.spans
    out: Event = {"kind": timeline.kinds[s.kind[span]]}
    for name, column in (("stage", s.stage), ("unit", s.unit), ("bytes", s.nbytes)):
        if column[span] != NONE:
            out[name] = int(column[span])
    if s.flops[span] != NONE:
        out["flops"] = float(s.flops[span])
    if s.path[span] != NONE:
        out["path"] = timeline.paths[s.path[span]]
    if s.step[span]:
        out["step"] = int(s.step[span])
    if s.lag_s[span]:
        out["lag_us"] = float(s.lag_s[span]) * 1e6
    if s.cause[span] != NONE:
        out["waited for"] = timeline.where(int(s.cause[span])) + (
            f", {s.cause_steps[span]} steps before" if s.cause_steps[span] else ""
        )
    return out


def _memory(timeline: Timeline, pids: Longs) -> Iterator[Event]:
    """One counter a worker, with a series for each class that it ever holds, at every moment that any changes."""
    if timeline.memory is None:
        return
    for index, worker in enumerate(timeline.workers):
        curves = {name: memory_curve(timeline, worker.name, name) for name in timeline.buffers}
        curves = {name: curve for name, curve in curves.items() if curve.bytes.any()}
        moments = np.unique(np.concatenate([curve.time_s for curve in curves.values()])) if curves else np.zeros(0)
        by_row = {
            name: curve.bytes[np.searchsorted(curve.time_s, moments, side="right") - 1].tolist()
            for name, curve in curves.items()
        }
        for i, at in enumerate(np.rint(moments * 1e9).astype(np.int64).tolist()):
            args = {name: values[i] for name, values in by_row.items()}
            yield {"ph": "C", "name": "memory", "pid": int(pids[index]), "tid": 0, "ts": at / _US, "args": args}


def _flows(timeline: Timeline, pids: Longs, threads: _Threads, first: int) -> list[Event]:
    """Draws arrows between slices: a start in the last nanosecond of one, an end at the beginning of the other."""
    s = timeline.spans
    out: list[Event] = []
    for source, target in _arrows(timeline, threads):
        start, end = int(threads.end[source]) - 1, int(threads.start[target])
        if start > end:  # an arrow leads forward in time: from the earlier slice's beginning, if they overlap
            start = min(int(threads.start[source]), end)
        number = first + len(out) // 2 + 1
        common = {"name": "waits for", "cat": "cause", "id": number}
        for phase, span, at in (("s", source, start), ("f", target, end)):
            event = common | {"ph": phase, "pid": int(pids[s.worker[span]]), "tid": int(threads.tid[span])}
            out.append(event | {"ts": at / _US} | ({"bp": "e"} if phase == "f" else {}))
    return out


def _arrows(timeline: Timeline, threads: _Threads) -> Iterator[tuple[int, int]]:
    """(source, target) spans of arrows. Spans without length cannot hold an arrow: their own cause stands for them."""
    s = timeline.spans
    lasts = (threads.end > threads.start).tolist()
    cause = np.where(s.cause_steps == 0, s.cause, NONE)
    for send, receive in _messages(timeline):
        if cause[receive] == NONE:
            cause[receive] = send
    causes = cause.tolist()
    # Worker and thread as one number, to compare lanes by.
    lane = (s.worker.astype(np.int64) << 32 | threads.tid).tolist()
    for target, source in enumerate(causes):
        if not lasts[target]:
            continue
        for _ in range(s.size):  # causes come before what they cause, so this ends
            if source == NONE or lasts[source]:
                break
            source = causes[source]
        if source != NONE and lane[source] != lane[target] and threads.start[source] <= threads.start[target]:
            yield source, target


def _messages(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """(send, receive) of every message whose receive names no cause, as in a measured timeline."""
    s = timeline.spans
    receives: dict[tuple[str, int, int, int], int] = {}
    columns = list(zip(s.kind.tolist(), s.stage.tolist(), s.unit.tolist(), s.step.tolist(), strict=True))
    for span, (kind, stage, unit, step) in enumerate(columns):
        receives.setdefault((timeline.kinds[kind], stage, unit, step), span)
    for span, (kind, stage, unit, step) in enumerate(columns):
        name, further = MESSAGES.get(timeline.kinds[kind], ("", 0))
        if name and (receive := receives.get((name, stage + further, unit, step))) is not None:
            yield span, receive
