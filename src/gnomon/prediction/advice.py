"""What to change when a plan does not or may not fit: neighbouring plans, each predicted like any other.

`advice(prediction)` tries changes in the order of how little they change a job and returns those that fit, with their
time and memory. A bounded number of predictions. Leaves out other meshes than those that move ranks from data to tensor
or pipeline parallelism, which are for `search`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Literal

from gnomon.errors import GnomonError
from gnomon.plans import Offload, Plan, Saved
from gnomon.prediction.predict import Prediction, predict

TRIES = 24
"""Predictions at most: with 20 ms each, half a second. Fewer, but FEWEST, for jobs of thousands of devices."""
FEWEST = 4
MANY_DEVICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change after which every rank fits with room."""

    what: str
    """In words, as in `micro_batch_size 4 -> 2 and recompute full`."""
    plan: Plan
    """The plan with it."""
    step_s: float
    """Its predicted step."""
    peak_bytes: int
    """Predicted peak of its tightest rank."""
    limit_bytes: int
    """Memory of that rank's device."""


Change = tuple[str, Plan]


def advice(prediction: Prediction, *, most: int = 4) -> tuple[Advice, ...]:
    """Changes after which every rank fits with room, the least first, `most` of them; empty for a plan that has it.

    One change at a time; then, when no single one is enough, pairs, and threes. At most TRIES predictions: an empty
    result for a plan that does not fit says that none of those fits, not that nothing does.
    """
    if prediction.has_room:
        return ()
    singles = list(_changes(prediction.plan))
    found: list[Advice] = []
    tries, limit = 0, max(FEWEST, min(TRIES, TRIES * MANY_DEVICES // prediction.plan.world_size))
    for names, plan in chain(singles, _several(prediction.plan, 2), _several(prediction.plan, 3)):
        if tries == limit or (found and tries >= len(singles)) or len(found) == most:
            break
        tries += 1
        made = _try(prediction, names, plan)
        if made is not None:
            found.append(made)
    return tuple(found)


def _try(prediction: Prediction, what: str, plan: Plan) -> Advice | None:
    pricing = prediction.pricing
    try:
        tried = predict(pricing.graph, pricing.cluster, plan, prediction.workload, pricing.stack)
    except GnomonError:  # this neighbour cannot run or has no price; there are others
        return None
    if not tried.has_room:
        return None
    tightest = tried.tightest
    return Advice(
        what=what, plan=plan, step_s=tried.step_s, peak_bytes=tightest.peak_bytes, limit_bytes=tightest.limit_bytes
    )


def _several(plan: Plan, count: int) -> Iterator[Change]:
    """Plans with `count` changes of different kinds, each taken as far as it goes; those that free most come first."""
    kinds = (_zero, _recompute, _parallel, _micro_batch, _offload)
    for chosen in combinations(kinds, count):
        names, changed = [], plan
        for kind in chosen:
            last = list(kind(changed))[-1:]
            if not last:
                break
            names.append(last[0][0])
            changed = last[0][1]
        else:
            yield " and ".join(names), changed


def _changes(plan: Plan) -> Iterator[Change]:
    """Single changes, the least first."""
    for kind in (_micro_batch, _recompute, _sequence_parallel, _zero, _offload, _parallel):
        yield from kind(plan)


def _micro_batch(plan: Plan) -> Iterator[Change]:
    size = plan.schedule.micro_batch_size
    while size is not None and size > 1 and size % 2 == 0:
        size //= 2
        name = f"micro_batch_size {plan.schedule.micro_batch_size} -> {size}"
        yield name, replace(plan, schedule=replace(plan.schedule, micro_batch_size=size))
    count = plan.schedule.num_microbatches
    if plan.schedule.micro_batch_size is None and count is not None:
        for more in (2 * count, 4 * count):
            schedule = replace(plan.schedule, num_microbatches=more)
            yield f"num_microbatches {count} -> {more}", replace(plan, schedule=schedule)


def _recompute(plan: Plan) -> Iterator[Change]:
    presets: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    if plan.saved.rules:
        return
    for preset in presets[presets.index(plan.saved.preset) + 1 :]:
        yield f"recompute {preset}", replace(plan, saved=Saved(preset=preset))


def _sequence_parallel(plan: Plan) -> Iterator[Change]:
    if not plan.layout.sequence_parallel and plan.stage_mesh(0).tp > 1:
        yield "sequence_parallel", replace(plan, layout=replace(plan.layout, sequence_parallel=True))


def _zero(plan: Plan) -> Iterator[Change]:
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    mesh = plan.stage_mesh(0)
    if mesh.dp_shard * mesh.cp == 1:
        return
    for zero in stages[plan.optimizer.zero + 1 :]:
        yield f"ZeRO stage {zero}", replace(plan, optimizer=replace(plan.optimizer, zero=zero))


def _offload(plan: Plan) -> Iterator[Change]:
    if plan.optimizer.offload is None:
        moved = replace(plan.optimizer, offload=Offload(), clip=False)
        name = "optimizer on the host" + (", no clipping" if plan.optimizer.clip else "")
        yield name, replace(plan, optimizer=moved)


def _parallel(plan: Plan) -> Iterator[Change]:
    """Half, then a quarter of the data-parallel ranks, the others for tensor or pipeline parallelism."""
    mesh, size = plan.mesh, plan.schedule.micro_batch_size
    if plan.stages:
        return
    for ways in (2, 4):
        if mesh.dp_shard % ways:
            return
        layout = replace(plan.layout, sequence_parallel=True)
        moved = replace(mesh, dp_shard=mesh.dp_shard // ways, tp=mesh.tp * ways)
        yield f"tp {mesh.tp} -> {moved.tp}", replace(plan, mesh=moved, layout=layout)
        if moved.dp_shard * mesh.cp * mesh.tp % (mesh.ep * mesh.etp):
            continue  # a pipeline would leave too few ranks to the experts
        if size is not None or plan.schedule.num_microbatches:
            moved = replace(mesh, dp_shard=mesh.dp_shard // ways, pp=mesh.pp * ways)
            schedule = replace(plan.schedule, layers_per_stage=())  # of other stages
            yield f"pp {mesh.pp} -> {moved.pp}", replace(plan, mesh=moved, schedule=schedule)
