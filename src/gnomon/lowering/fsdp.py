"""Fully sharded data parallelism (ZeRO-3, FSDP2): each rank keeps a shard of every block's parameters.

`fully_shard(program)` takes a Program whose stages are blocks (`with_blocks` makes one) and returns it with rows that
gather a block before it computes (UNSHARD, on a stream of its own, some blocks ahead), free it (RESHARD) and reduce
and scatter its gradient (REDUCE_GRAD, on another stream). Gathers are issued ahead across blocks and, because the
first ones wait only for the update of their own block, across the end of the step. PS and GS are the shards.
Left out: which blocks are wrapped together (that is the Program's stages), and the sizes of shards.
Source: Zhao et al. 2023 (PyTorch FSDP); Rajbhandari et al. 2020 (ZeRO).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.insertions import Insertions, refuse_tied, require_updates, touches
from gnomon.program import BufferClass, Kind, Pool, Program, effects, with_buffers, with_kinds

POOL = "gathered"
KINDS = (
    Kind(name="UNSHARD", stream="unshard", comm="dp_shard", effects=effects("read PS, write P")),
    Kind(name="RESHARD", effects=effects("free P")),
    Kind(name="REDUCE_GRAD", stream="reduce", comm="dp_shard", effects=effects("consume G, accumulate GS")),
    Kind(name="OPT", effects=effects("consume GS, read PS, write PS")),
)
_REPLICAS = Kind(name="AR", stream="reduce", comm="dp_replicate", effects=effects("accumulate GS"))
_FORWARD = ("F", "C")


def fully_shard(
    program: Program,
    *,
    prefetch: int = 1,
    limit_gathered: bool = True,
    reshard_after_forward: bool = True,
    keep_last_block: bool = True,
    reduce_each_unit: bool = True,
    replicas: bool = False,
) -> Program:
    """The Program under fully sharded data parallelism; each stage is a block.

    prefetch: blocks gathered ahead; 0 gathers a block when it is reached.
    limit_gathered: hold at most prefetch + 1 gathered blocks at once; a gather waits for a free. Otherwise gathers run
    as far ahead as their stream and the order of issue allow. Without resharding there is no limit.
    reshard_after_forward: free a block after forward and gather it again for backward; otherwise it stays from its
    first use in the step to its last.
    keep_last_block: a block whose backward comes right after its forward stays gathered. (What is used again next in
    the same direction, or forward after backward, always stays.)
    reduce_each_unit: reduce and add to the shard after each unit's backward; otherwise whole gradients add up and are
    reduced after the last.
    replicas: hybrid sharding; an AR of each gradient shard over the replicas follows its last reduction.
    All-reduces of whole gradients (AR) that the Program has are dropped. PlanError for tied blocks, missing updates and
    a second sharding.
    """
    if prefetch < 0:
        raise PlanError(f"prefetch = {prefetch} must be at least 0")
    if any(kind.name == "UNSHARD" for kind in program.kinds):
        raise PlanError("the parameters of this Program are sharded already; shard them once")
    refuse_tied(program, "full sharding")
    require_updates(program, "full sharding")
    readers = frozenset(k.name for k in program.kinds if k.name != "OPT" and touches(k, "P", "read"))
    writers = frozenset(k.name for k in program.kinds if k.name != "AR" and touches(k, "G", "accumulate"))
    listed = []
    for rows in rows_of(program):
        reading = [(i, row) for i, row in enumerate(rows) if row.kind in readers]
        uses = [_Use(index=i, block=row.stage, forward=row.kind in _FORWARD) for i, row in reading]
        if prefetch == 0 and limit_gathered and any(row.group >= 0 for _, row in reading):
            raise PlanError("a composite action needs two blocks at once, but prefetch = 0 holds one; use 1 or more")
        visits = _visits(uses, reshard_after_forward, keep_last_block)
        new = Insertions(rows)
        _gather(new, visits, prefetch)
        _reduce(new, writers, reduce_each_unit, replicas)
        listed.append(new.without("AR"))
    # Without resharding every block is held at once, and a pool would only deadlock.
    limited = limit_gathered and reshard_after_forward
    buffers = with_buffers(
        BufferClass(name="P", memory="parameters", per="stage", pool=POOL if limited else ""),
        BufferClass(name="PS", memory="not in the step's", lifetime="carried", per="stage"),
        BufferClass(name="GS", memory="gradients", per="stage"),
        base=program.buffers,
    )
    pools = (*program.pools, Pool(name=POOL, size=prefetch + 1)) if limited else program.pools
    kinds = with_kinds(*KINDS, *((_REPLICAS,) if replicas else ()), base=program.kinds)
    comms = tuple(comm for comm in program.comms if comm.name != "dp")
    return with_rows(replace(program, buffers=buffers, pools=pools, comms=comms), listed, kinds=kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A row that reads a block's parameters."""

    index: int
    block: int
    forward: bool


_Visit = list[_Use]
"""Uses of one block from its gather to its free."""


def _visits(uses: Sequence[_Use], reshard_after_forward: bool, keep_last_block: bool) -> list[_Visit]:
    """Uses that share one gather, in the order of their first uses."""
    visits: list[_Visit] = []
    whole_step: dict[int, _Visit] = {}
    for use in uses:
        if not reshard_after_forward:
            if use.block not in whole_step:
                visits.append(whole_step.setdefault(use.block, []))
            whole_step[use.block].append(use)
            continue
        before = visits[-1][-1] if visits else None
        # The turn from forward to backward, where the last block is needed again at once.
        turn = before is not None and before.forward and not use.forward
        if before is not None and before.block == use.block and (keep_last_block or not turn):
            visits[-1].append(use)
        else:
            visits.append([use])
    return visits


def _gather(new: Insertions, visits: Sequence[_Visit], prefetch: int) -> None:
    """UNSHARD before the visit `prefetch` earlier begins, RESHARD after each visit.

    In the turn from forward to backward it waits for that visit's backward; and it never comes before the same block's
    last RESHARD, nor before the gathers of earlier visits, whose frees the pool counts on.
    """
    # Rows that read parameters: a gather is anchored at one of them.
    indices = sorted(use.index for visit in visits for use in visit)
    anchor, free_after = 0, dict[int, int]()
    for i, visit in enumerate(visits):
        block = visit[0].block
        ahead = visits[max(0, i - prefetch)]
        same = [use for use in ahead if use.forward == visit[0].forward and i >= prefetch]
        freed = free_after.get(block, -1)
        # Anchors never decrease: the pool hands out places in the order of gathers, so an earlier gather must not wait
        # for a later one's free.
        anchor = max(anchor, (same or ahead)[0].index, indices[bisect_right(indices, freed)])
        new.before(anchor, Row(kind="UNSHARD", stage=block))
        new.after(visit[-1].index, Row(kind="RESHARD", stage=block))
        free_after[block] = new.end_of(visit[-1].index)


def _reduce(new: Insertions, writers: frozenset[str], each_unit: bool, replicas: bool) -> None:
    """REDUCE_GRAD after each row that completes a unit's gradient, or after the last of each block."""
    mine = [(i, row.stage) for i, row in enumerate(new.rows) if row.kind in writers]
    last = {stage: i for i, stage in mine}
    for i, stage in mine:
        if each_unit or last[stage] == i:
            new.after(i, Row(kind="REDUCE_GRAD", stage=stage))
        if replicas and last[stage] == i:
            new.after(i, Row(kind="AR", stage=stage))
