"""Training on machines that are taken away and come back: useful steps of copies, checkpoints, and torch elastic.

`replay(losses, shape, costs, system)` plays one list of losses in simulated time and returns how far each system came:
the same machines, losses, seconds of a step (from `predict`) and of a start. *bamboo* goes on within the step while no
rank and the one with its copy are gone at once; *memory* waits until every machine is there again and goes back to the
last copies in memory; both are decided by the controllers of the runtime's launchers (`control`). *restart* waits too,
and goes back to a checkpoint; *elastic* starts anew with as many whole pipelines as machines make, and again when one
more can be made. `losses_at` draws a list by a rate; `shares` says what each system makes of it. Leaves out prices of
machines, and losses while others start. Source: Thorpe et al., NSDI 2023 (Bamboo), whose simulator has a rate of
losses, seconds until a machine comes and seconds of a rendezvous.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from gnomon.control import Incident, SimulatedLauncher
from gnomon.errors import InputError
from gnomon.plans import Mesh, Plan, Schedule

System = Literal["bamboo", "memory", "restart", "elastic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShape:
    """Machines of a job: a rank each."""

    stages: int
    """Of a pipeline."""
    pipelines: int
    """Data-parallel replicas."""

    @property
    def machines(self) -> int:
        """The number of all machines. Machine m is stage m % stages of pipeline m // stages."""
        return self.stages * self.pipelines

    @property
    def plan(self) -> Plan:
        """The plan with a rank for each machine."""
        return Plan(
            mesh=Mesh(pp=self.stages, dp_replicate=self.pipelines),
            schedule=Schedule(num_microbatches=1),
        )

    def rank(self, machine: int) -> int:
        """The rank of a machine in the plan. A stage's ranks follow each other."""
        pipeline, stage = divmod(machine, self.stages)
        # The plan numbers ranks by stage first, machines here lie by pipeline first.
        return stage * self.pipelines + pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotCosts:
    """Seconds of a step, a checkpoint, a restart and what else a loss costs."""

    step_s: float
    """Of a step on all machines."""
    copied_step_s: float
    """With copies of stages."""
    memory_step_s: float = 0.0
    """With copies in memory, on average; 0: as without."""
    memory_every: int = 1
    """Steps between copies in memory."""
    alike: bool = False
    """Whether pipelines hold the same, so that any of them is another one's copy in memory."""
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
        steps = min(self.step_s, self.copied_step_s, self.taken_step_s)
        if steps <= 0 or self.memory_step_s < 0 or min(self.checkpoint_every, self.memory_every) < 1:
            raise InputError("steps take time, and checkpoints are whole steps apart")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotResult:
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
    rate: float, shape: MachineShape, seconds: float, *, seed: int = 0, bulk: float = 0.0
) -> list[tuple[float, int]]:
    """Draws a list of losses, (when, machine) in order. rate: losses of a machine in an hour. bulk: share of losses
    that take another machine, drawn from all, at the same moment."""
    draw, now, losses = random.Random(seed), 0.0, list[tuple[float, int]]()
    while (a_second := rate * shape.machines / 3600) > 0:
        # A Poisson process: machines are lost independently, so gaps are exponential.
        now += draw.expovariate(a_second)
        if now >= seconds:
            break
        for _ in range(2 if draw.random() < bulk else 1):
            losses.append((now, draw.randrange(shape.machines)))
    return losses


def replay(
    losses: Sequence[tuple[float, int]], shape: MachineShape, costs: SpotCosts, system: System, seconds: float
) -> SpotResult:
    """Plays a list of losses on a system. losses: (when, machine) in order; one of a machine that is gone already does
    nothing. seconds: how long."""
    played = (_Decided if system in CONTROLLED else _Played)(shape, costs, system)
    # At one moment 0 (comes) sorts before 1 (is lost).
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
            played.replace_lost(machine)
    played.until(seconds)
    return SpotResult(steps=played.steps, redone=played.redone, stopped_s=played.stopped_s, starts=played.starts)


CONTROLLED: Mapping[System, str] = {"bamboo": "takeover", "memory": "same_ranks"}
"""System -> the controller that decides for it."""


class _Played:
    """A system at work, in simulated time."""

    def __init__(self, shape: MachineShape, costs: SpotCosts, system: System) -> None:
        self.shape, self.costs, self.system = shape, costs, system
        self.now = self.steps = self.redone = self.stopped_s = self.goes_at = 0.0
        """goes_at: from when on steps go on, if machines are there."""
        self.starts = 0
        self.gone: set[int] = set()
        self.pipelines = shape.pipelines
        """Of elastic: those that run."""

    def until(self, at: float) -> None:
        """Moves the clock to a moment, with the steps that were done meanwhile."""
        # Speed is the same between two events, so the steps of the whole time are one product.
        goes = max(0.0, at - max(self.now, self.goes_at)) if self._speed() else 0.0
        self.steps += goes * self._speed()
        self.stopped_s += at - self.now - goes
        self.now = at

    def _speed(self) -> float:
        """Returns the steps done in a second."""
        if self.system == "restart":
            return 0.0 if self.gone else 1 / self.costs.step_s
        # Fewer pipelines take longer for the same global batch.
        return self.pipelines / self.shape.pipelines / self.costs.step_s

    def lose(self, machine: int) -> None:
        """Loses a machine: all go back to the last checkpoint."""
        self.gone.add(machine)
        self._back(self.costs.checkpoint_every)
        if self.system == "elastic":
            self._meet()

    def replace_lost(self, machine: int) -> None:
        """Takes a machine in the place of a lost one."""
        self.gone.discard(machine)
        if self.system == "restart" and not self.gone:
            self._start()
        # Only another whole pipeline is worth a start.
        elif self.system == "elastic" and self._whole() > self.pipelines:
            self._back(self.costs.checkpoint_every)
            self._meet()

    def _whole(self) -> int:
        return (self.shape.machines - len(self.gone)) // self.shape.stages

    def _meet(self) -> None:
        self.pipelines = self._whole()
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self.goes_at = self.now + self.costs.start_s

    def _back(self, every: int) -> None:
        """Goes back to the last step that was kept, of every so many."""
        # The last multiple of `every`: what was done after it is done again.
        saved_steps = float(self.steps // every * every)
        self.redone += self.steps - saved_steps
        self.steps = saved_steps


class _Decided(_Played):
    """A system that goes on without a start, by the controller of the runtime's launcher."""

    def __init__(self, shape: MachineShape, costs: SpotCosts, system: System) -> None:
        super().__init__(shape, costs, system)
        self.job = SimulatedLauncher(CONTROLLED[system], shape.plan)
        self.process: dict[int, int] = {}
        """Of each machine that is there."""
        self.born = 0
        self.apart = False
        """Whether a state was lost with its copy: all wait for every machine, and begin from a checkpoint."""
        for machine in range(shape.machines):
            self._born(machine)
        self._look()

    def _speed(self) -> float:
        seen, costs = self.job.seen, self.costs
        if self.apart or not set(seen.members) <= set(seen.there):
            return 0.0
        if self.system == "memory":
            return 1 / (costs.memory_step_s or costs.step_s)
        places = self.job.plan.device_of
        twice = len(set(places)) < len(places)
        return 1 / (costs.taken_step_s if twice else costs.copied_step_s)

    def lose(self, machine: int) -> None:
        """Loses a machine: a process ends."""
        self.gone.add(machine)
        if self.system == "memory":
            self._without_copy()
        self.job.happens(Incident(what="lost", process=self.process.pop(machine)))
        self._look()

    def replace_lost(self, machine: int) -> None:
        """A process is started in its place, and ready."""
        self.gone.discard(machine)
        self._born(machine)
        self._look()

    def _born(self, machine: int) -> None:
        self.process[machine], self.born = self.born, self.born + 1
        one = self.process[machine]
        self.job.happens(Incident(what="came", process=one, rank=self.shape.rank(machine)))
        self.job.happens(Incident(what="ready", process=one))

    def _without_copy(self) -> None:
        """Goes back to copies in memory, or to a checkpoint where a rank and those with its copy are gone at once."""
        ranks, count, replicas = {self.shape.rank(one) for one in self.gone}, self.shape.machines, self.shape.pipelines
        if self.costs.alike and replicas > 1:
            # Replicas of a stage are alike: its state is lost only where all of them are gone.
            stages = Counter(rank // replicas for rank in ranks)
            lost = replicas in stages.values()
        else:
            # A rank's copy is with the next one (`runtime.checkpoint.in_memory.keeper`).
            lost = any((rank + 1) % count in ranks for rank in ranks)
        if not self.apart and lost:
            self.apart = True
            self._back(self.costs.checkpoint_every)
        elif not self.apart:
            self._back(self.costs.memory_every)

    def _look(self) -> None:
        """Lets the launcher look, and does what its controller says."""
        _, decision = self.job.look()
        if decision is None:
            return
        self.job.happens(Incident(what="met"))
        if self.system == "bamboo" and decision.lost:
            if not self.apart:
                self.apart = True
                self._back(self.costs.checkpoint_every)
        elif self.apart:
            self.apart = False
            self._start()
        elif self.now:
            self.goes_at = max(self.goes_at, self.now + self.costs.takeover_s)


def shares(
    rate: float,
    shape: MachineShape,
    costs: SpotCosts,
    systems: Iterable[System],
    *,
    seconds: float,
    seeds: int,
    bulk: float = 0.0,
) -> dict[System, float]:
    """Useful steps of each system over those of a run without losses and copies, the mean of `seeds` lists of
    losses."""
    lists = [losses_at(rate, shape, seconds, seed=seed, bulk=bulk) for seed in range(seeds)]
    return {
        system: mean(replay(one, shape, costs, system, seconds).steps for one in lists) * costs.step_s / seconds
        for system in systems
    }
