"""Whether a program runs a plan, as far as its record says.

`beyond(stack, plan)` names what the record leaves out; nothing where the record is silent. `predict` says it beside the
number, `explain` proposes no such change, and the search has it as limits. Leaves out what no program runs
(`plans.check`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gnomon.plans import Plan
from gnomon.software.record import Stack


def beyond(stack: Stack, plan: Plan) -> tuple[str, ...]:
    """What a plan asks that the record does not list, one phrase each."""
    return tuple(_beyond(stack, plan))


def _beyond(stack: Stack, plan: Plan) -> Iterator[str]:
    runs, zero = stack.runs, plan.optimizer.zero
    meshes = [stage.mesh for stage in plan.stages] or [plan.mesh]
    pipelined = len(plan.stages) > 1 or plan.mesh.pp > 1
    ranks = max(mesh.dp_replicate * mesh.dp_shard * mesh.cp for mesh in meshes)
    stages = (runs.zero_in_pipeline or runs.zero) if pipelined else runs.zero
    if stages and zero not in stages and ranks > 1:
        where = " in a pipeline" if stages is not runs.zero else ""
        yield f"ZeRO {zero}{where} (it has {', '.join(map(str, stages))})"
    name = plan.schedule.name
    if runs.schedules and pipelined and name not in runs.schedules:
        yield f"schedule {name} (it has {', '.join(runs.schedules)})"
    if runs.contexts and any(mesh.cp > 1 for mesh in meshes) and plan.layout.context not in runs.contexts:
        yield f"context parallelism by {plan.layout.context} (it has {', '.join(runs.contexts)})"
    for axis in ("dp_replicate", "tp", "cp", "ep") if runs.axes else ():
        if axis not in runs.axes and any(getattr(mesh, axis) > 1 for mesh in meshes):
            yield f"{axis} (it divides ranks over dp_shard, {', '.join(runs.axes)})"
    if runs.axes and "pp" not in runs.axes and pipelined:
        yield f"pipelines (it divides ranks over dp_shard, {', '.join(runs.axes)})"
