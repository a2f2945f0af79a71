"""Reasons: what bounds a plan's step, what each neighbour of it gains or loses, and what other machines would change.

`explain(prediction)` predicts the plan's neighbours (one axis moved to or from data parallelism, another ZeRO stage,
recompute, microbatch or schedule), and the same plan on faster links and larger devices. Every number is a prediction;
nothing is estimated. Leaves out plans more than one change away: that is `solve`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gnomon.errors import GnomonError, PlanError
from gnomon.hardware import Cluster, Link, Node
from gnomon.plans import Mesh, Plan, Saved, Schedule
from gnomon.plans.check import V_SCHEDULES
from gnomon.prediction import Prediction, predict

GIB = 2**30
MORE_MEMORY = 10 * GIB
"""What a larger device has more."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A plan one change away."""

    what: str
    """The change: `tp 2 -> 4`."""
    prediction: Prediction | None
    """None if it cannot run."""
    why_not: str = ""
    """What it breaks, if it cannot run."""

    @property
    def fits(self) -> bool:
        """Whether it can run and fits."""
        return self.prediction is not None and self.prediction.fits


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What other machines would change."""

    what: str
    """`network 2x`, `links inside a node 2x`, `+10 GiB a device`."""
    step_s: float
    """Of the same plan; or of the best neighbour that then fits."""
    change: str = ""
    """The change of plan that it allows."""


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """Why a plan is as fast and as large as it is."""

    prediction: Prediction
    neighbours: tuple[Neighbour, ...]
    sensitivities: tuple[Sensitivity, ...]

    @property
    def computing(self) -> float:
        """Share of the step in which the busiest rank computes what the plan needs once."""
        parts = self.prediction.breakdown
        return sum(parts.get(kind, 0.0) for kind in ("F", "B", "I", "W")) / self.prediction.step_s

    @property
    def communication(self) -> float:
        """Share of the step in which the busiest rank waits for links."""
        parts = self.prediction.breakdown
        waited = sum(s for name, s in parts.items() if name.endswith("communication"))
        return waited / self.prediction.step_s

    @property
    def zero(self) -> tuple[tuple[int, int], ...]:
        """(ZeRO stage, peak bytes) of the plan and of the others that can run."""
        found = {self.prediction.plan.optimizer.zero: self.prediction.tightest.peak_bytes}
        for each in self.neighbours:
            if each.what.startswith("ZeRO") and each.prediction is not None:
                found[each.prediction.plan.optimizer.zero] = each.prediction.tightest.peak_bytes
        return tuple(sorted(found.items()))


def explain(prediction: Prediction) -> Reasons:
    """The reasons of a predicted plan; some twenty predictions. PlanError for a plan that lists its stages."""
    if prediction.plan.stages:
        raise PlanError("reasons are for plans of equal stages; this plan lists its stages one by one")
    neighbours = tuple(_predicted(prediction, what, plan) for what, plan in changes(prediction.plan))
    sensitivities = (*_links(prediction), *_memory(prediction, neighbours))
    return Reasons(prediction=prediction, neighbours=neighbours, sensitivities=sensitivities)


def _predicted(prediction: Prediction, what: str, plan: Plan) -> Neighbour:
    pricing = prediction.pricing
    try:
        found = predict(pricing.graph, pricing.cluster, plan, prediction.workload, pricing.stack)
    except GnomonError as error:
        return Neighbour(what=what, prediction=None, why_not=str(error).partition(";")[0])
    return Neighbour(what=what, prediction=found)


def changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """(change, plan with it), one change at a time."""
    mesh = plan.mesh
    for axis in ("tp", "pp", "cp"):
        size = getattr(mesh, axis)
        if mesh.dp_shard % 2 == 0:
            yield f"{axis} {size} -> {2 * size}", _moved(plan, axis, 2 * size, mesh.dp_shard // 2)
        if size % 2 == 0:
            yield f"{axis} {size} -> {size // 2}", _moved(plan, axis, size // 2, mesh.dp_shard * 2)
    micro = plan.schedule.micro_batch_size
    for size in () if micro is None else ((2 * micro, micro // 2) if micro % 2 == 0 else (2 * micro,)):
        yield f"microbatch {micro} -> {size}", replace(plan, schedule=replace(plan.schedule, micro_batch_size=size))
    for zero in (0, 1, 2, 3):
        if zero != plan.optimizer.zero and mesh.dp_shard * mesh.cp > 1:
            name = f"ZeRO {plan.optimizer.zero} -> {zero}"
            yield name, replace(plan, optimizer=replace(plan.optimizer, zero=zero))
    for preset in ("none", "selective", "full"):
        if preset != plan.saved.preset and not plan.saved.rules:
            yield f"recompute {preset}", replace(plan, saved=Saved(preset=preset))
    if mesh.tp > 1:
        on = plan.layout.sequence_parallel
        changed = replace(plan, layout=replace(plan.layout, sequence_parallel=not on))
        yield "without sequence parallelism" if on else "sequence parallel", changed
    for schedule in _schedules(plan) if mesh.pp > 1 else ():
        yield f"schedule {schedule.name}", replace(plan, schedule=schedule)


def _moved(plan: Plan, axis: str, size: int, shards: int) -> Plan:
    mesh: Mesh = replace(plan.mesh, **{axis: size, "dp_shard": shards})  # type: ignore[arg-type]
    schedule = plan.schedule
    if mesh.pp == 1:  # nothing to schedule
        schedule = replace(schedule, name="one_f_one_b", virtual_stages=1, placement="loop")
    sequence = plan.layout.sequence_parallel or axis == "tp"
    return replace(plan, mesh=mesh, schedule=schedule, layout=replace(plan.layout, sequence_parallel=sequence))


def _schedules(plan: Plan) -> Iterator[Schedule]:
    for name, virtual in (("one_f_one_b", 1), ("interleaved_one_f_one_b", 2), ("zero_bubble_h1", 1),
                          ("zero_bubble_v", 2)):  # fmt: skip
        if name != plan.schedule.name:
            placement = "v" if name in V_SCHEDULES else "loop"
            yield replace(plan.schedule, name=name, virtual_stages=virtual, placement=placement)  # type: ignore[arg-type]


def _links(prediction: Prediction) -> Iterator[Sensitivity]:
    """The same plan with faster links."""
    pricing = prediction.pricing
    kinds = (("network 2x", "nic"), ("links inside a node 2x", "intra"))
    for what, field in kinds:
        if field == "nic" and pricing.cluster.num_nodes == 1:
            continue
        found = predict(
            pricing.graph, faster(pricing.cluster, field), prediction.plan, prediction.workload, pricing.stack
        )
        yield Sensitivity(what=what, step_s=found.step_s)


def _doubled(link: Link) -> Link:
    return replace(link, bytes_per_s=2 * link.bytes_per_s)


def faster(cluster: Cluster, field: str) -> Cluster:
    """The cluster with twice the bandwidth of `nic` or `intra` links."""

    def doubled(node: Node) -> Node:
        if field == "intra":
            return replace(node, intra=_doubled(node.intra))
        return node if node.nic is None else replace(node, nic=_doubled(node.nic))

    return replace(cluster, groups=tuple(replace(group, node=doubled(group.node)) for group in cluster.groups))


def _memory(prediction: Prediction, neighbours: tuple[Neighbour, ...]) -> Iterator[Sensitivity]:
    """The fastest neighbour that more memory would allow, if it is faster."""
    best: Neighbour | None = None
    for each in neighbours:
        found = each.prediction
        if found is None or found.fits or found.step_s >= prediction.step_s:
            continue
        if all(rank.peak_bytes <= rank.limit_bytes + MORE_MEMORY for rank in found.memory):
            if best is None or best.prediction is None or found.step_s < best.prediction.step_s:
                best = each
    if best is not None and best.prediction is not None:
        yield Sensitivity(what="+10 GiB a device", step_s=best.prediction.step_s, change=best.what)
    else:
        yield Sensitivity(what="+10 GiB a device", step_s=prediction.step_s, change="no neighbour gains by it")
