"""The global gradient norm, for which every rank waits before its first update (clipping).

Left out: the wait of updates on the host for gradients that stream there (`streaming`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gnomon.program import NO_UNIT, BufferRef, Communicator, Kind, Override, RowEffect, with_kinds
from gnomon.program.rows import Inserted, Rows, insert

EVERYONE = "norm"
"""Communicator of all ranks."""
NORM = Kind(name="NORM", comm=EVERYONE)
"""The global gradient norm: own gradients, then one small all-reduce over all ranks. Holds the compute stream."""


def with_norm(rows: Rows, *, buffer: str = "G") -> Rows:
    """The rows with a NORM on every rank class before its first OPT: one group, so all ranks meet there.

    buffer: the gradients that it reads. Source: clipping by the global norm (Pascanu et al. 2013); Qi et al. 2023 on
    what that wait costs a pipeline without bubbles.
    """
    updates = np.flatnonzero(rows.is_kind("OPT"))
    if not len(updates):
        return rows
    rank_class = rows.rank_class[updates]
    classes, first = np.unique(rank_class, return_index=True)
    kinds = with_kinds(NORM, base=rows.kinds)
    group = int(rows.group.max(initial=-1)) + 1
    parts = []
    for cls, at in zip(classes.tolist(), updates[first].tolist(), strict=True):
        # One row stands for the norm of all stages of the class, so it reads the gradients of each.
        mine = rows.stage[updates[rank_class == cls]].tolist()
        parts.append(
            Inserted(
                anchor=np.array([at], np.int64),
                kind=np.array([kinds.index(NORM)], np.int8),
                stage=rows.stage[[at]],
                unit=np.array([NO_UNIT], np.int32),
                before=True,
                override=Override(effects=tuple(RowEffect("read", BufferRef(buffer, stage)) for stage in mine)),
                group=group,
            )
        )
    comms = (*rows.comms, Communicator(name=EVERYONE, semantics="collective"))
    return replace(insert(rows, parts, kinds), comms=comms)
