"""The bare order of a schedule, played for many sets of durations at once: computing, messages, reductions.

`skeleton(schedule, pp, virtual, microbatches, reductions)` prepares the rows of a schedule; `play` returns when each
stage's last gradient is complete, for many columns of durations. It is what the simulator would say if there were no
updates, no gathers and no waiting for links: every dependency that it keeps is one of the Program's, so it is a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.search.bounds.families import Actions
from gnomon.search.bounds.in_flight import schedule_rows

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]
Reductions = Literal["", "once", "stages", "layers"]
"""When gradients are reduced: never; once a stage, after its last backward; of every microbatch and whole stages (ZeRO
2), each after its backward and before the stage's next one; of every microbatch and layers (ZeRO 3), which begin
somewhere in the backward. A rank's reductions follow each other."""

KINDS = ("F", "B", "I", "W", "R", "R_LAST", "G", "G_FIRST", "G_LAST", "F&B", "NONE")
"""Rows whose durations are given, reductions (the last of a stage with what follows it on its stream), gathers of a
stage's layers (of all, of all but the first, of all but the last, which the pass before has gathered already), and
composites, which are the first of their two rows; the second takes no time of its own."""

_FIRST_GATHER = KINDS.index("G")


NARROW = 48
"""Rows of a level times columns, in the mean, up to which rows are played one by one (measured: 12 us a level, 0.25 us
a row and column)."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A schedule's rows by level: rows of a level wait only for rows of earlier ones. Positions count from 1; position
    0 is the start of the step. Columns are [rows]."""

    levels: Longs
    """[levels + 1] the row at which each level begins."""
    before: Longs
    """Position of the row before each on its rank."""
    source: Longs
    """Position of the row whose message it waits for; 0 for none."""
    third: Longs
    """Position of another row that it waits for; 0 for none."""
    key: Longs
    """Row of the table of durations: kind x stage."""
    sent: Longs
    """Row of the table of messages."""
    ahead: Longs
    """Row of the table of what a row does before it needs the last of its gathers: kind x stage; the last for none."""
    last: Longs
    """[stages] position of the row that completes a stage's gradients."""
    final: Longs
    """[ranks] position of the last row of each rank."""
    reduced: Longs
    """[stages] position of the last reduction of each stage; 0 without."""

    @property
    def columns(self) -> tuple[Longs, ...]:
        """The columns that `play` reads of each row."""
        return self.before, self.source, self.third, self.key, self.sent, self.ahead


@lru_cache(maxsize=128)
def skeleton(
    schedule: str,
    pp: int,
    virtual: int,
    microbatches: int,
    reductions: Reductions = "",
    layers: tuple[int, ...] = (),
    gathered_ahead: int = 0,
) -> Skeleton:
    """The rows of a schedule, as far as time depends on them.

    layers, gathered_ahead: under ZeRO 3, layers of each stage, and how many of them may be gathered at once: the gather
    of a layer waits until the one so many before it is let go. A pass ends no sooner than its last gather and the last
    of its layers. Empty: gathers are not looked at.
    """
    # Positions count from 1 everywhere below, so that 0 can stand for "waits for nothing": end[0] = 0 is the step's
    # start.
    rows = schedule_rows(schedule, pp, virtual, microbatches)
    names = [KINDS.index(kind.name) if kind.name in KINDS else 0 for kind in rows.kinds]
    kind = np.array(names, np.int64)[rows.kind]
    stage, unit = rows.stage.astype(np.int64), rows.unit.astype(np.int64)
    stages = rows.num_stages
    before = np.arange(len(kind), dtype=np.int64)  # the row before, as a position from 1
    # The first row of each rank waits for none before it.
    before[rows.class_ptr[:-1]] = 0
    # A composite is two neighbouring rows of one group.
    pairs = np.flatnonzero((rows.group[:-1] >= 0) & (rows.group[:-1] == rows.group[1:]))
    source = _sources(kind, stage, unit, stages, microbatches, pairs)
    third = np.zeros(len(kind), np.int64)
    third[pairs] = source[pairs + 1]  # both begin together and end together
    edges = rows.class_ptr
    # KINDS 1 and 3 are B and W: either completes a stage's gradients for a unit.
    ends = np.flatnonzero((kind == 1) | (kind == 3))
    last = np.zeros(stages, np.int64)
    last[stage[ends]] = ends + 1  # rows are in order of issue, so the last assignment stands
    final, reduced = rows.class_ptr[1:], np.zeros(stages, np.int64)
    opens = (before == 0) & (source == 0)  # the first row of a chain
    read = kind, stage
    # One reduction a stage: after the last row that adds to its gradients.
    if reductions == "once":
        ends = np.sort(last) - 1
    # From here on rows are appended: first the reductions, rank by rank, each lane in order of the rows behind which
    # they stand.
    if reductions:
        own = np.arange(len(ends), dtype=np.int64) + len(kind) + 1
        lanes = np.searchsorted(ends, rows.class_ptr)
        previous = own - 1
        previous[lanes[:-1]] = 0
        reduced[stage[ends]] = own
        # ZeRO 2: the backward may not add to gradients that are still being reduced.
        if reductions == "stages":
            third[ends] = _same_stage_before(stage[ends], own, stages)
        # "layers" (ZeRO 3) reductions begin somewhere inside their backward, so they wait only for the row before it.
        started = ends + 1 if reductions == "stages" else before[ends]
        # The stage's last reduction carries the sums over replicas that follow on its stream.
        final_of_stage = np.where(last[stage[ends]] == ends + 1, KINDS.index("R_LAST"), KINDS.index("R"))
        kind, stage = np.append(kind, final_of_stage), np.append(stage, stage[ends])
        before, source = np.append(before, previous), np.append(source, started)
        third, edges = np.append(third, np.zeros(len(ends), np.int64)), np.append(edges, lanes[1:] + edges[-1])
    # 3 x stages is the row of the `ahead` table that means "needs no gather".
    ahead = np.full(len(kind), 3 * stages, np.int64)
    if layers:
        gathers = _gathers(*read, rows.class_ptr, np.array(layers, np.int64), gathered_ahead)
        own = np.arange(len(gathers.row), dtype=np.int64) + len(kind) + 1
        third = np.append(third, np.zeros(len(own), np.int64))
        # A row that reads parameters waits for its gathers, which are rows of their own lane: position `own`.
        third[gathers.row] = own
        ahead = np.append(ahead, np.full(len(own), 3 * stages, np.int64))
        ahead[gathers.row] = kind[gathers.row] * stages + stage[gathers.row]
        previous = own - 1
        previous[gathers.lanes[:-1]] = 0
        before, source = np.append(before, previous), np.append(source, gathers.freed)
        kind, stage = np.append(kind, gathers.kind), np.append(stage, stage[gathers.row])
        edges = np.append(edges, gathers.lanes[1:] + edges[-1])
    # Rows of one level do not depend on each other, so `play` computes a level of all columns as one array operation.
    level = _levels(before, source, third, edges)
    key, sent = _tables(kind, stage, source, stages, pairs, opens)
    order = np.argsort(level, kind="stable")
    place = np.zeros(len(kind) + 1, np.int64)
    # place: old position -> new position once rows are sorted by level; 0 stays 0.
    place[order + 1] = np.arange(1, len(kind) + 1)
    bounds = np.append(np.searchsorted(level[order], np.arange(int(level.max()) + 1)), len(kind))
    return Skeleton(
        levels=bounds,
        before=place[before[order]],
        source=place[source[order]],
        third=place[third[order]],
        key=key[order],
        sent=sent[order],
        ahead=ahead[order],
        last=place[last],
        final=place[final],
        reduced=place[reduced],
    )


def _tables(
    kind: Longs, stage: Longs, source: Longs, stages: int, pairs: Longs, opens: NDArray[np.bool_]
) -> tuple[Longs, Longs]:
    """Each row's place in the table of durations and in that of messages. pairs: first rows of composites. opens: first
    rows of chains."""
    cost = kind.copy()
    # The second row of a composite takes no time, the first takes that of both.
    cost[pairs], cost[pairs + 1] = KINDS.index("F&B"), KINDS.index("NONE")
    # a message between a stage and the one before it, or after it; a reduction waits without one
    sent = np.where(source == 0, stages - 1, np.select([kind == 0, kind >= 4], [stage - 1, stages], stage))
    # The first row of a chain waits for what begins the step (update, gather) of its stage.
    sent[np.flatnonzero(opens)] = stages + 1 + stage[np.flatnonzero(opens)]
    return cost * stages + stage, sent


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """One node for each row that reads parameters, rank after rank."""

    row: Longs
    kind: Longs
    freed: Longs
    """Position of the row that must have ended before they begin; 0 for none."""
    lanes: Longs
    """[ranks + 1] where each rank's begin."""


def _gathers(kind: Longs, stage: Longs, edges: Longs, layers: Longs, gathered_ahead: int) -> Gathers:
    """Neighbouring passes over one stage in opposite directions share the layer where they turn; over one stage in one
    direction they share a layer only if it has no other, which the caller's durations say by being 0.

    So a pass gathers at least all layers of its stage but those shared. Counted in these, the one that must be let go
    before a pass's first gather is in some earlier pass, and all passes before that one have ended.
    """
    row = np.flatnonzero(kind != 3)
    # W reads no parameters (KINDS 3); every other row of the schedule does.
    lanes = np.searchsorted(row, edges)
    forward = kind[row] == 0
    first = np.zeros(len(row), bool)
    first[lanes[:-1]] = True
    same = np.append(False, stage[row][1:] == stage[row][:-1]) & ~first
    # same: the pass before on this rank was over the same stage; turned: in the other direction, so that the last layer
    # of one is the first of the other.
    turned = same & np.append(False, forward[1:] != forward[:-1])
    # a forward begins with the first layer, where a backward ends; a backward begins with the last
    node = _FIRST_GATHER + np.where(turned, np.where(forward, 1, 2), 0)
    sizes = layers[stage[row]]
    # Layers that a pass must gather: all of its stage but the one that is still held.
    gather_sizes = np.maximum(sizes - (turned | (same & (sizes == 1))), 0)
    freed = np.zeros(len(row), np.int64)
    for start, stop in _pairs(lanes):
        # done: gathers of the lane up to and with each pass. The gather number `wanted` must be let go first; `inside`
        # is the pass that made it, and the pass before that one is over for sure.
        done = np.cumsum(gather_sizes[start:stop])
        let_go = done - gather_sizes[start:stop] - gathered_ahead  # index of the layer that must be let go
        inside = np.searchsorted(done, let_go, side="right")  # the pass that it is in
        freed[start:stop] = np.where((let_go >= 0) & (inside > 0), row[start + np.maximum(inside - 1, 0)] + 1, 0)
    return Gathers(row=row, kind=node.astype(np.int64), freed=freed, lanes=lanes)


def _same_stage_before(stage: Longs, own: Longs, stages: int) -> Longs:
    """The reduction of the stage's backward before each one; 0 for the first."""
    order = np.argsort(stage, kind="stable")
    out = np.zeros(len(stage), np.int64)
    same = np.append(False, stage[order][1:] == stage[order][:-1])
    out[order[same]] = own[order[np.flatnonzero(same) - 1]]
    return out


def play(
    skeleton_: Skeleton,
    act: Actions,
    reduce: Doubles,
    final: Doubles,
    sends: Doubles,
    heads: Doubles,
    gathers: Doubles | None = None,
    lasts: Doubles | None = None,
) -> tuple[Doubles, Doubles, Doubles]:
    """(end of each stage's gradients [stages, columns], end of each rank [ranks, columns], end of each stage's last
    reduction [stages, columns]), in seconds from the start.

    act, reduce, final: [stages, columns] of actions, reductions, the last of them. sends: [stages - 1, columns] of
    messages to the next stage; negative where none is sent. heads: [stages, columns] before the first forward of a
    stage that begins a chain.
    """
    forward, whole, first, second = act.forward, act.whole, act.input, act.weight
    columns = forward.shape[1]
    gathers = np.zeros((3 * len(forward), columns)) if gathers is None else gathers
    lasts = np.concatenate([forward, whole, first]) if lasts is None else lasts
    # In V placement the rank of stage s also holds stage S - 1 - s, so both[::-1] is the other row of the composite.
    both = forward + whole  # composites are in V placement: the rank's other stage is as far from the other end
    # In the order of KINDS, `stages` rows for each; `gathers` are three kinds.
    times = np.concatenate(
        [forward, whole, first, second, reduce, final, gathers, np.maximum(both, both[::-1]), np.zeros_like(both)]
    )
    # ahead: what a row does before it needs the last gathered layer, as a negative of its last layer's seconds.
    ahead = np.concatenate([lasts - np.concatenate([forward, whole, first]), np.zeros((1, columns))])
    # -inf marks a message that is not sent: its row never waits for it.
    none = np.full((1, columns), -np.inf)
    # Rows of `wires`, as `_tables` numbers them: messages 0 … S - 2, no message (S - 1), no time (S), heads from S + 1.
    wires = np.concatenate([np.where(sends >= 0, sends, -np.inf), none, np.zeros((1, columns)), heads])
    # Few rows a level: numpy's call overhead exceeds the arithmetic, so plain Python floats are faster.
    if len(skeleton_.key) * columns <= NARROW * (len(skeleton_.levels) - 1):
        end = _one_by_one(skeleton_, times, wires, ahead)
    else:
        end = _by_level(skeleton_, times, wires, ahead)
    return end[skeleton_.last], end[skeleton_.final], end[skeleton_.reduced]


def _by_level(skeleton_: Skeleton, times: Doubles, wires: Doubles, ahead: Doubles) -> Doubles:
    """[positions, columns] ends of rows. times, wires, ahead: tables with the same columns."""
    end = np.zeros((len(skeleton_.key) + 1, times.shape[1]))
    for a, b in _pairs(skeleton_.levels):
        before, source, third, key, sent, early = (column[a:b] for column in skeleton_.columns)
        # start = max(row before, message, third row): the recurrence of a longest path.
        start = np.maximum(end[before], end[source] + wires[sent])
        np.maximum(start, end[third] + ahead[early], out=start)
        np.add(start, times[key], out=end[a + 1 : b + 1])
    return end


def _one_by_one(skeleton_: Skeleton, times: Doubles, wires: Doubles, ahead: Doubles) -> Doubles:
    """Plays the schedule action by action, where `_by_level` plays a level at once."""
    rows = [column.tolist() for column in skeleton_.columns]
    ended = []
    for column in range(times.shape[1]):
        lasts, sends, waits = (table[:, column].tolist() for table in (times, wires, ahead))
        end = [0.0]
        add = end.append
        for before, source, third, key, sent, early in zip(*rows, strict=True):
            start, arrived, gathered = end[before], end[source] + sends[sent], end[third] + waits[early]
            if arrived > start:
                start = arrived
            if gathered > start:
                start = gathered
            add(start + lasts[key])
        ended.append(end)
    return np.array(ended).T


def _sources(kind: Longs, stage: Longs, unit: Longs, stages: int, units: int, pairs: Longs) -> Longs:
    """Position (from 1) of the row that a forward or an input gradient gets its message from; 0 for none. pairs: first
    rows of composites, which end with their second row."""
    # Tables [stage + 1, unit] of the row that does a forward or an input gradient, with a margin of zero rows for the
    # stages before the first and after the last.
    forward = np.zeros((stages + 2, units), np.int64)
    back = np.zeros((stages + 2, units), np.int64)
    index = np.arange(1, len(kind) + 1)
    index[pairs] += 1
    is_forward, is_back = kind == 0, (kind == 1) | (kind == 2)
    forward[stage[is_forward] + 1, unit[is_forward]] = index[is_forward]
    back[stage[is_back] + 1, unit[is_back]] = index[is_back]
    out = np.zeros(len(kind), np.int64)
    out[is_forward] = forward[stage[is_forward], unit[is_forward]]
    out[is_back] = back[stage[is_back] + 2, unit[is_back]]
    return out


def _levels(before: Longs, source: Longs, third: Longs, edges: Longs) -> Longs:
    """[rows] one more than the levels of what a row waits for. edges: of lanes, whose rows follow each other."""
    level = [0, *[-1] * len(before)]
    # Rounds over the lanes: each lane moves on as far as what it waits for has a level. Schedules are deadlock-free, so
    # every round moves at least one lane.
    earlier, waits, also = before.tolist(), source.tolist(), third.tolist()
    next_row, ends = edges[:-1].tolist(), edges[1:].tolist()
    moved = True
    while moved:
        moved = False
        for lane, stop in enumerate(ends):
            begin = row = next_row[lane]
            while row < stop:
                a, b, c = level[waits[row]], level[also[row]], level[earlier[row]]
                if a < 0 or b < 0:
                    break
                if b > a:
                    a = b
                row += 1
                level[row] = (c if c > a else a) + 1
            if row > begin:
                next_row[lane], moved = row, True
    assert next_row == ends, "the rows of a schedule can run"
    return np.array(level[1:], np.int64) - 1


def _pairs(edges: Longs) -> Iterator[tuple[int, int]]:
    listed = edges.tolist()
    return zip(listed, listed[1:], strict=False)
