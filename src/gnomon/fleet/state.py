"""What a policy sees and what it answers: jobs that wait and run, free devices by node, and decisions.

A policy is a function `(State, Forecasts) -> decisions`; it changes nothing that it is given. The replay and the live
controller build the same State. Leaves out how decisions are carried out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gnomon.fleet.costs import Costs
from gnomon.fleet.job import Job
from gnomon.fleet.machines import Machines

Allocation = tuple[tuple[int, int], ...]
"""(node, devices on it) of every node that a job holds, in the order of its ranks."""


@lru_cache(maxsize=65536)
def packed_on(count: int, node: int, per_node: int) -> Allocation:
    """An allocation of so many devices on full nodes and the rest on one, where `node` stands for any."""
    full, rest = divmod(count, per_node)
    return ((node, per_node),) * full + (((node, rest),) if rest else ())


def devices_of(allocation: Allocation) -> int:
    """Devices in an allocation."""
    return sum(count for _, count in allocation)


class Forecasts(Protocol):
    """What is foretold of jobs: the interface that policies and the replay use."""

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Says (rate, until): seconds of work that an allocation does in a second, and the work done up to which that
        holds. A job's `work_s` is at rate 1 on what it asked for."""

    def packed(self, job: Job, done_s: float, node: int, per_node: int, most: int) -> NDArray[np.float64]:
        """Rates on 1, 2 … `most` devices, on as few nodes of `per_node` as hold them, of the kind of `node`."""

    def limits(self, job: Job) -> tuple[int, int]:
        """(fewest, most) devices that the job can run on."""

    def remaining_s(self, job: Job, done_s: float, allocation: Allocation) -> float:
        """Seconds to the end of the job if it keeps an allocation, without the pause at its start."""

    def memory_bytes(self, job: Job, devices: int) -> float:
        """Peak memory of a device when the job runs on so many; 0 where it is not known."""

    def resize_s(self, job: Job, devices: int) -> float:
        """Seconds without progress when the job starts again, or on another allocation."""

    def speed_share(self, job: Job, other: Job) -> float:
        """Share of its speed that a job keeps when it shares its devices with another."""


class PhaseForecasts:
    """Forecasts that follow from `phase` alone; what a source of forecasts knows better than that, it overrides."""

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Says (rate, until) of an allocation, as `Forecasts` asks."""
        raise NotImplementedError

    def packed(self, job: Job, done_s: float, node: int, per_node: int, most: int) -> NDArray[np.float64]:
        """Returns the rates on 1 to `most` devices packed on nodes as `node`."""
        shapes = (packed_on(count, node, per_node) for count in range(1, most + 1))
        return np.array([self.phase(job, done_s, shape)[0] for shape in shapes])

    def remaining_s(self, job: Job, done_s: float, allocation: Allocation) -> float:
        """Returns the seconds left at today's rate; infinite at rate 0."""
        rate = self.phase(job, done_s, allocation)[0]
        return max(job.work_s - done_s, 0.0) / rate if rate else math.inf

    def memory_bytes(self, job: Job, devices: int) -> float:
        """Returns the memory that the job's line states."""
        return job.memory_bytes

    def resize_s(self, job: Job, devices: int) -> float:
        """Charges no time for a resize: a replay has its own (`Costs`)."""
        return 0.0

    def speed_share(self, job: Job, other: Job) -> float:
        """Assumes half the speed for a job that shares its devices, where that was not measured."""
        return 0.5


REASONS: tuple[str, ...] = (
    "too few devices free", "free devices on too many nodes", "others go first", "paused by the policy",
    "next decision of the policy",
)  # fmt: skip
"""Why a job waits. A policy that decides at intervals leaves a job that came meanwhile to its next decision."""
FULL, FRAGMENTED, BEHIND, PAUSED, UNDECIDED = range(5)


@dataclass(slots=True)
class Active:
    """A submitted job that has not finished. Policies read it; only the replay and the controller write it."""

    job: Job
    """What was submitted."""
    index: int
    """Its place in the trace."""
    allocation: Allocation = ()
    """What it holds; empty while it waits."""
    done_s: float = 0.0
    """Work done at `since_s`."""
    since_s: float = 0.0
    """When `done_s`, `served` and `rate` were last brought up to date."""
    ready_s: float = 0.0
    """Until then it holds devices without progress: it starts, or is resized."""
    rate: float = 0.0
    """Seconds of work a second, from `ready_s` on."""
    until_s: float = float("inf")
    """Work up to which `rate` holds."""
    saved_s: float = 0.0
    """Work that its last checkpoint has."""
    served: float = 0.0
    """Device-seconds that it has held."""
    turns: list[tuple[float, float, int]] = field(default_factory=list)
    """(when, `served` then, devices) of every time that it got devices."""
    pools: list[int] = field(default_factory=list)
    """The pool of its devices, of each of `turns`."""
    furthest_s: float = 0.0
    """Most work that it ever had done, lost or not."""
    peak: int = 0
    """Most devices that it ever held."""
    first_s: float = -1.0
    """When it first started; -1 before."""
    held_s: float = 0.0
    """Since when it has its allocation."""
    preemptions: int = 0
    """Times that it was stopped to run again later."""
    resizes: int = 0
    """Times that it was given other devices while it ran."""
    failures: int = 0
    """Times that a node under it failed."""
    waited_s: float = 0.0
    """Time without devices, up to `queued_s`."""
    queued_s: float = 0.0
    """Since when it waits, if it does."""
    reason: int = 0
    """Why it waits: an index of REASONS."""
    reason_s: float = 0.0
    """Since when."""
    reasons: list[float] = field(default_factory=lambda: [0.0] * len(REASONS))
    """Seconds waited, by REASONS."""
    shares_with: str = ""
    """Job that it shares its devices with."""
    slice_at: tuple[str, int] = ("", 0)
    """MIG profile and first memory slice that it holds."""
    version: int = 0
    """Counts changes, so that an event of an earlier state is known to be void."""

    @property
    def devices(self) -> int:
        """Devices that it holds."""
        return devices_of(self.allocation)

    def done_at(self, now: float) -> float:
        """Work done at a later moment with the present rate."""
        # Neither before the last update, whose work is in `done_s` already, nor before the pause at its start has
        # ended.
        return self.done_s + self.rate * max(now - max(self.since_s, self.ready_s), 0.0)

    def left_s(self, now: float) -> float:
        """Work left, in seconds on the devices that it asked for."""
        return max(self.job.work_s - self.done_at(now), 0.0)

    def served_at(self, now: float) -> float:
        """Device-seconds held up to now."""
        return self.served + self.devices * (now - self.since_s)

    def reached_s(self, service: float) -> float:
        """When it had had so many device-seconds, of a job that has had them."""
        # The last turn that began with less is the one in which it got them; within a turn service grows evenly.
        when, before, devices = next(turn for turn in reversed(self.turns) if turn[1] < service)
        return when + (service - before) / devices


@dataclass(frozen=True, slots=True)
class Decision:
    """What a job holds from now on; a job without a decision keeps what it has."""

    job: str
    """Its id."""
    allocation: Allocation
    """Its devices; empty to preempt it."""
    shares_with: str = ""
    """A running job whose devices it shares; then `allocation` is that job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A cluster at one moment."""

    now: float
    """Seconds from the start of the trace."""
    machines: Machines
    """All nodes."""
    queue: Sequence[Active]
    """Jobs that wait, by submission."""
    running: Sequence[Active]
    """Jobs that hold devices, by submission."""
    free: Sequence[int]
    """Free devices of every node; 0 for a node that is down or serves inference."""
    owed: int = 0
    """Nodes that inference wants back and training holds."""
    serving: int = 0
    """Nodes of the inference pools that serve inference."""
    load: float = 0.0
    """Load of inference, from 0 to 1 of its nodes."""
    spread: bool = True
    """Whether a job may take devices of more nodes than it needs."""
    costs: Costs = Costs()
    """Of starting and stopping jobs."""

    def jobs(self) -> Mapping[str, Active]:
        """All active jobs by id."""
        return {active.job.id: active for active in (*self.queue, *self.running)}


Decide = Callable[[State, Forecasts], Sequence[Decision]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A scheduling policy: one file of `gnomon.fleet.policies`."""

    name: str
    """As `--policy` takes it."""
    paper: str
    """Where it was published, or `textbook`."""
    about: str
    """What it does, in a line."""
    decide: Decide
    """The policy itself."""
    needs: str = "nothing"
    """What it must know of a job beforehand."""
    interval_s: float = 0.0
    """Seconds between two decisions; 0 to decide whenever something happens."""
    always: bool = False
    """Whether its answer may change with time alone, while something waits."""
    adapts: bool = False
    """Whether it changes running jobs though nothing waits and nothing has happened."""
    order: Callable[[Job], float] | None = None
    """For policies that start jobs in a fixed order and never stop them: the smallest first, ties by submission."""
    backfill: bool = False
    """With `order`: a job may start though an earlier one does not fit."""
    slices: bool = False
    """Whether it places jobs on MIG slices, and on nothing else."""
    parts: bool = False
    """Whether it places jobs on parts of devices, and on nothing else."""
    shares: bool = False
    """Whether it puts jobs beside others on the same devices."""
    loans: bool = False
    """Whether it uses the inference pools, and gives them back."""
