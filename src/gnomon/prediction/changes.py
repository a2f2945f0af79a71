"""Changes of a plan that spare memory, one kind a function: (the change in words, the plan with it), the least first.

Each yields plans that may not be able to run, which `predict` then says. Leaves out what they free and cost
(`search.fit`), and choices that `search.refinement.choices` has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Literal

from gnomon.plans import Offload, Plan, Saved

Single = tuple[str, Plan]
"""(one change in words, the plan with it)."""


def micro_batch(plan: Plan) -> Iterator[Single]:
    size = plan.schedule.micro_batch_size
    while size is not None and size > 1 and size % 2 == 0:
        size //= 2
        name = f"micro_batch_size {plan.schedule.micro_batch_size} -> {size}"
        yield name, replace(plan, schedule=replace(plan.schedule, micro_batch_size=size))
    count = plan.schedule.num_microbatches
    if plan.schedule.micro_batch_size is None and count is not None:
        for microbatches in (2 * count, 4 * count):
            schedule = replace(plan.schedule, num_microbatches=microbatches)
            yield f"num_microbatches {count} -> {microbatches}", replace(plan, schedule=schedule)


def recompute(plan: Plan) -> Iterator[Single]:
    presets: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    if plan.saved.rules:
        return
    for preset in presets[presets.index(plan.saved.preset) + 1 :]:
        yield f"recompute {preset}", replace(plan, saved=Saved(preset=preset))


def sequence_parallel(plan: Plan) -> Iterator[Single]:
    if not plan.layout.sequence_parallel and plan.stage_mesh(0).tp > 1:
        yield "sequence_parallel", replace(plan, layout=replace(plan.layout, sequence_parallel=True))


def zero(plan: Plan) -> Iterator[Single]:
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    mesh, over = plan.stage_mesh(0), ""
    if mesh.dp_shard * mesh.cp == 1:
        if mesh.dp_replicate == 1 or plan.stages:
            return
        over = f" over {mesh.dp_replicate} replicas (dp_shard)"
        plan = replace(plan, mesh=replace(plan.mesh, dp_shard=mesh.dp_replicate, dp_replicate=1))
    for stage in stages[plan.optimizer.zero + 1 :]:
        changed = replace(plan, optimizer=replace(plan.optimizer, zero=stage))
        whole = fully_sharded(changed) if stage == 3 else changed
        if stage == 3:  # whether lower stages gathered ahead says nothing of layers that are gathered one by one
            whole = replace(whole, overlap=replace(whole.overlap, param_gather=True))
        without = " without gradient buckets" if stage == 3 and changed.overlap.in_buckets else ""
        yield f"ZeRO stage {stage}{over}{without}", whole


def fully_sharded(plan: Plan) -> Plan:
    """A plan under ZeRO 3 without what only lower stages have: it reduces gradients block by block alongside the
    backward, so the buckets go that a program has by default below it."""
    overlap = replace(plan.overlap, bucket_bytes=None, buckets=(), fused=(), grad_reduce=True)
    return replace(plan, overlap=overlap)


def offload(plan: Plan) -> Iterator[Single]:
    """States and update on the host; gradients of several microbatches added up on the device, then there too."""
    if plan.optimizer.offload is None:
        summed = Offload(accumulate="device")
        yield "optimizer on the host, gradients summed on the device", _moved(plan, summed)
        yield "optimizer on the host", _moved(plan, Offload())


def _moved(plan: Plan, offload: Offload) -> Plan:
    return replace(plan, optimizer=replace(plan.optimizer, offload=offload))


def tensor_parallel(plan: Plan, most: int = 4) -> Iterator[Single]:
    """Half, then a quarter … of the data-parallel ranks, the others for tensor parallelism, up to `most` times as much
    of it."""
    mesh = plan.mesh
    for ways in (ways for ways in (2, 4, 8) if ways <= most):
        if plan.stages or mesh.dp_shard % ways:
            return
        layout = replace(plan.layout, sequence_parallel=True)
        moved = replace(mesh, dp_shard=mesh.dp_shard // ways, tp=mesh.tp * ways)
        yield f"tp {mesh.tp} -> {moved.tp}", replace(plan, mesh=moved, layout=layout)


def pipeline_parallel(plan: Plan) -> Iterator[Single]:
    """The same for pipeline parallelism, where microbatches can follow each other and experts keep enough ranks."""
    mesh, schedule = plan.mesh, plan.schedule
    for ways in (2, 4):
        if plan.stages or mesh.dp_shard % ways or (schedule.micro_batch_size or schedule.num_microbatches) is None:
            return
        shards = mesh.dp_shard // ways
        if shards * mesh.cp * mesh.tp % (mesh.ep * mesh.etp) == 0:
            moved = replace(mesh, dp_shard=shards, pp=mesh.pp * ways)
            schedule = replace(schedule, layers_per_stage=())  # of other stages
            yield f"pp {mesh.pp} -> {moved.pp}", replace(plan, mesh=moved, schedule=schedule)


def parallel(plan: Plan) -> Iterator[Single]:
    """Both by turns, the smaller change first."""
    tensor, pipeline = list(tensor_parallel(plan)), list(pipeline_parallel(plan))
    yield from (change for pair in zip_longest(tensor, pipeline) for change in pair if change is not None)
