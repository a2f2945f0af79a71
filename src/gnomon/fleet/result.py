"""What a replay returns: the fate of every job, where every device-second went, and what the cluster looked like.

`Result.figures()` are the numbers that policies are compared by. Leaves out printing them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gnomon.fleet.job import Job
from gnomon.fleet.machines import Machines
from gnomon.fleet.state import REASONS, Allocation

Floats = NDArray[np.float64]

USES = ("useful", "lost", "overhead", "serving", "down", "idle")
"""Where device-seconds go: work that counts, work done again, starts and resizes, inference, failed nodes, nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A span of time in which a job held an allocation."""

    index: int
    """Place of the job in the trace."""
    allocation: Allocation
    """The devices that it held, by node."""
    start_s: float
    """Seconds of the trace at which it got them."""
    end_s: float
    """Seconds of the trace at which it lost them."""
    why: str
    """What ended it: finished, preempted, resized, failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The cluster over time, a point at each change."""

    time_s: Floats
    """Seconds of the trace, ascending."""
    busy: Floats
    """Devices held by jobs."""
    waiting: Floats
    """Jobs that wait."""
    serving: Floats
    """Devices that serve inference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One replay of a trace under a policy."""

    policy: str
    """Name of the policy."""
    jobs: tuple[Job, ...]
    """The jobs of the trace, in the order of all arrays by job."""
    machines: Machines
    """The cluster."""
    finish_s: Floats
    """By job."""
    first_s: Floats
    """When it first held devices."""
    waited_s: Floats
    """Time without devices, in all."""
    preemptions: int
    """Times that a job was stopped to run again later."""
    resizes: int
    """Times that a running job was given other devices."""
    failures: int
    """Times that a job was stopped by a failed node."""
    device_s: Mapping[str, float]
    """Device-seconds by USES, from 0 to `end_s`."""
    end_s: float
    """When the last job finished."""
    unmet_s: float = 0.0
    """Node-seconds that inference wanted and did not get."""
    reasons: Floats = field(default_factory=lambda: np.zeros((0, len(REASONS))))
    """Seconds by job and REASONS; empty where they were not recorded."""
    runs: tuple[Run, ...] = ()
    """Empty where they were not recorded."""
    series: Series | None = None
    """The cluster over time; None where it was not recorded."""
    decisions: int = 0
    """How often the policy was asked."""

    @property
    def submit_s(self) -> Floats:
        """Returns the second of submission, by job."""
        return np.array([job.submit_s for job in self.jobs])

    @property
    def jct_s(self) -> Floats:
        """Returns the job completion times, from submission to the end, by job."""
        return np.asarray(self.finish_s - self.submit_s)

    def figures(self) -> dict[str, float]:
        """What policies are compared by; times in seconds, shares from 0 to 1."""
        jct, wait = self.jct_s, self.waited_s
        total = self.machines.devices / self.machines.unit * self.end_s
        busy_s = self.device_s["useful"] + self.device_s["lost"] + self.device_s["overhead"]
        return {
            "jct_mean_s": float(jct.mean()),
            "jct_p50_s": float(np.percentile(jct, 50)),
            "jct_p99_s": float(np.percentile(jct, 99)),
            "queue_mean_s": float(wait.mean()),
            "queue_p99_s": float(np.percentile(wait, 99)),
            "makespan_s": self.end_s,
            "utilisation": busy_s / total if total else 0.0,
            "goodput": self.device_s["useful"] / total if total else 0.0,
            "preemptions": float(self.preemptions),
            "resizes": float(self.resizes),
            "failures": float(self.failures),
            "unmet_node_s": self.unmet_s,
        }
