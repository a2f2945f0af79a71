"""What to change when a plan does not or may not fit: neighbouring plans, each predicted like any other.

`advice(prediction)` tries changes in the order of how little they change a job and returns those that fit, the fastest
first, with their time and memory. A bounded number of predictions. Leaves out other meshes than those that move ranks
from data to tensor or pipeline parallelism, which are for `search`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Literal

from gnomon.errors import GnomonError
from gnomon.plans import Offload, Plan, Saved
from gnomon.prediction.predict import Prediction, predict
from gnomon.software import proposes

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


Change = tuple[tuple[str, ...], Plan]
"""(each single change in words, the plan with all of them)."""
Single = tuple[str, Plan]


def advice(prediction: Prediction, *, most: int = 4) -> tuple[Advice, ...]:
    """Changes after which every rank fits with room, the fastest first, `most` of them; empty for a plan that has it.

    One change at a time, then pairs, then threes, where no smaller set is part of them that is enough. At most TRIES
    predictions: an empty result for a plan that does not fit says that none of those fits, not that nothing does.
    """
    if prediction.has_room:
        return ()
    plan = prediction.plan
    found: list[Advice] = []
    enough: list[frozenset[str]] = []
    tries, limit = 0, max(FEWEST, min(TRIES, TRIES * MANY_DEVICES // plan.world_size))
    for names, changed in chain(_changes(plan), _several(plan, 2), _several(plan, 3)):
        if tries == limit:
            break
        if any(fewer < frozenset(names) for fewer in enough):
            continue
        if not proposes(prediction.pricing.stack, plan, changed):
            continue
        tries += 1
        made = _try(prediction, " and ".join(names), changed)
        if made is not None:
            found.append(made)
            enough.append(frozenset(names))
    return tuple(sorted(found, key=lambda each: each.step_s)[:most])


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
            yield tuple(names), changed


def _changes(plan: Plan) -> Iterator[Change]:
    """Single changes, the least first."""
    for kind in (_micro_batch, _recompute, _sequence_parallel, _zero, _offload, _parallel):
        yield from (((name,), changed) for name, changed in kind(plan))


def _micro_batch(plan: Plan) -> Iterator[Single]:
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


def _recompute(plan: Plan) -> Iterator[Single]:
    presets: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    if plan.saved.rules:
        return
    for preset in presets[presets.index(plan.saved.preset) + 1 :]:
        yield f"recompute {preset}", replace(plan, saved=Saved(preset=preset))


def _sequence_parallel(plan: Plan) -> Iterator[Single]:
    if not plan.layout.sequence_parallel and plan.stage_mesh(0).tp > 1:
        yield "sequence_parallel", replace(plan, layout=replace(plan.layout, sequence_parallel=True))


def _zero(plan: Plan) -> Iterator[Single]:
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    mesh, over = plan.stage_mesh(0), ""
    if mesh.dp_shard * mesh.cp == 1:
        if mesh.dp_replicate == 1 or plan.stages:
            return
        over = f" over {mesh.dp_replicate} replicas (dp_shard)"
        plan = replace(plan, mesh=replace(plan.mesh, dp_shard=mesh.dp_replicate, dp_replicate=1))
    for zero in stages[plan.optimizer.zero + 1 :]:
        yield f"ZeRO stage {zero}{over}", replace(plan, optimizer=replace(plan.optimizer, zero=zero))


def _offload(plan: Plan) -> Iterator[Single]:
    if plan.optimizer.offload is None:
        moved = replace(plan.optimizer, offload=Offload(), clip=False)
        name = "optimizer on the host" + (", no clipping" if plan.optimizer.clip else "")
        yield name, replace(plan, optimizer=moved)


def _parallel(plan: Plan) -> Iterator[Single]:
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
