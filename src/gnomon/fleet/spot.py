"""Training on machines that are taken away and come back: useful steps of Bamboo, checkpoints, and torch elastic.

`replay(losses, shape, costs, system)` plays one list of losses in simulated time and returns how far each system came:
the same machines, losses, seconds of a step (from `predict`) and of a start. Bamboo goes on within the step while no
rank and the one with its copy are gone at once; *restart* waits until every machine is there again; *elastic* starts
anew with as many whole pipelines as machines make, and again when one more can be made. `losses_at` draws a list by a
rate. Leaves out prices of machines, and losses while others start. Source: Thorpe et al., NSDI 2023 (Bamboo), whose
simulator has a rate of losses, seconds until a machine comes and seconds of a rendezvous.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gnomon.errors import InputError

System = Literal["bamboo", "restart", "elastic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Machines of a job: a rank each."""

    stages: int
    """Of a pipeline."""
    pipelines: int
    """Data-parallel replicas."""

    @property
    def machines(self) -> int:
        """All of them. Machine m is stage m % stages of pipeline m // stages."""
        return self.stages * self.pipelines

    def keeper(self, machine: int) -> int:
        """That has the copy of a machine's stage: the one before it in its pipeline."""
        pipeline, stage = divmod(machine, self.stages)
        return pipeline * self.stages + (stage - 1) % self.stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds."""

    step_s: float
    """Of a step on all machines."""
    copied_step_s: float
    """With copies of stages."""
    taken_step_s: float
    """While a rank has two stages."""
    takeover_s: float
    """Until a step goes on in which a rank was lost."""
    come_s: float
    """From a loss until another machine is there."""
    start_s: float
    """Of all processes: meeting, loading a checkpoint."""
    checkpoint_every: int
    """Steps between checkpoints, which a run that starts anew goes back to."""

    def __post_init__(self) -> None:
        if min(self.step_s, self.copied_step_s, self.taken_step_s) <= 0 or self.checkpoint_every < 1:
            raise InputError("steps take time, and checkpoints are whole steps apart")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How far a system came."""

    steps: float
    """Behind it at the end, of the global batch; what was lost is not counted."""
    redone: float
    """Steps that were lost."""
    stopped_s: float
    """In which no step went on."""
    starts: int
    """Times that all processes started anew."""


def losses_at(
    rate: float, shape: Shape, seconds: float, *, seed: int = 0, bulk: float = 0.0
) -> list[tuple[float, int]]:
    """(when, machine), in order. rate: losses of a machine in an hour. bulk: share of losses that take another machine,
    drawn from all, at the same moment."""
    draw, now, made = random.Random(seed), 0.0, list[tuple[float, int]]()
    while (a_second := rate * shape.machines / 3600) > 0:
        now += draw.expovariate(a_second)
        if now >= seconds:
            break
        for _ in range(2 if draw.random() < bulk else 1):
            made.append((now, draw.randrange(shape.machines)))
    return made


def replay(losses: Sequence[tuple[float, int]], shape: Shape, costs: Costs, system: System, seconds: float) -> Result:
    """losses: (when, machine) in order; one of a machine that is gone already does nothing. seconds: how long."""
    played = _Played(shape, costs, system)
    events: list[tuple[float, int, int]] = [(at, 1, machine) for at, machine in losses if at < seconds]
    heapq.heapify(events)
    while events:
        at, lost, machine = heapq.heappop(events)
        if at >= seconds:
            break
        played.until(at)
        if lost and machine not in played.gone:
            played.lose(machine)
            heapq.heappush(events, (at + costs.come_s, 0, machine))
        elif not lost:
            played.come(machine)
    played.until(seconds)
    return Result(steps=played.steps, redone=played.redone, stopped_s=played.stopped_s, starts=played.starts)


class _Played:
    """A system, as far as it came."""

    def __init__(self, shape: Shape, costs: Costs, system: System) -> None:
        self.shape, self.costs, self.system = shape, costs, system
        self.now = self.steps = self.redone = self.stopped_s = self.goes_at = 0.0
        """goes_at: from when on steps go on, if machines are there."""
        self.starts = 0
        self.gone: set[int] = set()
        self.apart = False
        """Of Bamboo: whether a stage was lost with its copy, and all wait for both."""
        self.pipelines = shape.pipelines
        """Of elastic: those that run."""

    def until(self, at: float) -> None:
        """Nothing happens until then."""
        goes = max(0.0, at - max(self.now, self.goes_at)) if self._speed() else 0.0
        self.steps += goes * self._speed()
        self.stopped_s += at - self.now - goes
        self.now = at

    def _speed(self) -> float:
        """Steps a second."""
        if self.system == "restart":
            return 0.0 if self.gone else 1 / self.costs.step_s
        if self.system == "elastic":
            return self.pipelines / self.shape.pipelines / self.costs.step_s
        if self.apart:
            return 0.0
        return 1 / (self.costs.taken_step_s if self.gone else self.costs.copied_step_s)

    def lose(self, machine: int) -> None:
        """Machine by machine."""
        self.gone.add(machine)
        if self.system == "bamboo":
            both = any(self.shape.keeper(one) in self.gone for one in self.gone)
            if both and not self.apart:
                self.apart = True
                self._back()
            elif not self.apart:
                self.goes_at = max(self.goes_at, self.now + self.costs.takeover_s)
            return
        self._back()
        if self.system == "elastic":
            self._meet()

    def come(self, machine: int) -> None:
        """Another one in its place."""
        self.gone.discard(machine)
        if self.system == "bamboo":
            if not self.apart:
                self.goes_at = max(self.goes_at, self.now + self.costs.takeover_s)
            elif not self.gone:
                self.apart = False
                self._start()
        elif self.system == "restart" and not self.gone:
            self._start()
        elif self.system == "elastic" and self._whole() > self.pipelines:
            self._back()
            self._meet()

    def _whole(self) -> int:
        return (self.shape.machines - len(self.gone)) // self.shape.stages

    def _meet(self) -> None:
        self.pipelines = self._whole()
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self.goes_at = self.now + self.costs.start_s

    def _back(self) -> None:
        """To the last checkpoint."""
        kept = float(self.steps // self.costs.checkpoint_every * self.costs.checkpoint_every)
        self.redone += self.steps - kept
        self.steps = kept
