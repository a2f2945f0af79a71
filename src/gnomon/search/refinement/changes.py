"""Plans one change away from a plan: another size of an axis, ZeRO stage, recomputation, microbatch, context, schedule.

`changes(plan)` lists them, each with words for it. They are what `questions.reasons` explains a plan by, what cutting
stages goes on to, and what no plan that a search gives is slower than (`neighbours`). Leaves out choices beyond fields
of points (`choices`) and plans that list their stages (`questions.stage_changes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon import orders
from gnomon.errors import PlanError
from gnomon.plans import Mesh, Plan, Saved, Schedule


def changes(plan: Plan, *, experts: bool = False) -> Iterator[tuple[str, Plan]]:
    """(change, plan with it), one change at a time. experts: the model has some, so that ep can grow from 1."""
    mesh = plan.mesh
    for axis in ("tp", "pp", "cp"):
        size = getattr(mesh, axis)
        if mesh.dp_shard % 2 == 0 and (changed := move_ranks(plan, axis, 2 * size, mesh.dp_shard // 2)):
            yield f"{axis} {size} -> {2 * size}", changed
        if size % 2 == 0 and (changed := move_ranks(plan, axis, size // 2, mesh.dp_shard * 2)):
            yield f"{axis} {size} -> {size // 2}", changed
    for size in (2 * mesh.ep, mesh.ep // 2) if mesh.ep > 1 or experts else ():
        if size and (changed := with_experts(plan, size)):
            yield f"ep {mesh.ep} -> {size}", changed
    for context in ("ring", "all_gather", "ulysses") if mesh.cp > 1 else ():
        if context != plan.layout.context:
            yield f"context by {context}", replace(plan, layout=replace(plan.layout, context=context))
    micro = plan.schedule.micro_batch_size
    for size in () if micro is None else ((2 * micro, micro // 2) if micro % 2 == 0 else (2 * micro,)):
        yield f"microbatch {micro} -> {size}", replace(plan, schedule=replace(plan.schedule, micro_batch_size=size))
    for zero in (0, 1, 2, 3):
        if zero != plan.optimizer.zero and mesh.dp_shard * mesh.cp > 1:
            name = f"ZeRO {plan.optimizer.zero} -> {zero}"
            yield name, replace(plan, optimizer=replace(plan.optimizer, zero=zero))
    alike = all(rule.preset is not None for rule in plan.saved.rules)  # by layer or stage: other presets
    for preset in ("none", "selective", "full"):
        if (preset != plan.saved.preset or plan.saved.rules) and alike:
            yield f"recompute {preset}", replace(plan, saved=Saved(preset=preset))
    if with_equal_stages(plan) != plan:
        yield "equal stages", with_equal_stages(plan)
    if mesh.tp > 1:
        on = plan.layout.sequence_parallel
        changed = replace(plan, layout=replace(plan.layout, sequence_parallel=not on))
        yield "without sequence parallelism" if on else "sequence parallel", changed
    ways = orders.find(plan.schedule.name).vocabulary
    for how in ways if mesh.pp > 1 and mesh.tp == 1 and plan.optimizer.zero < 2 else ():
        changed = replace(plan, schedule=replace(plan.schedule, vocabulary=how))
        if changed != plan:
            yield f"vocabulary {how}", changed
    for schedule in schedules(plan) if mesh.pp > 1 else ():
        same = schedule.virtual_stages == plan.schedule.virtual_stages
        yield f"schedule {schedule.name}", replace(plan if same else with_equal_stages(plan), schedule=schedule)


def with_experts(plan: Plan, size: int) -> Plan | None:
    try:
        return replace(plan, mesh=replace(plan.mesh, ep=size))
    except PlanError:  # more ranks than experts may refold
        return None


def move_ranks(plan: Plan, axis: str, size: int, shards: int) -> Plan | None:
    """Ranks moved between an axis and data parallelism; None where too few are left to the experts. Matmuls cut into as
    many parts as there are tensor-parallel ranks stay so."""
    try:
        mesh: Mesh = replace(plan.mesh, **{axis: size, "dp_shard": shards})  # type: ignore[arg-type]
    except PlanError:
        return None
    schedule = plan.schedule
    if mesh.pp == 1:  # nothing to schedule
        schedule = replace(schedule, name=orders.DEFAULT, virtual_stages=1, placement="loop", layers_per_stage=())
    sequence = plan.layout.sequence_parallel or axis == "tp"
    layout = replace(plan.layout, sequence_parallel=sequence)
    if axis == "pp":
        plan, schedule = with_equal_stages(plan), replace(schedule, layers_per_stage=())
    splits = plan.overlap.splits
    if axis == "tp":
        splits = tuple(replace(s, parts=size) if s.parts == plan.mesh.tp else s for s in splits) if size > 1 else ()
    overlap = replace(plan.overlap, splits=splits)
    return replace(plan, mesh=mesh, schedule=schedule, layout=layout, overlap=overlap)


def with_equal_stages(plan: Plan) -> Plan:
    """The plan with equal stages, which all save alike."""
    rules = tuple(rule for rule in plan.saved.rules if not rule.stages)
    schedule = replace(plan.schedule, layers_per_stage=())
    return replace(plan, schedule=schedule, saved=replace(plan.saved, rules=rules))


def schedules(plan: Plan) -> Iterator[Schedule]:
    for order in orders.every():
        if order.tried and order.name != plan.schedule.name:
            virtual = order.stages[0]
            layers = plan.schedule.layers_per_stage if virtual == plan.schedule.virtual_stages else ()
            yield replace(
                plan.schedule,
                name=order.name,
                virtual_stages=virtual,
                placement=order.placement,
                layers_per_stage=layers,
            )
