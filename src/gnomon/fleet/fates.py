"""What is known of live jobs: a fold over the journal, so that a controller that was killed knows what it knew.

`Fate.apply(event)` is the only thing that changes a fate. Leaves out who writes events (`live`) and where (`journal`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gnomon.fleet.journal import Event
from gnomon.fleet.tasks import Task

MOST_FAILURES = 3
"""Times that a job may fail before it is given up."""

Stage = Literal["queued", "running", "stopping", "resizing", "done", "failed"]
LIVE: tuple[Stage, ...] = ("running", "stopping", "resizing")
"""Those whose process is there, or was."""
ENDED: tuple[Stage, ...] = ("done", "failed")


@dataclass(slots=True)
class Fate:
    """What became of one job so far: its state, its devices and its attempts."""

    task: Task
    """What was submitted."""
    index: int
    """Its place in the table."""
    state: Stage = "queued"
    """Where it stands."""
    devices: tuple[int, ...] = ()
    """Numbers of its devices."""
    target: int = 0
    """Devices that it will have when it is resized."""
    begun_s: float = 0.0
    """When it got its devices."""
    first_s: float = -1.0
    """When it first did; -1 before."""
    served: float = 0.0
    """Device-seconds that it had before."""
    turns: list[tuple[float, float, int]] = field(default_factory=list)
    """(when, `served` then, devices) of every time that it got devices."""
    done_s: float = 0.0
    """Work that it had done before."""
    peak: int = 0
    """Most devices that it ever had."""
    attempt: int = 0
    """Times that it was started: the number of its last process."""
    settled: int = 0
    """The last process whose end is journalled."""
    failures: int = 0
    """Times that it ended by a failure that counts against it."""
    preemptions: int = 0
    """Times that it was stopped to run again later."""
    resizes: int = 0
    """Times that it was given other devices."""

    @property
    def reserved(self) -> int:
        """Devices that no other job may have."""
        return max(len(self.devices), self.target)

    def apply(self, event: Event) -> None:
        """What an event changes."""
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
