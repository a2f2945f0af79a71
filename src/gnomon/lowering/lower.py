"""`lower`: from a graph and a plan to the Program that simulator and runtime both follow.

One rank class for each pipeline rank, with as many ranks as its stages' mesh (several where data-parallel workers have
other shares or devices than each other); compute rows by the plan's schedule, then what ends the step (reductions over
data-parallel ranks, tied parameters, the update), then messages (those that skip stages too).
What a plan asks for and is not expressed here is a PlanError, never left out. Left out: durations and sizes, which
prices look up by the Program's keys, and everything within a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gnomon import orders
from gnomon.errors import PlanError
from gnomon.graph import Graph, Layer
from gnomon.hardware import Cluster
from gnomon.lowering.blocks import with_blocks
from gnomon.lowering.chunked import BUFFERS as CHUNK_BUFFERS
from gnomon.lowering.chunked import chunk_pass, chunkflow
from gnomon.lowering.data_parallel import moved_to_host
from gnomon.lowering.exchanges import apart, composites, side_by_side, with_exchanges
from gnomon.lowering.gradient_buckets import gradient_buckets, with_gradient_buckets, with_shard_buckets
from gnomon.lowering.gradients import with_all_reduce, with_optimizer
from gnomon.lowering.messages import with_messages, with_polled
from gnomon.lowering.optimizer import apply_optimizer, with_meetings
from gnomon.lowering.shared import Shared, shared_buffers, shared_stages
from gnomon.lowering.skips import Skip, skip_buffers, with_skips
from gnomon.lowering.tensor_sums import tensor_sums, with_tensor_sums
from gnomon.lowering.units import worker_units
from gnomon.lowering.workers import Workers, alike, divided_units, meet, split
from gnomon.orders.one_f_one_b import DAPPLE, dapple_warm_up, one_f_one_b
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.orders.patterns.vocabulary import BUFFERS
from gnomon.plans import (
    Mesh,
    Optimizer,
    Overlap,
    Pass,
    Plan,
    Schedule,
    Unit,
    Workload,
    batch,
    check,
    divided_layers,
    normalised,
    stage_layers,
    transfers,
)
from gnomon.plans.expert_rows import Part, has_rows, part_of, taken_apart
from gnomon.plans.experts import under
from gnomon.plans.groups import layer_groups
from gnomon.plans.plan import effective_zero
from gnomon.plans.stages import held_by_several
from gnomon.program import Communicator, Program, with_buffers
from gnomon.program.program import MAX_ROWS, MAX_UNITS
from gnomon.program.rows import Rows, repeated
from gnomon.sharding.homes import routed_tensors

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

Messages = Literal["buffered", "rendezvous", "polled"]
"""How messages between stages go: see `lower`."""


def lower(
    graph: Graph,
    plan: Plan,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    *,
    messages: Messages = "buffered",
    by_layer: bool = False,
) -> Program:
    """The Program of one step, before the methods of `schedule.passes` that rewrite it (`gnomon.methods`). PlanError
    when the plan cannot run, or asks for what is not expressed here.

    workload: gives the units their sequences and, with micro_batch_size, their number; left out, the plan's
    num_microbatches plain ones. messages: whether a send between stages ends without its receive, or both start and
    end together, or the host sleeps between looks at each; a property of the software, not of the plan. by_layer: a row
    for each layer even where nothing acts inside a stage; where something does it is so anyway. With it, gradients are
    reduced in buckets of `overlap.bucket_bytes`, one row each; without it a stage's are one row, and
    what of it is exposed is a matter of its price.
    """
    check(plan, graph, cluster, workload)
    graph = under(graph, plan)
    if has_rows(plan):
        cut = taken_apart(plan, graph)
        graph, plan = cut.graph, cut.plan
    return build(outline(graph, plan, cluster, workload, by_layer=by_layer), messages=messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """All that a plan's Program follows from, passes that edit it aside: plans of one outline have the same rows."""

    schedule: Schedule
    """Of the plan, without what rows do not show."""
    overlap: Overlap
    """Of the plan."""
    optimizer: Optimizer
    """Of the plan."""
    zero: int
    """ZeRO stage, 0 where there is nothing to divide over."""
    replicated: bool
    """Whether shards have copies (`dp_replicate`)."""
    pipeline_ranks: tuple[int, ...]
    """Pipeline rank of each stage."""
    counts: tuple[int, ...]
    """Ranks of each rank class."""
    num_microbatches: int
    """Of one step."""
    units: tuple[Unit, ...]
    """What each holds; none where nothing is said."""
    workers: tuple[Workers, ...]
    """Data-parallel workers that are alike."""
    layers: tuple[int, ...]
    """Of each stage, where each is gathered by itself, or its gradient goes to the host by itself; else none."""
    buckets: tuple[tuple[int, ...], ...]
    """Layers whose gradients are reduced together; none where each is by itself, or stages are whole."""
    stream: bool
    """Whether gradients go to an optimizer on the host as they are made."""
    reduced: frozenset[int]
    """Stages whose gradients several ranks add up."""
    shared: tuple[Shared, ...]
    """Stages of one rank that hold the same parameters."""
    tied: tuple[tuple[int, ...], ...]
    """Stages of several ranks that do; of blocks under ZeRO 3."""
    sums: tuple[tuple[int, str], ...]
    """Gradients that tensor-parallel ranks add up once a step; of blocks under ZeRO 3."""
    starts: tuple[int, ...]
    """Stages that read nothing from the stage before them."""
    skips: tuple[Skip, ...]
    """Pairs of stages of which one reads the other from afar."""
    parts: tuple[tuple[int, Part], ...]
    """Stages that are parts of layers of experts, and which, where exchanges are rows."""


MAX_LAYER_ROWS = 2**21
"""Forwards, backwards and gathers of layers in a step that are played: they take a minute."""


def outline(
    graph: Graph,
    plan: Plan,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    *,
    by_layer: bool = False,
    units: tuple[Unit, ...] = (),
) -> Outline:
    """What the Program of a plan that was checked follows from. PlanError for what rows cannot say. by_layer: as in
    `lower`. units: of one data-parallel worker, where they are known. Where exchanges of experts are rows, graph and
    plan are those of `taken_apart`."""
    _refuse_unexpressed(plan)
    count, units = (len(units), units) if units else _units(graph, plan, workload)
    # Refused before any column is allocated.
    if count > MAX_UNITS or 2 * count * plan.num_stages > MAX_ROWS:  # a forward and a backward each
        raise PlanError(
            f"{count:,} microbatches on {plan.num_stages} stages: a Program holds up to {MAX_UNITS:,} microbatches and "
            f"{MAX_ROWS:,} rows; use larger microbatches (micro_batch_size), or a smaller batch"
        )
    zero, layers, workers = effective_zero(plan), stage_layers(plan, graph), alike(plan, cluster)
    # Vocabulary parallelism: embedding and head are rows of the order, no longer layers of a stage.
    if divided := {layer.label for layer in divided_layers(plan, graph)}:  # a part of them is on every rank
        layers = tuple(tuple(layer for layer in part if layer.label not in divided) for part in layers)
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    parts = list(zip(meshes, layers, strict=True))
    reduced = frozenset(stage for stage in range(plan.num_stages) if _reduces(graph, meshes[stage], layers[stage]))
    shared = shared_stages(graph, layers, plan.pipeline_ranks)
    # Layer by layer, since a gradient that goes to the host with one layer must not get a term from another.
    tied = bool(shared or tied_stages(graph, [(layer,) for part in layers for layer in part]))  # fused or not
    together = by_layer and plan.overlap.in_buckets  # gradients go down once ranks have added them up
    stream = not together and len(workers) == 1 and streams(plan, zero, reduced=bool(reduced), tied=tied)
    if stream and zero == 1 and plan.optimizer.offload is not None and plan.optimizer.offload.accumulate == "host":
        zero = 2  # a gradient is not there whole for longer than its reduction
    if plan.overlap.fused and not together and (zero == 3 or stream):
        raise PlanError("overlap.fused with ZeRO 3 or an update on the host, which go layer by layer; leave it out")
    by_layer = by_layer or zero == 3 or stream or has_rows(plan)
    groups = layer_groups(plan, layers)
    if by_layer:
        # Forward, backward and a gather before each.
        rows = 4 * count * sum(len(part) for part in groups)
        if rows > MAX_LAYER_ROWS:
            raise PlanError(
                f"{count:,} microbatches layer by layer (ZeRO 3, or an update on the host) are {rows:,} rows, over the "
                f"limit of {MAX_LAYER_ROWS:,}; use larger microbatches (micro_batch_size), or a smaller batch"
            )
        parts = [(mesh, group) for mesh, of_stage in zip(meshes, groups, strict=True) for group in of_stage]
    named = [part_of(graph, group[-1]) for of_stage in groups for group in of_stage] if has_rows(plan) else []
    cut = tuple((stage, part) for stage, part in enumerate(named) if part is not None)
    starts, skips = _chains(graph, plan)
    ranks_of = dict(zip(plan.pipeline_ranks, plan.stage_ranks, strict=True))
    # The ranks of a stage are shared out to its kinds of data-parallel worker by how many workers each has.
    members = [len(group.members) for group in workers]
    return Outline(
        # What rows do not show is left out, so that plans of one Program have equal outlines.
        schedule=replace(plan.schedule, micro_batch_size=None, num_microbatches=count, layers_per_stage=()),
        overlap=plan.overlap,
        optimizer=plan.optimizer,
        zero=zero,
        replicated=meshes[0].dp_replicate > 1,
        pipeline_ranks=plan.pipeline_ranks,
        counts=tuple(len(ranks_of[r]) * n // sum(members) for r in range(plan.num_pipeline_ranks) for n in members),
        num_microbatches=count,
        units=units,
        workers=workers,
        layers=tuple(len(part) for part in groups) if by_layer else (),
        buckets=gradient_buckets(graph, plan, layers) if together else (),
        stream=stream,
        reduced=reduced,
        shared=shared,
        tied=tied_stages(graph, [part for _, part in parts]),
        sums=tensor_sums(graph, plan.layout, parts),
        starts=starts,
        skips=skips,
        parts=cut,
    )


def streams(plan: Plan, zero: int, *, reduced: bool, tied: bool) -> bool:
    """Whether gradients of a plan go to its optimizer on the host layer by layer, as they are made.

    zero: the stage in effect. reduced: ranks add gradients up without dividing them first (ZeRO 0), once a step, so
    that all of them are on the device until then. tied: layers share parameters, whose gradients come from several.
    """
    if plan.optimizer.offload is None or plan.schedule.vocabulary != "ends":
        return False
    if orders.find(plan.schedule.name).composite or plan.schedule.passes:
        return False
    return not tied and (zero > 0 or not reduced)


def _reduces(graph: Graph, mesh: Mesh, layers: Sequence[Layer]) -> bool:
    """Whether several ranks add up gradients of a stage: those of data and context parallelism, and for experts those
    of tensor parallelism too that hold the same ones."""
    if mesh.data_ranks * mesh.cp > 1:
        return True
    return mesh.edp > 1 and any(routed_tensors(graph.block(layer.call.block)) for layer in layers)


def build(step_outline: Outline, *, messages: Messages = "buffered") -> Program:
    """The Program of an outline, without the plan's passes that edit Programs."""
    schedule, units, workers_differ, pairs = (
        step_outline.schedule,
        step_outline.units,
        len(step_outline.workers) > 1,
        None,
    )
    chosen = any(own.name in ROW_PASSES for own in schedule.passes)
    if step_outline.parts and schedule.name == ONE_F_ONE_B.name and not chosen and max(step_outline.pipeline_ranks) > 0:
        # with less, a pair of one rank waits for the whole pair of the next, and that for this one's
        schedule = replace(schedule, passes=(*schedule.passes, Pass(name=DAPPLE, params=(("policy", "2p"),))))
    rows = _scheduled(schedule, step_outline.pipeline_ranks, step_outline.num_microbatches, units)
    if step_outline.parts:
        if orders.find(step_outline.schedule.name).composite:
            pairs = composites(rows)
        rows = apart(rows)
    if workers_differ:
        if step_outline.schedule.vocabulary != "ends":
            raise PlanError(
                f"vocabulary = {step_outline.schedule.vocabulary!r} over unlike workers has no rows; use 'ends'"
            )
        if step_outline.zero:
            raise PlanError(
                f"ZeRO stage {step_outline.zero} over unlike workers has no rows yet; use optimizer.zero = 0"
            )
        rows = split(rows, len(step_outline.workers))
        units = divided_units(units, step_outline.num_microbatches, step_outline.workers)
    if not step_outline.zero:  # a pass that divides gradients reduces them in its own way
        rows = _with_reductions(rows, step_outline, workers_differ=workers_differ)
    # Of stages that share parameters, only the first has an update.
    rows = with_optimizer(rows, without=[same for _, same in step_outline.shared])
    optimizer = step_outline.optimizer
    first = bool(step_outline.tied) or bool(step_outline.buckets)  # added up before they go down
    after = first and optimizer.offload is not None
    late = bool(
        step_outline.zero or step_outline.layers
    )  # a pass that divides gradients or stages must come before ranks meet
    if not late:
        rows = with_tensor_sums(rows, step_outline.sums)
        rows = with_meetings(rows, step_outline.tied, clip=optimizer.clip)
    program = _program(rows, step_outline, units, messages)
    blocks = step_outline.layers
    if step_outline.parts:  # before gathers and reductions, which follow the order of what computes
        program = with_exchanges(with_blocks(program, blocks), dict(step_outline.parts))
        stage_of = [stage for stage, count in enumerate(blocks) for _ in range(count)]
        program, blocks = side_by_side(program, stage_of, pairs), ()
    program = apply_optimizer(
        program,
        replace(optimizer, offload=None, delay=0) if after else optimizer,
        replace(step_outline.overlap, bucket_bytes=None) if step_outline.buckets else step_outline.overlap,
        step_outline.zero,
        replicated=step_outline.replicated,
        blocks=blocks,
        stream=step_outline.stream,
    )
    if step_outline.buckets and step_outline.zero:
        program = with_shard_buckets(program, step_outline.buckets)
    elif step_outline.buckets:
        program = with_gradient_buckets(program, step_outline.buckets, overlap=step_outline.overlap.grad_reduce)
    if late:
        buffer = "G" if step_outline.zero < 2 else "GS"
        rows = with_tensor_sums(Rows.of(program), step_outline.sums, buffer=buffer)
        rows = with_meetings(rows, step_outline.tied, clip=optimizer.clip and not step_outline.stream, buffer=buffer)
        program = rows.like(program)
    return (
        moved_to_host(program, optimizer, step_outline.tied, by_layer=bool(step_outline.buckets)) if after else program
    )


def compute_rows(plan: Plan, num_microbatches: int) -> Rows:
    """Returns the plan's schedule: the forwards and backwards of every pipeline rank, in issue order."""
    return _scheduled(plan.schedule, plan.pipeline_ranks, num_microbatches)


def _scheduled(
    schedule: Schedule, pipeline_ranks: tuple[int, ...], num_microbatches: int, units: tuple[Unit, ...] = ()
) -> Rows:
    name, ranks = schedule.name, max(pipeline_ranks) + 1
    if (chunked := chunk_pass(schedule)) is not None:
        if not units:
            raise PlanError("chunkflow cuts the sequences of a batch: its order of rows needs a workload")
        return chunkflow(ranks, units, keep=chunked.keep or None, extra=chunked.extra)
    if schedule.rounds > 1:
        per_round, rest = divmod(num_microbatches, schedule.rounds)
        if rest or schedule.vocabulary != "ends":
            what = f"vocabulary = {schedule.vocabulary!r}" if not rest else f"{num_microbatches} microbatches"
            raise PlanError(f"schedule rounds = {schedule.rounds} with {what}; use rounds that divide the microbatches")
        return repeated(_scheduled(replace(schedule, rounds=1), pipeline_ranks, per_round), schedule.rounds)
    chosen = [method for method in schedule.passes if method.name in ROW_PASSES]
    if chosen and name != ONE_F_ONE_B.name:
        raise PlanError(
            f"pass {chosen[0].name} changes {ONE_F_ONE_B.name}, but the schedule is {name}; choose one of the two"
        )
    if chosen and schedule.vocabulary == "ends":
        rows = ROW_PASSES[chosen[-1].name](ranks, num_microbatches, chosen[-1])
    else:
        virtual = len(pipeline_ranks) // ranks
        rows = orders.find(name).rows(ranks, num_microbatches, virtual, vocabulary=schedule.vocabulary)
    _check_placement(name, pipeline_ranks, rows)
    return rows


def tied_stages(graph: Graph, stages: Sequence[Sequence[Layer]]) -> tuple[tuple[int, ...], ...]:
    """Sets of stages that hold the same parameter (embedding and head, as a rule), each once, in order of stages."""
    return tuple(sorted(set(held_by_several(graph, stages).values())))


def _dapple(ranks: int, num_microbatches: int, method: Pass) -> Rows:
    params = dict(method.params)
    policy = params.pop("policy", None)
    if params or policy not in ("p", "2p"):
        raise PlanError(f"pass {DAPPLE} takes policy = 'p' or '2p', not {dict(method.params)}")
    return one_f_one_b(ranks, num_microbatches, warm_up=dapple_warm_up("p" if policy == "p" else "2p", ranks))


ROW_PASSES: Mapping[str, Callable[[int, int, Pass], Rows]] = {DAPPLE: _dapple}
"""Passes that choose the order of compute rows themselves: (ranks, microbatches, pass) -> rows."""


def _with_reductions(rows: Rows, step_outline: Outline, *, workers_differ: bool) -> Rows:
    """The rows with the reductions over data-parallel ranks. workers_differ: they are of several classes, which
    meet in them."""
    # Stages of one rank that share parameters have one gradient: it is reduced once, under the first of them.
    pairs = {stage for pair in step_outline.shared for stage in pair}
    rows = with_all_reduce(rows, step_outline.reduced - pairs, overlap=step_outline.overlap.grad_reduce)
    rows = with_all_reduce(
        rows, step_outline.reduced & {one for one, _ in step_outline.shared}, overlap=False
    )  # after both
    return meet(rows, step_outline.pipeline_ranks) if workers_differ else rows


def _program(rows: Rows, step_outline: Outline, units: tuple[Unit, ...], messages: Messages) -> Program:
    """The Program of the rows, with messages between stages."""
    sends_overlap = step_outline.overlap.pipeline_sends
    rows = with_skips(rows, step_outline.skips, blocking=not sends_overlap)
    if messages == "polled":
        rows = with_polled(rows, chains=step_outline.starts, paired=step_outline.schedule.name == ONE_F_ONE_B.name)
    else:
        rows = with_messages(rows, chains=step_outline.starts, blocking=() if sends_overlap else MESSAGES)
    names = () if messages != "rendezvous" else ("fwd", "bwd", *(("skip", "skip_grad") if step_outline.skips else ()))
    comms = tuple(Communicator(name=name, semantics="rendezvous") for name in names)
    skips = skip_buffers(step_outline.skips)
    own = (
        CHUNK_BUFFERS
        if chunk_pass(step_outline.schedule)
        else BUFFERS
        if step_outline.schedule.vocabulary != "ends"
        else ()
    )
    return rows.program(
        units=units,
        counts=step_outline.counts,
        buffers=with_buffers(*own, base=skips),
        chains=step_outline.starts,
        comms=comms,
        aliases=shared_buffers(step_outline.shared),
    )


def _refuse_unexpressed(plan: Plan) -> None:
    """PlanError for fields that no row would show: left out, they would make the Program a different plan's."""
    if plan.num_devices < plan.world_size:
        device_of = plan.device_of
        rank = next(rank for rank, device in enumerate(device_of) if device in device_of[:rank])
        raise PlanError(
            f"placement puts ranks {device_of.index(device_of[rank])} and {rank} on device {device_of[rank]}, where "
            f"they would take turns, but rows here are of ranks that run at once; give each rank a device of its own, "
            f"or predict the plan, which makes rows for each device"
        )
    if plan.overlap.priority and not any(method.name not in ROW_PASSES for method in plan.schedule.passes):
        raise PlanError(
            f"overlap.priority = {list(plan.overlap.priority)}, but collectives are issued in the order in which they "
            f"are ready; name the pass that reorders them in schedule.passes, or leave priority out"
        )


def _units(graph: Graph, plan: Plan, workload: Workload | None) -> tuple[int, tuple[Unit, ...]]:
    """Number of microbatches, and what each holds over all data-parallel ranks (nothing said without a workload)."""
    if workload is None:
        if plan.schedule.num_microbatches is None:
            raise PlanError("the number of microbatches follows from the batch; give a workload or num_microbatches")
        return plan.schedule.num_microbatches, ()
    count, size = batch(plan, workload)
    if plan.schedule.makes_units:
        own = worker_units(graph, plan, workload)[0]
        return len(own), own
    lengths = workload.sequence_lengths()
    pieces = [tuple((i, 0, lengths[i]) for i in range(first, first + size)) for first in range(0, count * size, size)]
    return count, normalised([Unit(pieces=part) for part in pieces])


def _chains(graph: Graph, plan: Plan) -> tuple[tuple[int, ...], tuple[Skip, ...]]:
    """(stages that read nothing from the stage before them, pairs of stages of which one reads the other from afar)."""
    pairs = {(transfer.source, transfer.target) for transfer in transfers(plan, graph)}
    starts = tuple(stage for stage in range(plan.num_stages) if (stage - 1, stage) not in pairs)
    # Transfers to the next stage are the chain; all others are skips.
    return starts, tuple(sorted((a, b) for a, b in pairs if b != a + 1))


def _check_placement(name: str, pipeline_ranks: tuple[int, ...], rows: Rows) -> None:
    """PlanError unless the schedule puts every stage on the rank that the plan gives it."""
    scheduled = np.full(rows.num_stages, -1)
    # All rows of a stage are on one rank, so it does not matter which of them is written last.
    scheduled[rows.stage] = rows.rank_class
    if tuple(scheduled.tolist()) != pipeline_ranks:
        raise PlanError(
            f"schedule {name} puts stages 0 … {rows.num_stages - 1} on ranks {scheduled.tolist()}, but "
            f"the plan has them on {list(pipeline_ranks)}; change placement, virtual_stages or the stages' devices"
        )
