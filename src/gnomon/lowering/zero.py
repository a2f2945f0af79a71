"""ZeRO stages 1 and 2: every rank holds all parameters, and a shard of the optimizer's states (and of gradients).

`shard_optimizer(program)` takes a Program whose stages are blocks and returns it with a reduction of gradients a bucket
(REDUCE_GRAD), updates of the rank's shard PS, and a gather of the updated parameters (UNSHARD). The gather writes what
the next step's forward reads, so it overlaps with that forward and the period is shorter than the makespan.
Stage 1 reduces in place and holds whole gradients to the end of the step; stage 2 keeps only the shard GS.
Left out: stage 3, which is `fsdp`, and sizes.
Source: Rajbhandari et al. 2020; overlap of the gather as in Megatron-LM's distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.insertions import Insertions, bucket, buckets, refuse_tied, require_updates, touches
from gnomon.program import NO_UNIT, BufferClass, Kind, Program, effects, with_buffers, with_kinds
from gnomon.program.rows import Inserted, Rows, insert

_COMMON = (Kind(name="UNSHARD", stream="unshard", comm="dp_shard", effects=effects("read PS, write P")),)
ZERO_1 = (
    *_COMMON,
    Kind(name="REDUCE_GRAD", stream="reduce", comm="dp_shard", effects=effects("accumulate G")),
    Kind(name="OPT", effects=effects("consume G, read PS, write PS")),
)
ZERO_2 = (
    *_COMMON,
    Kind(name="REDUCE_GRAD", stream="reduce", comm="dp_shard", effects=effects("consume G, accumulate GS")),
    Kind(name="OPT", effects=effects("consume GS, read PS, write PS")),
)


def shard_optimizer(
    program: Program,
    *,
    zero: int,
    blocks_per_bucket: int = 1,
    overlap_reduce: bool = True,
    overlap_gather: bool = True,
    replicas: bool = False,
) -> Program:
    """The Program under ZeRO stage `zero`, 1 or 2.

    blocks_per_bucket: blocks whose gradients are reduced together, once the last of them is complete.
    overlap_reduce: reduce alongside backward; otherwise on the compute stream after the last backward.
    overlap_gather: gather the parameters of a block as soon as it is updated, alongside what follows (the next step's
    forward included); otherwise on the compute stream after the last update.
    replicas: hybrid sharding; an AR of each block's gradients over the replicas follows their last reduction.
    Stage 1 reduces once, after the last unit; stage 2, if alongside backward, after every unit, adding to the shard.
    All-reduces of gradients (AR) that the Program has are dropped. PlanError for another stage, tied blocks, and
    missing updates.
    """
    if zero not in (1, 2):
        raise PlanError(f"shard_optimizer does ZeRO stages 1 and 2, not {zero}; stage 3 is fully_shard")
    refuse_tied(program, f"ZeRO stage {zero}")
    require_updates(program, f"ZeRO stage {zero}")
    blocking = {"REDUCE_GRAD": not overlap_reduce, "UNSHARD": not overlap_gather}
    chosen = tuple(
        replace(kind, stream="compute") if blocking.get(kind.name) else kind for kind in (ZERO_1, ZERO_2)[zero - 1]
    )
    reduction = next(kind for kind in chosen if kind.name == "REDUCE_GRAD")
    writers = frozenset(k.name for k in program.kinds if k.name != "AR" and touches(k, "G", "accumulate"))
    buffers = with_buffers(
        BufferClass(name="PS", memory="not in the step's", lifetime="carried", per="stage"),
        *((BufferClass(name="GS", memory="gradients", per="stage"),) if zero == 2 else ()),
        base=program.buffers,
    )
    if replicas:
        shard = "G" if zero == 1 else "GS"
        chosen = (*chosen, replace(reduction, name="AR", comm="dp_replicate", effects=effects(f"accumulate {shard}")))
    kinds = with_kinds(*chosen, base=program.kinds)
    divided = replace(program, buffers=buffers, comms=tuple(comm for comm in program.comms if comm.name != "dp"))
    old = Rows.of(divided)
    # The common case, on columns: rows become objects only for buckets of several blocks and composites.
    if blocks_per_bucket == 1 and not (old.group >= 0).any() and not old.is_kind("AR").any():
        last_only = zero == 1 or not overlap_reduce
        inserted = _inserted(old, kinds, writers, last_only, overlap_reduce, overlap_gather, replicas)
        return inserted.like(divided)
    listed = []
    for rows in rows_of(program):
        new = Insertions(rows)
        ends = _bucket_ends(rows, writers, blocks_per_bucket, each_unit=zero == 2 and overlap_reduce)
        # Of each stage its last bucket: replicas add up the shard once it is complete.
        last = {stage: i for i, (_, stages) in enumerate(ends) for stage in stages}
        for i, (index, stages) in enumerate(ends):
            at = index if overlap_reduce else ends[-1][0]
            new.after(at, bucket(reduction, stages))
            for stage in stages if replicas else ():
                if last[stage] == i:
                    new.after(at, Row(kind="AR", stage=stage))
        updates = [i for i, row in enumerate(rows) if row.kind == "OPT"]
        for index in updates:
            new.after(index if overlap_gather else updates[-1], Row(kind="UNSHARD", stage=rows[index].stage))
        listed.append(new.without("AR"))
    return with_rows(divided, listed, kinds=kinds)


def _inserted(
    rows: Rows,
    kinds: tuple[Kind, ...],
    writers: frozenset[str],
    last_only: bool,
    overlap_reduce: bool,
    overlap_gather: bool,
    replicas: bool,
) -> Rows:
    """The rows with reductions of one block each and gathers. last_only: reductions after each stage's last writer."""
    names = [kind.name for kind in kinds]
    reduce, gather, sums = names.index("REDUCE_GRAD"), names.index("UNSHARD"), names.index("AR") if replicas else -1
    writes, updates = rows.is_kind(*writers), rows.is_kind("OPT")
    anchor, kind, stage = [], [], []
    for low, high in pairwise(rows.class_ptr.tolist()):
        ends = low + np.flatnonzero(writes[low:high])
        # `unique` finds the first of each stage; in the reversed list that is the last.
        lasts = np.sort(len(ends) - 1 - np.unique(rows.stage[ends][::-1], return_index=True)[1])
        ends, is_last = (
            (ends[lasts], np.ones(len(lasts), bool)) if last_only else (ends, np.isin(np.arange(len(ends)), lasts))
        )
        # The last reduction of a stage is followed by the sum over replicas: two rows at one anchor.
        times = 1 + is_last * replicas
        # `max(initial=0)`: a class without writers has no last one, and inserts no rows either.
        anchor.append(np.repeat(ends if overlap_reduce else np.full(len(ends), ends[-1:].max(initial=0)), times))
        # Where each reduction lies among the repeated anchors; what is not one is its sum over replicas.
        first = np.cumsum(times) - times
        kind.append(np.where(np.isin(np.arange(int(times.sum())), first), reduce, sums))
        stage.append(np.repeat(rows.stage[ends], times))
        done = low + np.flatnonzero(updates[low:high])
        anchor.append(done if overlap_gather else np.full(len(done), done[-1:].max(initial=0)))
        kind.append(np.full(len(done), gather))
        stage.append(rows.stage[done])
    new = Inserted(
        anchor=np.concatenate(anchor).astype(np.int64),
        kind=np.concatenate(kind).astype(np.int8),
        stage=np.concatenate(stage).astype(np.int16),
        unit=np.full(sum(map(len, anchor)), NO_UNIT, np.int32),
    )
    return insert(rows, [new], kinds)


def _bucket_ends(
    rows: Sequence[Row], writers: frozenset[str], size: int, *, each_unit: bool
) -> list[tuple[int, tuple[int, ...]]]:
    """(row that completes it, stages) of each bucket. Buckets of stage 2 hold one unit's gradients."""
    written = [(i, row) for i, row in enumerate(rows) if row.kind in writers]
    if not each_unit:
        last = {row.stage: i for i, row in written}
        done = sorted(last.values())
        return [(b[-1], tuple(rows[i].stage for i in b)) for b in buckets(done, size)]
    runs: list[list[int]] = []
    for i, row in written:
        # A bucket holds each stage once, of one unit: a second backward of a stage begins another.
        if runs and rows[runs[-1][0]].unit == row.unit and row.stage not in {rows[j].stage for j in runs[-1]}:
            runs[-1].append(i)
        else:
            runs.append([i])
    return [(b[-1], tuple(rows[i].stage for i in b)) for run in runs for b in buckets(run, size)]
