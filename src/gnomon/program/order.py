"""The order of play: rows of a Program renumbered so that everything a row waits for comes in an earlier level.

`order(program, dependencies)` advances all streams together, one ready entry each a round; a round is a level. Its
result holds, per entry, the positions it waits for, so that playing a Program is a few vector operations a level,
for one set of durations or for thousands. No progress is a deadlock, which is returned as the shortest cycle of
waiting rows. Entries are rows, except that rows of one group on one stream (a composite such as `(0F3&1B1)`) are
one entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.program.dependencies import Dependencies, lanes
from gnomon.program.program import Program
from gnomon.units import distinct

Longs = NDArray[np.int64]
Positions = NDArray[np.int32]


_ROW_BITS = 23  # from_columns allows no more rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """Entries in an order that respects all dependencies within the step. `size` stands for "nothing" in
    predecessors."""

    size: int
    """The number of entries."""
    rows: Longs
    """[size] the (first) row of each position."""
    position: Positions
    """[rows of the Program] position of each row."""
    level_ptr: Longs
    """Where levels begin: positions level_ptr[i]:level_ptr[i + 1] wait only for positions before level_ptr[i]."""
    lane_before: Positions
    """[size] the entry before on the same stream, or `size`."""
    waits: tuple[Positions, Positions]
    """Two further predecessors of each position, or `size`."""
    wait_is_data: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    """Whether each of `waits` also waits for the lag of its source."""
    further: tuple[tuple[int, Longs, Longs, NDArray[np.bool_]], ...]
    """Lists the rare further predecessors: (level, positions, predecessors, data?), each position once in an item."""
    groups: tuple[tuple[int, Longs, Longs], ...]
    """(level, positions of grouped entries sorted by group, start of each group): they start together."""
    before: tuple[Longs, Longs, NDArray[np.int32], NDArray[np.bool_]]
    """Edges from earlier steps: (source position, target position, distance, data?), streams included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """No entry can go on: a shortest cycle of rows, each waiting for the next, and where the streams stand."""

    rows: tuple[int, ...]
    """Rows of the cycle: each waits for the next, the last for the first: for its data or message, or because it, or a
    partner of it, comes later on the same stream."""
    partners: tuple[tuple[int, ...], ...]
    """The others of the group or message of each of `rows`."""
    heads: tuple[int, ...]
    """The first row of each stream that did not run."""
    finished: int
    """The number of rows that ran before everything stopped."""


def order(program: Program, deps: Dependencies, *, why: bool = True) -> Order | Deadlock | None:
    """The order of play, or the deadlock: without `why` None, because its cycle takes long to find. Time: about 20
    microseconds a level on one core."""
    graph = _Entries(program, deps)
    sequence, level_ptr = _advance(graph)
    if len(sequence) < graph.count:
        return _deadlock(program, graph, sequence) if why else None
    return _renumber(program, deps, graph, sequence, level_ptr)


class _Entries:
    """Rows as entries in lanes, with the edges of the step between them and the groups that must start together."""

    def __init__(self, program: Program, deps: Dependencies) -> None:
        rows = program.num_rows
        group = _groups(program, deps)
        lane = lanes(program)
        # Legend: R rows in issue order, E entries, lanes are streams of rank classes. Rows of one group that follow
        # each other on a lane are one entry: they start together, so nothing can come between them.
        packed = np.sort(lane.astype(np.int64) << _ROW_BITS | np.arange(rows))  # sorting values beats sorting indices
        by_lane, lane_sorted = packed & ((1 << _ROW_BITS) - 1), packed >> _ROW_BITS
        follows = np.zeros(rows, bool)
        if group is not None:
            g = group[by_lane]
            follows[1:] = (g[1:] >= 0) & (g[1:] == g[:-1]) & (lane_sorted[1:] == lane_sorted[:-1])
        entry_sorted = np.cumsum(~follows) - 1  # [R] in order of lanes
        self.count = int(entry_sorted[-1]) + 1 if rows else 0
        """Entries are numbered lane by lane in stream order, so the entry before on a stream is the number before."""
        self.of_row = np.empty(rows, np.int64)
        self.of_row[by_lane] = entry_sorted
        # Sorting kept the rows of a lane in issue order, so this is the earliest row of each entry.
        self.row = by_lane[~follows]
        entry_lane = lane_sorted[~follows]
        starts = np.flatnonzero(np.append(True, entry_lane[1:] != entry_lane[:-1])) if rows else np.zeros(0, np.int64)
        self.lane_start = starts
        self.lane_end = np.append(starts[1:], self.count)
        self.is_head = np.zeros(self.count, bool)
        self.is_head[starts] = True
        self.group = np.full(self.count, -1, np.int64) if group is None else group[self.row]
        self.has_groups = group is not None
        # Edges from earlier steps say when an entry may start, not which entries of one step come first: they are no
        # part of the levels, and go into `Order.before`.
        same_step = deps.edges.distance == 0
        source, target = self.of_row[deps.edges.source[same_step]], self.of_row[deps.edges.target[same_step]]
        self.source, self.target, self.data = source, target, deps.edges.data[same_step]
        if self.has_groups:
            # within an entry an edge forward holds by itself; one backward is a cycle, and is kept to be found
            keep = (source != target) | (deps.edges.source[same_step] >= deps.edges.target[same_step])
            self.source, self.target, self.data = source[keep], target[keep], self.data[keep]
        # edges by target, then source: the edges of a target are one run, `wait_ptr` says where it begins
        packed = np.sort((self.target << _ROW_BITS | self.source) << 1 | self.data)
        self.target, self.source = packed >> (_ROW_BITS + 1), packed >> 1 & ((1 << _ROW_BITS) - 1)
        self.data = (packed & 1).astype(bool)
        self.wait_ptr = np.append(0, np.cumsum(np.bincount(self.target, minlength=self.count)))

    def columns(self) -> tuple[Longs, Longs]:
        """The first two predecessors off the lane, padded with `count`."""
        rank = np.arange(len(self.target)) - self.wait_ptr[self.target]  # [edges] number within its target's run
        out = []
        for j in (0, 1):
            column = np.full(self.count + 1, self.count, np.int64)
            column[self.target[rank == j]] = self.source[rank == j]
            out.append(column)
        return out[0], out[1]

    def third_predecessors(self) -> dict[int, list[int]]:
        """Third and further predecessors of the entries that have any."""
        rank, further = np.arange(len(self.target)) - self.wait_ptr[self.target], dict[int, list[int]]()
        for target, source in zip(self.target[rank >= 2].tolist(), self.source[rank >= 2].tolist(), strict=True):
            further.setdefault(target, []).append(source)
        return further

    def lane_of(self) -> Longs:
        """[entries] index of the stream of each."""
        return np.repeat(np.arange(len(self.lane_start)), self.lane_end - self.lane_start)

    def further(self) -> tuple[Longs, Longs, Longs]:
        """Third and further predecessors, counted: (how many each entry has, the entries that wait for a source sorted
        by source, where those of each source begin)."""
        rank = np.arange(len(self.target)) - self.wait_ptr[self.target]
        extra = np.flatnonzero(rank >= 2)
        by_source = extra[np.argsort(self.source[extra], kind="stable")]
        begin = np.append(0, np.cumsum(np.bincount(self.source[extra], minlength=self.count)))
        return np.bincount(self.target[extra], minlength=self.count), self.target[by_source], begin


def _groups(program: Program, deps: Dependencies) -> Longs | None:
    """Group of each row, rendezvous messages included, or None when there are no groups: connected rows get one
    number."""
    sends, receives = deps.pairs
    names = {c.name for c in program.comms if c.semantics == "rendezvous"}
    # A rendezvous starts only when both ends are there, so a send and its receive are one group. A buffered send goes
    # on alone.
    meet = (
        np.array([program.comm_of(r) in names for r in sends.tolist()], bool) if names else np.zeros(len(sends), bool)
    )
    grouped = np.flatnonzero(program.group >= 0)
    if not meet.any() and not len(grouped):
        return None
    _, first, which = np.unique(program.group[grouped], return_index=True, return_inverse=True)
    a = np.concatenate([sends[meet], grouped])
    b = np.concatenate([receives[meet], grouped[first[which]]])
    # Connected components by label propagation: every pair takes the lower label of both until none changes. Chains of
    # groups and messages are short, so a few rounds do.
    label = np.arange(program.num_rows)
    while True:
        lowest = np.minimum(label[a], label[b])
        if np.array_equal(lowest, label[a]) and np.array_equal(lowest, label[b]):
            break
        np.minimum.at(label, a, lowest)
        np.minimum.at(label, b, lowest)
    out = np.full(program.num_rows, -1, np.int64)
    members = distinct(np.concatenate([a, b]))
    out[members] = np.unique(label[members], return_inverse=True)[1]
    return out


FEW = 200
"""The number of streams up to which they are followed one by one (measured: 0.3 us an entry; together 25 us a
level)."""


def _advance(graph: _Entries) -> tuple[Longs, Longs]:
    """Entries in the order in which they can run, and where each level starts."""
    return _one_by_one(graph) if len(graph.lane_start) <= FEW else _together(graph)


def _one_by_one(graph: _Entries) -> tuple[Longs, Longs]:
    """Each stream as far as it goes, in turns, until none goes any further. An entry's level is one more than that of
    the last it waits for, so the result is the same whatever the turns."""
    first, second = (column.tolist() for column in graph.columns())
    third_sources, group, lane_of = graph.third_predecessors(), graph.group.tolist(), graph.lane_of().tolist()
    sizes = np.bincount(graph.group[graph.group >= 0]).tolist() if graph.has_groups else []
    # A group runs when all its entries stand at the heads of their streams; whoever comes last runs them all, one level
    # after the latest that any of them waits for.
    met: list[list[int]] = [[] for _ in sizes]
    latest, standing = [0] * len(sizes), set[int]()
    level = [-1] * graph.count + [0]  # 0 of "nothing"; entries count from 1
    starts, heads, ends = graph.lane_start.tolist(), graph.lane_start.tolist(), graph.lane_end.tolist()
    moved = True
    while moved:
        moved = False
        for lane, stop in enumerate(ends):
            begin = entry = heads[lane]
            after = level[entry - 1] if entry > starts[lane] else 0  # level of the entry before on the stream
            while entry < stop:
                a, b = level[first[entry]], level[second[entry]]
                if a < 0 or b < 0:  # has not run: the stream stands here until another turn
                    break
                if entry in third_sources:
                    others = [level[source] for source in third_sources[entry]]
                    if min(others) < 0:
                        break
                    a = max(a, *others)
                if b > a:
                    a = b
                if after > a:
                    a = after
                g = group[entry]
                if g >= 0:
                    # A stream that stands at its group is looked at again in every turn; it counts as met only once.
                    if entry not in standing:
                        standing.add(entry)
                        met[g].append(entry)
                        latest[g] = max(latest[g], a)
                    if len(met[g]) < sizes[g]:
                        break
                    a = latest[g]
                    for other in met[g]:  # each at the head of its stream
                        level[other] = a + 1
                        heads[lane_of[other]] = other + 1
                after = a + 1
                level[entry] = after
                entry += 1
            # Streams before this one in the turn that its group set free go on in the next turn, which comes because
            # this one has moved.
            if entry > begin:
                heads[lane], moved = entry, True
    levels = np.array(level[:-1], np.int64)
    sequence = np.argsort(levels, kind="stable")
    sequence = sequence[np.searchsorted(levels[sequence], 1) :]  # without what never runs
    return sequence, np.searchsorted(levels[sequence], np.arange(1, int(levels.max(initial=0)) + 2))


def _together(graph: _Entries) -> tuple[Longs, Longs]:
    """All streams at once, one entry each a round."""
    first, second = graph.columns()
    missing, waiters, begin = graph.further()
    many = bool(missing.any())
    done = np.zeros(graph.count + 1, bool)
    # A round runs what stands at the head of each stream and waits for nothing, so a round is a level.
    done[graph.count] = True  # "nothing" is always done
    heads, ends = graph.lane_start.copy(), graph.lane_end
    sizes = np.bincount(graph.group[graph.group >= 0]) if graph.has_groups else np.zeros(0, np.int64)
    arrived = np.zeros(len(sizes), np.int64)
    waiting = np.zeros(graph.count + 1, bool)
    levels: list[Longs] = []
    alive = np.arange(len(heads))
    while len(alive):
        now = heads[alive]
        ok = done[first[now]]
        ok &= done[second[now]]
        if many:
            ok &= missing[now] == 0
        if graph.has_groups:
            ok = _meet(graph.group, now, ok, arrived, sizes, waiting)
        ran = now[ok]
        if not len(ran):
            break
        levels.append(ran)
        done[ran] = True
        for entry in ran[begin[ran + 1] > begin[ran]].tolist() if many else ():
            np.subtract.at(missing, waiters[begin[entry] : begin[entry + 1]], 1)
        moved = alive[ok]  # streams that went on by one entry
        heads[moved] += 1
        if (heads[moved] == ends[moved]).any():
            alive = alive[heads[alive] < ends[alive]]
    ptr = np.concatenate([[0], np.cumsum([len(level) for level in levels])]).astype(np.int64)
    return (np.concatenate(levels) if levels else np.zeros(0, np.int64)), ptr


def _meet(
    group: Longs, now: Longs, ok: NDArray[np.bool_], arrived: Longs, sizes: Longs, waiting: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Picks from the entries that could run alone those whose whole group could run."""
    g = group[now]
    # A stream may stand at its group for many rounds; only its first one counts.
    fresh = now[ok & (g >= 0) & ~waiting[now]]
    if len(fresh):
        waiting[fresh] = True
        np.add.at(arrived, group[fresh], 1)
    # Without a group g is -1 and `arrived[-1]` is read too; g < 0 decides then, whatever it holds.
    ready: NDArray[np.bool_] = ok & ((g < 0) | (arrived[g] == sizes[g]))
    return ready


def _renumber(program: Program, deps: Dependencies, graph: _Entries, sequence: Longs, level_ptr: Longs) -> Order:
    """Positions in order of play instead of entry numbers."""
    count = graph.count
    at = np.empty(count + 1, np.int32)  # [E + 1] position of each entry; "nothing" stays `count`
    at[sequence] = np.arange(count, dtype=np.int32)
    at[count] = count
    head = graph.is_head[sequence]
    # entries of a lane are numbered one after another, so the one before on the stream is entry - 1
    lane_before = np.where(head, np.int32(count), at[sequence - 1]).astype(np.int32)
    rank = np.arange(len(graph.target)) - graph.wait_ptr[graph.target]
    waits, is_data = [], []
    for j in (0, 1):
        column, flag = np.full(count, count, np.int32), np.zeros(count, bool)
        mine = rank == j
        column[at[graph.target[mine]]] = at[graph.source[mine]]
        flag[at[graph.target[mine]]] = graph.data[mine]
        waits.append(column)
        is_data.append(flag)
    return Order(
        size=count,
        rows=graph.row[sequence],
        position=at[graph.of_row],
        level_ptr=level_ptr,
        lane_before=lane_before,
        waits=(waits[0], waits[1]),
        wait_is_data=(is_data[0], is_data[1]),
        further=_further_sources(graph, at, rank, level_ptr),
        groups=_group_slices(graph, sequence, level_ptr),
        before=_before(deps, graph, at),
    )


def _further_sources(
    graph: _Entries, at: Positions, rank: Longs, level_ptr: Longs
) -> tuple[tuple[int, Longs, Longs, NDArray[np.bool_]], ...]:
    """Third and further predecessors, by level and then by rank so that no position comes twice in an item."""
    extra = np.flatnonzero(rank >= 2)
    target, source = at[graph.target[extra]].astype(np.int64), at[graph.source[extra]].astype(np.int64)
    level = np.searchsorted(level_ptr, target, side="right") - 1
    items = []
    for lv, r in sorted(set(zip(level.tolist(), rank[extra].tolist(), strict=True))):
        mine = (level == lv) & (rank[extra] == r)
        items.append((lv, target[mine], source[mine], graph.data[extra][mine]))
    return tuple(items)


def _group_slices(graph: _Entries, sequence: Longs, level_ptr: Longs) -> tuple[tuple[int, Longs, Longs], ...]:
    if not graph.has_groups:
        return ()
    group = graph.group[sequence]
    members = np.flatnonzero(group >= 0)
    level = np.searchsorted(level_ptr, members, side="right") - 1
    sort = np.lexsort((group[members], level))
    members, level = members[sort], level[sort]
    items = []
    for lv, begin in zip(*np.unique(level, return_index=True), strict=True):
        end = int(np.searchsorted(level, lv, side="right"))
        mine = members[begin:end]
        starts = np.flatnonzero(np.append(True, group[mine][1:] != group[mine][:-1]))
        # Where every group of the level has one entry here, nobody waits for a partner.
        if len(starts) < len(mine):
            items.append((int(lv), mine, starts))
    return tuple(items)


def _before(
    deps: Dependencies, graph: _Entries, at: Positions
) -> tuple[Longs, Longs, NDArray[np.int32], NDArray[np.bool_]]:
    """Edges from earlier steps, and from the end of each stream to its head."""
    later = deps.edges.distance > 0
    # The streams' own edges stand last; `simulate.many` finds them by that.
    source = np.append(at[graph.of_row[deps.edges.source[later]]], at[graph.lane_end - 1])
    target = np.append(at[graph.of_row[deps.edges.target[later]]], at[graph.lane_start])
    distance = np.append(deps.edges.distance[later], np.ones(len(graph.lane_start), np.int32))
    data = np.append(deps.edges.data[later], np.zeros(len(graph.lane_start), bool))
    return source.astype(np.int64), target.astype(np.int64), distance.astype(np.int32), data


def _deadlock(program: Program, graph: _Entries, sequence: Longs) -> Deadlock:
    """A shortest cycle among the entries that did not run."""
    stuck = _Stuck(graph, sequence)
    cycle = stuck.shortest_cycle()
    partners = []
    for entry in cycle:
        together = np.flatnonzero(np.isin(graph.of_row, stuck.members(entry))).tolist()
        partners.append(tuple(row for row in together if row != graph.row[entry]))
    return Deadlock(
        rows=tuple(int(graph.row[entry]) for entry in cycle),
        partners=tuple(partners),
        heads=tuple(int(graph.row[entry]) for entry in stuck.heads if entry >= 0),
        finished=int(stuck.ran[graph.of_row].sum()),
    )


class _Stuck:
    """Entries that did not run. Each waits for its sources and for all before it on its stream; so do its partners."""

    BUDGET = 2_000_000
    """The number of entries looked at in search of a shorter cycle, about a second; one cycle is found whatever it
    costs."""

    def __init__(self, graph: _Entries, sequence: Longs) -> None:
        self.graph = graph
        self.ran = np.zeros(graph.count, bool)
        self.ran[sequence] = True
        self.entries = np.flatnonzero(~self.ran).tolist()
        lane = np.zeros(graph.count, np.int64)
        lane[graph.lane_start[1:]] = 1
        self.lane: list[int] = np.cumsum(lane).tolist()
        self.heads = [-1] * len(graph.lane_start)
        self.groups: dict[int, list[int]] = {}
        self.group: list[int] = graph.group.tolist()
        # From the last to the first, so that what remains is the first stuck entry of each stream.
        for entry in reversed(self.entries):
            self.heads[self.lane[entry]] = entry
            if self.group[entry] >= 0:
                self.groups.setdefault(self.group[entry], []).append(entry)

    def members(self, entry: int) -> list[int]:
        """Entries that run together with this one."""
        return self.groups[self.group[entry]] if self.group[entry] >= 0 else [entry]

    def sources(self, entry: int) -> list[int]:
        """Stuck entries that this one waits for, its stream aside."""
        awaited = self.graph.source[self.graph.wait_ptr[entry] : self.graph.wait_ptr[entry + 1]].tolist()
        return [source for source in awaited if not self.ran[source]]

    def shortest_cycle(self) -> list[int]:
        """Entries of a shortest cycle, of several the one that starts first; in huge Programs merely a short one."""
        best = self.cycle_through(self._on_a_cycle(), len(self.entries) + 1)
        limit = len(best)
        # One search looks at every stuck entry once at most, so the budget is a number of starts.
        for start in self.entries[: max(1, self.BUDGET // len(self.entries))]:
            cycle = self.cycle_through(start, limit)
            if cycle:
                # Later starts must be strictly shorter: of equally short cycles the first stays.
                best, limit = cycle, len(cycle) - 1
        return best

    def _on_a_cycle(self) -> int:
        """An entry on some cycle: from the head of a stream on to the heads that it waits for."""
        # A head that did not run waits for another stream's stuck head, so this walk has no end, and among so few heads
        # it comes back to one that it has seen. A group goes by its least entry.
        at = next(head for head in self.heads if head >= 0)
        seen: set[int] = set()
        while min(self.members(at)) not in seen:
            seen.add(min(self.members(at)))
            at = next(head for entry in self.members(at) for head in self._heads_before(entry))
        return at

    def _heads_before(self, entry: int) -> list[int]:
        """The heads of the streams that hold this entry up."""
        head = self.heads[self.lane[entry]]
        return [self.heads[self.lane[source]] for source in self.sources(entry)] + ([head] if head != entry else [])

    def cycle_through(self, start: int, limit: int) -> list[int]:
        """A shortest cycle through `start` of up to `limit` entries, or nothing. Breadth first."""
        parent: dict[int, int] = {}
        covered = list(self.heads)  # on each stream, what is before this has been reached
        frontier, length = [start], 1
        while frontier and length <= limit:
            following = []
            for at in frontier:
                for entry in self.members(at):
                    lane = self.lane[entry]
                    before = range(covered[lane], entry)
                    covered[lane] = max(covered[lane], entry)
                    for after in (*self.sources(entry), *before):
                        node = min(self.members(after))
                        if node == min(self.members(start)):
                            return self._path(start, at, after, parent)
                        if node not in parent:
                            parent[node] = at
                            following.append(after)
            frontier, length = following, length + 1
        return []

    def _path(self, start: int, last: int, reached: int, parent: dict[int, int]) -> list[int]:
        path = [last] if last != start else []
        while path and (before := parent[min(self.members(path[-1]))]) != start:
            path.append(before)
        # `path` leads from `last` back to the first entry after `start`; each entry waits for the next in the result,
        # and the last for `reached`, which is `start` or a partner of it.
        return [reached, *reversed(path)]
