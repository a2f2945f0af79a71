"""`lower`: from a graph and a plan to the Program that simulator and runtime both follow.

One rank class for each pipeline rank, with as many ranks as its stages' mesh (several where data-parallel workers have
other shares or devices than each other); compute rows by the plan's schedule, then what ends the step (reductions over
data-parallel ranks, tied parameters, the update), then messages (those that skip stages too), then the plan's passes.
What a plan asks for and is not expressed here is a PlanError, never left out. Left out: durations and sizes, which
prices look up by the Program's keys, and everything within a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from gnomon.errors import PlanError, nearest
from gnomon.graph import Graph, Layer
from gnomon.hardware import Cluster
from gnomon.plans import Pass, Plan, Unit, Workload, batch, check, normalised, stage_layers, transfers
from gnomon.program import Communicator, Program
from gnomon.schedules.dualpipe_v import dualpipe_v
from gnomon.schedules.gpipe import gpipe
from gnomon.schedules.gradients import with_all_reduce, with_optimizer
from gnomon.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b, looped_bfs
from gnomon.schedules.messages import with_messages
from gnomon.schedules.one_f_one_b import dapple_warm_up, one_f_one_b
from gnomon.schedules.optimizer import apply_optimizer, effective_zero, with_meetings
from gnomon.schedules.rows import Rows
from gnomon.schedules.shared import Shared, shared_buffers, shared_stages
from gnomon.schedules.skips import Skip, skip_buffers, with_skips
from gnomon.schedules.tensor_sums import tensor_sums, with_tensor_sums
from gnomon.schedules.v_half import v_half, v_min
from gnomon.schedules.workers import Workers, alike, divided_units, meet, split
from gnomon.schedules.zero_bubble import interleaved_zero_bubble, zero_bubble_h1, zero_bubble_h2
from gnomon.schedules.zero_bubble_v import zero_bubble_v

FLAT: Mapping[str, Callable[[int, int], Rows]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_h2": zero_bubble_h2,
    "zero_bubble_v": zero_bubble_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}
"""Schedules whose number of stages a rank is fixed: (ranks, microbatches) -> rows."""

LOOPED: Mapping[str, Callable[[int, int, int], Rows]] = {
    "interleaved_one_f_one_b": interleaved_one_f_one_b,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "looped_bfs": looped_bfs,
}
"""Schedules that take the number of stages a rank too."""

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

ProgramPass = Callable[[Program, Pass], Program]
"""A pass of the plan: a Program and the pass with its parameters -> a Program."""


def lower(
    graph: Graph,
    plan: Plan,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    *,
    messages: Literal["buffered", "rendezvous"] = "buffered",
    passes: Mapping[str, ProgramPass] | None = None,
) -> Program:
    """The Program of one step. PlanError when the plan cannot run, or asks for what is not expressed here.

    workload: gives the units their sequences and, with micro_batch_size, their number; left out, the plan's
    num_microbatches plain ones. messages: whether a send between stages ends without its receive, or both start and
    end together; a property of the software, not of the plan. passes: further passes by name; one that needs prices
    has them bound.
    """
    check(plan, graph, cluster, workload)
    _refuse_unexpressed(plan)
    count, units = _units(plan, workload)
    rows = compute_rows(plan, count)
    zero, layers, workers = effective_zero(plan), stage_layers(plan, graph), alike(plan, cluster)
    if len(workers) > 1:
        if zero:
            raise PlanError(f"ZeRO stage {zero} over unlike workers has no rows yet; use optimizer.zero = 0")
        rows, units = split(rows, len(workers)), divided_units(units, count, workers)
    shared = shared_stages(graph, layers, plan.pipeline_ranks)
    rows = _with_reductions(rows, plan, shared, unlike=len(workers) > 1)
    rows = with_optimizer(rows, without=[same for _, same in shared])
    parts = [(plan.stage_mesh(stage), part) for stage, part in enumerate(layers)]
    if zero == 3:
        parts = [(mesh, (layer,)) for mesh, part in parts for layer in part]
    tied, sums = tied_stages(graph, [part for _, part in parts]), tensor_sums(graph, plan.layout, parts)
    if not zero:  # a pass that divides gradients must come before ranks meet
        rows = with_tensor_sums(rows, sums)
        rows = with_meetings(rows, tied, clip=plan.optimizer.clip and plan.optimizer.offload is None)
    program = _program(rows, graph, plan, units, workers, shared, messages)
    program = apply_optimizer(program, plan, [len(part) for part in layers])
    if zero and tied and plan.optimizer.offload is not None:
        raise PlanError("tied weights on several ranks with both ZeRO and optimizer.offload have no rows yet; drop one")
    if zero:
        buffer = "G" if zero == 1 else "GS"
        rows = with_tensor_sums(Rows.of(program), sums, buffer=buffer)
        rows = with_meetings(rows, tied, clip=plan.optimizer.clip, buffer=buffer)
        program = rows.like(program)
    for given in plan.schedule.passes:
        if given.name not in ROW_PASSES:
            program = _find(given, passes or {})(program, given)
    return program


def compute_rows(plan: Plan, num_microbatches: int) -> Rows:
    """The plan's schedule: forwards and backwards of every pipeline rank."""
    name, ranks = plan.schedule.name, plan.num_pipeline_ranks
    chosen = [given for given in plan.schedule.passes if given.name in ROW_PASSES]
    if chosen and name != "one_f_one_b":
        raise PlanError(f"pass {chosen[0].name} changes one_f_one_b, but the schedule is {name}; choose one of the two")
    if chosen:
        rows = ROW_PASSES[chosen[-1].name](ranks, num_microbatches, chosen[-1])
    elif name in FLAT:
        rows = FLAT[name](ranks, num_microbatches)
    elif name in LOOPED:
        rows = LOOPED[name](ranks, num_microbatches, plan.num_stages // ranks)
    else:
        raise PlanError(f"schedule {name!r} has no builder yet; there are {', '.join(sorted({*FLAT, *LOOPED}))}")
    _check_placement(plan, rows)
    return rows


def tied_stages(graph: Graph, stages: Sequence[Sequence[Layer]]) -> tuple[tuple[int, ...], ...]:
    """Sets of stages that hold the same parameter (embedding and head, as a rule), each once, in order of stages."""
    holders: dict[str, dict[int, None]] = {}
    for stage, layers in enumerate(stages):
        for layer in layers:
            for tensor in graph.block(layer.call.block).parameters:
                holders.setdefault(layer.call.parameter_name(tensor.name, layer.index), {})[stage] = None
    return tuple(sorted({tuple(found) for found in holders.values() if len(found) > 1}))


def _dapple(ranks: int, num_microbatches: int, given: Pass) -> Rows:
    params = dict(given.params)
    policy = params.pop("policy", None)
    if params or policy not in ("p", "2p"):
        raise PlanError(f"pass dapple_warmup takes policy = 'p' or '2p', not {dict(given.params)}")
    return one_f_one_b(ranks, num_microbatches, warm_up=dapple_warm_up("p" if policy == "p" else "2p", ranks))


ROW_PASSES: Mapping[str, Callable[[int, int, Pass], Rows]] = {"dapple_warmup": _dapple}
"""Passes that choose the order of compute rows themselves: (ranks, microbatches, pass) -> rows."""


def _with_reductions(rows: Rows, plan: Plan, shared: Sequence[Shared], *, unlike: bool) -> Rows:
    """The rows with the reductions over data-parallel ranks. unlike: of several classes, which meet in them."""
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    reduced = {stage for stage, mesh in enumerate(meshes) if mesh.data_ranks * mesh.cp > 1}
    rows = with_all_reduce(rows, reduced - {s for pair in shared for s in pair}, overlap=plan.overlap.grad_reduce)
    rows = with_all_reduce(rows, reduced & {one for one, _ in shared}, overlap=False)  # complete only after both
    return meet(rows, plan.pipeline_ranks) if unlike else rows


def _program(
    rows: Rows,
    graph: Graph,
    plan: Plan,
    units: tuple[Unit, ...],
    workers: Sequence[Workers],
    shared: Sequence[Shared],
    messages: Literal["buffered", "rendezvous"],
) -> Program:
    """The Program of the rows, with messages between stages."""
    chains, skips = _chains(graph, plan)
    rows = with_skips(rows, skips, blocking=not plan.overlap.pipeline_sends)
    rows = with_messages(rows, chains=chains, blocking=() if plan.overlap.pipeline_sends else MESSAGES)
    ranks_of = dict(zip(plan.pipeline_ranks, plan.stage_ranks, strict=True))
    members = [len(group.members) for group in workers]
    counts = tuple(len(ranks_of[r]) * n // sum(members) for r in range(plan.num_pipeline_ranks) for n in members)
    names = () if messages == "buffered" else ("fwd", "bwd", *(("skip", "skip_grad") if skips else ()))
    comms = tuple(Communicator(name=name, semantics=messages) for name in names)
    return rows.program(
        units=units,
        counts=counts,
        buffers=skip_buffers(skips),
        chains=chains,
        comms=comms,
        aliases=shared_buffers(shared),
    )


def _refuse_unexpressed(plan: Plan) -> None:
    """PlanError for fields that no row would show: left out, they would make the Program a different plan's."""
    device_of = plan.device_of
    if len(set(device_of)) < len(device_of):
        rank = next(rank for rank, device in enumerate(device_of) if device in device_of[:rank])
        raise PlanError(
            f"placement puts ranks {device_of.index(device_of[rank])} and {rank} on device {device_of[rank]}, where "
            f"they would take turns, but rows here are of ranks that run at once; give each rank a device of its own, "
            f"or build the Program with gnomon.schedules.easyscale"
        )
    if plan.overlap.priority and not any(given.name not in ROW_PASSES for given in plan.schedule.passes):
        raise PlanError(
            f"overlap.priority = {list(plan.overlap.priority)}, but collectives are issued in the order in which they "
            f"are ready; name the pass that reorders them in schedule.passes, or leave priority out"
        )


def _units(plan: Plan, workload: Workload | None) -> tuple[int, tuple[Unit, ...]]:
    """Number of microbatches, and what each holds over all data-parallel ranks (nothing said without a workload)."""
    if workload is None:
        if plan.schedule.num_microbatches is None:
            raise PlanError("the number of microbatches follows from the batch; give a workload or num_microbatches")
        return plan.schedule.num_microbatches, ()
    count, size = batch(plan, workload)
    lengths = workload.sequence_lengths()
    pieces = [tuple((i, 0, lengths[i]) for i in range(first, first + size)) for first in range(0, count * size, size)]
    return count, normalised([Unit(pieces=part) for part in pieces])


def _chains(graph: Graph, plan: Plan) -> tuple[tuple[int, ...], tuple[Skip, ...]]:
    """(stages that read nothing from the stage before them, pairs of stages of which one reads the other from afar)."""
    pairs = {(transfer.source, transfer.target) for transfer in transfers(plan, graph)}
    starts = tuple(stage for stage in range(plan.num_stages) if (stage - 1, stage) not in pairs)
    return starts, tuple(sorted((a, b) for a, b in pairs if b != a + 1))


def _check_placement(plan: Plan, rows: Rows) -> None:
    """PlanError unless the schedule puts every stage on the rank that the plan gives it."""
    scheduled = np.full(rows.num_stages, -1)
    scheduled[rows.stage] = rows.rank_class
    if tuple(scheduled.tolist()) != plan.pipeline_ranks:
        raise PlanError(
            f"schedule {plan.schedule.name} puts stages 0 … {rows.num_stages - 1} on ranks {scheduled.tolist()}, but "
            f"the plan has them on {list(plan.pipeline_ranks)}; change placement, virtual_stages or the stages' devices"
        )


def _find(given: Pass, passes: Mapping[str, ProgramPass]) -> ProgramPass:
    if given.name not in passes:
        known = sorted({*ROW_PASSES, *passes})
        raise PlanError(f"unknown pass {given.name!r}{nearest(given.name, known)}; there are {', '.join(known)}")
    return passes[given.name]
