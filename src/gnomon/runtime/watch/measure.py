"""A measured Timeline: spans that the interpreter records, gathered from all ranks.

`Recorder` takes (row, start, end) as rows run; `gather` returns the Timeline on every rank, `per_class` the part of it
that compares with a prediction, whose workers are rank classes. Clocks are the machine's
monotonic one, which processes of one machine share. Left out: time and memory inside an action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError
from gnomon.program import Program
from gnomon.runtime.watch.causes import with_causes
from gnomon.timeline import NONE, ROLES, Memory, Spans, Timeline, Worker
from gnomon.units import TICK_S

ASSUMPTIONS = (
    "times are those of the issuing thread: a communication beside compute ends when its first reader has it, or when "
    "the step ends",
    "a receive begins with its sender's send, and the gradient norm when the last rank asks for it, where both are "
    "shown; among the ranks of a class, a collective's span holds the wait for the slowest",
)
CLASSES = ("parameters", "gradients", "master", "states", "activations", "logits", "communication")
"""Classes of memory, as in `prediction.RankMemory.by_class`."""
Levels = tuple[int, ...]
"""Bytes of each of CLASSES."""
MEMORY_ASSUMPTIONS = (
    "memory is that between actions: what lives inside one only (temporary of a prediction) is not in it",
)


class Clock(Protocol):
    """Marks that are cheap to take, and what they are in seconds once the step is over."""

    def begin(self) -> float:
        """Starts a step; returns the machine's monotonic clock."""

    def mark(self) -> Any:
        """A mark for this moment."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds of marks on the machine's monotonic clock; NaN for None."""


class HostClock:
    """A clock for devices that compute while the host waits."""

    def begin(self) -> float:
        """Reads the clock now."""
        return perf_counter()

    def mark(self) -> float:
        """Reads the clock now."""
        return perf_counter()

    def seconds(self, marks: Sequence[float | None]) -> list[float]:
        """The marks, which are seconds already; NaN for None."""
        return [math.nan if mark is None else mark for mark in marks]


class EventClock:
    """A clock for CUDA, where the host runs ahead: events on the stream that computes. A communication's end is marked
    once that stream waits for it."""

    def begin(self) -> float:
        """Now, with nothing left to do."""
        torch.cuda.synchronize()
        self.origin_s, self.origin = perf_counter(), self.mark()
        return self.origin_s

    def mark(self) -> Any:
        """Records an event on the stream that computes."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds of events, from their distance to the first one."""
        torch.cuda.synchronize()
        return [math.nan if m is None else self.origin_s + self.origin.elapsed_time(m) / 1e3 for m in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when `device` is done."""
    return EventClock() if device.type == "cuda" else HostClock()


@dataclass(slots=True)
class Recorder:
    """Spans of one rank, one step."""

    origin_s: float = 0.0
    """The clock when the step began."""
    row: list[int] = field(default_factory=list)
    """Row of the Program."""
    start: list[Any] = field(default_factory=list)
    """Marks of the clock."""
    end: list[Any] = field(default_factory=list)
    """None while a span is open."""
    clock: Clock = field(default_factory=lambda: HostClock())
    """What takes the times."""
    nbytes: list[int] = field(default_factory=list)
    """Bytes of the buffer that is communicated; NONE for compute."""
    cause: list[int] = field(default_factory=list)
    """The span of this rank that it waited for; NONE for none."""
    inside: int = NONE
    """The span of compute that is open."""
    memory: bool = False
    """Whether it wants what is held after each row."""
    levels: list[tuple[int, Levels]] = field(default_factory=list)
    """(row, bytes of each class once it was issued), where they changed; first those before the step."""

    def begin(self) -> None:
        """Starts the step's clock."""
        self.origin_s = self.clock.begin()

    def open(self, row: int, nbytes: int = NONE) -> int:
        """Starts a span and returns its number."""
        self.row.append(row)
        self.nbytes.append(nbytes)
        self.cause.append(NONE)
        if nbytes == NONE:
            self.inside = len(self.row) - 1
        self.start.append(self.clock.mark())
        self.end.append(None)
        return len(self.row) - 1

    def seconds(self) -> tuple[list[float], list[float]]:
        """(starts, ends) on the machine's monotonic clock; NaN for what never ended."""
        return self.clock.seconds(self.start), self.clock.seconds(self.end)

    def hold(self, row: int, levels: Levels) -> None:
        """Takes what is held after a row."""
        if not self.levels or levels != self.levels[-1][1]:
            self.levels.append((row, levels))

    def close(self, span: int) -> None:
        """Ends a span at the clock's time."""
        self.end[span] = self.clock.mark()
        if span == self.inside:
            self.inside = NONE

    def end_wait(self, span: int) -> None:
        """A communication has arrived that the compute under way waited for: only now does that begin."""
        if self.inside != NONE:
            self.start[self.inside] = self.clock.mark()
            self.cause[self.inside] = span


def gather(program: Program, recorder: Recorder, group: ProcessGroup | None) -> Timeline:
    """The Timeline of all ranks, a worker each, from the earliest start of the step.

    PlanError if a span was never closed.
    """
    r, rows = recorder, np.array(recorder.row, np.int64)
    talks = np.array([bool(program.comm_of(row)) for row in r.row], np.bool_)
    # ranks may follow Programs of their own (other microbatches), so that rows mean something here alone
    columns = program.stream[rows], program.kind[rows], program.stage[rows], program.unit[rows], talks
    mine = (r.origin_s, r.row, *r.seconds(), r.nbytes, r.levels, r.cause, columns)
    parts = [mine]
    if group is not None:
        parts = [mine] * dist.get_world_size(group)
        dist.all_gather_object(parts, mine, group=group)
    origin = min(part[0] for part in parts)
    worker = np.concatenate([np.full(len(part[1]), i) for i, part in enumerate(parts)])
    row = np.concatenate([np.array(part[1], np.int64) for part in parts])
    start = np.concatenate([np.array(part[2]) for part in parts]) - origin
    end = np.concatenate([np.array(part[3]) for part in parts]) - origin
    first = np.cumsum([0, *(len(part[1]) for part in parts)])
    cause = np.concatenate([np.array(part[6], np.int64) for part in parts])
    if np.isnan(end).any():
        raise PlanError(f"{program.where(int(row[np.isnan(end)][0]))} was begun but never ended; measure a whole step")
    stream, kind, stage, unit, talks = (np.concatenate([part[7][at] for part in parts]) for at in range(5))
    spans = Spans.of(
        worker=worker,
        stream=stream,
        kind=kind,
        role=np.where(talks, ROLES.index("communication"), ROLES.index("compute")),
        start_s=start,
        end_s=end,
        stage=stage,
        unit=unit,
        nbytes=np.concatenate([np.array(part[4], np.int64) for part in parts]),
        # Ranks number their own spans from 0; in the joint table those of a rank begin at `first`.
        cause=np.where(cause == NONE, NONE, cause + first[worker]),
    )
    return Timeline(
        clock="measured",
        workers=tuple(Worker(name=f"rank {i}") for i in range(len(parts))),
        streams=program.streams,
        kinds=tuple(kind.name for kind in program.kinds),
        buffers=CLASSES if recorder.memory else (),
        spans=spans,
        memory=_memory(spans, row, [part[5] for part in parts]) if recorder.memory else None,
        # Up to a whole tick, so that no span ends after the step.
        makespan_s=float(np.ceil(spans.end_s.max(initial=0.0) / TICK_S) * TICK_S),
        assumptions=ASSUMPTIONS + MEMORY_ASSUMPTIONS if recorder.memory else ASSUMPTIONS,
    )


def _memory(spans: Spans, row: NDArray[np.int64], levels_of_ranks: Sequence[Sequence[tuple[int, Levels]]]) -> Memory:
    """What came and went with which span. levels_of_ranks: of each worker."""
    changes: list[tuple[int, int, int, float, int]] = []
    for worker, levels in enumerate(levels_of_ranks):
        mine = np.flatnonzero(spans.worker == worker)
        span_of = dict(zip(row[mine].tolist(), mine.tolist(), strict=True))
        span = int(mine[0])
        for (_, before), (at, after) in pairwise(levels):
            span = span_of.get(at, span)  # a row that had nobody to talk to has no span
            for cls, change in enumerate(np.subtract(after, before).tolist()):
                if change:
                    time = spans.start_s[span] if change > 0 else spans.end_s[span]
                    changes.append((worker, cls, span, float(time), change))
    columns = list(zip(*changes, strict=True)) or [()] * 5
    return Memory.of(
        worker=columns[0],
        buffer=columns[1],
        span=columns[2],
        time_s=columns[3],
        change_bytes=columns[4],
        resident_bytes=[levels[0][1] for levels in levels_of_ranks],
    )


def per_class(timeline: Timeline, first_ranks: Sequence[int], counts: Sequence[int]) -> Timeline:
    """The spans of one rank of each class, under the names that predictions use.

    first_ranks: the rank that stands for each class. counts: ranks of each class. The step's seconds stay those of all
    ranks.
    """
    of_rank = {rank: cls for cls, rank in enumerate(first_ranks)}
    chosen = np.isin(timeline.spans.worker, list(first_ranks))
    columns = {column.name: getattr(timeline.spans, column.name)[chosen] for column in fields(Spans)}
    columns["worker"] = np.array([of_rank[rank] for rank in columns["worker"].tolist()], np.int32)
    cause, number = columns["cause"], np.cumsum(chosen) - 1  # of the same rank, so it stays if the span does
    columns["cause"] = np.where(cause == NONE, NONE, number[cause]).astype(np.int32)
    workers = tuple(Worker(name=f"class {cls}", count=count) for cls, count in enumerate(counts))
    memory = None if timeline.memory is None else _memory_of(timeline.memory, chosen, first_ranks)
    spans = with_causes(Spans(**columns), timeline.kinds)
    return replace(timeline, workers=workers, spans=spans, memory=memory)


def _memory_of(memory: Memory, chosen: NDArray[np.bool_], first_ranks: Sequence[int]) -> Memory:
    """The memory curves of one rank of each class. chosen: the spans that stay."""
    number = np.cumsum(chosen) - 1
    mine = np.isin(memory.worker, list(first_ranks))
    return Memory.of(
        worker=[list(first_ranks).index(rank) for rank in memory.worker[mine].tolist()],
        buffer=memory.buffer[mine],
        span=number[memory.span[mine]],
        time_s=memory.time_s[mine],
        change_bytes=memory.change_bytes[mine],
        resident_bytes=memory.resident_bytes[list(first_ranks)],
    )
