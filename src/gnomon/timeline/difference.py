"""Where two timelines differ, in time and in memory.

`difference(before, after)` compares two runs of the same or of different Programs, predicted or measured, worker by
worker: how the seconds of each part of the breakdown, action and operation changed, and how the peak did by class of
buffer. The changes of a worker add up to the difference of the steps exactly; those of memory to the difference of the
peaks (when bytes are whole). Left out: which single spans moved; spans of different Programs do not correspond.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import InputError
from gnomon.timeline.breakdown import Breakdown, Part, breakdown
from gnomon.timeline.memory import peaks
from gnomon.timeline.types import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChange:
    """Seconds of one thing on one worker, in both timelines."""

    worker: str
    """Name of the worker, the same in both."""
    part: Part
    """What the seconds are, of PARTS."""
    busy: bool
    """The stream is held by it; otherwise idle because of it."""
    action: str
    """Kind of the action that the time went into."""
    path: str
    """Operation inside that action; empty for the action as a whole."""
    before_s: float
    """Seconds in the first timeline; 0 where it has none."""
    after_s: float
    """Seconds in the second; 0 where it has none."""

    @property
    def seconds(self) -> float:
        """after - before, exact."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """Bytes of one class of buffer at the worker's peak, in both timelines."""

    worker: str
    """Name of the worker, the same in both."""
    buffer: str
    """Class of memory."""
    before_bytes: float
    """Bytes at the first timeline's peak; 0 where it holds none."""
    after_bytes: float
    """Bytes at the second's peak, which may be at another moment of the step."""

    @property
    def bytes(self) -> float:
        """Bytes that the peak of `after` holds beyond that of `before`."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Changes of the workers that both timelines have, largest first."""

    before_s: float
    """Step of the first timeline."""
    after_s: float
    """Step of the second."""
    changes: tuple[TimeChange, ...]
    """By size, whichever sign; what did not change is left out."""
    memory: tuple[MemoryChange, ...]
    """Likewise; empty if either timeline has no memory."""
    only_before: tuple[str, ...]
    """Workers that the second timeline lacks; nothing is said about them."""
    only_after: tuple[str, ...]
    """Workers that the first timeline lacks."""

    @property
    def seconds(self) -> float:
        """after - before, exact: what the changes of each worker add up to."""
        return self.after_s - self.before_s

    @property
    def largest(self) -> TimeChange | None:
        """The change of most seconds, or None if nothing changed."""
        return self.changes[0] if self.changes else None

    def of(self, worker: str) -> tuple[TimeChange, ...]:
        """Changes of one worker."""
        return tuple(change for change in self.changes if change.worker == worker)


def difference(before: Timeline, after: Timeline, stream: str = "compute") -> Difference:
    """Compares two timelines worker by worker and part by part. Workers correspond by name.

    InputError if no worker is in both, or if one shows a makespan and the other a period: those are not one quantity.
    """
    one, two = breakdown(before, stream), breakdown(after, stream)
    if one.window != two.window:
        raise InputError(
            f"the first timeline shows a {one.window} and the second a {two.window}; compare two of a kind "
            "(`simulate(..., steady=True)` shows a period)"
        )
    both = [name for name in one.workers if name in two.workers]
    if not both:
        raise InputError(f"no worker is in both timelines: {', '.join(one.workers)} and {', '.join(two.workers)}")
    return Difference(
        before_s=one.step_s,
        after_s=two.step_s,
        changes=_changes(one, two, both),
        memory=_memory(before, after, both) if before.memory is not None and after.memory is not None else (),
        only_before=tuple(name for name in one.workers if name not in both),
        only_after=tuple(name for name in two.workers if name not in both),
    )


def _changes(before: Breakdown, after: Breakdown, workers: list[str]) -> tuple[TimeChange, ...]:
    seconds: dict[tuple[str, Part, bool, str, str], list[float]] = {}
    for side, parts in enumerate((before, after)):
        for s in parts.shares:
            if s.worker in workers:
                seconds.setdefault((s.worker, s.part, s.busy, s.action, s.path), [0.0, 0.0])[side] += s.seconds
    changes = [
        TimeChange(worker=worker, part=part, busy=busy, action=action, path=path, before_s=a, after_s=b)
        for (worker, part, busy, action, path), (a, b) in seconds.items()
        if a != b
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.seconds)))


def _memory(before: Timeline, after: Timeline, workers: list[str]) -> tuple[MemoryChange, ...]:
    bytes_by: dict[tuple[str, str], list[float]] = {}
    for side, timeline in enumerate((before, after)):
        for peak in peaks(timeline):
            for buffer, amount in peak.by_buffer if peak.worker in workers else ():
                bytes_by.setdefault((peak.worker, buffer), [0.0, 0.0])[side] = amount
    changes = [
        MemoryChange(worker=worker, buffer=buffer, before_bytes=a, after_bytes=b)
        for (worker, buffer), (a, b) in bytes_by.items()
        if a != b
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.bytes)))
