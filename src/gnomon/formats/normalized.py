"""A plan in one normal form: a field without effect is at its default, a value that follows from others is written.

`normalized(plan, graph, workload)` returns such a plan; `differences(asked, found)` lists the fields in which two
values differ. Used to compare a plan with what another program's file says of it. Leaves out whether a plan can run
(`check`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.plans import Layout, Mesh, Optimizer, Overlap, Plan, Schedule, Workload
from gnomon.plans.check import batch
from gnomon.plans.mesh import DENSE_AXES
from gnomon.plans.stages import stage_layers

_LAYOUT, _OVERLAP, _OPTIMIZER = Layout(), Overlap(), Optimizer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field that two values do not share."""

    field: str
    """Its path, as in `optimizer.zero`."""
    before: str
    """The first value's."""
    actual: str
    """The second value's."""


def normalized(plan: Plan, graph: Graph, workload: Workload | None = None) -> Plan:
    """The plan with one mesh, its batch as micro_batch_size, its layers counted, and nothing that has no effect.

    PlanError for stages that differ in more than their layers, and for a batch that does not divide.
    """
    plan = _uniform(plan, graph)
    mesh, zero = plan.mesh, plan.optimizer.zero
    if mesh.dp_shard * mesh.cp == 1:
        zero = 0
    return replace(
        plan,
        mesh=_mesh(mesh, graph, zero),
        schedule=_schedule(plan, graph, workload),
        layout=_layout(plan.layout, mesh),
        overlap=_overlap(plan.overlap, mesh, zero),
        optimizer=_optimizer(replace(plan.optimizer, zero=zero)),
        placement=() if plan.placement == tuple(range(plan.world_size)) else plan.placement,
    )


def _uniform(plan: Plan, graph: Graph) -> Plan:
    """The same plan with one mesh and `layers_per_stage`, if its stages say no more than that."""
    if not plan.stages:
        return plan
    pp, first = plan.num_pipeline_ranks, plan.stages[0].mesh
    schedule = replace(
        plan.schedule, virtual_stages=max(1, plan.num_stages // pp), layers_per_stage=_counts(plan, graph)
    )
    same = all(stage.mesh == first and not stage.shares and stage.inputs is None for stage in plan.stages)
    try:
        short = replace(plan, stages=(), mesh=replace(first, pp=pp), schedule=schedule)
        same = (
            same and short.stage_ranks == plan.stage_ranks and stage_layers(short, graph) == stage_layers(plan, graph)
        )
    except PlanError:
        same = False
    if not same:
        raise PlanError(
            f"the plan's stages differ in more than their layers: {_first_difference(plan)}, which no job file of "
            "these programs says; give a plan with one mesh and equal shares (gnomon plan for one kind of device), "
            "or run it with gnomon run"
        )
    return short


def _first_difference(plan: Plan) -> str:
    """What its stages differ in, with the first two that do."""
    meshes = list(dict.fromkeys(stage.mesh for stage in plan.stages))
    if len(meshes) > 1:
        return f"some have {meshes[0].describe()}, others {meshes[1].describe()}"
    if uneven := [stage.shares for stage in plan.stages if stage.shares]:
        return f"data-parallel ranks take {' and '.join(map(str, dict.fromkeys(uneven[0])))} sequences of a microbatch"
    if listed := [stage.inputs for stage in plan.stages if stage.inputs is not None]:
        return f"one lists its inputs, {listed[0]}"
    return "their ranks are not those of equal stages in order"


def _counts(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Indexed layers of each stage, or all layers where none has an index."""
    indexed = any(layer.call.first is not None for layer in graph.layers())
    return tuple(
        sum(not indexed or layer.call.first is not None for layer in part) for part in stage_layers(plan, graph)
    )


def _mesh(mesh: Mesh, graph: Graph, zero: int) -> Mesh:
    experts = any(dim.name.split(".")[-1] == "experts" for block in graph.blocks for dim in block.dims)
    if not experts:
        mesh = replace(mesh, ep=1, etp=1)
        if zero == 0:  # all data-parallel ranks hold the same
            mesh = replace(mesh, dp_shard=mesh.dp_shard * mesh.dp_replicate, dp_replicate=1)
    used = [axis for axis in mesh.order if getattr(mesh, axis) > 1]
    return replace(mesh, order=DENSE_AXES) if used == [a for a in DENSE_AXES if a in used] else mesh


def _schedule(plan: Plan, graph: Graph, workload: Workload | None) -> Schedule:
    schedule = plan.schedule
    if workload is not None:
        count, size = batch(plan, workload)
        schedule = replace(schedule, micro_batch_size=size // plan.mesh.data_ranks, num_microbatches=None)
    if plan.num_stages == 1:
        return replace(schedule, placement="loop", layers_per_stage=())
    return replace(schedule, layers_per_stage=_counts(plan, graph))


def _layout(layout: Layout, mesh: Mesh) -> Layout:
    if mesh.tp == 1:
        layout = replace(layout, sequence_parallel=False, vocab_parallel=True, loss_parallel=True)
    if mesh.cp == 1:
        layout = replace(layout, context=_LAYOUT.context, context_order=_LAYOUT.context_order)
    if mesh.ep == 1:
        layout = replace(layout, dispatch=None)
    elif layout.dispatch is None:  # priced as that, and what files without a choice do
        layout = replace(layout, dispatch="all_to_all")
    if mesh.cp == 1 and not layout.sequence_parallel:
        layout = replace(layout, keep_gathered=False)
    return layout


def _overlap(overlap: Overlap, mesh: Mesh, zero: int) -> Overlap:
    if mesh.data_ranks * mesh.cp == 1:
        overlap = replace(overlap, grad_reduce=_OVERLAP.grad_reduce)
    if zero == 0:
        overlap = replace(overlap, param_gather=_OVERLAP.param_gather)
    if zero < 3:
        overlap = replace(overlap, prefetch=_OVERLAP.prefetch)
    if zero == 3 or mesh.data_ranks * mesh.cp == 1 or not overlap.grad_reduce:
        overlap = replace(overlap, bucket_bytes=None, buckets=(), fused=())
    return overlap if mesh.pp > 1 else replace(overlap, pipeline_sends=_OVERLAP.pipeline_sends)


def _optimizer(optimizer: Optimizer) -> Optimizer:
    if optimizer.zero < 3:
        return replace(
            optimizer,
            reshard_after_forward=_OPTIMIZER.reshard_after_forward,
            keep_last_block=_OPTIMIZER.keep_last_block,
        )
    return optimizer if optimizer.reshard_after_forward else replace(optimizer, keep_last_block=True)


def differences(requested: object, actual: object, path: str = "") -> Iterator[Difference]:
    """Every field, by path, in which two values of one dataclass differ; values of two classes differ as a whole."""
    if requested == actual:
        return
    if is_dataclass(requested) and type(requested) is type(actual):
        for field in fields(requested):
            inner = f"{path}.{field.name}" if path else field.name
            yield from differences(getattr(requested, field.name), getattr(actual, field.name), inner)
    else:
        yield Difference(field=path, before=text_of(requested), actual=text_of(actual))


def text_of(value: object) -> str:
    """A value as a list of differences shows it: of a dataclass only what is not at its default."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    if is_dataclass(value):
        arguments = [(f.name, getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default]
        return f"{type(value).__name__}({', '.join(f'{name}={text_of(one)}' for name, one in arguments)})"
    if isinstance(value, tuple):
        return f"[{', '.join(map(text_of, value))}]"
    return str(value)
