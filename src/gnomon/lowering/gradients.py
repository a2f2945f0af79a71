"""What ends a step: gradients reduced over data-parallel ranks and over stages with tied parameters, and the update.

`with_all_reduce` inserts one AR for each stage, after its last backward or after all of the rank's computing;
`with_tied_all_reduce` adds the AR in which the stages that hold the same parameters meet (Megatron-LM's embedding
group); `with_optimizer` adds an OPT for each stage. Left out: buckets within a stage (`gradient_buckets`) and sharded
gradients (`zero`, `fsdp`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gnomon.program import NO_UNIT, BufferRef, Communicator, Override, RowEffect
from gnomon.program.rows import KIND, Inserted, Longs, Rows, insert

WRITES_GRADIENTS = ("B", "W", "S", "T", "EGRAD")
TIED = "embedding"
"""Communicator of the stages that share tied parameters, and the price name of their all-reduce."""


def with_all_reduce(rows: Rows, stages: Collection[int], *, overlap: bool = True) -> Rows:
    """The rows with an AR for each of `stages`. overlap: right after the stage's last backward, so that it runs
    alongside what follows; otherwise after all other rows of the rank."""
    last, stage = last_of_stage(rows, WRITES_GRADIENTS)
    chosen = np.isin(stage, list(stages))
    return insert(rows, [_per_stage("AR", last[chosen] if overlap else _ends(rows, last[chosen]), stage[chosen])])


def with_tied_all_reduce(rows: Rows, stages: Collection[int], *, buffer: str = "G") -> Rows:
    """The rows with an AR that `stages`, which hold the same parameters, run together before the first update.

    buffer: what is reduced, the gradient or its shard. Stages on one rank class need no message; when all are on one
    class nothing is inserted.
    """
    last, stage = last_of_stage(rows, WRITES_GRADIENTS)
    chosen = np.flatnonzero(np.isin(stage, list(stages)))
    classes, one_each = np.unique(rows.rank_class[last[chosen]], return_index=True)
    # One rank holds all of them, and adds their gradients up in memory.
    if len(one_each) < 2:
        return rows
    # Rows of one group on several classes are one collective: all meet in it.
    group = int(rows.group.max(initial=-1)) + 1
    updates = np.flatnonzero(rows.is_kind("OPT"))
    usual = any(effect.buffer == buffer for kind in rows.kinds if kind.name == "AR" for effect in kind.effects)
    parts = []
    for cls, at in zip(classes.tolist(), chosen[one_each].tolist(), strict=True):
        mine = updates[rows.rank_class[updates] == cls]
        effect = RowEffect("accumulate", BufferRef(buffer, int(stage[at])))
        override = Override(comm=TIED, name=TIED, effects=None if usual else (effect,))
        anchor = mine[:1] if len(mine) else _ends(rows, last[[at]])
        part = _per_stage("AR", anchor, stage[[at]], group=group, override=override)
        parts.append(replace(part, before=bool(len(mine))))
    comms = {comm.name: comm for comm in (*rows.comms, Communicator(name=TIED, semantics="collective"))}
    return replace(insert(rows, parts), comms=tuple(comms.values()))


def with_optimizer(rows: Rows, *, without: Collection[int] = ()) -> Rows:
    """The rows with an OPT for each stage, by stage, at the end of its rank's rows. without: stages whose parameters
    another stage of the rank updates."""
    last, stage = last_of_stage(rows, WRITES_GRADIENTS)
    # By stage, whatever the order of the last backwards: updates of every rank then come in one order.
    order = np.argsort(stage, kind="stable")
    order = order[~np.isin(stage[order], list(without))]
    return insert(rows, [_per_stage("OPT", _ends(rows, last[order]), stage[order])])


def last_of_stage(rows: Rows, kinds: Collection[str]) -> tuple[Longs, NDArray[np.int16]]:
    """(row, stage) of the last row of these kinds of each stage on each rank class, by class and then by row."""
    mine = np.flatnonzero(rows.is_kind(*kinds))
    code = rows.rank_class[mine].astype(np.int64) * rows.num_stages + rows.stage[mine]
    # unique returns first occurrences; of the reversed list these are the last.
    _, from_the_end = np.unique(code[::-1], return_index=True)
    last = np.sort(mine[len(mine) - 1 - from_the_end])
    return last, rows.stage[last]


def _ends(rows: Rows, of: Longs) -> Longs:
    """Last row of the rank class of each of these rows."""
    ends: Longs = rows.class_ptr[rows.rank_class[of].astype(np.int64) + 1] - 1
    return ends


def _per_stage(
    kind: str, anchor: Longs, stage: NDArray[np.int16], *, group: int = -1, override: Override | None = None
) -> Inserted:
    return Inserted(
        anchor=anchor,
        kind=np.full(len(anchor), KIND[kind], np.int8),
        stage=stage,
        unit=np.full(len(anchor), NO_UNIT, np.int32),
        group=group,
        override=override,
    )
