"""Skips: what a stage sends to one that is not its neighbour: a U-Net's way down to its way up, an encoder's output.

`with_skips` makes the forward of stage a write `SKIP_a_b` and that of stage b consume it, their backwards `DSKIP_a_b`
the other way, and inserts the messages in between where the two are on different rank classes. The gradient joins what
comes from the next stage in the backward of stage a. `skip_buffers` declares the buffers. Left out: skips through
recomputed stages, and what a skip weighs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gnomon.errors import PlanError
from gnomon.lowering.messages import BACKWARD, FORWARD, blocking_kinds, group_ends, in_senders_order
from gnomon.program import BufferClass, BufferRef, EffectOp, Kind, Override, RowEffect, with_buffers, with_kinds
from gnomon.program.rows import Inserted, Longs, Rows, insert

Skip = tuple[int, int]
"""(stage that sends in forward, stage that receives)."""

KINDS = (
    Kind(name="SEND_SKIP", stream="send_skip", comm="skip", message="send"),
    Kind(name="RECV_SKIP", stream="recv_skip", comm="skip", message="recv"),
    Kind(name="SEND_SKIP_GRAD", stream="send_skip_grad", comm="skip_grad", message="send"),
    Kind(name="RECV_SKIP_GRAD", stream="recv_skip_grad", comm="skip_grad", message="recv"),
)
"""Kinds of the messages. A row of one names the stage at the other end and the buffer, whose name is that of its price
too."""


def skip_buffers(skips: Sequence[Skip]) -> tuple[BufferClass, ...]:
    """The standard buffers and those of the skips. A SKIP is held by the stage that sends it and by the one that
    receives it."""
    names = [f"{prefix}_{a}_{b}" for a, b in skips for prefix in ("SKIP", "DSKIP")]
    return with_buffers(*(BufferClass(name=name, memory="communication") for name in names))


def with_skips(rows: Rows, skips: Sequence[Skip], *, blocking: bool = False) -> Rows:
    """The rows with these skips, given in order of stages. To be called before `with_messages`: what is inserted later
    stands closer to its forward, and the next stage needs its message before a farther one needs the skip. blocking:
    messages are issued on the compute stream.

    A send comes right after the forward that makes what it sends, a receive right before the forward that needs it, or
    as much earlier as the sender's order asks for. PlanError for stages that recompute.
    """
    if not skips:
        return rows
    if rows.is_kind("C", "R")[np.isin(rows.stage, [stage for skip in skips for stage in skip])].any():
        raise PlanError(
            "a stage that sends or takes a skip is recomputed, which is not expressed; keep its activations"
        )
    kinds = blocking_kinds([kind.name for kind in KINDS], KINDS) if blocking else KINDS
    rows = replace(rows, kinds=with_kinds(*kinds, base=rows.kinds))
    for a, b in reversed(skips):  # what is inserted later stands closer to its forward: the nearest stage is sent first
        rows = _one_way(rows, FORWARD, a, b, f"SKIP_{a}_{b}", "SEND_SKIP", "RECV_SKIP")
        rows = _one_way(rows, BACKWARD, b, a, f"DSKIP_{a}_{b}", "SEND_SKIP_GRAD", "RECV_SKIP_GRAD")
    return rows


def _one_way(rows: Rows, kinds: tuple[str, ...], source: int, target: int, name: str, send: str, recv: str) -> Rows:
    """`name` from the rows of `kinds` of stage `source` to those of stage `target`."""
    computes = rows.is_kind(*kinds)
    writers, used = (np.flatnonzero(computes & (rows.stage == stage)) for stage in (source, target))
    classes = rows.rank_class
    # All rows of a stage are on one rank class, so the first of each says it.
    same_rank = bool((classes[writers[:1]] == classes[used[:1]]).all())
    # On one rank class the buffer is handed over in memory, under the sender's name.
    received = source if same_rank else target
    overrides = dict(rows.overrides)
    for row, op, stage in (*((r, "write", source) for r in writers), *((r, "consume", received) for r in used)):
        effect = RowEffect("write" if op == "write" else "consume", BufferRef(name, stage, int(rows.unit[row])))
        overrides[int(row)] = _adding(overrides.get(int(row)), effect)
    rows = rows.with_overrides(overrides)
    return rows if same_rank else _messages(rows, writers, used, name, send, recv)


def _adding(override: Override | None, effect: RowEffect) -> Override:
    """The override with one more effect. `adds`: its effects come on top of those of the row's kind; an override whose
    effects replace those of the kind stays so."""
    if override is None:
        return Override(effects=(effect,), adds=True)
    return replace(
        override, effects=(effect, *(override.effects or ())), adds=override.adds or override.effects is None
    )


def _messages(rows: Rows, writers: Longs, used: Longs, name: str, send: str, recv: str) -> Rows:
    """The rows with a send after each of `writers` and a receive before each of `used`, of the same unit."""
    source, target = int(rows.stage[writers[0]]), int(rows.stage[used[0]])
    # For each row that uses the skip, the row that makes it for the same microbatch: each makes and uses it once.
    by_unit = writers[np.argsort(rows.unit[writers])]
    makes = by_unit[np.searchsorted(rows.unit[by_unit], rows.unit[used])]
    first, last = group_ends(rows)
    order, anchor = in_senders_order(rows, makes if last is None else last[makes], makes, used, first)
    parts = [
        _inserted(rows, anchor, used[order], recv, before=True),
        _inserted(rows, writers if last is None else last[writers], writers, send, before=False),
    ]
    rows = insert(rows, parts)
    overrides = dict(rows.overrides)
    ends: tuple[tuple[str, int, int, EffectOp], ...] = (
        (send, source, target, "consume"),
        (recv, target, source, "write"),
    )
    for kind, stage, peer, op in ends:
        for row in _without_peer(rows, kind, stage):
            effect = RowEffect(op, BufferRef(name, stage, int(rows.unit[row])))
            overrides[row] = Override(peer=peer, name=name, effects=(effect,))
    return rows.with_overrides(overrides)


def _inserted(rows: Rows, anchor: Longs, of: Longs, kind: str, *, before: bool) -> Inserted:
    index = next(i for i, known in enumerate(rows.kinds) if known.name == kind)
    kinds = np.full(len(of), index, np.int8)
    return Inserted(anchor=anchor, kind=kinds, stage=rows.stage[of], unit=rows.unit[of], before=before)


def _without_peer(rows: Rows, kind: str, stage: int) -> Iterator[int]:
    """Rows of `kind` at `stage` that were just inserted: those of earlier skips have their overrides."""
    inserted = np.flatnonzero(rows.is_kind(kind) & (rows.stage == stage)).tolist()
    return (row for row in inserted if row not in rows.overrides)
