"""Neighbours of a plan that lists its stages: over heterogeneous devices, or with other numbers of replicas a stage.

`stage_changes(plan, graph, cluster)` yields plans one change away: a layer over a border, a sequence from one kind of
device to another, twice or half the microbatches, ZeRO, recompute, schedule, sequence parallelism. `evened(plan, …)`
yields the plan without what makes it uneven. Leaves out other devices for a stage: that is the search's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gnomon import orders
from gnomon.graph import Graph, Layer
from gnomon.hardware import Cluster
from gnomon.hardware.kinds import kinds_of
from gnomon.plans import Plan, Saved, Workload, batch, stage_layers
from gnomon.plans.select import format_layers
from gnomon.search.mixed.space import equal_layers, selectors


def stage_changes(plan: Plan, graph: Graph, cluster: Cluster, workload: Workload) -> Iterator[tuple[str, Plan]]:
    """(change, plan with it), one change at a time. Some may not run; whoever predicts them is told why."""
    yield from _borders(plan, graph)
    yield from _shares(plan, cluster)
    count, _ = batch(plan, workload)
    # From one microbatch, half is 0, which is no plan.
    for new in (2 * count, count // 2):
        if new and (changed := _counted(plan, count, new)):
            yield f"microbatches {count} -> {new}", changed
    if max(plan.stage_mesh(stage).data_ranks for stage in range(plan.num_stages)) > 1:
        for zero in (0, 1, 2, 3):
            if zero != plan.optimizer.zero:
                what = f"ZeRO {plan.optimizer.zero} -> {zero}"
                yield what, replace(plan, optimizer=replace(plan.optimizer, zero=zero))
    for preset in ("none", "selective", "full"):
        if preset != plan.saved.preset and not plan.saved.rules:
            yield f"recompute {preset}", replace(plan, saved=Saved(preset=preset))
    if plan.num_pipeline_ranks > 1:
        for order in orders.every():
            if order.takes(1) and order.name != plan.schedule.name:
                schedule = replace(plan.schedule, name=order.name, passes=())
                yield f"schedule {order.name}", replace(plan, schedule=schedule)
        if plan.schedule.passes:
            yield "the usual warm-up", replace(plan, schedule=replace(plan.schedule, passes=()))
    if max(plan.stage_mesh(stage).tp for stage in range(plan.num_stages)) > 1:
        on = plan.layout.sequence_parallel
        changed = replace(plan, layout=replace(plan.layout, sequence_parallel=not on))
        yield "without sequence parallelism" if on else "sequence parallel", changed


def evened(plan: Plan, graph: Graph, workload: Workload) -> Iterator[tuple[str, Plan]]:
    """(what it has, plan without it)."""
    layers = [len(_counted_layers(part)) for part in stage_layers(plan, graph)]
    if sum(layers) and (even := equal_layers(sum(layers), len(layers))) != tuple(layers):
        parts = selectors(graph, even)
        stages = tuple(replace(stage, calls=calls) for stage, calls in zip(plan.stages, parts, strict=True))
        yield f"uneven layers {':'.join(map(str, layers))}", replace(plan, stages=stages)
    if any(stage.shares for stage in plan.stages):
        _, size = batch(plan, workload)
        if all(size % stage.mesh.data_ranks == 0 for stage in plan.stages):
            stages = tuple(replace(stage, shares=()) for stage in plan.stages)
            count = workload.batch_size // size
            schedule = replace(plan.schedule, num_microbatches=count)
            yield "uneven shares", replace(plan, stages=stages, schedule=schedule)
    if plan.optimizer.zero:
        yield f"ZeRO {plan.optimizer.zero}", replace(plan, optimizer=replace(plan.optimizer, zero=0))
    if plan.saved.preset != "none" and not plan.saved.rules:
        yield f"recompute {plan.saved.preset}", replace(plan, saved=Saved())


def _counted_layers(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if layer.call.first is not None]


def _borders(plan: Plan, graph: Graph) -> Iterator[tuple[str, Plan]]:
    """A layer moved over each border, either way, where the stage keeps one."""
    parts = stage_layers(plan, graph)
    for stage in range(len(parts) - 1):
        one, two = parts[stage], parts[stage + 1]
        moves = (
            (f"a layer from stage {stage} to {stage + 1}", one, (one[:-1], (one[-1], *two))),
            (f"a layer from stage {stage + 1} to {stage}", two, ((*one, two[0]), two[1:])),
        )
        for what, giver, new_layers in moves:
            if len(_counted_layers(giver)) > 1:
                stages = list(plan.stages)
                for at, layers in zip((stage, stage + 1), new_layers, strict=True):
                    stages[at] = replace(stages[at], calls=format_layers(layers))
                yield what, replace(plan, stages=tuple(stages))


def _shares(plan: Plan, cluster: Cluster) -> Iterator[tuple[str, Plan]]:
    """A sequence of every microbatch moved from a worker of one kind to one of another; all stages must share alike."""
    shares = plan.stages[0].shares
    if not shares or any(stage.shares != shares for stage in plan.stages):
        return
    kinds, ranks, mesh = kinds_of(cluster), plan.stage_ranks[0], plan.stage_mesh(0)
    name_of = {device: kind.name for kind in kinds for device in kind.devices}
    workers: dict[str, list[int]] = {}
    for worker in range(mesh.data_ranks):
        # Ranks of one worker are on devices of one kind, so the first says of which.
        first = next(i for i in range(len(ranks)) if mesh.dense.coordinate(i, "dp") == worker)
        workers.setdefault(name_of[plan.device_of[ranks[first]]], []).append(worker)
    for one, mine in workers.items():
        for other, theirs in workers.items():
            giver, taker = max(mine, key=lambda w: shares[w]), min(theirs, key=lambda w: shares[w])
            if one != other and shares[giver] > 1:
                moved = list(shares)
                moved[giver], moved[taker] = moved[giver] - 1, moved[taker] + 1
                stages = tuple(replace(stage, shares=tuple(moved)) for stage in plan.stages)
                yield f"a sequence from {one} to {other}", replace(plan, stages=stages)


def _counted(plan: Plan, count: int, new: int) -> Plan | None:
    """The plan with another number of microbatches, twice or half; None where shares cannot be halved."""
    # Sequences of a step stay: share * count over new microbatches must be whole.
    if any(share * count % new for stage in plan.stages for share in stage.shares):
        return None
    stages = tuple(
        replace(stage, shares=tuple(share * count // new for share in stage.shares)) for stage in plan.stages
    )
    schedule = replace(plan.schedule, num_microbatches=new, micro_batch_size=None)
    return replace(plan, stages=stages, schedule=schedule)
