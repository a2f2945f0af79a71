"""What a plan says about data-parallel state, applied to a Program of blocks: ZeRO stage, overlap, offload, delay.

`shard_state(program, optimizer, overlap, …)` chooses and runs the passes (`fsdp`, `zero`, `offload`, `delayed_update`)
that `plan.optimizer` and `plan.overlap` ask for. What they ask for and no pass does is a PlanError, so that nothing is
lost. Returns a Program. Left out: taking stages apart into blocks (`with_blocks`), which comes before.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.errors import PlanError
from gnomon.lowering.delayed_update import delay_update
from gnomon.lowering.fsdp import fully_shard
from gnomon.lowering.insertions import by_name
from gnomon.lowering.norm import with_norm
from gnomon.lowering.offload import offload_optimizer, update_buffers
from gnomon.lowering.streaming import stream_gradients
from gnomon.lowering.zero import shard_optimizer
from gnomon.plans import Optimizer, Overlap
from gnomon.program import Program
from gnomon.program.rows import Rows


def shard_state(
    program: Program,
    optimizer: Optimizer,
    overlap: Overlap,
    *,
    shards: int,
    replicas: int,
    stream: bool = False,
    meets: bool = False,
) -> Program:
    """The Program with data-parallel state as the plan has it.

    program: with all-reduces (AR, if any) and updates (OPT), each stage a block. shards, replicas: ranks that divide
    the state (dp_shard x cp), and copies of it (dp_replicate). With one shard a ZeRO stage means nothing and the AR
    rows stay. meets: ranks wait for the global norm before gradients go to an optimizer on the host, and have not met
    before. Under overlap.optimizer updates follow the backward here too: they take the compute stream as long, and what
    is held of gradients meanwhile is known to their prices (`StagePrice.static_bytes`). stream: gradients go to an
    optimizer on the host as they are made; stage 1 then keeps them no longer than stage 2.
    """
    if shards > 1 and optimizer.zero == 3:
        program = _stage_3(program, optimizer, overlap, replicas)
    elif shards > 1 and optimizer.zero:
        program = shard_optimizer(
            program,
            zero=2 if stream and optimizer.offload and optimizer.offload.accumulate == "host" else optimizer.zero,
            overlap_reduce=overlap.grad_reduce,
            overlap_gather=overlap.param_gather,
            replicas=replicas > 1,
        )
    if optimizer.offload is not None:
        fraction, tiles = optimizer.offload.fraction, optimizer.offload.tiles
        if stream:
            sums_at_once = shards == 1 or optimizer.zero == 3 or overlap.grad_reduce  # reduced after each unit
            each_unit = optimizer.offload.accumulate == "host" and replicas == 1 and sums_at_once
            program = stream_gradients(
                program, fraction=fraction, tiles=tiles, clip=optimizer.clip, each_unit=each_unit
            )
        else:
            if meets:
                gradient = update_buffers(by_name(program.kinds)["OPT"])[0]
                program = with_norm(Rows.of(program), buffer=gradient).like(program)
            return moved_to_host(program, optimizer)
    return delay_update(program) if optimizer.delay else program


def moved_to_host(
    program: Program, optimizer: Optimizer, tied: Sequence[Sequence[int]] = (), *, by_layer: bool = False
) -> Program:
    """The Program with updates on the host once gradients are added up, late where the plan says so. tied: sets of
    stages that hold the same parameters. by_layer: its stages are layers, of which some may stay."""
    assert optimizer.offload is not None
    fraction, tiles = optimizer.offload.fraction, optimizer.offload.tiles
    if fraction < 1 and not by_layer:
        raise PlanError(
            f"optimizer.offload.fraction = {fraction}: a part of the updates stays on the device only where each "
            f"layer's gradient goes to the host as it is made. That is not so of tied weights, of ZeRO 0 over several "
            f"data-parallel ranks, and under schedule.passes, vocabulary parallelism or composite schedules; use "
            f"fraction = 1, all updates on the host"
        )
    program = offload_optimizer(program, tiles=tiles or 1, fraction=fraction, tied=tied)
    return delay_update(program) if optimizer.delay else program


def _stage_3(program: Program, optimizer: Optimizer, overlap: Overlap, replicas: int) -> Program:
    if not overlap.grad_reduce or overlap.bucket_bytes is not None:
        raise PlanError("full sharding reduces block by block beside backward; leave grad_reduce on, bucket_bytes out")
    return fully_shard(
        program,
        prefetch=overlap.prefetch if overlap.param_gather else 0,
        reshard_after_forward=optimizer.reshard_after_forward,
        keep_last_block=optimizer.keep_last_block,
        replicas=replicas > 1,
    )
