"""What each worker holds over time, by class of buffer, and its peak with the moment and the action.

A buffer is held from the start of the action that allocates it to the end of the one that frees it; at one instant
frees come before allocations, each in the order of spans. In a timeline that repeats, all steps that overlap are
counted: a buffer that outlives the period is there twice. Bytes are exact when they are whole numbers. Left out: what a
caching allocator sees, which is the peak in issue order (`program.issue_order_peak`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError, nearest
from gnomon.timeline.types import NONE, Memory, Timeline

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """bytes[i] are held from time_s[i] until time_s[i + 1]; the last until the end of the step."""

    time_s: Doubles
    """Strictly increasing, from 0."""
    bytes: Doubles
    """Bytes held, all of `buffer` or of every class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Most bytes that a worker holds."""

    worker: str
    """Name of the worker."""
    bytes: float
    """Bytes at the peak, all classes of buffer together."""
    moment_s: float
    """When it is first reached."""
    action: str
    """The action that allocates at that moment, `2F0`; empty if nothing is ever allocated."""
    span: int
    """Its span, or NONE."""
    by_buffer: tuple[tuple[str, float], ...]
    """Bytes of each class of buffer at that moment, in the order of the Timeline; they add up to `bytes`."""


def memory_curve(timeline: Timeline, worker: str, buffer: str | None = None) -> Curve:
    """Bytes that a worker holds, of one class of buffer or of all. InputError for a name that is not there, or for a
    timeline without memory."""
    names = tuple(w.name for w in timeline.workers)
    if worker not in names:
        raise InputError(f"no worker {worker!r} in this timeline{nearest(worker, names)}")
    if buffer is not None and buffer not in timeline.buffers:
        raise InputError(f"no buffer {buffer!r} in this timeline{nearest(buffer, timeline.buffers)}")
    events = _events(timeline, names.index(worker))
    level, time, change = events.level, events.time, events.change
    if buffer is not None:
        mine = events.buffer == timeline.buffers.index(buffer)
        level, time, change = level[[timeline.buffers.index(buffer)]], time[mine], change[mine]
    moments, last = np.unique(np.append(0.0, time)[::-1], return_index=True)
    levels = math.fsum(level) + np.cumsum(np.append(0.0, change))
    return Curve(time_s=moments, bytes=levels[len(time) - last])


def peaks(timeline: Timeline) -> tuple[Peak, ...]:
    """The peak of every worker. InputError for a timeline without memory, or one that grows from step to step."""
    return tuple(_peak(timeline, worker) for worker in range(len(timeline.workers)))


def _peak(timeline: Timeline, worker: int) -> Peak:
    events = _events(timeline, worker)
    levels = np.append(0.0, np.cumsum(events.change))
    top = int(np.argmax(levels))
    level = events.level + np.bincount(events.buffer[:top], events.change[:top], len(timeline.buffers))
    span = int(events.span[top - 1]) if top else NONE
    return Peak(
        worker=timeline.workers[worker].name,
        bytes=math.fsum(level),
        moment_s=float(events.time[top - 1]) if top else 0.0,
        action=timeline.action(span) if top else "",
        span=span,
        by_buffer=tuple(zip(timeline.buffers, level.tolist(), strict=True)),
    )


def seen_buffers(timeline: Timeline) -> tuple[str, ...]:
    """Classes of buffer that the timeline can tell of: a prediction of all that it names, a measurement of those that
    it ever saw a byte of. InputError for a timeline without memory."""
    memory = _of(timeline)
    if timeline.clock == "predicted":
        return timeline.buffers
    seen = set(np.flatnonzero(np.abs(memory.resident_bytes).sum(axis=0)).tolist())
    seen |= set(memory.buffer[memory.change_bytes != 0].tolist())
    return tuple(name for i, name in enumerate(timeline.buffers) if i in seen)


def of_buffers(timeline: Timeline, names: Collection[str]) -> Timeline:
    """The same timeline with no other classes of buffer than these. InputError for one without memory."""
    memory = _of(timeline)
    chosen = [i for i, name in enumerate(timeline.buffers) if name in names]
    number = np.full(len(timeline.buffers), NONE)
    number[chosen] = np.arange(len(chosen))
    rows = number[memory.buffer] != NONE
    columns = {name: getattr(memory, name)[rows] for name in ("worker", "span", "time_s", "change_bytes")}
    only = Memory.of(buffer=number[memory.buffer[rows]], resident_bytes=memory.resident_bytes[:, chosen], **columns)
    return replace(timeline, buffers=tuple(timeline.buffers[i] for i in chosen), memory=only)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Events:
    """Changes of one worker in order of time, frees first at one instant."""

    time: Doubles
    change: Doubles
    buffer: Longs
    span: Longs
    level: Doubles
    """[buffer classes] bytes before the first change."""


def _events(timeline: Timeline, worker: int) -> _Events:
    memory = _of(timeline)
    mine = np.flatnonzero(memory.worker == worker)
    time, change = memory.time_s[mine], memory.change_bytes[mine]
    buffer, span = memory.buffer[mine].astype(np.int64), memory.span[mine].astype(np.int64)
    level = memory.resident_bytes[worker].copy()
    if timeline.repeats and len(mine):
        time, before = _folded(timeline, time, change, buffer, worker)
        level += before
    order = np.lexsort((span, change > 0, time))
    return _Events(time=time[order], change=change[order], buffer=buffer[order], span=span[order], level=level)


def _folded(timeline: Timeline, time: Doubles, change: Doubles, buffer: Longs, worker: int) -> tuple[Doubles, Doubles]:
    """Times within one period, and what earlier steps have left at its start.

    What is allocated in one period and freed q periods later is there q times over.
    """
    grown = np.bincount(buffer, change, len(timeline.buffers))
    if grown.any():
        name = timeline.buffers[int(np.flatnonzero(grown)[0])]
        who = timeline.workers[worker].name
        raise InputError(f"{name} on {who} grows by {grown[grown != 0][0]:g} bytes each step: it has no steady state")
    if not timeline.step_s:
        return time, np.zeros(len(timeline.buffers))
    within: Doubles = np.fmod(time, timeline.step_s)
    periods = np.rint((time - within) / timeline.step_s)
    return within, -np.bincount(buffer, change * periods, len(timeline.buffers)).astype(float)


def _of(timeline: Timeline) -> Memory:
    if timeline.memory is None:
        raise InputError("this timeline has no memory; give `simulate` the sizes of buffers")
    return timeline.memory
