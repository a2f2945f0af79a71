"""Sends and receives between stages on different ranks, inserted into rows of compute actions.

`with_messages` puts each send right after the action that makes its buffer, and each receive right before the action
that needs it, or as much earlier as the sender's order asks for, because messages of a communicator are matched by
order. Receives have a stream of their own unless `blocking` puts them on the compute stream. `with_polled` has them as
a host does that sleeps between looks at each of them. `with_loads` inserts rows that load the inputs. Left out: what a
message costs, and skips between stages that are not neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gnomon.program import STANDARD_KINDS, Kind
from gnomon.program.rows import Inserted, Longs, Rows, insert

FORWARD, BACKWARD = ("F", "C"), ("B", "I")


def with_messages(rows: Rows, *, chains: Sequence[int] = (0,), blocking: Sequence[str] = ()) -> Rows:
    """The rows with SEND_F, RECV_F, SEND_B, RECV_B where neighbouring stages are on different rank classes.

    chains: stages that take no input from the stage before them. blocking: kinds of message issued on the compute
    stream, which then waits for them (`("RECV_B",)`).
    """
    kinds = blocking_kinds(blocking, rows.kinds)
    parts = []
    for names, hop, send, receive in ((FORWARD, 1, "SEND_F", "RECV_F"), (BACKWARD, -1, "SEND_B", "RECV_B")):
        parts += _direction(rows, _Side(rows, names), hop, chains, _index(kinds, send), _index(kinds, receive))
    return insert(rows, parts, kinds)


POLL = Kind(name="POLL")
"""A host that sleeps until it sees that a tensor's description has gone or come, and issues nothing meanwhile."""


def with_polled(rows: Rows, *, chains: Sequence[int] = (0,), paired: bool = False) -> Rows:
    """The rows with messages that the host looks after, asleep between looks: a POLL for each tensor that it sends, and
    one before each activation that it receives, which comes as two tensors (hidden states, mask). RECV_F and RECV_B
    are the other waits. paired: the rows are 1F1B, where the second tensor, here SEND_F, leaves after the backward
    that is paired with the forward.

    Source: a development branch, huggingface/nanotron 67c5ebb6 (2024-12-27)
    src/nanotron/parallel/pipeline_parallel/p2p.py _send_meta, _recv_meta; state.py run_communication; functional.py.
    """
    kinds = (*blocking_kinds(("SEND_F", "RECV_F", "SEND_B", "RECV_B"), rows.kinds), POLL)
    poll = len(kinds) - 1
    parts = []
    for names, hop, send, receive in ((FORWARD, 1, "SEND_F", "RECV_F"), (BACKWARD, -1, "SEND_B", "RECV_B")):
        side = _Side(rows, names)
        come, go = _direction(rows, side, hop, chains, _index(kinds, send), _index(kinds, receive))
        waits = np.full(len(go.anchor), poll, np.int8)
        if hop > 0:
            parts.append(replace(go, kind=waits))  # the first tensor: right after the forward
            go = replace(go, anchor=_after_pair(rows, go)) if paired else go
            parts.append(replace(come, kind=np.full(len(come.anchor), poll, np.int8)))
        # Rows next to one action stand in the order of the parts: the message, then the look whether it has gone.
        parts += [come, go, replace(go, kind=waits)]
    return insert(rows, parts, kinds)


def _after_pair(rows: Rows, sends: Inserted) -> Longs:
    """Says after which row activations leave under 1F1B: once it is warm, after the backward that follows their
    forward."""
    forward = np.asarray(sends.anchor)  # [sends] row after which each leaves now
    after = np.minimum(forward + 1, rows.num_rows - 1)
    paired = rows.is_kind("B")[after] & (rows.rank_class[after] == rows.rank_class[forward])
    # Stage s of p runs p - 1 - s forwards before its first pair (PipeDream-flush): units below that are warm-up. In the
    # warm-up, which may be all of a stage's forwards, they leave at once.
    return np.where(paired & (sends.unit >= rows.num_stages - 1 - sends.stage), after, forward)


def blocking_kinds(names: Sequence[str], base: tuple[Kind, ...] = STANDARD_KINDS) -> tuple[Kind, ...]:
    """The kinds with those named on the compute stream."""
    return tuple(replace(kind, stream="compute") if kind.name in names else kind for kind in base)


def with_loads(rows: Rows, stages: Sequence[int] = (0,)) -> Rows:
    """The rows with a LOAD before each forward of the stages that take the inputs. For `inputs="loaded"`."""
    first = np.flatnonzero(rows.is_kind(*FORWARD) & np.isin(rows.stage, stages))
    load = np.full(len(first), _index(rows.kinds, "LOAD"), np.int8)
    part = Inserted(anchor=first, kind=load, stage=rows.stage[first], unit=rows.unit[first], before=True)
    return insert(rows, [part])


def _index(kinds: tuple[Kind, ...], name: str) -> int:
    return next(i for i, kind in enumerate(kinds) if kind.name == name)


class _Side:
    """The forward or backward actions of all stages: which row does stage s, unit u, and on which class."""

    def __init__(self, rows: Rows, names: tuple[str, ...]) -> None:
        self.row = np.flatnonzero(rows.is_kind(*names))
        self.stage, self.unit = rows.stage[self.row], rows.unit[self.row]
        self.rank_class = rows.rank_class[self.row]
        shape = (rows.num_stages + 2, rows.num_units)  # a border on both sides: stages -1 and num_stages do nothing
        self.class_at = np.full(shape, -1, np.int16)
        self.class_at[self.stage + 1, self.unit] = self.rank_class
        self.row_at = np.full(shape, -1, np.int32)
        # int32: rows of a Program stay below 2**31 (`MAX_ROWS`).
        self.row_at[self.stage + 1, self.unit] = self.row


def _direction(rows: Rows, side: _Side, hop: int, chains: Sequence[int], send: int, receive: int) -> list[Inserted]:
    """Messages of one direction. hop: stage of the receiver minus stage of the sender."""
    cut = np.zeros(rows.num_stages + 2, bool)  # cut[s + 1]: nothing passes between stages s - 1 and s
    cut[np.array([0, *chains, rows.num_stages]) + 1] = True
    here = side.stage.astype(np.int64) + 1  # [actions], shifted by the border of `_Side`
    to_next, to_before = ~cut[here + 1], ~cut[here]
    sends, receives = (to_next, to_before) if hop > 0 else (to_before, to_next)
    # a neighbour on the same rank is handed the tensor in memory
    sends = sends & (side.class_at[here + hop, side.unit] != side.rank_class)
    receives = receives & (side.class_at[here - hop, side.unit] != side.rank_class)
    first, last = group_ends(rows)
    out = np.flatnonzero(sends)
    # the row that makes what a receive takes, or the end of its group, after which the message leaves
    source = side.row_at[here[receives] - hop, side.unit[receives]].astype(np.int64)
    target = side.row[receives]
    order, anchor = in_senders_order(rows, source if last is None else last[source], source, target, first)
    chosen = np.flatnonzero(receives)[order]
    return [
        _message(rows, anchor, side, chosen, receive, before=True),
        _message(rows, side.row[out] if last is None else last[side.row[out]], side, out, send, before=False),
    ]


def _message(rows: Rows, anchor: Longs, side: _Side, which: Longs, kind: int, *, before: bool) -> Inserted:
    return Inserted(
        anchor=anchor,
        kind=np.full(len(which), kind, np.int8),
        stage=side.stage[which],
        unit=side.unit[which],
        before=before,
    )


def group_ends(rows: Rows) -> tuple[Longs | None, Longs | None]:
    """First and last row of each row's group (itself without one), or None twice when there are no groups."""
    grouped = np.flatnonzero(rows.group >= 0)
    if not len(grouped):
        return None, None
    first, last = np.arange(rows.num_rows), np.arange(rows.num_rows)
    size = int(rows.group.max()) + 1
    code = rows.rank_class[grouped].astype(np.int64) * size + rows.group[grouped]  # groups are counted in each class
    _, begin, inverse = np.unique(code, return_index=True, return_inverse=True)
    end = np.zeros(len(begin), np.int64)
    np.maximum.at(end, inverse, grouped)
    first[grouped], last[grouped] = grouped[begin][inverse], end[inverse]
    return first, last


def in_senders_order(
    rows: Rows, source_end: Longs, source: Longs, target: Longs, first: Longs | None
) -> tuple[Longs, Longs]:
    """Returns (order, anchors) of the receives, so placed that each pair of ranks receives in the order sent."""
    # target: [receives] the row that needs each; source: the row that makes it; source_end: after which it is sent.
    # NCCL matches messages between two ranks in the order of issue, so a receive that is needed early but sent
    # late must not overtake: it is posted where the earliest receive behind it in the sender's order is.
    anchor = target if first is None else first[target]
    order = np.arange(len(target))
    receiver = rows.class_ptr.searchsorted(anchor, side="right")
    sender = rows.class_ptr.searchsorted(source, side="right")
    flow = receiver * np.int64(rows.num_classes + 2) + sender  # one number for each ordered pair of classes
    by_flow = np.argsort(flow, kind="stable")  # within a flow in the order of need
    sent, same = source[by_flow], flow[by_flow][1:] == flow[by_flow][:-1]
    if first is None and not (same & (sent[1:] < sent[:-1])).any():
        return order, anchor
    # lexsort takes its last key first: by flow, then by the end of the group after which it leaves, then by the row
    # itself.
    by_sending = np.lexsort((source, source_end, flow))
    placed = anchor[by_sending]
    starts = np.flatnonzero(np.append(True, flow[by_sending][1:] != flow[by_sending][:-1]))
    for begin, end in zip(starts.tolist(), np.append(starts[1:], len(placed)).tolist(), strict=True):
        # the least anchor of this receive and all sent after it: anchors then never decrease in the sender's order
        placed[begin:end] = np.minimum.accumulate(placed[begin:end][::-1])[::-1]
    again = np.argsort(placed, kind="stable")
    return by_sending[again], placed[again]
