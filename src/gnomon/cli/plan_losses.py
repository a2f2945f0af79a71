"""`gnomon plan --mtbf`: the plan that trains most where machines are lost, with copies of stages or without.

`compared(asked, result, best, hours)` asks `fleet.losses` with the seconds that `gnomon fleet spot` takes unless told
otherwise; `text` and `mapping` say what came out. Leaves out the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gnomon.cli.fleet_spot import WAYS
from gnomon.cli.plan_asked import PlanRequest
from gnomon.fleet import losses
from gnomon.fleet.assumed_losses import AssumedLosses
from gnomon.fleet.losses import Losses
from gnomon.plans import Plan
from gnomon.report.tables import wrapped
from gnomon.search import FoundPlan, Result, plan
from gnomon.search.budget import KeepGoing, always


def compare_copies(
    request: PlanRequest, result: Result, best: FoundPlan, hours: float, keep_going: KeepGoing = always
) -> Losses:
    """PlanError for a program that has no copies of stages, and for stages with meshes of their own."""

    def searched(fixed: Mapping[str, object], top: int) -> tuple[FoundPlan, ...]:
        # A stage's copy lies with another stage, so there must be two.
        forbid = (*request.choices.forbid, "pp<2")
        return plan(
            *request.job, base=request.base, fixed=dict(fixed), forbid=forbid, top=top, keep_going=keep_going
        ).best

    job = (request.graph, request.machines, request.workload, request.stack)
    return losses.compare_copies(job, best, hours, request.fixed, searched, result.limit_bytes, AssumedLosses())


def text(found: Losses) -> Iterator[str]:
    """The useful steps an hour of each way to meet losses, as lines of text."""
    head = f"at one loss of a machine in {found.hours:g} hours, useful steps an hour:"
    yield from ("", *wrapped(head, indent=""))
    for one in (found.without, found.copied):
        if one is not None:
            mark = "  <- taken" if one.found is found.best else ""
            yield f"  {one.steps_per_hour:10.1f}  {WAYS[one.way]}: {shape(one.found.plan)}{mark}"
    if found.copied is None:
        yield from wrapped(f"no plan has copies of stages: {found.why}", indent="  ")


def mapping(found: Losses) -> dict[str, Any]:
    """Plain values for JSON."""
    each = {"without": found.without, "copied": found.copied}
    by_way = {
        name: {"way": one.way, "step_s": one.found.step_s, "useful_steps_per_hour": one.steps_per_hour}
        for name, one in each.items()
        if one is not None
    }
    return {"mtbf_hours": found.hours, **by_way, "copies_pay": found.best is not found.without.found, "why": found.why}


def shape(plan: Plan) -> str:
    """Axes with several ranks, as in `pp 4 x dp_shard 8`."""
    mesh = plan.mesh
    axes = {"pp": mesh.pp, "tp": mesh.tp, "cp": mesh.cp, "dp_shard": mesh.dp_shard, "dp_replicate": mesh.dp_replicate}
    return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"
