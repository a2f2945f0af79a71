"""Whether a program runs a plan, as far as its record says.

`beyond(stack, plan)` names what the record leaves out; nothing where the record is silent. `predict` says it above the
numbers, `proposes` keeps advice and `explain` from such changes, and the search has it as limits. Leaves out what no
program runs (`plans.check`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gnomon.plans import Plan
from gnomon.software import own
from gnomon.software.record import Stack, with_facts


def unsupported(stack: Stack, plan: Plan) -> tuple[str, ...]:
    """What a plan asks that the record does not list, one phrase each."""
    return tuple(_not_run(stack, plan))


def beyond_lines(stack: Stack, plan: Plan) -> tuple[str, ...]:
    """The same as sentences."""
    return tuple(f"stack {stack.name!r} does not run {what}, by its record" for what in unsupported(stack, plan))


def proposes(stack: Stack, plan: Plan, changed: Plan) -> bool:
    """Whether a change of a plan asks nothing of the program that the plan has not asked and the record leaves out."""
    return set(unsupported(stack, changed)) <= set(unsupported(stack, plan))


def able(stack: Stack, plan: Plan, source: str) -> Stack:
    """The record with what a plan asks, as of a plan that a file of the program itself holds. source: that file."""
    if not unsupported(stack, plan):
        return stack
    runs, meshes = stack.runs, [stage.mesh for stage in plan.stages] or [plan.mesh]
    axes = [axis for axis in ("dp_replicate", "tp", "cp", "ep") if any(getattr(mesh, axis) > 1 for mesh in meshes)]
    axes += ["pp"] if len(plan.stages) > 1 or plan.mesh.pp > 1 else []
    needs: dict[str, tuple[object, ...]] = {
        "schedules": (plan.schedule.name,),
        "zero": (plan.optimizer.zero,),
        "zero_in_pipeline": (plan.optimizer.zero,),
        "contexts": (plan.layout.context,),
        "axes": tuple(axes),
        "recompute": (plan.saved.preset,),
        "sequence_parallel": (plan.layout.sequence_parallel,),
        "dispatches": (plan.layout.dispatch,) if plan.layout.dispatch is not None else (),
        "choices": tuple(name for name, chosen, _ in _chosen(plan) if chosen),
    }
    listed = {name: getattr(runs, name) for name in needs}
    values = {
        name: tuple(dict.fromkeys((*has, *needs[name])))
        for name, has in listed.items()
        if (has or name == "choices") and not set(needs[name]) <= set(has)
    }
    if "contexts" in values and "none" in values["contexts"]:
        values["contexts"] = needs["contexts"] if "cp" in axes else ("none",)
    return with_facts(stack, source, "as read", **values)


def _chosen(plan: Plan) -> tuple[tuple[str, bool, str], ...]:
    """Decisions that a record lists by name: (name, whether the plan takes it, in words)."""
    return (
        ("optimizer_offload", plan.optimizer.offload is not None, "an optimizer on the host"),
        ("parameter_offload", plan.optimizer.offload_parameters, "parameters on the host"),
        ("parameter_disk", plan.optimizer.parameter_tier == "disk", "parameters on a disk"),
        ("async_tp", bool(plan.overlap.splits), "cut products beside their collectives (async_tp)"),
        ("buckets", bool(plan.overlap.buckets or plan.overlap.fused), "buckets or actions of so many layers each"),
    )


def _not_run(stack: Stack, plan: Plan) -> Iterator[str]:
    if stack.name == own.NAME:
        yield from own.lacking(plan)
    runs, zero = stack.runs, plan.optimizer.zero
    meshes = [stage.mesh for stage in plan.stages] or [plan.mesh]
    pipelined = len(plan.stages) > 1 or plan.mesh.pp > 1
    ranks = max(mesh.dp_replicate * mesh.dp_shard * mesh.cp for mesh in meshes)
    stages = (runs.zero_in_pipeline or runs.zero) if pipelined else runs.zero
    replicated = zero == 0 and (not runs.axes or "dp_replicate" in runs.axes)  # nothing divided, as in torch's DDP
    if stages and zero not in stages and ranks > 1 and not replicated:
        where = " in a pipeline" if stages is not runs.zero else ""
        yield f"ZeRO {zero}{where} (it has {', '.join(map(str, stages))})"
    name = plan.schedule.name
    if runs.schedules and pipelined and name not in runs.schedules:
        yield f"schedule {name} (it has {', '.join(runs.schedules)})"
    if runs.contexts and any(mesh.cp > 1 for mesh in meshes) and plan.layout.context not in runs.contexts:
        yield f"context parallelism by {plan.layout.context} (it has {', '.join(runs.contexts)})"
    dispatch, divided = plan.layout.dispatch, any(mesh.ep > 1 for mesh in meshes)
    if runs.dispatches and divided and dispatch is not None and dispatch not in runs.dispatches:
        yield f"dispatch {dispatch} (it has {', '.join(runs.dispatches)})"
    for axis in ("dp_replicate", "tp", "cp", "ep") if runs.axes else ():
        if axis not in runs.axes and any(getattr(mesh, axis) > 1 for mesh in meshes):
            yield f"{axis} (it divides ranks over dp_shard, {', '.join(runs.axes)})"
    if runs.axes and "pp" not in runs.axes and pipelined:
        yield f"pipelines (it divides ranks over dp_shard, {', '.join(runs.axes)})"
    yield from _choices_beyond(stack, plan, tensor_parallel=any(mesh.tp > 1 for mesh in meshes))


def _choices_beyond(stack: Stack, plan: Plan, *, tensor_parallel: bool) -> Iterator[str]:
    runs, divided = stack.runs, plan.layout.sequence_parallel
    if runs.recompute and plan.saved.preset not in runs.recompute:
        yield f"recompute {plan.saved.preset} (it has {', '.join(runs.recompute)})"
    if tensor_parallel and runs.sequence_parallel and divided not in runs.sequence_parallel:
        only = "only without" if divided else "only with"
        yield f"tp {'with' if divided else 'without'} sequence parallelism (it has it {only})"
    known = (*runs.choices, *runs.overlaps)
    both = plan.optimizer.offload is not None and plan.optimizer.offload_parameters
    # `cpu_offload` is one switch that sends both to the host, and neither alone.
    together = ("optimizer_offload", "parameter_offload") if both and "cpu_offload" in known else ()
    for name, chosen, says in _chosen(plan):
        if chosen and known and name not in (*known, *together):
            yield f"{says} (its choices: {', '.join(known)})"
