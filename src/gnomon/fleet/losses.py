"""What losses of machines cost a plan, and which plan trains most under them.

`priced(job, plan, assumed)` predicts the seconds that `fleet.spot` plays; `useful` plays them; `compared` sets the
fastest plan of a search, which goes back to checkpoints or to copies in memory, beside the fastest plans that can have
copies of stages (Bamboo) and have room for them. Leaves out the simulation (`fleet.spot`) and the search (`search`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from gnomon.errors import GnomonError, InputError, PlanError
from gnomon.fleet.assumed_losses import AssumedLosses
from gnomon.fleet.spot import MachineShape, SpotCosts, System, shares
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.methods import bamboo
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.plans import Pass, Plan, Workload
from gnomon.prediction import memory_copies, predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import FoundPlan
from gnomon.software import Stack, own

Job = tuple[Graph, Cluster, Workload, Stack]
"""What a plan is for."""

OURS: tuple[System, ...] = ("restart", "memory", "bamboo")
"""What `gnomon run` does; of equal ones the first is taken."""
TRIED = 3
"""Plans with copies of stages that are played, of so many times more that are looked at for room."""
LOOKED_AT = 8 * TRIED
NEEDED = {"schedule": ONE_F_ONE_B.name, "zero": 0, "virtual_stages": 1}
"""What a plan with copies of stages must be, as fields of a point of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan with its seconds."""

    shape: MachineShape
    """Pipelines, and stages of each, which losses take machines from."""
    costs: SpotCosts
    """Seconds of its step and of what a loss costs under each way of going on."""
    refused: str
    """Why the plan cannot have copies of stages; empty where it can."""
    copies: str
    """What copies in memory are."""
    plan: Plan
    """Without copies."""


def price_under_losses(job: Job, plan_given: Plan, assumed: AssumedLosses) -> PricedPlan:
    """InputError for a plan whose stages have meshes of their own."""
    graph, cluster, workload, stack = job
    plan = bamboo.without(plan_given)
    if plan.stages:
        raise InputError("the plan gives each stage its own mesh; losses are played on pipelines that are alike")
    plain = predict(graph, cluster, plan, workload, stack)
    copies = memory_copies(plain, assumed.memory_every)
    refused = bamboo.METHOD.refusal(_with(plan, bamboo.NOBODY)) or ""
    # Never read where the plan is refused; they only must be times.
    copied, takeover = (1.0, 1.0) if refused else _seconds(job, plan)
    return PricedPlan(
        shape=MachineShape(stages=plan.mesh.pp, pipelines=plan.mesh.data_ranks),
        costs=SpotCosts(
            step_s=plain.step_s,
            copied_step_s=copied,
            memory_step_s=plain.step_s + copies.step_s,
            memory_every=assumed.memory_every,
            alike=not copies.sent_bytes,
            taken_step_s=takeover,
            takeover_s=assumed.takeover_s,
            come_s=assumed.come_s,
            start_s=assumed.start_s,
            checkpoint_every=max(1, round(assumed.checkpoint_s / plain.step_s)),
        ),
        refused=refused,
        copies=copies.sentence,
        plan=plan,
    )


def _with(plan: Plan, rank: int) -> Plan:
    params = () if rank == bamboo.NOBODY else (("rank", rank),)
    passes = (*plan.schedule.passes, Pass(name=bamboo.NAME, params=params))
    return replace(plan, schedule=replace(plan.schedule, passes=passes))


def _seconds(job: Job, plan: Plan) -> tuple[float, float]:
    """(of a step with copies of stages, of one in which the slowest rank has two stages)."""
    graph, cluster, workload, stack = job

    def step_s(rank: int) -> float:
        return predict(graph, cluster, _with(plan, rank), workload, stack).step_s

    # Which rank fails is chance: the slowest of all cases is charged.
    return step_s(bamboo.NOBODY), max(step_s(rank) for rank in range(plan.mesh.pp))


def useful(known: PricedPlan, hours: float, ways: Iterable[System], assumed: AssumedLosses) -> dict[System, float]:
    """Useful steps of each way over those of a run without losses and copies, at one loss of a machine in `hours`."""
    return shares(
        1 / hours,
        known.shape,
        known.costs,
        tuple(ways),
        seconds=assumed.hours * 3600,
        seeds=assumed.lists,
        bulk=assumed.bulk,
    )


def best_of(found: Mapping[System, float]) -> System:
    """The system with most useful steps among those that `gnomon run` has."""
    return max((one for one in OURS if one in found), key=lambda one: found[one])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedUnderLosses:
    """A plan under losses."""

    found: FoundPlan
    """The plan without losses, with its prediction."""
    way: System
    """How it goes on after a loss."""
    steps_per_hour: float
    """Useful ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What losses make of the plans."""

    hours: float
    """Between losses of one machine."""
    without: PlayedUnderLosses
    """The fastest plan, as it goes on best without a redundant copy."""
    copied: PlayedUnderLosses | None
    """The best plan with one."""
    why: str
    """Why there is none."""

    @property
    def best(self) -> FoundPlan:
        """The plan that makes most useful steps; of equal ones that without a copy."""
        pays = self.copied is not None and self.copied.steps_per_hour > self.without.steps_per_hour
        return self.copied.found if pays and self.copied is not None else self.without.found


def compare_copies(
    job: Job,
    fastest: FoundPlan,
    hours: float,
    fixed: Mapping[str, object],
    searched: Callable[[Mapping[str, object], int], Iterable[FoundPlan]],
    limit_bytes: float,
    assumed: AssumedLosses,
) -> Losses:
    """The fastest plan beside those with copies of stages. fixed: fields of a point that were asked to be so. searched:
    (such fields, how many) -> the fastest plans with more than one stage that have them. PlanError for a program that
    has no copies of stages, and for stages with meshes of their own."""
    stack = job[-1]
    if stack is not PLAIN_STACK and stack.name != own.NAME:
        raise PlanError(
            f"--mtbf compares plans with copies of stages, which {stack.name} does not run; leave it out, or plan for "
            f"gnomon run with --stack {own.NAME}"
        )
    without = max(
        (_played(job, fastest, hours, way, assumed) for way in OURS if way != "bamboo"),
        key=lambda one: one.steps_per_hour,
    )
    try:
        for name, value in NEEDED.items():
            if fixed.get(name, value) != value:
                raise PlanError(f"{name} = {fixed[name]} is fixed, and they need {name} = {value}")
        candidates = _with_room(job, searched({**fixed, **NEEDED}, LOOKED_AT), limit_bytes)
        # The same lists of losses for all plans: their differences are the plans', not the draw's.
        played = [_played(job, found, hours, "bamboo", assumed) for found in candidates[:TRIED]]
    except GnomonError as error:
        return Losses(hours=hours, without=without, copied=None, why=str(error))
    why = "" if played else "none of the fastest has room for a second stage on each rank"
    copied = max(played, key=lambda one: one.steps_per_hour, default=None)
    return Losses(hours=hours, without=without, copied=copied, why=why)


def _with_room(job: Job, plain: Iterable[FoundPlan], limit_bytes: float) -> list[FoundPlan]:
    """The fastest plans with copies of stages that fit."""
    graph, cluster, workload, stack = job
    found = []
    for candidate in plain:
        for variant in bamboo.METHOD.variants(candidate.plan):
            prediction = predict(graph, cluster, variant, workload, stack)
            if max(rank.peak_bytes for rank in prediction.memory) <= limit_bytes:
                found.append(replace(candidate, plan=variant, prediction=prediction))
    return sorted(found, key=lambda one: one.step_s)


def _played(job: Job, found: FoundPlan, hours: float, way: System, assumed: AssumedLosses) -> PlayedUnderLosses:
    """A plan under lists of losses that are the same for all plans."""
    known = price_under_losses(job, found.plan, assumed)
    if known.refused and way == "bamboo":
        raise PlanError(known.refused)
    return PlayedUnderLosses(
        found=found, way=way, steps_per_hour=3600 * useful(known, hours, (way,), assumed)[way] / known.costs.step_s
    )
