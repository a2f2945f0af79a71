"""Which Program a rank follows, and its rows of it with what each does.

`program_of(graph, plan, workload)` is `lower`'s; `followed` is that or one that a caller gives in its place, checked;
`rows(program, cls, actions)` binds a rank class's rows to functions. Left out: what the functions do (`compute`,
`messages`, `state`), and running them (`execute`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.lowering.lower import build, lower, outline
from gnomon.methods import rewrites
from gnomon.plans import Plan, Unit, Workload, stage_layers
from gnomon.plans import batch as batch_of
from gnomon.plans.expert_rows import has_rows
from gnomon.plans.groups import layer_groups
from gnomon.plans.plan import effective_zero
from gnomon.program import Program
from gnomon.runtime.mesh.arrivals import out_of_order
from gnomon.runtime.step.check_program import check_program
from gnomon.software import own

MEET = ("NORM", "S", "EMBED", "EGRAD")
"""Kinds that compute where ranks meet: a divided head, the gradient norm."""

Action = Callable[[int, int], None]
"""Takes stage and unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """A row of the Program as this rank does it."""

    number: int
    """In the Program."""
    action: Action
    """What it does."""
    stage: int
    unit: int
    blocks: bool
    """A communication on the compute stream, which waits for its end."""
    timed: bool
    """Its span is from the call to the return; that of a communication ends when it has arrived."""


def program_of(graph: Graph, plan: Plan, workload: Workload, units: tuple[Unit, ...] = ()) -> Program:
    """The Program that all ranks follow. With uneven shares the rows are those of equal ones: each rank takes its own
    part of every unit, and the weight of a sequence does not depend on who computes it. units: of this rank's
    data-parallel worker, where workers have units of their own: all of them end the step with the same rows."""
    plan = own.followed(plan)
    if units and has_rows(plan):
        raise PlanError("overlap.experts has no rows for units of several lengths yet; leave it out")
    if units:
        return build(outline(graph, plan, units=units, by_layer=own.by_layer(plan)))
    if not any(stage.shares for stage in plan.stages):
        return lower(graph, plan, None, workload, by_layer=own.by_layer(plan))
    count, _ = batch_of(plan, workload)
    schedule = replace(plan.schedule, num_microbatches=count, micro_batch_size=None)
    equal = replace(plan, stages=tuple(replace(s, shares=()) for s in plan.stages), schedule=schedule)
    return lower(graph, equal, by_layer=own.by_layer(plan))


def followed(
    graph: Graph,
    plan: Plan,
    workload: Workload,
    of_job: Program | None,
    tied: Iterable[int],
    *,
    in_order: bool,
    units: tuple[Unit, ...] = (),
) -> Program:
    """`of_job`, if it is a step of the plan, or `program_of`.

    tied: stages that hold a parameter that others hold too. in_order: whether the backend matches messages by order.
    units: as in `program_of`.
    PlanError for what the runtime does not run, ProgramError for a Program that is no step of the plan.
    """
    if of_job is None and rewrites(plan):
        names = ", ".join(rewrite.name for rewrite in plan.schedule.passes)
        raise PlanError(f"{names} rewrites the Program by predicted seconds; give it: program = the prediction's")
    program = program_of(graph, plan, workload, units)
    if of_job is not None:
        check_program(of_job, program, zero=effective_zero(plan), tied=set(tied))
        program = of_job
    if program.aliases:
        raise PlanError("the runtime does not run layers that two stages of one rank share; give each its own")
    if program.num_classes != plan.num_pipeline_ranks:
        raise PlanError("the runtime wants one rank class for each pipeline rank; workers that differ share it")
    if in_order and (message := out_of_order(program)) is not None:
        raise PlanError(f"message {message} is received out of order, which NCCL does not do; run it with gloo")
    return program


def plan_stages(graph: Graph, plan: Plan, program: Program) -> list[int]:
    """The plan's stage of each stage of the Program, which may be one of its layers."""
    blocks = [1] * plan.num_stages
    if program.num_stages > plan.num_stages:
        blocks = [len(groups) for groups in layer_groups(plan, stage_layers(plan, graph))]
    return [stage for stage, count in enumerate(blocks) for _ in range(count)]


def rows(program: Program, cls: int, actions: Mapping[str, Action]) -> list[RankRow]:
    """Rows of a rank class, in issue order. actions: by kind. PlanError for a kind that is not among them."""
    out = []
    for row in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
        override = program.overrides.get(row)
        if override is not None and override.inside:
            continue
        name = program.kinds[program.kind[row]].name
        if name not in actions:
            raise PlanError(
                f"{program.where(row)}: the runtime does not execute {name}; there are {', '.join(actions)}"
            )
        out.append(
            RankRow(
                number=row,
                action=actions[name],
                stage=int(program.stage[row]),
                unit=int(program.unit[row]),
                blocks=program.streams[program.stream[row]] == "compute",
                timed=not program.comm_of(row) or name in MEET,
            )
        )
    return out


def stages_of_row(program: Program, row: int) -> Iterable[int]:
    """Stages that a row is about: a bucket is one row for several."""
    override = program.overrides.get(row)
    if override is None or override.effects is None:
        return (int(program.stage[row]),)
    return dict.fromkeys(effect.ref.stage for effect in override.effects)
