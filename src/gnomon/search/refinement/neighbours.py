"""Plans one change away from the best one, tried by the simulator until none of them is faster.

`climb(result, start)` is the last word of a search that its budget cut, and of passes that left the exact search's
space: whatever else was left out, no neighbour of the plan that is given as the best (another axis size, ZeRO stage,
recomputation, microbatch, schedule, as `questions.reasons` lists them) is faster and was free to take. A plan that the
exact search proved to be the fastest has no such neighbour. Leaves out choices beyond fields of points (`refine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gnomon.errors import GnomonError, PlanError, ProgramError
from gnomon.plans import Plan, Saved
from gnomon.prediction import Prediction, TimedPlan, fits_within
from gnomon.search.refinement.changes import changes
from gnomon.search.results import FoundPlan, Result
from gnomon.search.space.points import Point, Space, saving_of
from gnomon.software import proposes


@dataclass(frozen=True, kw_only=True)
class ClimbReport:
    """How far steps to neighbours went, and what they gained."""

    steps: tuple[tuple[str, Prediction], ...]
    """Changes in order, each with the plan that it led to."""
    best: FoundPlan
    """The best plan; where the climb began if nothing was faster."""
    tried: int
    """Predictions made."""


def climb(result: Result, start: FoundPlan, *, accepts: Callable[[FoundPlan], bool] = lambda _: True) -> ClimbReport:
    """The plan that is reached from `start` by changes that each shorten the step, until no change does.

    result: whose space says which values are free, and whose limit plans must keep. accepts: whether a plan may be
    given at all. No budget is asked: every plan is predicted once, and each change is a shorter step, so it ends; two
    or three sweeps of some twenty predictions are usual.
    """
    best, steps, seen, tried = start, list[tuple[str, Prediction]](), {start.plan}, 0
    moved = True
    while moved:
        moved = False
        for what, plan in _neighbours(result, best.plan):
            if plan in seen:
                continue
            seen.add(plan)
            point = point_of(plan, best.point)
            if not allowed(point, result.space):
                continue
            tried += 1
            faster = _faster(result, point, plan, best.step_s)
            if faster is not None and accepts(faster):
                best, moved = faster, True
                steps.append((what, faster.prediction))
                break  # on from there: its neighbours are others
    return ClimbReport(steps=tuple(steps), best=best, tried=tried)


def _neighbours(result: Result, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Changes of what a search chooses, and the program that was asked for runs."""
    if plan.stages:
        return
    routed = any(block.does("routes") for block in result.graph.blocks)
    for what, changed in (*changes(plan, experts=routed), *_stages_of_ranks(plan)):
        word = what.partition(" ")[0]
        fixed = word == "recompute" and any(rule.preset is None for rule in plan.saved.rules)
        if word != "vocabulary" and not fixed and proposes(result.stack, plan, changed):
            yield what, changed


def _stages_of_ranks(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """One virtual stage more or less on each pipeline rank."""
    virtual = plan.schedule.virtual_stages
    for count in (virtual - 1, virtual + 1):
        if plan.mesh.pp > 1 and count:
            schedule = replace(plan.schedule, virtual_stages=count, layers_per_stage=())
            # Rules by stage name stages of the old division.
            rules = tuple(rule for rule in plan.saved.rules if not rule.stages)
            saved = replace(plan.saved, rules=rules)
            yield f"virtual stages {virtual} -> {count}", replace(plan, schedule=schedule, saved=saved)


def _faster(result: Result, point: Point, plan: Plan, than_s: float) -> FoundPlan | None:
    """The plan, if it runs, is faster and fits. Memory is asked only of one that is faster."""
    try:
        timed = TimedPlan.of(result.graph, result.cluster, plan, result.workload, result.stack)
    except (PlanError, ProgramError):
        return None
    if timed.step_s >= than_s:
        return None
    try:
        prediction = timed.prediction()
    except GnomonError:
        return None
    if not fits_within(prediction, result.limit_bytes):
        return None
    return FoundPlan(point=point, plan=plan, prediction=prediction)


def point_of(plan: Plan, like: Point) -> Point:
    """The point of a plan with one mesh; what only a point says is that of `like`."""
    mesh, schedule, layout = plan.mesh, plan.schedule, plan.layout
    return like._replace(
        tp=mesh.tp,
        cp=mesh.cp,
        ep=mesh.ep,
        pp=mesh.pp,
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        schedule=schedule.name,
        virtual_stages=schedule.virtual_stages,
        micro_batch_size=schedule.micro_batch_size or 1,
        sequence_parallel=layout.sequence_parallel,
        context=layout.context,
        recompute=saving_of(plan.saved),  # type: ignore[arg-type]
        zero=plan.optimizer.zero,
    )


def allowed(point: Point, space: Space, *, recompute: bool = True) -> bool:
    """Whether each field is one of the space's choices. recompute: that too; otherwise whatever it is."""
    fields = [name for name in Point._fields if name != "virtual_stages" and (recompute or name != "recompute")]
    free = all(getattr(point, name) in getattr(space, name) for name in fields)
    paired = point.virtual_stages == 1 or (point.schedule, point.virtual_stages) in space.pipelines(point.pp)
    return free and paired and space.runs(point.pp, point.zero)


def unsaved(plan: Plan) -> Plan:
    """The plan without what it recomputes and how its layers are cut, which passes choose by themselves."""
    return replace(plan, saved=Saved(), schedule=replace(plan.schedule, layers_per_stage=()))
