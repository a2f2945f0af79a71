"""Which row waits for which, derived from effects, messages, pools and streams alone.

`dependencies(program)` returns edges (source row, target row, distance in steps, and whether the edge carries data)
and the problems met on the way: buffers that are missing, freed twice, overwritten or leaked, and messages without
a partner. The rules, with e1 … en the effects on one buffer in issue order:
- a read waits for the latest write before it, or for the last write of the step before when the buffer is carried;
- a write waits for the reads of the version it replaces (`slots` versions back), within the step or from the step
  before;
- a step buffer written in step k waits for its release in step k - slots; a free waits for every read;
- RECV waits for its SEND; with capacity n, SEND j waits for RECV j - n; in a pool of n, allocation k waits for free
  k - n. Streams are not edges here: their order is the order of rows, also from one step to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.program.effects import EffectTable, effect_table
from gnomon.program.kinds import ACCUMULATE, CONSUME, EXTEND, FREE, READ, WRITE
from gnomon.program.messages import messages, pool_edges
from gnomon.program.problems import Problem
from gnomon.program.program import Program

Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edges:
    """source[i] happens before target[i], `distance` steps later; `data` edges also wait for the source's lag."""

    source: Longs
    """[edges] the row that is waited for."""
    target: Longs
    """[edges] the row that waits."""
    distance: NDArray[np.int32]
    """[edges] steps between the two; 0 within one step."""
    data: Bools
    """[edges] whether the wait is for data, which a lag delays, or for the order alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dependencies:
    """Everything about a Program that does not depend on durations, except the order of play."""

    table: EffectTable
    """What every row does to which buffer."""
    edges: Edges
    """Which row waits for which."""
    pairs: tuple[Longs, Longs]
    """(sends, receives) matched, as rows."""
    alloc: Bools
    """For each entry of the table: does it allocate (or grow) its buffer?"""
    release: Bools
    """For each entry: does it free its buffer?"""
    problems: tuple[Problem, ...]
    """What is wrong with the Program; empty for a valid one."""


def dependencies(program: Program) -> Dependencies:
    """Edges and problems of a Program, in one pass over its effects. Cost is a few vector operations per effect."""
    table = effect_table(program)
    lane = lanes(program)
    out = _Collector(lane)
    # The common lives are settled first and their entries filled in at once; `rest` holds what only a history settles.
    # The edges of both go into one collector.
    alloc, release, rest = _handed_over(program, table, out)
    history = _History(program, table, rest)
    opened = alloc.copy()
    alloc[rest], release[rest], opened[rest] = history.alloc, history.release, history.opens
    problems = _liveness(program, table, history) + _leaks(program, table, history)
    _data_edges(history, out)
    _reuse_edges(history, out)
    pairs, message_problems = messages(program, out.add)
    pool_edges(program, table, opened, release, out.add)
    return Dependencies(
        table=table,
        edges=out.edges(),
        pairs=pairs,
        alloc=alloc,
        release=release,
        problems=tuple(sorted(problems + message_problems, key=lambda p: (p.rank_class, p.row))),
    )


def lanes(program: Program) -> NDArray[np.int32]:
    """Lane of each row: one per (rank class, stream)."""
    # Streams of the same name on ranks of two classes are two lanes.
    lane = program.stream.astype(np.int32)
    for cls in range(program.num_classes):
        lane[int(program.class_ptr[cls]) : int(program.class_ptr[cls + 1])] += np.int32(cls * len(program.streams))
    return lane


class _Collector:
    """Gathers edges and drops those that a stream's own order already gives."""

    def __init__(self, lane: NDArray[np.int32]) -> None:
        self.lane = lane
        self.parts: list[tuple[Longs, Longs, NDArray[np.int32], Bools]] = []

    def add(
        self, source: Longs, target: Longs, distance: int | NDArray[np.int32], *, data: bool, strict: bool = False
    ) -> None:
        """strict: a row that waits for itself waits for ever, instead of seeing to it within itself."""
        # On one stream a row waits for every row before it, in this step and in all before; what is left is an edge
        # against that order, kept so that the cycle it makes is found.
        keep = self.lane[source] != self.lane[target]
        steps = np.full(len(source), distance, np.int32) if isinstance(distance, int) else distance
        keep |= (steps == 0) & ((source >= target) if strict else (source > target))
        if not keep.all():
            source, target, steps = source[keep], target[keep], steps[keep]
        self.parts.append((source, target, steps, np.full(len(source), data, bool)))

    def first_readers(self, writer: Longs, reader: Longs) -> tuple[Longs, Longs]:
        """Keeps of the edges from a writer to readers on one stream only the first: the stream's order gives the
        others."""
        keep = self._ends_of_runs(writer, self.lane[reader], reader)
        return writer[keep], reader[keep]

    def last_readers(self, reader: Longs, writer: Longs) -> tuple[Longs, Longs]:
        """Keeps of the edges from readers on one stream to a writer only the last."""
        # Rows are negated so that the last reader is the smallest.
        keep = self._ends_of_runs(writer, self.lane[reader], -reader)
        return reader[keep], writer[keep]

    @staticmethod
    def _ends_of_runs(end: Longs, lane: NDArray[np.int32], order: Longs) -> Longs:
        """Indices of the smallest `order` for each (end, lane)."""
        if not len(end):
            return end
        by = np.lexsort((order, lane, end))  # the first of each run of equal (end, lane) has the smallest order
        new = np.ones(len(by), bool)
        new[1:] = (end[by][1:] != end[by][:-1]) | (lane[by][1:] != lane[by][:-1])
        return by[new]

    def edges(self) -> Edges:
        columns = [np.concatenate(column) for column in zip(*self.parts, strict=True)]
        return Edges(
            source=columns[0].astype(np.int64), target=columns[1].astype(np.int64), distance=columns[2], data=columns[3]
        )


def _handed_over(program: Program, table: EffectTable, out: _Collector) -> tuple[Bools, Bools, Longs]:
    """Deals at once with the buffers that need no history, and returns (alloc, release, the entries that do).

    Most step buffers are written once and consumed once: one edge each way. What is left is a small part of the table.
    """
    size = len(table.op)
    alloc, release = np.zeros(size, bool), np.zeros(size, bool)
    first, length = _segments(table)
    kind = table.buffer_class(table.buffer[first])
    # With several slots the next write takes another slot, so a write does not wait for this version's end.
    plain = np.array([b.lifetime in ("action", "step") and b.slots == 1 for b in program.buffers], bool)[kind]
    # Entries of a buffer lie together, in issue order (`_segments`): a pair is its first entry and the one after.
    pair = first[plain & (length == 2)]
    pair = pair[(table.op[pair] == WRITE) & (table.op[pair + 1] == CONSUME)]
    wrote, used = table.row[pair].astype(np.int64), table.row[pair + 1].astype(np.int64)
    out.add(wrote, used, 0, data=True)
    out.add(used, wrote, 1, data=False)  # with one slot, the next step's write waits until this version is gone
    alloc[pair] = release[pair + 1] = True
    done = np.zeros(size, bool)
    done[pair] = done[pair + 1] = True
    rest = np.flatnonzero(~done)
    return alloc, release, _on_several_streams(program, table, out.lane, rest, alloc, release)


def _on_several_streams(
    program: Program, table: EffectTable, lane: NDArray[np.int32], rest: Longs, alloc: Bools, release: Bools
) -> Longs:
    """Picks from the entries `rest` those of buffers that need a history: on one stream a simple life has no edges.

    Simple: a carried buffer that is never freed; or a step buffer that is opened, read and accumulated, and freed last.
    """
    if not len(rest):
        return rest
    op, on = table.op[rest], lane[table.row[rest]]
    new = np.ones(len(rest), bool)
    np.not_equal(table.buffer[rest[1:]], table.buffer[rest[:-1]], out=new[1:])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(rest)) - 1
    kind = table.buffer_class(table.buffer[rest[first]])
    # Effects are numbered so that comparisons are classes (`kinds`): READ and ACCUMULATE leave a version what it is,
    # EXTEND and WRITE grow or open one, CONSUME and FREE, the last, end it.
    one_stream = np.minimum.reduceat(on, first) == np.maximum.reduceat(on, first)
    carried = np.array([b.lifetime == "carried" for b in program.buffers], bool)[kind]
    never_freed = carried & (np.maximum.reduceat(op, first) <= WRITE)
    plain = np.array([b.lifetime in ("action", "step") and b.slots == 1 for b in program.buffers], bool)[kind]
    opens = (op[first] == WRITE) | (op[first] == ACCUMULATE)
    # Entries between the first and the last that grow, open or end a version: a simple life has none.
    inner = np.add.reduceat((op >= EXTEND).astype(np.int64), first) - (op[first] >= EXTEND) - (op[last] >= EXTEND)
    one_life = plain & opens & (op[last] >= CONSUME) & (inner == 0) & (last > first)
    simple = one_stream & (never_freed | one_life)
    lived = simple & one_life
    alloc[rest[first[lived]]] = release[rest[last[lived]]] = True
    history: Longs = rest[~np.repeat(simple, last - first + 1)]
    return history


def _segments(table: EffectTable) -> tuple[Longs, Longs]:
    """First entry and number of entries of each buffer."""
    new = np.ones(len(table.op), bool)
    np.not_equal(table.buffer[1:], table.buffer[:-1], out=new[1:])
    first = np.flatnonzero(new)
    return first, np.diff(np.append(first, len(new)))


class _History:
    """Entries as one history per buffer: what was live when, and which entries open and end versions."""

    def __init__(self, program: Program, table: EffectTable, entries: Longs) -> None:
        self.row, self.op, self.buffer = table.row[entries].astype(np.int64), table.op[entries], table.buffer[entries]
        size = len(self.op)
        new = np.ones(size, bool)
        np.not_equal(self.buffer[1:], self.buffer[:-1], out=new[1:])
        self.first = np.flatnonzero(new)
        """First entry of each buffer."""
        self.length = np.diff(np.append(self.first, size))
        self.starts = np.repeat(self.first, self.length)
        self.ends = np.repeat(self.first + self.length, self.length)
        kind = table.buffer_class(self.buffer[self.first])
        self.slots = np.array([b.slots for b in program.buffers], np.int64)[kind]
        self.carried_class = np.array([b.lifetime == "carried" for b in program.buffers], bool)[kind]
        self.in_step = np.array([b.lifetime in ("action", "step") for b in program.buffers], bool)[kind]
        self.carried = np.repeat(self.carried_class, self.length)
        self.write = self.op == WRITE
        self.modify = self.write | (self.op == ACCUMULATE) | (self.op == EXTEND)
        self.free = self.op >= CONSUME
        # Live before an entry: written since it was last freed; a carried buffer also from the step before.
        self.last_modify = self.before(self.modify)
        self.last_free = self.before(self.free)
        self.live = (self.last_modify > self.last_free) | (self.carried & (self.last_free < 0))
        self.opens = self.modify & ~self.live
        self.alloc = self.opens | (self.op == EXTEND)
        self.release = self.free & self.live & ~self.carried

    def before(self, flag: Bools) -> Longs:
        """Finds for each entry the index of the latest earlier flagged entry of its buffer, or -1."""
        # A running maximum over all entries, with what lies before the buffer's own first entry taken away.
        index = np.where(flag, np.arange(len(flag)), -1)
        last = np.full(len(flag), -1, np.int64)
        np.maximum.accumulate(index[:-1], out=last[1:])
        last[last < self.starts] = -1
        return last

    def after(self, flag: Bools) -> Longs:
        """Finds for each entry the index of the next later flagged entry of its buffer, or -1."""
        size = len(flag)
        index = np.where(flag, np.arange(size), size)
        following = np.full(size, size, np.int64)
        # A running minimum from the end; [:0:-1] leaves out the first item, so that no entry is its own successor.
        following[:-1] = np.minimum.accumulate(index[:0:-1])[::-1]
        following[following >= self.ends] = -1
        return following

    def first_of(self, flag: Bools) -> Longs:
        """Index of the first flagged entry of each buffer, or -1."""
        size = len(flag)
        index = np.minimum.reduceat(np.where(flag, np.arange(size), size), self.first) if size else self.first
        return np.where(index < self.first + self.length, index, -1)

    def final_of(self, flag: Bools) -> Longs:
        """Index of the last flagged entry of each buffer, or -1."""
        index = np.maximum.reduceat(np.where(flag, np.arange(len(flag)), -1), self.first) if len(flag) else self.first
        return np.where(index >= self.first, index, -1)


def _liveness(program: Program, table: EffectTable, h: _History) -> list[Problem]:
    """Entries that find their buffer in the wrong state."""
    problems = []

    def report(i: int, what: str, why: str) -> None:
        name = table.name(program, int(h.buffer[i]))
        problems.append(Problem.of(program, what, int(h.row[i]), f"{name} {why}"))

    for i in np.flatnonzero(~h.modify & ~h.live).tolist():
        if h.last_free[i] >= 0:
            what = "double free" if h.op[i] == FREE else "use after free"
            report(i, what, f"was freed by {program.token(int(h.row[h.last_free[i]]))} before")
        else:
            report(i, "missing buffer", "has not been written before, in issue order")
    for i in np.flatnonzero(h.write & h.live & ~h.carried).tolist():
        report(i, "overwrite", "is still live; free it before it is written again")
    for i in np.flatnonzero(h.free & h.carried).tolist():
        report(i, "carried buffer freed", "lives from step to step and cannot be freed")
    return problems


def _leaks(program: Program, table: EffectTable, h: _History) -> list[Problem]:
    """Step buffers that are live at the end of the step."""
    problems = []
    modified = h.final_of(h.modify)
    for i in np.flatnonzero((modified > h.final_of(h.free)) & h.in_step).tolist():
        name = table.name(program, int(h.buffer[h.first[i]]))
        row = int(h.row[modified[i]])
        problems.append(Problem.of(program, "leak", row, f"{name} is written but not freed by the end of the step"))
    return problems


def _data_edges(h: _History, out: _Collector) -> None:
    """Read after write, accumulations in their order, and the last write of a carried buffer to the next step's
    reads."""
    # Within the step: whatever looks at a version that is live, in this order of issue; writes open a new one instead,
    # but for carried buffers, which are changed in place.
    here = np.flatnonzero((h.last_modify > h.last_free) & (~h.write | h.carried))
    out.add(*out.first_readers(h.row[h.last_modify[here]], h.row[here]), 0, data=True)
    # Across the step: what reads a carried buffer before it is first changed reads what the step before left.
    wraps = np.flatnonzero(h.carried & (h.last_modify < 0))
    source = np.repeat(h.final_of(h.modify), h.length)[wraps]
    wraps, source = wraps[source >= 0], source[source >= 0]
    out.add(*out.first_readers(h.row[source], h.row[wraps]), 1, data=True)


def _reuse_edges(h: _History, out: _Collector) -> None:
    """Frees and rewrites wait for the reads before them; a new version for the release of the one `slots` before it."""
    # Write after read: with one slot, what ends a version (a change or a free) waits for the reads of it. With several,
    # only changes in place do: a write takes another slot.
    single = np.repeat(h.slots == 1, h.length)
    ender = h.after(h.modify | h.free)
    read = np.flatnonzero((h.op == READ) & (ender >= 0))
    read = read[single[read] | ~h.write[ender[read]]]
    out.add(*out.last_readers(h.row[read], h.row[ender[read]]), 0, data=False)
    # Opened again within the step: after the free.
    again = np.flatnonzero(h.opens & (h.last_free >= 0) & single)
    out.add(h.row[h.last_free[again]], h.row[again], 0, data=False)
    # Reads after the last change of a carried buffer: the next step's first change waits for them.
    opening = np.repeat(h.first_of(h.modify), h.length)
    in_place = opening >= 0  # an accumulation changes the version itself, however many slots there are
    in_place[in_place] = single[in_place] | ~h.write[opening[in_place]]
    tail = np.flatnonzero(h.carried & in_place & (h.op == READ) & (ender < 0))
    out.add(*out.last_readers(h.row[tail], h.row[opening[tail]]), 1, data=False)
    # A step buffer of one slot: the next step opens it once this step has released it.
    released, opened = h.final_of(h.release), h.first_of(h.opens)
    step = np.flatnonzero((released >= 0) & (opened >= 0) & (h.slots == 1))
    out.add(h.row[released[step]], h.row[opened[step]], 1, data=False)
    for buffer in np.flatnonzero(h.slots > 1).tolist():
        _several_slots(h, buffer, out)


def _several_slots(h: _History, buffer: int, out: _Collector) -> None:
    """Reuse edges of one buffer with more than one slot: version j waits for what ends version j - slots."""
    begin, slots = int(h.first[buffer]), int(h.slots[buffer])
    entries = range(begin, begin + int(h.length[buffer]))
    carried = bool(h.carried_class[buffer])
    # Versions are numbered by what opens them; those of step k are k * len(opened) + j.
    opened = [i for i in entries if (h.write[i] if carried else h.opens[i])]
    if not opened:
        return
    ends: list[list[tuple[int, int]]] = [[] for _ in opened]
    for i in entries:
        # -1 before the first is opened: the last version, which the step before left.
        version = sum(o <= i for o in opened) - 1
        # What holds a version's slot: reads of a carried buffer, which is never freed; the release of a step buffer.
        if (h.op[i] == READ) if carried else h.release[i]:
            ends[version].append(
                (i, 1 if version < 0 else 0)
            )  # reads before the first write use the last step's version
    for j, start in enumerate(opened):
        # The version whose slot this one takes: `slots` earlier, which may lie some steps back (steps < 0).
        steps, version = divmod(j - slots, len(opened))
        for end, later in ends[version]:
            distance = -steps - later
            # In the same step only what comes before in issue order can be waited for.
            if distance > 0 or (distance == 0 and end < start):
                out.add(h.row[[end]], h.row[[start]], distance, data=False)
