"""The jobs of a replay: what waits, what runs, how far each is, and where its device-seconds went.

`Work` starts and stops jobs, keeps what each has done up to date and pushes the event at which its rate ends. Leaves
out which job is started when (the policy, `replay`) and which devices are free (`devices`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from gnomon.errors import RunError
from gnomon.fleet.devices import Devices
from gnomon.fleet.learned import LearnedForecasts
from gnomon.fleet.result import Run
from gnomon.fleet.rules import Rules
from gnomon.fleet.state import FULL, PAUSED, Active, Allocation, Forecasts, devices_of

ARRIVE, FINISH, FAIL, REPAIR, DEMAND, TICK = range(6)
"""Kinds of events."""


def _index(active: Active) -> int:
    return active.index


@dataclass(slots=True)
class Work:
    """The work done and left of all jobs at one moment."""

    devices: Devices
    """Who has which devices."""
    rules: Rules
    """How the cluster behaves."""
    truth: Forecasts
    """How fast jobs really go."""
    learned: LearnedForecasts | None = None
    """What jobs measure of themselves, where their speeds are not known."""
    now: float = 0.0
    """Seconds of the trace."""
    queue: dict[str, Active] = field(default_factory=dict)
    """Id -> job that waits."""
    running: dict[str, Active] = field(default_factory=dict)
    """Id -> job that has devices."""
    waiting: list[Active] = field(default_factory=list)
    """Those of the queue, by submission."""
    events: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    """(time, kind, order, index, version)."""
    order: int = 0
    """Events that were pushed so far: what decides between two of one time."""
    uses: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("useful", "lost", "overhead"), 0.0))
    """Device-seconds that jobs had."""
    runs: list[Run] = field(default_factory=list)
    """Spans in which jobs held allocations; empty where they are not recorded."""
    preemptions: int = 0
    """Times that a job was stopped to run again later."""
    resizes: int = 0
    """Times that a running job was given other devices."""
    failures: int = 0
    """Times that a job was stopped by a failed node."""

    def push(self, time: float, kind: int, index: int, version: int = 0) -> None:
        """An event to come."""
        self.order += 1
        heapq.heappush(self.events, (time, kind, self.order, index, version))

    def active(self, job: str) -> Active:
        """A job that runs or waits."""
        return self.running.get(job) or self.queue[job]

    def sync(self, active: Active) -> None:
        """Bring work and device-seconds up to now."""
        now, devices = self.now, active.devices
        if active.shares_with:
            # Of two jobs on the same devices each is charged half of them.
            devices = devices / 2  # type: ignore[assignment]
        elapsed = now - active.since_s
        # The pause may have ended before the last update, end within this span, or last beyond it.
        idle = min(max(active.ready_s - active.since_s, 0.0), elapsed)
        before = active.done_s
        active.done_s = min(before + active.rate * (elapsed - idle), active.job.work_s)
        active.furthest_s = max(active.furthest_s, active.done_s)
        self.uses["overhead"] += devices * idle
        self.uses["useful"] += devices * (elapsed - idle)
        active.served += devices * elapsed
        if self.learned and elapsed > idle:
            self.learned.ran(active.job, before, active.allocation)
        every = self.rules.costs.checkpoint_every_s
        if every > 0 and active.rate:
            # Checkpoints are written every so many seconds of progress since the job got its devices.
            running = now - max(active.held_s, active.ready_s)
            age = running % every if running > 0 else 0.0
            active.saved_s = (
                max(active.saved_s, active.done_s - active.rate * age) if running >= every else active.saved_s
            )
        elif every == 0:
            active.saved_s = active.done_s
        active.since_s = now

    def set_rate(self, active: Active) -> None:
        """The rate from now on, and the event at which it ends."""
        rate, until = self.truth.phase(active.job, active.done_s, active.allocation)
        if active.shares_with:
            rate *= self.truth.speed_share(active.job, self.active(active.shares_with).job)
        if not rate > 0:
            raise RunError(f"job {active.job.id!r} makes no progress on {devices_of(active.allocation)} devices")
        active.rate, active.until_s = rate, until
        active.version += 1
        goal = min(until, active.job.work_s)
        start = max(self.now, active.ready_s)
        self.push(start + max(goal - active.done_s, 0.0) / rate, FINISH, active.index, active.version)

    def measure(self) -> None:
        """Have all running jobs learn from what they did since, and choose their batch anew."""
        for active in self.running.values():
            if self.now > max(active.since_s, active.ready_s):
                self.sync(active)
                self.set_rate(active)

    def occupy(self, active: Active, allocation: Allocation, pause_s: float) -> None:
        """Have a job run on these devices, after a pause."""
        active.allocation = allocation
        active.ready_s = self.now + pause_s
        active.since_s = active.held_s = self.now
        active.peak = max(active.peak, devices_of(allocation))
        active.turns.append((self.now, active.served, devices_of(allocation)))
        active.pools.append(self.devices.machines.pool_of[allocation[0][0]])
        if active.first_s < 0:
            active.first_s = self.now
        if not active.shares_with:
            self.devices.take(active, allocation)
        self.set_rate(active)

    def release(self, active: Active, why: str) -> None:
        """Give its devices back; one that shares them keeps them alone."""
        if self.rules.record:
            self.runs.append(
                Run(
                    index=active.index,
                    allocation=active.allocation,
                    start_s=active.held_s,
                    end_s=self.now,
                    why=why,
                )
            )
        other = self.running.get(active.shares_with) if active.shares_with else None
        # The devices stay with the other job of the pair: there is nothing to give back.
        if other is not None:
            self.sync(other)
            other.shares_with = ""
            self.set_rate(other)
        else:
            self.devices.give_back(active)
        active.allocation = ()
        active.shares_with = ""
        active.rate = 0.0
        active.version += 1

    def _lose(self, active: Active) -> None:
        """Go back to the last checkpoint. Device-seconds of the work that is done again were lost."""
        again = active.done_s - active.saved_s
        if again > 0 and active.rate > 0:
            seconds = again / active.rate * active.devices / (2 if active.shares_with else 1)
            seconds = min(seconds, self.uses["useful"])
            self.uses["useful"] -= seconds
            self.uses["lost"] += seconds
        active.done_s = active.saved_s

    def stop(self, active: Active, why: str) -> None:
        """Back to the queue."""
        self.sync(active)
        if why == "failed" or not self.rules.costs.saves_when_preempted:
            self._lose(active)
        else:
            active.saved_s = active.done_s
        self.release(active, why)
        del self.running[active.job.id]
        active.queued_s = active.reason_s = self.now
        active.reason = PAUSED if why == "preempted" else FULL
        self.enqueue(active)

    def enqueue(self, active: Active) -> None:
        """Put a job into the queue."""
        self.queue[active.job.id] = active
        insort(self.waiting, active, key=_index)

    def dequeue(self, active: Active) -> None:
        """Take a job out of the queue."""
        del self.queue[active.job.id]
        del self.waiting[bisect_left(self.waiting, active.index, key=_index)]

    def wait_for(self, active: Active, reason: int) -> None:
        """A job waits for another reason from now on."""
        active.reasons[active.reason] += self.now - active.reason_s
        active.reason, active.reason_s = reason, self.now
