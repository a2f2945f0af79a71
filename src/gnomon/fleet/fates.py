"""The state of each live job, folded from the journal's events: a controller that was killed reads it back whole.

`Fate.apply(event)` is the only thing that changes a fate. Leaves out who writes events (`live`) and where (`journal`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gnomon.fleet.journal import Event
from gnomon.fleet.tasks import Task

MOST_FAILURES = 3
"""Failures that count against a job after which it is given up."""

Stage = Literal["queued", "running", "stopping", "resizing", "done", "failed"]
"""States of a job: `stopping` and `resizing` are of one that is asked to end, to run again later on as many devices or
on others."""
LIVE: tuple[Stage, ...] = ("running", "stopping", "resizing")
"""States in which the last journalled word is of a process that was started: it runs, or ended and that is not
journalled yet."""
ENDED: tuple[Stage, ...] = ("done", "failed")
"""States that nothing follows."""


@dataclass(slots=True)
class Fate:
    """What became of one job so far: its state, its devices and its attempts."""

    task: Task
    """What was submitted."""
    index: int
    """Its row in the table of submitted jobs."""
    state: Stage = "queued"
    """The last event's state."""
    devices: tuple[int, ...] = ()
    """Indices of the devices that it has; none between two attempts."""
    target: int = 0
    """While it is resized, the number of devices that it is stopped to have; else 0."""
    begun_s: float = 0.0
    """Start of its last attempt, in seconds of the journal's clock."""
    first_s: float = -1.0
    """Start of its first attempt, by the same clock; -1 before."""
    served: float = 0.0
    """Device-seconds of the attempts that have ended."""
    turns: list[tuple[float, float, int]] = field(default_factory=list)
    """(start, `served` then, number of devices) of each attempt."""
    done_s: float = 0.0
    """Work that is done and kept when no attempt runs (what its checkpoint holds), in the seconds of `work_s`."""
    peak: int = 0
    """The most devices that it had at once."""
    attempt: int = 0
    """The number of its last attempt, counted from 1; 0 before the first."""
    settled: int = 0
    """The number of the last attempt whose end is journalled."""
    failures: int = 0
    """Attempts that ended by a failure that counts against it."""
    preemptions: int = 0
    """Times that it was stopped to run again later."""
    resizes: int = 0
    """Times that it was given other devices."""

    @property
    def reserved(self) -> int:
        """The number of devices that no other job may have: those it has, or will have where that is more."""
        return max(len(self.devices), self.target)

    def apply(self, event: Event) -> None:
        """Changes the state by one event of this job; events of kinds that say nothing of it change nothing."""
        kind = event["event"]
        match kind:
            case "starting":
                self.state, self.begun_s, self.target = "running", float(event["at"]), 0
                self.devices = tuple(event["devices"])
                self.attempt += 1
                self.peak = max(self.peak, len(self.devices))
                self.turns.append((self.begun_s, self.served, len(self.devices)))
                self.first_s = self.begun_s if self.first_s < 0 else self.first_s
            case "stopping":
                self.state = "stopping"
            case "resizing":
                self.state, self.target = "resizing", int(event["target"])
            case "preempted" | "resized" | "failed" | "lost" | "done":
                self._end(kind, event)

    def _end(self, kind: str, event: Event) -> None:
        """Ends an attempt. `failed` and `lost` queue the job again, until MOST_FAILURES of them have counted against
        it: all do but an attempt of a controller before this one that is not known to have begun."""
        self.served += max(float(event["at"]) - self.begun_s, 0.0) * len(self.devices)
        self.devices, self.target = (), 0
        self.settled = max(self.settled, int(event["attempt"]))
        self.done_s = float(event["done_s"])
        self.state = "queued"
        if kind == "done":
            self.state = "done"
        elif kind == "preempted":
            self.preemptions += 1
        elif kind == "resized":
            self.resizes += 1
        elif event["counts"]:
            self.failures += 1
            self.state = "failed" if self.failures >= MOST_FAILURES else "queued"
