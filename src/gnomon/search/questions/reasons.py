"""Reasons: what bounds a plan's step, what each neighbour of it gains or loses, what each axis buys, what the
runners-up of its search lose and where, and what other machines would change.

`explain(prediction, …)` predicts the plan's neighbours (one axis moved to or from data parallelism, another ZeRO stage,
recompute, microbatch, context or schedule), the plan without each of its axes, the plans that its search found next,
and the same plan on other links and larger devices. Every number is a prediction; nothing is estimated. Leaves out
plans further away: that is `solve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from gnomon.errors import GnomonError
from gnomon.graph import Graph
from gnomon.hardware import scaled
from gnomon.plans import Goal, Plan, Saved, Workload
from gnomon.prediction import Prediction, predict
from gnomon.search.planning import Loss, loss_between
from gnomon.search.questions.stage_changes import evened, stage_changes
from gnomon.search.refinement.changes import changes, move_ranks, with_experts
from gnomon.search.refinement.choices import choices_of, show_value
from gnomon.search.space.dispatchers import dispatchers, has_dispatcher
from gnomon.software import proposes

GIB = 2**30
SHARE = Goal().memory_fraction
"""Of a device's memory: what a search fills unless it is told otherwise."""

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
class Other:
    """Another plan of the same search."""

    prediction: Prediction
    """Its time and memory."""
    loss: Loss
    """Against the plan that is explained; negative seconds for a faster one."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What other machines would change."""

    what: str
    """`network 2x`, `links inside a node 2x`, `network half`, `+10 GiB a device`."""
    step_s: float
    """Of the same plan; or of the best neighbour that then fits."""
    change: str = ""
    """The change of plan that it allows."""


@dataclass(frozen=True, kw_only=True)
class OtherJob:
    """The job with something changed that is no decision of a plan: its mathematics, or how much comes in."""

    option: str
    """`precision` or `global_batch`, as terms of a job file name it."""
    what: str
    """The change in words."""
    prediction: Prediction
    """Time and memory of the same plan with it."""


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """Why a plan is as fast and as large as it is."""

    prediction: Prediction
    """Of the plan that is explained."""
    neighbours: tuple[Neighbour, ...]
    """Plans with one decision changed, with what that costs or gains."""
    sensitivities: tuple[Sensitivity, ...]
    """How much the step changes with properties of the machines."""
    bought: tuple[Neighbour, ...] = ()
    """The plan without each axis that it has, its ranks moved to data parallelism."""
    runners_up: tuple[Other, ...] = ()
    """The next plans of its search."""
    too_large: tuple[Other, ...] = ()
    """Faster plans of its search that do not fit."""
    other_jobs: tuple[OtherJob, ...] = ()
    """The job in another precision, or with a larger batch."""

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
        peaks = {self.prediction.plan.optimizer.zero: self.prediction.tightest.peak_bytes}
        for neighbour in self.neighbours:
            if neighbour.what.startswith("ZeRO") and neighbour.prediction is not None:
                peaks[neighbour.prediction.plan.optimizer.zero] = neighbour.prediction.tightest.peak_bytes
        return tuple(sorted(peaks.items()))


def explain(
    prediction: Prediction,
    *,
    runners_up: Sequence[Plan] = (),
    too_large: Sequence[Plan] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Reasons:
    """The reasons of a predicted plan; some thirty predictions.

    runners_up, too_large: plans of the search that made it, as its plan file lists them. on_progress: is called with
    (plans predicted, all of them) after each.
    """
    pricing, plan = prediction.pricing, prediction.plan
    graph = pricing.graph
    if plan.stages:
        moves = tuple(stage_changes(plan, graph, pricing.cluster, prediction.workload))
        less = tuple(evened(plan, graph, prediction.workload))
    else:
        routed = any(block.does("routes") for block in graph.blocks)
        moves = (*changes(plan, experts=routed), *sent_otherwise(prediction), *undone(plan, graph))
        less = tuple(without(plan))
    total, done = len(moves) + len(less) + len(runners_up) + len(too_large), count(1)

    def look(what: str, changed: Plan) -> Neighbour:
        neighbour = _predicted(prediction, what, changed)
        if on_progress is not None:
            on_progress(next(done), total)
        return neighbour

    moves = tuple((what, changed) for what, changed in moves if proposes(pricing.stack, plan, changed))
    neighbours = tuple(look(what, changed) for what, changed in moves)
    bought = tuple(look(what, changed) for what, changed in less)
    larger = _others(prediction, [look("", other) for other in too_large])
    sensitivities = (*_links(prediction), *_memory(prediction, neighbours, larger))
    return Reasons(
        prediction=prediction,
        neighbours=neighbours,
        sensitivities=sensitivities,
        bought=bought,
        runners_up=_others(prediction, [look("", other) for other in runners_up]),
        too_large=larger,
        other_jobs=tuple(_other_jobs(prediction)),
    )


BATCHES = (4, 16)
"""How many times as many sequences a step, where stages wait for each other or every step sums gradients."""


def _other_jobs(prediction: Prediction) -> Iterator[OtherJob]:
    """The job in bf16 where it computes in fp32 on devices that are faster in bf16, as when a switch was forgotten; and
    with more sequences a step, where that makes a token at least a tenth faster."""
    plan, work = prediction.plan, prediction.workload
    base = prediction.tokens_per_s_per_device
    if plan.precision.compute in ("fp32", "tf32"):
        half = replace(plan.precision, param="bf16", compute="bf16", grad="fp32", reduce="fp32", master="fp32")
        changed = _asked(prediction, replace(plan, precision=half), work)
        if changed is not None and changed.tokens_per_s_per_device > 1.1 * base:
            yield OtherJob(
                option="precision", what="in bf16, with a copy of the parameters in fp32", prediction=changed
            )
        if plan.precision.compute == "fp32":
            tensor = replace(plan.precision, compute="tf32")
            changed = _asked(prediction, replace(plan, precision=tensor), work)
            if changed is not None and changed.tokens_per_s_per_device > 1.1 * base:
                what = "fp32 products in TF32, which NVIDIA's containers switch on"
                yield OtherJob(option="tf32", what=what, prediction=changed)
    total = work.global_batch_size
    for times in BATCHES if total is not None and work.seq_len is not None and not plan.stages else ():
        assert total is not None
        changed = _asked(prediction, plan, replace(work, global_batch_size=times * total))
        if changed is not None and changed.tokens_per_s_per_device > 1.1 * base:
            yield OtherJob(option="global_batch", what=f"global batch {total} -> {times * total}", prediction=changed)


def _asked(prediction: Prediction, plan: Plan, work: Workload) -> Prediction | None:
    pricing = prediction.pricing
    try:
        return predict(pricing.graph, pricing.cluster, plan, work, pricing.stack)
    except GnomonError:
        return None


def within_share(prediction: Prediction, more_bytes: int = 0) -> bool:
    """Whether every rank stays within the share of its device that a search fills, were it so much larger."""
    return all(rank.peak_bytes <= SHARE * (rank.limit_bytes + more_bytes) for rank in prediction.memory)


def _others(prediction: Prediction, neighbours: Iterable[Neighbour]) -> tuple[Other, ...]:
    able = (neighbour.prediction for neighbour in neighbours)
    predictions = (Other(prediction=other, loss=loss_between(prediction, other)) for other in able if other is not None)
    return tuple(sorted(predictions, key=lambda other: other.prediction.step_s))


def _predicted(prediction: Prediction, what: str, plan: Plan) -> Neighbour:
    pricing = prediction.pricing
    try:
        predicted = predict(pricing.graph, pricing.cluster, plan, prediction.workload, pricing.stack)
    except GnomonError as error:
        return Neighbour(what=what, prediction=None, why_not=str(error).partition(";")[0])
    return Neighbour(what=what, prediction=predicted)


def sent_otherwise(prediction: Prediction) -> Iterator[tuple[str, Plan]]:
    """(change, plan with it), for every other way for tokens to get to their experts that machines and program have."""
    plan, pricing = prediction.plan, prediction.pricing
    now = plan.layout.dispatch or pricing.stack.experts.moe_dispatch or "all_to_all"
    for way in dispatchers(pricing.cluster) if plan.mesh.ep > 1 else ():
        if way != now and has_dispatcher(pricing.stack, way):
            yield f"dispatch {now} -> {way}", replace(plan, layout=replace(plan.layout, dispatch=way))


def undone(plan: Plan, graph: Graph) -> Iterator[tuple[str, Plan]]:
    """(choice, plan with its default), for every choice beyond the exact search that the plan makes otherwise."""
    for option, value in choices_of(plan):
        if option.name == "dispatch":  # `sent_otherwise` says what each way takes
            continue
        usual = option.of(Plan())
        yield (
            f"{option.name} {show_value(option, value, plan)} -> {show_value(option, usual, plan)}",
            option.make(plan, graph, usual),
        )


def without(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """(axis and its size, or method, plan without it), for every axis of several ranks but data parallelism, and every
    method of `schedule.passes`."""
    mesh = plan.mesh
    for axis in ("tp", "cp", "pp"):
        size = getattr(mesh, axis)
        if size > 1 and (changed := move_ranks(plan, axis, 1, mesh.dp_shard * size)):
            yield f"{axis} {size}", changed
    usual = replace(plan.experts, replicas=0, placement=(), rebalance_every=0)
    if mesh.ep > 1 and (changed := with_experts(plan, 1)):
        yield f"ep {mesh.ep}", replace(changed, experts=replace(usual, speculate=False))
    if usual != plan.experts:
        yield "flexmoe" if plan.experts.replicas else "brainstorm", replace(plan, experts=usual)
    if plan.experts.threshold < 1.0:
        yield "adaptive_gating", replace(plan, experts=replace(plan.experts, threshold=1.0))
    if plan.optimizer.zero and mesh.dp_shard * mesh.cp > 1:
        yield f"ZeRO {plan.optimizer.zero}", replace(plan, optimizer=replace(plan.optimizer, zero=0))
    if plan.saved.preset != "none" and not plan.saved.rules:
        yield f"recompute {plan.saved.preset}", replace(plan, saved=Saved())
    for dropped in plan.schedule.passes:
        rest = tuple(other for other in plan.schedule.passes if other != dropped)
        yield dropped.name, replace(plan, schedule=replace(plan.schedule, passes=rest))


def _links(prediction: Prediction) -> Iterator[Sensitivity]:
    """The same plan with other links. A machine that was measured has no links to scale."""
    pricing = prediction.pricing
    if any(group.node.device.measured is not None for group in pricing.cluster.groups):
        return
    kinds: list[tuple[str, dict[str, float]]] = [("links inside a node 2x", {"links": 2.0})]
    if pricing.cluster.num_nodes > 1:
        kinds = [("network 2x", {"network": 2.0}), ("network half", {"network": 0.5}), *kinds]
    for what, factors in kinds:
        machines = scaled(pricing.cluster, **factors)  # type: ignore[arg-type]
        predicted = predict(pricing.graph, machines, prediction.plan, prediction.workload, pricing.stack)
        yield Sensitivity(what=what, step_s=predicted.step_s)


def _memory(
    prediction: Prediction, neighbours: tuple[Neighbour, ...], others: tuple[Other, ...]
) -> Iterator[Sensitivity]:
    """The fastest neighbour, or faster plan of the search, that more memory would allow."""
    able = [(neighbour.what, neighbour.prediction) for neighbour in neighbours if neighbour.prediction is not None]
    able += [("another plan of the search", other.prediction) for other in others]
    gains = [
        (predicted.step_s, what, predicted)
        for what, predicted in able
        if predicted.step_s < prediction.step_s and not within_share(predicted) and within_share(predicted, MORE_MEMORY)
    ]
    if not gains:
        yield Sensitivity(what="+10 GiB a device", step_s=prediction.step_s, change="no plan looked at gains by it")
        return
    step_s, what, fastest = min(gains, key=lambda gain: gain[:2])
    again = prediction.plan.saved.preset
    drops = f", drops recompute {again}" if again != fastest.plan.saved.preset == "none" else ""
    yield Sensitivity(what="+10 GiB a device", step_s=step_s, change=what + drops)
