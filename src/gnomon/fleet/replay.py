"""The replay: a trace is played on machines under a policy, event by event, in simulated time.

`replay(trace, machines, policy)` returns a Result. Events are arrivals, finishes, failed and repaired nodes, changes of
inference load and the policy's own ticks; at each moment the policy sees a State and answers Decisions, which are
checked (no device twice, no node that is down) before they are carried out. Every device-second is accounted for, and
the same input gives the same output. Policies with a fixed order on plain machines take a faster way with the same
result (`gnomon.fleet.ordered`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gnomon.errors import InputError, RunError
from gnomon.fleet.devices import Devices
from gnomon.fleet.forecast import Curve
from gnomon.fleet.job import Trace
from gnomon.fleet.learned import LearnedForecasts
from gnomon.fleet.machines import Machines, check_fits
from gnomon.fleet.ordered import can_be_ordered, replay_ordered
from gnomon.fleet.placement import fit
from gnomon.fleet.result import Result, Series
from gnomon.fleet.rules import Rules
from gnomon.fleet.state import (
    BEHIND,
    FRAGMENTED,
    FULL,
    PAUSED,
    REASONS,
    UNDECIDED,
    Active,
    Decision,
    Forecasts,
    Policy,
    State,
    devices_of,
)
from gnomon.fleet.work import ARRIVE, DEMAND, FAIL, FINISH, REPAIR, TICK, Work

_EPS = 1e-9
STALLED = 200
"""Decisions between two looks at whether any job has got further."""
IN_VAIN = 300
"""Preemptions and resizes since any job last did, after which a replay ends."""
EXPLAIN_EVERY_S = 300.0
"""Why jobs wait is looked at no more often: with thousands in the queue it would take most of the time."""


Progress = Callable[[int], None]
"""Told how many jobs have finished, now and then."""


def replay(
    trace: Trace,
    machines: Machines,
    policy: Policy,
    *,
    rules: Rules | None = None,
    forecasts: Forecasts | None = None,
    truth: Forecasts | None = None,
    progress: Progress | None = None,
) -> Result:
    """The fate of a trace's jobs under a policy.

    forecasts: what the policy is told; default the stated curve. truth: what happens; default the forecasts, and of
    `LearnedForecasts` what it says, which begins anew.
    InputError for jobs that these machines cannot run. RunError for jobs that a policy never starts.
    """
    forecasts_used = forecasts or Curve(machines)
    check_fits(trace, machines, forecasts_used.memory_bytes)
    cut = [pool.mig for pool in machines.pools if not pool.serves]
    if policy.slices and not all(cut):
        raise InputError(f"policy {policy.name} places jobs on MIG slices only; cut the devices with --mig")
    if any(cut) and not policy.slices:
        raise InputError(f"policy {policy.name} knows no MIG slices; elastic-batch does, or leave --mig out")
    if policy.parts != (machines.unit > 1):
        raise InputError(
            f"policy {policy.name} places jobs on parts of devices only; add --gpu-sharing"
            if policy.parts
            else f"policy {policy.name} knows no parts of devices; fgd does, or leave --gpu-sharing out"
        )
    rules = rules or Rules()
    learned = forecasts_used.fresh() if isinstance(forecasts_used, LearnedForecasts) else None
    if learned:
        forecasts_used, truth = learned, learned.execution
    if can_be_ordered(trace, machines, policy, plain=rules == Rules(costs=rules.costs), known=forecasts or truth):
        return replay_ordered(trace, machines, policy, first_start_s=rules.costs.first_start_s)
    devices = Devices(machines, rules.headroom)
    work = Work(devices, rules, truth or forecasts_used, learned)
    return _Replay(trace, machines, policy, rules, forecasts_used, work, devices, progress).run()


@dataclass(slots=True)
class _Replay:
    """Plays events, and asks the policy."""

    trace: Trace
    machines: Machines
    policy: Policy
    rules: Rules
    forecasts: Forecasts
    work: Work
    devices: Devices
    progress: Progress | None
    explained_s: float = -math.inf
    finished: int = 0
    decisions: int = 0
    points: list[tuple[float, int, int, int]] = field(default_factory=list)
    actives: list[Active] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    ticking: bool = False
    coming: int = 0
    """Events from outside that have not happened yet: arrivals, failures, repairs, loads."""
    last_look: tuple[int, int, float] = (0, 0, -1.0)
    """Decisions when progress was last looked at; moves and work of all jobs when there last was."""
    dirty: bool = False
    """Something happened since the policy was last asked."""

    def run(self) -> Result:
        self._prepare()
        jobs = self.trace.jobs
        while self.finished < len(jobs):
            if not self.work.events:
                raise self._stuck()
            time = self.work.events[0][0]
            self.devices.advance(time - self.work.now)
            self.work.now = time
            changed = False
            # All that happens at one moment happens before the policy is asked: a decision must not see half of it.
            while self.work.events and self.work.events[0][0] == time:
                _, kind, _, index, version = heapq.heappop(self.work.events)
                changed = self._happen(kind, index, version) or changed
            self.dirty = self.dirty or changed
            self.devices.serve()
            if self._due():
                self._decide()
                self.devices.serve()
                self._check_progress()
            self._tick()
            if self.rules.record:
                self.points.append((time, len(self.work.queue), self.devices.busy, self.devices.serving_now))
        return self._result()

    def _prepare(self) -> None:
        self.finish = [math.nan] * len(self.trace.jobs)
        for index, job in enumerate(self.trace.jobs):
            active = Active(job=job, index=index)
            self.actives.append(active)
            self.coming += 1
            self.work.push(job.submit_s, ARRIVE, index)
        for number, failure in enumerate(self.rules.failures):
            if not 0 <= failure.node < len(self.devices.free):
                raise InputError(f"a failure is of node {failure.node}, but there are {len(self.devices.free)} nodes")
            self.work.push(failure.at_s, FAIL, number)
            self.coming += 2  # it is repaired too
        for number, (at, load) in enumerate(self.rules.demand):
            if not 0 <= load <= 1:
                raise InputError(f"inference load is {load!r} at {at:g} s; it must be from 0 to 1")
            self.work.push(at, DEMAND, number)
            self.coming += 1

    def _happen(self, kind: int, index: int, version: int) -> bool:
        """Carry out an event; whether anything changed."""
        if kind == TICK:
            self.ticking = False
            return False
        # Finishes are made by the replay itself, so they say nothing of whether anything comes from outside.
        self.coming -= kind != FINISH
        if kind == ARRIVE:
            active = self.actives[index]
            active.queued_s = active.reason_s = active.since_s = self.work.now
            active.reason = UNDECIDED
            self.work.enqueue(active)
            return True
        if kind == FINISH:
            active = self.actives[index]
            # A job whose rate changed has pushed another end since: the older one is stale.
            return active.version == version and self._progress(active)
        if kind == DEMAND:
            self.devices.demand(self.rules.demand[index][1])
            return True
        if kind == FAIL:
            self._fail(index)
        else:
            self.devices.repair(self.rules.failures[index].node)
        return True

    def _progress(self, active: Active) -> bool:
        """A job reached the end of its work, or of a phase."""
        # The amount itself, not what was integrated: a phase ends at its exact work, whatever rounding says.
        reached = active.until_s if active.until_s < active.job.work_s - _EPS else active.job.work_s
        self.work.sync(active)
        active.done_s = reached
        if reached < active.job.work_s:
            self.work.set_rate(active)
            return False
        self.work.release(active, "finished")
        del self.work.running[active.job.id]
        self.finish[active.index] = self.work.now
        self.finished += 1
        if self.progress and self.finished % 256 == 0:
            self.progress(self.finished)
        return True

    def _fail(self, number: int) -> None:
        failure = self.rules.failures[number]
        node = failure.node
        # A list: stopping a job takes it, and one that shares its devices, out of `running`.
        for active in [a for a in self.work.running.values() if any(node == n for n, _ in a.allocation)]:
            if active.job.id in self.work.running:
                active.failures += 1
                self.work.failures += 1
                self.work.stop(active, "failed")
        self.devices.fail(node)
        self.work.push(self.work.now + failure.for_s, REPAIR, number)

    def _due(self) -> bool:
        """Whether the policy is asked now."""
        if len(self.devices.serving) < self.devices.nodes_wanted:
            return True  # inference does not wait for a tick
        every = self.policy.interval_s
        if not every:
            return self.dirty
        # Ticks are multiples of the interval; both remainders, as rounding may put one just before.
        return self._may_change() and min(self.work.now % every, every - self.work.now % every) < _EPS

    def _may_change(self) -> bool:
        """Whether the policy's answer may differ from its last."""
        waits = self.policy.always and bool(self.work.queue)
        return self.dirty or waits or (self.policy.adapts and bool(self.work.running))

    def _tick(self) -> None:
        """The next tick, where there is something to decide."""
        every = self.policy.interval_s
        if not every or self.ticking or not self._may_change():
            return
        self.ticking = True
        self.work.push((math.floor(self.work.now / every + _EPS) + 1) * every, TICK, 0)

    def state(self) -> State:
        """What the policy sees."""
        return State(
            now=self.work.now,
            machines=self.machines,
            queue=tuple(self.work.waiting),
            running=tuple(self.work.running.values()),
            free=tuple(self.devices.free),
            owed=self.devices.owed,
            serving=len(self.devices.serving),
            load=self.devices.load,
            spread=self.rules.spread,
            costs=self.rules.costs,
        )

    def _decide(self) -> None:
        self.dirty = False
        if not self.work.queue and not self.work.running:
            return
        if self.work.learned:
            self.work.measure()
        state = self.state()
        self.decisions += 1
        decisions = self.policy.decide(state, self.forecasts)
        for decision in decisions:
            if decision.job not in self.work.queue and decision.job not in self.work.running:
                raise RunError(f"policy {self.policy.name} decides on {decision.job!r}, which is not active")
        moved = [
            d for d in decisions if d.job in self.work.running and d.allocation != self.work.running[d.job].allocation
        ]
        resized = set()
        for decision in moved:
            active = self.work.running[decision.job]
            if not decision.allocation:
                active.preemptions += 1
                self.work.preemptions += 1
                self.work.stop(active, "preempted")
            else:
                active.resizes += 1
                self.work.resizes += 1
                self.work.sync(active)
                # A resize is announced, so the job writes a checkpoint first; a failure is not.
                active.saved_s = active.done_s
                self.work.release(active, "resized")
                # Released first, all of them: what one gives up another may take at the same moment.
                resized.add(decision.job)
        for decision in decisions:
            if decision.allocation and (decision.job in self.work.queue or decision.job in resized):
                self._carry_out(decision, self.work.active(decision.job), decision.job in resized)
        self._explain(state)

    def _carry_out(self, decision: Decision, active: Active, resize: bool) -> None:
        """Start a job, or go on with another allocation."""
        other = self.work.running.get(decision.shares_with) if decision.shares_with else None
        if decision.shares_with:
            if other is None or other.allocation != decision.allocation or other.shares_with:
                raise RunError(
                    f"policy {self.policy.name} puts {decision.job!r} beside {decision.shares_with!r}: it cannot"
                )
        else:
            needed = self.forecasts.memory_bytes(active.job, devices_of(decision.allocation))
            if why := self.devices.refusal(active.job, decision.allocation, needed):
                raise RunError(f"policy {self.policy.name} {why}")
        pause = self.rules.costs.pause_s(active.job, first=active.first_s < 0, resize=resize)
        pause += self.work.truth.resize_s(active.job, devices_of(decision.allocation)) if active.first_s >= 0 else 0.0
        if not resize:
            active.waited_s += self.work.now - active.queued_s
            self.work.wait_for(active, active.reason)
            self.work.dequeue(active)
            self.work.running[decision.job] = active
        if other is not None:
            self.work.sync(other)
            other.shares_with, active.shares_with = decision.job, decision.shares_with
            self.work.set_rate(other)
        self.work.occupy(active, decision.allocation, pause)

    def _check_progress(self) -> None:
        """RunError where decisions go on for ever: nothing more comes from outside, and no job gets further.

        What comes from outside (arrivals, failures, load) is finite, and so is the work of all jobs: a replay that does
        not end is one in which neither goes on. Looked at every STALLED decisions.
        """
        if self.decisions < self.last_look[0] + STALLED:
            return
        before = self.last_look
        moved = self.work.preemptions + self.work.resizes
        furthest = sum(max(active.furthest_s, active.done_at(self.work.now)) for active in self.actives)
        # `furthest` is a maximum over time: work done again after a loss is no progress.
        if self.coming or furthest > before[2] + _EPS:
            self.last_look = (self.decisions, moved, furthest)
            return
        self.last_look = (self.decisions, before[1], before[2])
        if not self.work.running:
            raise self._stuck()
        if moved >= before[1] + IN_VAIN:
            stopped = [*self.work.queue.values(), *self.work.running.values()]
            names = ", ".join(active.job.id for active in stopped[:5])
            raise RunError(
                f"policy {self.policy.name} stops jobs ({names}) again and again before they get further than they "
                "were: they start for longer than they run, or lose what they did; shorten --restart, --resize or "
                "--checkpoint-every, or leave --no-notice out"
            )

    def _explain(self, state: State) -> None:
        """Why those wait that still do: all every EXPLAIN_EVERY_S, those that came since the last decision at once."""
        if not self.rules.record or not self.work.queue:
            return
        waiting = [active for active in self.work.queue.values() if active.reason == UNDECIDED]
        if self.work.now >= self.explained_s + EXPLAIN_EVERY_S:
            self.explained_s = self.work.now
            waiting = list(self.work.queue.values())
        free = sum(self.devices.free)
        # Would it fit now, with nothing running and nobody before it? Then it waits for its turn, else for devices on
        # fewer nodes.
        after = State(
            now=self.work.now,
            machines=self.machines,
            queue=(),
            running=(),
            free=self.devices.free,
            spread=self.rules.spread,
        )
        known: dict[tuple[int, str, float], bool] = {}
        for active in waiting:
            job = active.job
            if job.fewest > free:
                reason = FULL
            else:
                key = (job.fewest, job.device, self.forecasts.memory_bytes(job, job.fewest))
                if key not in known:
                    known[key] = fit(after, self.forecasts, self.devices.free, job, job.fewest) is not None
                reason = BEHIND if known[key] else FRAGMENTED
            if active.first_s >= 0 and reason == BEHIND:
                reason = PAUSED
            if reason != active.reason:
                self.work.wait_for(active, reason)

    def _stuck(self) -> RunError:
        names = ", ".join(list(self.work.queue)[:5])
        return RunError(
            f"policy {self.policy.name} never starts {len(self.work.queue):,} jobs ({names}), though nothing else "
            "happens; they may need more devices than a pool has, or another placement"
        )

    def _result(self) -> Result:
        device_s = {
            **self.work.uses,
            "serving": self.devices.serving_s,
            "down": self.devices.down_s,
            "idle": self.devices.free_s,
        }
        # Counted in parts of devices, told in devices.
        device_s = {use: seconds / self.machines.unit for use, seconds in device_s.items()}
        points = np.array(self.points, dtype=np.float64).reshape(-1, 4)
        busy = points[:, 2] / self.machines.unit
        series = Series(time_s=points[:, 0], waiting=points[:, 1], busy=busy, serving=points[:, 3])
        return Result(
            policy=self.policy.name,
            jobs=self.trace.jobs,
            machines=self.machines,
            finish_s=np.array(self.finish),
            first_s=np.array([active.first_s for active in self.actives]),
            waited_s=np.array([active.waited_s for active in self.actives]),
            preemptions=self.work.preemptions,
            resizes=self.work.resizes,
            failures=self.work.failures,
            device_s=device_s,
            end_s=self.work.now,
            unmet_s=self.devices.unmet_s,
            reasons=np.array([one.reasons for one in self.actives if self.rules.record]).reshape(-1, len(REASONS)),
            runs=tuple(self.work.runs),
            series=series if self.rules.record else None,
            decisions=self.decisions,
        )
