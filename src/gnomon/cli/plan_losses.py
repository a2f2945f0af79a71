"""`gnomon plan --mtbf`: the plan that trains most where machines are lost, with copies of stages or without.

`compared(asked, result, best, hours)` plays losses at that rate (`gnomon.fleet.spot`) on the fastest plan, which goes
back to checkpoints or to copies in memory, and on the fastest plans that can have copies of stages (Bamboo) and have
room for them, and says which makes most useful steps. Seconds of starts and of replacements are those that `gnomon
fleet spot` takes unless told otherwise. Leaves out the search (room `search`) and other ways to survive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gnomon.cli.fleet_spot import OURS, WAYS, asked_of
from gnomon.cli.options import parser
from gnomon.cli.plan_asked import Asked
from gnomon.errors import GnomonError, PlanError
from gnomon.fleet.spot import System, shares
from gnomon.methods import bamboo
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.plans import Plan
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.report.tables import wrapped
from gnomon.search import Found, Result, plan
from gnomon.search.budget import More, always
from gnomon.software import own

TRIED = 3
"""Plans with copies of stages that are played, of so many times more that are looked at for room."""
FIXED = {"schedule": ONE_F_ONE_B.name, "zero": 0, "virtual_stages": 1}
"""What a plan with copies of stages must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A plan under losses."""

    found: Found
    way: System
    steps_per_hour: float
    """Useful ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What losses make of the plans."""

    hours: float
    """Between losses of one machine."""
    without: Played
    """The fastest plan, as it goes on best without a redundant copy."""
    copied: Played | None
    """The best plan with one."""
    why: str
    """Why there is none."""

    @property
    def best(self) -> Found:
        """That makes most useful steps; of equal ones that without a copy."""
        pays = self.copied is not None and self.copied.steps_per_hour > self.without.steps_per_hour
        return self.copied.found if pays and self.copied is not None else self.without.found

    def text(self) -> Iterator[str]:
        """For people."""
        head = f"at one loss of a machine in {self.hours:g} hours, useful steps an hour:"
        yield from ("", *wrapped(head, indent=""))
        for one in (self.without, self.copied):
            if one is not None:
                taken = "  <- taken" if one.found is self.best else ""
                yield f"  {one.steps_per_hour:10.1f}  {WAYS[one.way]}: {shape(one.found.plan)}{taken}"
        if self.copied is None:
            yield from wrapped(f"no plan has copies of stages: {self.why}", indent="  ")

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        each = {"without": self.without, "copied": self.copied}
        said = {
            name: {"way": one.way, "step_s": one.found.step_s, "useful_steps_per_hour": one.steps_per_hour}
            for name, one in each.items()
            if one is not None
        }
        return {"mtbf_hours": self.hours, **said, "copies_pay": self.best is not self.without.found, "why": self.why}


def shape(plan: Plan) -> str:
    """Axes with several ranks, as in `pp 4 x dp_shard 8`."""
    mesh = plan.mesh
    axes = {"pp": mesh.pp, "tp": mesh.tp, "cp": mesh.cp, "dp_shard": mesh.dp_shard, "dp_replicate": mesh.dp_replicate}
    return " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"


def compared(asked: Asked, result: Result, best: Found, hours: float, more: More = always) -> Losses:
    """PlanError for a program that has no copies of stages, and for stages with meshes of their own."""
    if asked.stack is not PLAIN_STACK and asked.stack.name != own.NAME:
        raise PlanError(
            f"--mtbf compares plans with copies of stages, which {asked.stack.name} does not run; leave it out, or "
            f"plan for gnomon run with --stack {own.NAME}"
        )
    without = max(
        (_played(asked, best, hours, way) for way in OURS if way != "bamboo"), key=lambda one: one.steps_per_hour
    )
    try:
        candidates = _with_room(asked, result, more)
        played = [_played(asked, found, hours, "bamboo") for found in candidates[:TRIED]]
    except GnomonError as error:
        return Losses(hours=hours, without=without, copied=None, why=str(error))
    why = "" if played else "none of the fastest has room for a second stage on each rank"
    copied = max(played, key=lambda one: one.steps_per_hour, default=None)
    return Losses(hours=hours, without=without, copied=copied, why=why)


def _with_room(asked: Asked, result: Result, more: More) -> list[Found]:
    """The fastest plans with copies of stages that fit. PlanError where none can be."""
    for name, value in FIXED.items():
        if asked.fixed.get(name, value) != value:
            raise PlanError(f"{name} = {asked.fixed[name]} is fixed, and they need {name} = {value}")
    plain = plan(
        *asked.job,
        base=asked.base,
        fixed={**asked.fixed, **FIXED},
        forbid=(*asked.chosen.forbid, "pp<2"),
        top=8 * TRIED,
        more=more,
    )
    found = []
    for candidate in plain.best:
        for given in bamboo.METHOD.variants(candidate.plan):
            prediction = predict(asked.graph, asked.machines, given, asked.workload, asked.stack)
            if max(rank.peak_bytes for rank in prediction.memory) <= result.limit_bytes:
                found.append(replace(candidate, plan=given, prediction=prediction))
    return sorted(found, key=lambda one: one.step_s)


def _played(asked: Asked, found: Found, hours: float, way: System) -> Played:
    """A plan under lists of losses that are the same for all plans."""
    options = parser().parse_args(["fleet", "spot", "PLAN", "--mtbf", str(hours)])
    known = asked_of(options, asked.graph, asked.machines, found.plan, asked.workload, asked.stack)
    if known.refused and way == "bamboo":
        raise PlanError(known.refused)
    useful = shares(
        1 / hours,
        known.shape,
        known.costs,
        (way,),
        seconds=options.hours * 3600,
        seeds=options.lists,
        bulk=options.bulk,
    )
    return Played(found=found, way=way, steps_per_hour=3600 * useful[way] / known.costs.step_s)
