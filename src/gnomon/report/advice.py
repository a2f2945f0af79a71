"""What to change when a plan does not fit: neighbouring plans, predicted like any other, smallest change first.

`changes_that_fit` tries one change at a time, then pairs, and returns those whose every rank fits. It asks `predict`
and nothing else. Leaves out other meshes than those that move ranks from data to tensor parallelism (`search`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from gnomon.errors import GnomonError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Plan, Saved, Stack, Workload
from gnomon.prediction import Prediction, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the plan that makes it fit."""

    what: str
    """In words, as a person would do it."""
    plan: Plan
    """The plan with it."""
    step_s: float
    """Its step."""
    peak_bytes: int
    """Peak of its tightest rank."""


Edit = tuple[str, Callable[[Plan], Plan | None]]


def changes_that_fit(
    graph: Graph, cluster: Cluster, plan: Plan, workload: Workload, stack: Stack, *, most: int = 4
) -> tuple[Change, ...]:
    """Changes after which every rank fits: single ones, or pairs when no single one does. In the order of
    EDITS, `most` of them, so the smallest first; empty when none of those tried does."""
    for size in (1, 2):
        found = [
            change
            for edits in combinations(EDITS, size)
            if (change := _try(edits, graph, cluster, plan, workload, stack)) is not None
        ]
        if found:
            return tuple(found[:most])
    return ()


def _try(
    edits: tuple[Edit, ...], graph: Graph, cluster: Cluster, plan: Plan, workload: Workload, stack: Stack
) -> Change | None:
    changed = plan
    for _, edit in edits:
        after = edit(changed)
        if after is None:
            return None
        changed = after
    try:
        found: Prediction = predict(graph, cluster, changed, workload, stack)
    except GnomonError:  # this neighbour cannot run; there are others
        return None
    if not found.fits:
        return None
    what = " and ".join(name for name, _ in edits)
    return Change(what=what, plan=changed, step_s=found.step_s, peak_bytes=found.tightest.peak_bytes)


def _recompute(preset: str) -> Callable[[Plan], Plan | None]:
    order = ("none", "selective", "full")

    def edit(plan: Plan) -> Plan | None:
        if plan.saved.rules or order.index(plan.saved.preset) >= order.index(preset):
            return None
        return replace(plan, saved=Saved(preset=preset))  # type: ignore[arg-type]

    return edit


def _zero(stage: int) -> Callable[[Plan], Plan | None]:
    def edit(plan: Plan) -> Plan | None:
        if plan.stages or plan.optimizer.zero >= stage or plan.mesh.dp_shard * plan.mesh.cp == 1:
            return None
        return replace(plan, optimizer=replace(plan.optimizer, zero=stage))  # type: ignore[arg-type]

    return edit


def _halve_micro_batch(plan: Plan) -> Plan | None:
    size = plan.schedule.micro_batch_size
    if size is None or size % 2:
        return None
    return replace(plan, schedule=replace(plan.schedule, micro_batch_size=size // 2))


def _shard(plan: Plan) -> Plan | None:
    if plan.stages or plan.mesh.dp_replicate == 1:
        return None
    mesh = replace(plan.mesh, dp_shard=plan.mesh.dp_shard * plan.mesh.dp_replicate, dp_replicate=1)
    return replace(plan, mesh=mesh)


def _more_tensor_parallel(plan: Plan) -> Plan | None:
    if plan.stages or plan.mesh.dp_shard % 2 or plan.mesh.ep > 1:
        return None
    mesh = replace(plan.mesh, dp_shard=plan.mesh.dp_shard // 2, tp=plan.mesh.tp * 2)
    return replace(plan, mesh=mesh, layout=replace(plan.layout, sequence_parallel=True))


def _sequence_parallel(plan: Plan) -> Plan | None:
    if plan.stages or plan.mesh.tp == 1 or plan.layout.sequence_parallel:
        return None
    return replace(plan, layout=replace(plan.layout, sequence_parallel=True))


EDITS: tuple[Edit, ...] = (
    ("sequence parallelism", _sequence_parallel),
    ("ZeRO 1", _zero(1)),
    ("ZeRO 2", _zero(2)),
    ("ZeRO 3", _zero(3)),
    ("shard over all data-parallel ranks", _shard),
    ("half the micro batch", _halve_micro_batch),
    ("selective recompute", _recompute("selective")),
    ("full recompute", _recompute("full")),
    ("twice the tensor parallelism", _more_tensor_parallel),
)
"""What is tried, smallest change first."""
