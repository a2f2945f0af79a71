"""Finds the steps of a trace: by the profiler's own marks, by the optimizer's, or by what repeats.

`find_steps(trace)` returns the windows in order, and says how they were found. A window is on the clock of the work: of
the device where there is one, from the first kernel of a step to the first of the next, so that windows do not overlap
and what the device waits for at the end of a step is in it. `Steps.typical` is the one to look at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.profile.trace import CPU_OP, DEVICE_WORK, KERNEL, LAUNCH, MARK, NONE, Trace

_STEP_MARK = re.compile(r"ProfilerStep\*?#\d+$")
_OPTIMIZER_MARK = re.compile(r"Optimizer\.step#")

SAME_SHARE = 0.9
"""Events of a period that must be the same as those a period later, for a sequence to repeat."""

_MOST_REPEATS = 200
"""Steps looked for in a trace without marks; layers repeat more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow:
    """One step, in seconds of the trace."""

    label: str
    """What it is called: the mark in the trace, or how it was found."""
    start_s: float
    """Its first second in the trace."""
    end_s: float
    """Its last; the next step's start where steps follow each other."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of its work to the start of the next step's."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of one trace."""

    windows: tuple[StepWindow, ...]
    """At least one."""
    how: str
    """How they were found, a sentence for people."""
    marked: bool
    """By a mark, so that each is one step of the optimizer."""

    @property
    def typical(self) -> StepWindow:
        """The step of median length; of an even number the shorter one. The first of three or more is left out: it is
        where a profiler, an allocator and a compiler warm up."""
        seen = self.windows[1:] if len(self.windows) > 2 else self.windows
        return sorted(seen, key=lambda window: (window.seconds, window.start_s))[(len(seen) - 1) // 2]


def find_steps(trace: Trace) -> Steps:
    """Finds the steps of a trace. InputError if the trace holds no work."""
    marks = _marks(trace, _STEP_MARK)
    if marks:
        edges = [(trace.name_of(mark), float(trace.start_s[mark]), float(trace.end_s[mark])) for mark in marks]
        found = _on_work(trace, edges)
        if found:
            return Steps(windows=found, how="steps by the profiler's marks (ProfilerStep)", marked=True)
    marks = _marks(trace, _OPTIMIZER_MARK)
    first = trace.names[trace.name[marks[0]]] if marks else ""
    ends = [float(trace.end_s[mark]) for mark in marks if trace.name_of(mark) == first]
    if len(ends) > 1:
        edges = [(f"step {i}", a, b) for i, (a, b) in enumerate(zip(ends, ends[1:], strict=False))]
        found = _on_work(trace, edges)
        if found:
            return Steps(windows=found, how=f"steps between two updates ({first})", marked=True)
    return _by_repetition(trace)


def _marks(trace: Trace, pattern: re.Pattern[str]) -> list[int]:
    """Marks of the host by name, one thread's: the first thread that has one."""
    is_mark = np.array([bool(pattern.match(name)) for name in trace.names], np.bool_)
    events = np.flatnonzero((trace.category == MARK) & is_mark[trace.name])
    return [int(event) for event in events if trace.lane[event] == trace.lane[events[0]]]


def work_events(trace: Trace) -> NDArray[np.int64]:
    """What holds the device, or, where there is none, the ops of the host that no other op encloses."""
    if trace.on_device:
        return trace.of(*DEVICE_WORK)
    ops = trace.of(CPU_OP)
    return ops[[trace.parent[op] == NONE or trace.category[trace.parent[op]] != CPU_OP for op in ops.tolist()]]


def _on_work(trace: Trace, edges: Sequence[tuple[str, float, float]]) -> tuple[StepWindow, ...]:
    """The host's windows, on the clock of the work. Steps without work are left out."""
    if not trace.on_device:
        starts = trace.start_s[trace.of(CPU_OP)]
        windows = [
            StepWindow(label=label, start_s=start, end_s=edges[i + 1][1] if i + 1 < len(edges) else end)
            for i, (label, start, end) in enumerate(edges)
        ]
        # The mark that a profiler's schedule opens and does not use holds no op.
        return tuple(w for w in windows if ((starts >= w.start_s) & (starts < w.end_s)).any())
    work = trace.of(*DEVICE_WORK)
    launch = trace.launched_by[work]
    # Work without a recorded launch counts by its own start: rare, and then there is no better clue.
    issued = np.where(launch == NONE, trace.start_s[work], trace.start_s[np.maximum(launch, 0)])
    seen: list[tuple[str, float, float]] = []
    for label, start, end in edges:
        mine = work[(issued >= start) & (issued < end)]
        if len(mine):
            seen.append((label, float(trace.start_s[mine].min()), float(trace.end_s[mine].max())))
    if not seen:
        return ()
    if len(seen) == 1:
        # No next step tells when this one ends: the host's mark does, or its last kernel.
        label, start, end = seen[0]
        host = next(edge for edge in edges if edge[0] == label)
        return (StepWindow(label=label, start_s=min(start, host[1]), end_s=max(end, host[2])),)
    return tuple(
        StepWindow(label=label, start_s=start, end_s=seen[i + 1][1])
        # The last step has no next one that says when it ends, so it is left out.
        for i, (label, start, _) in enumerate(seen[:-1])
        if seen[i + 1][1] > start
    )


def _by_repetition(trace: Trace) -> Steps:
    """Steps of a trace without marks: the longest period by which the sequence of names repeats."""
    kernels = trace.of(KERNEL)
    sequence = kernels if len(kernels) else work_events(trace)
    if not len(sequence):
        sequence = trace.of(CPU_OP, LAUNCH, MARK)
    if not len(sequence):
        raise InputError(f"{trace.source!r} holds no work; record with torch.profiler.profile")
    start, end = float(trace.start_s[sequence[0]]), float(trace.end_s[sequence].max())
    starts = _repeats(trace.name[sequence])
    if starts:
        times = [float(trace.start_s[sequence[i]]) for i in starts]
        windows = tuple(
            StepWindow(label=f"repetition {i}", start_s=a, end_s=b)
            for i, (a, b) in enumerate(zip(times, times[1:], strict=False))
            if b > a
        )
        if windows:
            how = f"no mark of a step: the work repeats {len(starts)} times, and a repetition is taken for a step"
            return Steps(windows=windows, how=how, marked=False)
    whole = StepWindow(label="the whole trace", start_s=start, end_s=end)
    return Steps(
        windows=(whole,),
        how="no mark of a step, and nothing repeats: the whole trace is taken for one step; call prof.step() after "
        "each step, or name it torch.profiler.record_function",
        marked=False,
    )


def _repeats(names: NDArray[np.int32]) -> tuple[int, ...]:
    """Finds the places where each repetition of a sequence begins; empty if it does not repeat.

    A step's rarest names come once a step (the loss, the largest update). So: the names that come c times, for c from
    2 up; their distances are the period; c is right if the sequence agrees with itself one period later.
    """
    values, counts = np.unique(names, return_counts=True)
    for count in range(2, _MOST_REPEATS):
        for value in values[counts == count][:8]:
            at = np.flatnonzero(names == value)
            gaps = np.diff(at)
            # A step has some events, and steps have nearly the same number of them.
            if gaps.min() < 8 or gaps.max() > 1.1 * gaps.min():
                continue
            period = int(np.median(gaps))
            same = names[at[0] : at[-1]][: len(names) - period]
            later = names[at[0] + period : at[0] + period + len(same)]
            length = min(len(same), len(later))
            if length and float((same[:length] == later[:length]).mean()) >= SAME_SHARE:
                return tuple(at.tolist())
    return ()
