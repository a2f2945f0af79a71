"""One rank's recording as columns: ops, launches, kernels, copies, marks, each with its lane, start and duration.

The profiler's own categories are kept apart by what they are *on*: `cpu_op`, `launch` (a call into the device's
runtime) and `mark` (a named region) are the host's; `kernel`, `copy`, `set` and `device_mark` are the device's. A trace
without device events is of a job on CPUs. Seconds count from the first event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError

CATEGORIES = ("cpu_op", "launch", "mark", "kernel", "copy", "set", "device_mark", "python")
"""What an event is; a column holds the index."""

CPU_OP, LAUNCH, MARK, KERNEL, COPY, SET, DEVICE_MARK, PYTHON = range(len(CATEGORIES))

DEVICE_WORK = (KERNEL, COPY, SET)
"""Categories that hold a stream of the device."""

NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A thread of the host or a stream of the device."""

    process: str
    """The process, as the trace numbers it."""
    thread: str
    """The thread, or the stream."""
    name: str
    """As the trace calls it; empty where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """What the allocator said while it was recorded (`profile_memory=True`), in order of time."""

    time_s: NDArray[np.float64]
    """Seconds of the trace, ascending."""
    change_bytes: NDArray[np.float64]
    """Bytes allocated, or freed where negative."""
    allocated_bytes: NDArray[np.float64]
    """After the change, on that device."""
    on_device: NDArray[np.bool_]
    """False: in the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Columns of events, sorted by start. Arrays are read-only and of one length (InputError)."""

    source: str
    """The file, for messages."""
    rank: int
    """0 where the trace does not say."""
    world_size: int
    """Ranks of the job; 1 where the trace does not say."""
    device: str
    """The device's name; empty where it is not told, or there is none."""
    lanes: tuple[Lane, ...]
    """Threads and streams that events lie on."""
    names: tuple[str, ...]
    """Names of events; a column holds the index."""
    category: NDArray[np.int8]
    """Index into CATEGORIES, of each event."""
    name: NDArray[np.int32]
    """Index into `names`, of each event."""
    lane: NDArray[np.int32]
    """Index into `lanes`, of each event."""
    start_s: NDArray[np.float64]
    """Seconds from the trace's first event."""
    duration_s: NDArray[np.float64]
    """Seconds of each event."""
    correlation: NDArray[np.int64]
    """Ties a launch to what it put on the device; NONE where there is none."""
    external: NDArray[np.int64]
    """Ties a kernel to the op that launched it; NONE where there is none."""
    details: Mapping[int, Mapping[str, Any]]
    """Event -> what the profiler wrote of it, under Kineto's keys: shapes of an op, message of a collective, bytes."""
    allocations: Allocations | None
    """What the allocator did; None where it was not recorded."""
    dropped: int
    """Events of kinds that nothing here reads."""

    def __post_init__(self) -> None:
        columns = (self.category, self.name, self.lane, self.start_s, self.duration_s, self.correlation, self.external)
        for column in columns:
            if column.shape != self.start_s.shape:
                raise InputError(f"{self.source!r}: columns of a trace must have one length")
            column.flags.writeable = False

    @property
    def size(self) -> int:
        """Counts the events."""
        return len(self.start_s)

    @cached_property
    def end_s(self) -> NDArray[np.float64]:
        """Seconds at which each event ends."""
        return self.start_s + self.duration_s

    @cached_property
    def on_device(self) -> bool:
        """Whether a device worked; else the ops of the host are the work."""
        return bool(np.isin(self.category, DEVICE_WORK).any())

    def of(self, *categories: int) -> NDArray[np.int64]:
        """Events of these categories, by start."""
        return np.flatnonzero(np.isin(self.category, categories))

    def name_of(self, event: int) -> str:
        """Gives an event's name."""
        name: str = self.names[self.name[event]]
        return name

    @cached_property
    def launched_by(self) -> NDArray[np.int64]:
        """Event of the device -> the launch that put it there; NONE for others and where the launch is not recorded."""
        out = np.full(self.size, NONE, np.int64)
        launches = self.of(LAUNCH)
        known = launches[self.correlation[launches] != NONE]
        order = known[np.argsort(self.correlation[known], kind="stable")]
        work = self.of(*DEVICE_WORK)
        if len(order) and len(work):
            keys = self.correlation[order]
            # A join by the correlation; a number larger than all keys would be looked up past the end.
            at = np.minimum(np.searchsorted(keys, self.correlation[work]), len(keys) - 1)
            hit = (keys[at] == self.correlation[work]) & (self.correlation[work] != NONE)
            out[work[hit]] = order[at[hit]]
        return out

    @cached_property
    def parent(self) -> NDArray[np.int64]:
        """Event of the host -> the innermost op or mark of its thread that encloses it; NONE at the top.

        Events of one thread nest, so one walk with a stack finds all: O(n).
        """
        out = np.full(self.size, NONE, np.int64)
        host = self.of(CPU_OP, LAUNCH, MARK)
        # Of two that start together the longer one encloses the other.
        order = host[np.lexsort((-self.duration_s[host], self.start_s[host], self.lane[host]))]
        stack: list[int] = []
        lanes, ends, starts = self.lane, self.end_s, self.start_s
        launches = self.category == LAUNCH
        lane = NONE
        for event in order.tolist():
            if lanes[event] != lane:
                stack, lane = [], int(lanes[event])
            while stack and ends[stack[-1]] <= starts[event]:
                stack.pop()
            # Marks of asynchronous work may overlap an op without enclosing it: only what encloses is a parent.
            for above in reversed(stack):
                if ends[above] >= ends[event]:
                    out[event] = above
                    break
            # A launch is nobody's parent.
            if not launches[event]:
                stack.append(event)
        return out

    @cached_property
    def op_of(self) -> NDArray[np.int64]:
        """Event of the device -> the innermost op of the host that launched it; NONE where that was not recorded."""
        out = np.full(self.size, NONE, np.int64)
        # For kernels whose launch has no enclosing op: the profiler's own number of the op that launched them.
        by_external = {
            int(self.external[event]): int(event) for event in self.of(CPU_OP) if self.external[event] != NONE
        }
        for event in self.of(*DEVICE_WORK).tolist():
            launch = int(self.launched_by[event])
            above = int(self.parent[launch]) if launch != NONE else NONE
            if above == NONE:
                above = by_external.get(int(self.external[event]), NONE)
            out[event] = above
        return out

    def ancestors(self, event: int) -> tuple[int, ...]:
        """What encloses an event of the host, innermost first."""
        out = []
        above = int(self.parent[event])
        while above != NONE:
            out.append(above)
            above = int(self.parent[above])
        return tuple(out)
