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
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gnomon.errors import InputError, RunError
from gnomon.fleet.forecast import Costs, Curve
from gnomon.fleet.job import Trace
from gnomon.fleet.machines import Machines, check_fits
from gnomon.fleet.mig import Geometry, profile_of
from gnomon.fleet.ordered import can_be_ordered, replay_ordered
from gnomon.fleet.placement import fit
from gnomon.fleet.result import Result, Run, Series
from gnomon.fleet.state import (
    BEHIND,
    FRAGMENTED,
    FULL,
    PAUSED,
    Active,
    Allocation,
    Decision,
    Forecasts,
    Policy,
    State,
    devices_of,
)

ARRIVE, FINISH, FAIL, REPAIR, DEMAND, TICK = range(6)
_EPS = 1e-9
EXPLAIN_EVERY_S = 300.0
"""Why jobs wait is looked at no more often: with thousands in the queue it would take most of the time."""


def _index(active: Active) -> int:
    return active.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A node that is down for a while."""

    at_s: float
    node: int
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a cluster behaves, apart from its policy."""

    costs: Costs = Costs()
    spread: bool = True
    """Whether a job may take devices of more nodes than it needs."""
    failures: tuple[Failure, ...] = ()
    demand: tuple[tuple[float, float], ...] = ()
    """(from when, load) of inference: the share of its nodes that it needs."""
    headroom: float = 0.0
    """Share of the inference nodes that is kept free on top of the load."""
    record: bool = False
    """Keep every span, the series and why jobs waited, for a page."""


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

    forecasts: what the policy is told; default the stated curve. truth: what happens; default the forecasts.
    InputError for jobs that these machines cannot run. RunError for jobs that a policy never starts.
    """
    check_fits(trace, machines)
    cut = [pool.mig for pool in machines.pools if not pool.serves]
    if policy.slices and not all(cut):
        raise InputError(f"policy {policy.name} places jobs on MIG slices only; cut the devices with --mig")
    if any(cut) and not policy.slices:
        raise InputError(f"policy {policy.name} knows no MIG slices; elastic-batch does, or leave --mig out")
    rules = rules or Rules()
    told = forecasts or Curve(machines)
    if can_be_ordered(trace, machines, policy, plain=rules == Rules(costs=rules.costs), known=forecasts or truth):
        return replay_ordered(trace, machines, policy, first_start_s=rules.costs.first_start_s)
    return _Replay(trace, machines, policy, rules, told, truth or told, progress).run()


@dataclass(slots=True)
class _Replay:
    trace: Trace
    machines: Machines
    policy: Policy
    rules: Rules
    told: Forecasts
    truth: Forecasts
    progress: Progress | None
    now: float = 0.0
    queue: dict[str, Active] = field(default_factory=dict)
    running: dict[str, Active] = field(default_factory=dict)
    waiting: list[Active] = field(default_factory=list)
    """Those of the queue, by submission."""
    explained_s: float = -math.inf
    events: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    """(time, kind, order, index, version)."""
    free: list[int] = field(default_factory=list)
    down: dict[int, int] = field(default_factory=dict)
    """Node -> failures that hold it down."""
    serving: set[int] = field(default_factory=set)
    wanted: int = 0
    load: float = 0.0
    unmet_s: float = 0.0
    mig: dict[int, Geometry] = field(default_factory=dict)
    uses: dict[str, float] = field(default_factory=dict)
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Device-seconds free, serving and down, added up at every event."""
    finished: int = 0
    decisions: int = 0
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    runs: list[Run] = field(default_factory=list)
    points: list[tuple[float, int, int, int]] = field(default_factory=list)
    actives: list[Active] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    free_now: int = 0
    serving_now: int = 0
    down_now: int = 0
    order: int = 0
    ticking: bool = False
    dirty: bool = False
    """Something happened since the policy was last asked."""

    def run(self) -> Result:
        self._prepare()
        jobs = self.trace.jobs
        while self.finished < len(jobs):
            if not self.events:
                raise self._stuck()
            time = self.events[0][0]
            self._advance(time)
            changed = False
            while self.events and self.events[0][0] == time:
                _, kind, _, index, version = heapq.heappop(self.events)
                changed = self._happen(kind, index, version) or changed
            self.dirty = self.dirty or changed
            self._serve()
            if self._due():
                self._decide()
                self._serve()
            self._tick()
            if self.rules.record:
                self.points.append((time, len(self.queue), self._busy(), self.serving_now))
        return self._result()

    def _prepare(self) -> None:
        self.free = list(self.machines.capacity)
        self.free_now = sum(self.free)
        self.uses = dict.fromkeys(("useful", "lost", "overhead"), 0.0)
        for pool, each in enumerate(self.machines.pools):
            if each.mig:
                self.mig.update({node: Geometry() for node in self.machines.nodes_of(pool)})
        self.finish = [math.nan] * len(self.trace.jobs)
        for index, job in enumerate(self.trace.jobs):
            active = Active(job=job, index=index)
            self.actives.append(active)
            self._push(job.submit_s, ARRIVE, index)
        for number, failure in enumerate(self.rules.failures):
            if not 0 <= failure.node < len(self.free):
                raise InputError(f"a failure is of node {failure.node}, but there are {len(self.free)} nodes")
            self._push(failure.at_s, FAIL, number)
        for number, (at, load) in enumerate(self.rules.demand):
            if not 0 <= load <= 1:
                raise InputError(f"inference load is {load!r} at {at:g} s; it must be from 0 to 1")
            self._push(at, DEMAND, number)

    def _push(self, time: float, kind: int, index: int, version: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, kind, self.order, index, version))

    def _busy(self) -> int:
        return self.machines.devices - self.free_now - self.serving_now - self.down_now

    def _advance(self, time: float) -> None:
        passed = time - self.now
        self.totals[0] += passed * self.free_now
        self.totals[1] += passed * self.serving_now
        self.totals[2] += passed * self.down_now
        short = self.wanted - len(self.serving)
        if short > 0:
            self.unmet_s += passed * short
        self.now = time

    def _happen(self, kind: int, index: int, version: int) -> bool:
        """Carry out an event; whether anything changed."""
        if kind == TICK:
            self.ticking = False
            return False
        if kind == ARRIVE:
            active = self.actives[index]
            active.queued_s = active.reason_s = active.since_s = self.now
            active.reason = BEHIND
            self._enqueue(active)
            return True
        if kind == FINISH:
            active = self.actives[index]
            return active.version == version and self._progress(active)
        if kind == DEMAND:
            self.load = self.rules.demand[index][1]
            nodes = sum(pool.nodes for pool in self.machines.pools if pool.serves)
            self.wanted = min(nodes, math.ceil((self.load + self.rules.headroom) * nodes - _EPS))
            return True
        if kind == FAIL:
            self._fail(index)
        else:
            self._repair(index)
        return True

    def _progress(self, active: Active) -> bool:
        """A job reached the end of its work, or of a phase."""
        reached = active.until_s if active.until_s < active.job.work_s - _EPS else active.job.work_s
        self._sync(active)
        active.done_s = reached
        if reached < active.job.work_s:
            self._rate(active)
            return False
        self._release(active, "finished")
        del self.running[active.job.id]
        self.finish[active.index] = self.now
        self.finished += 1
        if self.progress and self.finished % 256 == 0:
            self.progress(self.finished)
        return True

    # Devices and time of one job.

    def _sync(self, active: Active) -> None:
        """Bring work and device-seconds up to now."""
        now, devices = self.now, active.devices
        if active.beside:
            devices = devices / 2  # type: ignore[assignment]
        held = now - active.since_s
        idle = min(max(active.ready_s - active.since_s, 0.0), held)
        before = active.done_s
        active.done_s = min(before + active.rate * (held - idle), active.job.work_s)
        self.uses["overhead"] += devices * idle
        self.uses["useful"] += devices * (held - idle)
        active.served += devices * held
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

    def _rate(self, active: Active) -> None:
        """The rate from now on, and the event at which it ends."""
        rate, until = self.truth.phase(active.job, active.done_s, active.allocation)
        if active.beside:
            rate *= self.truth.beside(active.job, self._active(active.beside).job)
        if not rate > 0:
            raise RunError(f"job {active.job.id!r} makes no progress on {devices_of(active.allocation)} devices")
        active.rate, active.until_s = rate, until
        active.version += 1
        goal = min(until, active.job.work_s)
        start = max(self.now, active.ready_s)
        self._push(start + max(goal - active.done_s, 0.0) / rate, FINISH, active.index, active.version)

    def _active(self, job: str) -> Active:
        return self.running.get(job) or self.queue[job]

    def _occupy(self, active: Active, allocation: Allocation, pause_s: float) -> None:
        active.allocation = allocation
        active.ready_s = self.now + pause_s
        active.since_s = active.held_s = self.now
        active.peak = max(active.peak, devices_of(allocation))
        if active.first_s < 0:
            active.first_s = self.now
        if not active.beside:
            for node, count in allocation:
                self.free[node] -= count
                self.free_now -= count
                if node in self.mig:
                    self.mig[node].add(active.job.id, profile_of(active.job))
                    active.slice_at = self.mig[node].slices[active.job.id]
        self._rate(active)

    def _release(self, active: Active, why: str) -> None:
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
        other = self.running.get(active.beside) if active.beside else None
        if other is not None:
            self._sync(other)
            other.beside = ""
            self._rate(other)
        else:
            for node, count in active.allocation:
                self.free[node] += count
                self.free_now += count
                if node in self.mig:
                    self.mig[node].remove(active.job.id)
        active.allocation = ()
        active.beside = ""
        active.rate = 0.0
        active.version += 1

    def _lose(self, active: Active) -> None:
        """Go back to the last checkpoint. Device-seconds of the work that is done again were lost."""
        again = active.done_s - active.saved_s
        if again > 0 and active.rate > 0:
            seconds = again / active.rate * active.devices / (2 if active.beside else 1)
            seconds = min(seconds, self.uses["useful"])
            self.uses["useful"] -= seconds
            self.uses["lost"] += seconds
        active.done_s = active.saved_s

    def _stop(self, active: Active, why: str) -> None:
        """Back to the queue."""
        self._sync(active)
        if why == "failed" or not self.rules.costs.saves_when_preempted:
            self._lose(active)
        else:
            active.saved_s = active.done_s
        self._release(active, why)
        del self.running[active.job.id]
        active.queued_s = active.reason_s = self.now
        active.reason = PAUSED if why == "preempted" else FULL
        self._enqueue(active)

    def _enqueue(self, active: Active) -> None:
        self.queue[active.job.id] = active
        insort(self.waiting, active, key=_index)

    def _dequeue(self, active: Active) -> None:
        del self.queue[active.job.id]
        del self.waiting[bisect_left(self.waiting, active.index, key=_index)]

    # Nodes.

    def _fail(self, number: int) -> None:
        failure = self.rules.failures[number]
        node = failure.node
        for active in [a for a in self.running.values() if any(node == n for n, _ in a.allocation)]:
            if active.job.id in self.running:
                active.failures += 1
                self.counts[2] += 1
                self._stop(active, "failed")
        if node not in self.down:
            if node in self.serving:
                self.serving.discard(node)
                self.serving_now -= self.machines.capacity[node]
            else:
                self.free_now -= self.free[node]
            self.free[node] = 0
            self.down_now += self.machines.capacity[node]
        self.down[node] = self.down.get(node, 0) + 1
        self._push(self.now + failure.for_s, REPAIR, number)

    def _repair(self, number: int) -> None:
        node = self.rules.failures[number].node
        self.down[node] -= 1
        if self.down[node] == 0:
            del self.down[node]
            capacity = self.machines.capacity[node]
            self.free[node] = capacity
            self.free_now += capacity
            self.down_now -= capacity

    def _serve(self) -> None:
        """Inference gives back what it does not need, and takes whole free nodes of its own up to what it needs."""
        capacity = self.machines.capacity
        if len(self.serving) > self.wanted:
            for node in sorted(self.serving, reverse=True)[: len(self.serving) - self.wanted]:
                self.serving.discard(node)
                self.free[node] = capacity[node]
                self.free_now += capacity[node]
                self.serving_now -= capacity[node]
        elif len(self.serving) < self.wanted:
            for node in self._own():
                if len(self.serving) == self.wanted:
                    return
                if node not in self.serving and self.free[node] == capacity[node]:
                    self.serving.add(node)
                    self.free[node] = 0
                    self.free_now -= capacity[node]
                    self.serving_now += capacity[node]

    def _own(self) -> Sequence[int]:
        pools = self.machines.pools
        return [node for index, pool in enumerate(pools) if pool.serves for node in self.machines.nodes_of(index)]

    # The policy.

    def _due(self) -> bool:
        """Whether the policy is asked now."""
        if len(self.serving) < self.wanted:
            return True  # inference does not wait for a tick
        every = self.policy.interval_s
        if not every:
            return self.dirty
        return self._may_change() and min(self.now % every, every - self.now % every) < _EPS

    def _may_change(self) -> bool:
        """Whether the policy's answer may differ from its last."""
        waits = self.policy.always and bool(self.queue)
        return self.dirty or waits or (self.policy.adapts and bool(self.running))

    def _tick(self) -> None:
        """The next tick, where there is something to decide."""
        every = self.policy.interval_s
        if not every or self.ticking or not self._may_change():
            return
        self.ticking = True
        self._push((math.floor(self.now / every + _EPS) + 1) * every, TICK, 0)

    def state(self) -> State:
        """What the policy sees."""
        return State(
            now=self.now,
            machines=self.machines,
            queue=tuple(self.waiting),
            running=tuple(self.running.values()),
            free=tuple(self.free),
            owed=max(self.wanted - len(self.serving), 0),
            serving=len(self.serving),
            load=self.load,
            spread=self.rules.spread,
        )

    def _decide(self) -> None:
        self.dirty = False
        if not self.queue and not self.running:
            return
        state = self.state()
        self.decisions += 1
        found = self.policy.decide(state, self.told)
        for decision in found:
            if decision.job not in self.queue and decision.job not in self.running:
                raise RunError(f"policy {self.policy.name} decides on {decision.job!r}, which is not active")
        moved = [d for d in found if d.job in self.running and d.allocation != self.running[d.job].allocation]
        resized = set()
        for decision in moved:
            active = self.running[decision.job]
            if not decision.allocation:
                active.preemptions += 1
                self.counts[0] += 1
                self._stop(active, "preempted")
            else:
                active.resizes += 1
                self.counts[1] += 1
                self._sync(active)
                active.saved_s = active.done_s
                self._release(active, "resized")
                resized.add(decision.job)
        for decision in found:
            if decision.allocation and (decision.job in self.queue or decision.job in resized):
                self._carry_out(decision, self._active(decision.job), decision.job in resized)
        self._explain(state)

    def _carry_out(self, decision: Decision, active: Active, resize: bool) -> None:
        """Start a job, or go on with another allocation."""
        other = self.running.get(decision.beside) if decision.beside else None
        if decision.beside:
            if other is None or other.allocation != decision.allocation or other.beside:
                raise RunError(f"policy {self.policy.name} puts {decision.job!r} beside {decision.beside!r}: it cannot")
        else:
            self._check(decision)
        costs = self.rules.costs
        pause = costs.resize_s if resize else costs.restart_s if active.first_s >= 0 else costs.first_start_s
        pause += self.truth.resize_s(active.job, devices_of(decision.allocation)) if active.first_s >= 0 else 0.0
        if not resize:
            active.waited_s += self.now - active.queued_s
            self._reason(active, active.reason)
            self._dequeue(active)
            self.running[decision.job] = active
        if other is not None:
            self._sync(other)
            other.beside, active.beside = decision.job, decision.beside
            self._rate(other)
        self._occupy(active, decision.allocation, pause)

    def _check(self, decision: Decision) -> None:
        nodes = [node for node, _ in decision.allocation]
        if len(set(nodes)) != len(nodes):
            raise RunError(f"policy {self.policy.name} gives {decision.job!r} a node twice")
        for node, count in decision.allocation:
            if count < 1 or count > self.free[node]:
                raise RunError(
                    f"policy {self.policy.name} gives {decision.job!r} {count} devices of node {node}, which has "
                    f"{self.free[node]} free"
                )
            job = self.queue.get(decision.job) or self.running[decision.job]
            if node in self.mig and self.mig[node].start(profile_of(job.job)) is None:
                raise RunError(
                    f"policy {self.policy.name} puts {decision.job!r} on device {node}: its slices leave no legal place"
                )

    def _reason(self, active: Active, reason: int) -> None:
        active.reasons[active.reason] += self.now - active.reason_s
        active.reason, active.reason_s = reason, self.now

    def _explain(self, state: State) -> None:
        """Why those wait that still do."""
        if not self.rules.record or not self.queue or self.now < self.explained_s + EXPLAIN_EVERY_S:
            return
        self.explained_s = self.now
        free = sum(self.free)
        after = State(
            now=self.now, machines=self.machines, queue=(), running=(), free=self.free, spread=self.rules.spread
        )
        known: dict[tuple[int, str], bool] = {}
        for active in self.queue.values():
            job = active.job
            if job.fewest > free:
                reason = FULL
            else:
                key = (job.fewest, job.device)
                if key not in known:
                    known[key] = fit(after, self.free, job, job.fewest) is not None
                reason = BEHIND if known[key] else FRAGMENTED
            if active.first_s >= 0 and reason == BEHIND:
                reason = PAUSED
            if reason != active.reason:
                self._reason(active, reason)

    def _stuck(self) -> RunError:
        names = ", ".join(list(self.queue)[:5])
        return RunError(
            f"policy {self.policy.name} never starts {len(self.queue):,} jobs ({names}), though nothing else happens; "
            "they may need more devices than a pool has, or another placement"
        )

    def _result(self) -> Result:
        device_s = {
            **self.uses,
            "serving": self.totals[1],
            "down": self.totals[2],
            "idle": self.totals[0],
        }
        points = np.array(self.points, dtype=np.float64).reshape(-1, 4)
        series = Series(time_s=points[:, 0], waiting=points[:, 1], busy=points[:, 2], serving=points[:, 3])
        return Result(
            policy=self.policy.name,
            jobs=self.trace.jobs,
            machines=self.machines,
            finish_s=np.array(self.finish),
            first_s=np.array([active.first_s for active in self.actives]),
            waited_s=np.array([active.waited_s for active in self.actives]),
            preemptions=self.counts[0],
            resizes=self.counts[1],
            failures=self.counts[2],
            device_s=device_s,
            end_s=self.now,
            unmet_s=self.unmet_s,
            reasons=np.array([active.reasons for active in self.actives]) if self.rules.record else np.zeros((0, 4)),
            runs=tuple(self.runs),
            series=series if self.rules.record else None,
            decisions=self.decisions,
        )
