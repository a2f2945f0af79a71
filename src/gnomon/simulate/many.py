"""Thousands of sets of durations over one structure: makespans and periods, in chunks that stay in cache.

The structure of a schedule does not change when prices do, so a search builds it once and plays it with a vector of
durations per action. Ends are kept only until their last reader's level has run (hundreds of slots instead of one per
action), and edges from the step before that others already imply are dropped, with `_needed` as the proof.
Same numbers as `play` and `period`, to the last bit; lags are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import UnpricedError
from gnomon.program import Order, Structure
from gnomon.simulate.durations import Durations
from gnomon.simulate.period import period
from gnomon.simulate.together import joint
from gnomon.units import distinct

# Legend: P positions of a structure in level order, L those of one level, K kept ones, S scenarios, N slots.
# A position's predecessors are all in earlier levels, so a level is one vector operation over its L positions.
Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]
_CHUNK = 256  # vectors at a time: a level of a 64-rank pipeline is then about 256 KiB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Level:
    """One level, in slots."""

    slots: Longs
    keys: Longs
    waits: tuple[Longs, ...]
    """Slots of predecessors; slot 0 is "nothing"."""
    partly: tuple[tuple[Longs, Longs], ...]
    """(offsets in the level, slots): predecessors that only some have."""
    earlier: tuple[tuple[Longs, Longs, int], ...]
    """(offsets in the level, index into kept, distance): waits for earlier steps."""
    groups: tuple[tuple[Longs, Longs], ...]
    """(offsets sorted by group, start of each group)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Script:
    """A structure prepared for many vectors. Build it once with `Script.of` and reuse it."""

    structure: Structure
    """What is played."""
    levels: tuple[_Level, ...]
    num_slots: int
    kept_slots: Longs
    """Slots of the actions that later steps or the makespan need."""
    reach: int
    """Steps back that the farthest dependency reaches."""

    @staticmethod
    def of(structure: Structure) -> Script:
        """Slots and levels of a structure."""
        return _script(structure)


def makespans(script: Script, durations: Durations) -> Doubles:
    """[scenarios] seconds of one step from rest. durations.busy: [scenarios, keys]; lags are not supported here."""
    return _run(script, durations, _one_step)


def periods(script: Script, durations: Durations) -> Doubles:
    """[scenarios] steady-state seconds per step, each exact as `period` gives it.

    Scenarios whose clocks repeat after two or three steps are done together; the others one by one.
    """
    return _run(script, durations, _steady)


def _run(script: Script, durations: Durations, what: Callable[[Script, Doubles, Doubles], Doubles]) -> Doubles:
    if durations.lag is not None and durations.lag.any():
        raise UnpricedError("many scenarios at once take no lags; use play or period, one scenario at a time")
    busy = np.atleast_2d(durations.busy)
    state = np.empty((script.num_slots, min(_CHUNK, len(busy))))  # [N, S], filled anew by every step
    parts = []
    for begin in range(0, len(busy), _CHUNK):
        chunk = np.ascontiguousarray(busy[begin : begin + _CHUNK].T)  # [keys, S]: a level reads whole rows
        parts.append(what(script, chunk, state[:, : chunk.shape[1]]))
    return np.concatenate(parts) if parts else np.zeros(0)


def _one_step(script: Script, busy: Doubles, state: Doubles) -> Doubles:
    ends: Doubles = _play(script, busy, state, []).max(axis=0, initial=0.0)
    return ends


def _steady(script: Script, busy: Doubles, state: Doubles) -> Doubles:
    # Clocks repeat once `reach` steps in a row have advanced every kept action by the same amount: all that a later
    # step looks back on has then moved alike. Durations are on a dyadic grid, so the comparison is exact.
    history = [_play(script, busy, state, [])]
    out = np.full(busy.shape[1], np.nan)
    for _ in range(script.reach + 1):
        history.append(_play(script, busy, state, history))
        if len(history) <= script.reach:
            continue
        first = history[-1][0] - history[-2][0]
        same = np.ones(len(first), bool)
        for back in range(1, script.reach + 1):
            same &= (history[-back] - history[-back - 1] == first).all(axis=0)
        out[same] = first[same]
        if same.all():
            return out
    # the others have a critical cycle over several steps, or settle slowly: `period` proves theirs by itself
    for column in np.flatnonzero(np.isnan(out)).tolist():
        out[column] = period(script.structure, Durations(busy=busy[:, column])).seconds
    return out


def _play(script: Script, busy: Doubles, state: Doubles, history: list[Doubles]) -> Doubles:
    """Ends of the kept actions, [kept, scenarios], after one more step."""
    state[0] = -np.inf  # slot 0 is "nothing": it never delays
    width = state.shape[1]
    widest = max((len(level.slots) for level in script.levels), default=0)
    t_all, other_all = np.empty((widest, width)), np.empty((widest, width))
    for level in script.levels:
        t, other = t_all[: len(level.slots)], other_all[: len(level.slots)]
        # NumPy buffers `out` of a take unless the mode is other than "raise"; indices are never out of range, so "clip"
        # changes nothing but the speed.
        state.take(level.waits[0], axis=0, out=t, mode="clip")
        for wait in level.waits[1:]:  # t = max over predecessors of their ends
            state.take(wait, axis=0, out=other, mode="clip")
            np.maximum(t, other, out=t)
        for offsets, slots in level.partly:
            t[offsets] = np.maximum(t[offsets], state[slots])
        for offsets, index, back in level.earlier:
            if back <= len(history):
                t[offsets] = np.maximum(t[offsets], history[-back][index])
        if not history:
            np.maximum(t, 0.0, out=t)  # the first step starts from rest at 0
        # members of a group start together, at the latest of their starts, and last as long as the longest of them
        for offsets, starts in level.groups:
            t[offsets] = joint(t[offsets], starts)
        busy.take(level.keys, axis=0, out=other, mode="clip")
        for offsets, starts in level.groups:
            other[offsets] = joint(other[offsets], starts)
        np.add(t, other, out=t)
        state[level.slots] = t
    return state[script.kept_slots]


def _script(structure: Structure) -> Script:
    order = structure.order
    needed = _needed(order)  # edges from earlier steps: [edges] of (source, target, distance in steps)
    source, target, distance = order.before[0][needed], order.before[1][needed], order.before[2][needed]
    kept_sources, kept_index = np.unique(source, return_inverse=True)  # ends that outlive their step
    slot, num_slots = _slots(order, kept_sources)
    keys = _keys(structure)
    third_of, groups = _of_levels(order)
    # a level's targets are one run of this order, as levels are runs of positions
    by_target = np.lexsort((distance, target))
    sorted_target = target[by_target]
    levels = []
    for number, (a, b) in enumerate(pairwise(order.level_ptr.tolist())):
        waits, partly = _level_waits(order, slot, a, b)
        partly += [(positions - a, slot[sources]) for positions, sources in third_of.get(number, [])]
        low, high = np.searchsorted(sorted_target, [a, b])
        mine = by_target[low:high]
        grouped = groups.get(number)
        levels.append(
            _Level(
                slots=slot[a:b],
                keys=keys[a:b],
                waits=waits,
                partly=tuple(partly),
                earlier=_rounds(target[mine] - a, kept_index[mine], distance[mine]),
                groups=() if grouped is None else ((grouped[0] - a, grouped[1]),),
            )
        )
    return Script(
        structure=structure,
        levels=tuple(levels),
        num_slots=num_slots,
        kept_slots=slot[kept_sources],
        reach=int(distance.max(initial=1)),
    )


def _of_levels(order: Order) -> tuple[dict[int, list[tuple[Longs, Longs]]], dict[int, tuple[Longs, Longs]]]:
    """Level -> its further (positions, sources), and level -> its groups as (members, starts)."""
    third_of: dict[int, list[tuple[Longs, Longs]]] = {}
    for level, positions, sources, _ in order.further:
        third_of.setdefault(level, []).append((positions, sources))
    return third_of, {level: (members, starts) for level, members, starts in order.groups}


def _keys(structure: Structure) -> Longs:
    """Price key of each position. Rows merged into one entry must share it, because a vector has no room for two."""
    order, key = structure.order, structure.program.key
    keys = key[order.rows].astype(np.int64)
    if order.size < len(key):
        same = np.array([k.label for k in structure.program.keys])
        assert (same[keys[order.position]] == same[key]).all(), "a composite's rows must have one price name"
    return keys


def _level_waits(order: Order, slot: Longs, a: int, b: int) -> tuple[tuple[Longs, ...], list[tuple[Longs, Longs]]]:
    """Predecessors of a level: columns that most of it has, and (offsets, slots) of those that few have."""
    columns: list[Longs] = []
    partly: list[tuple[Longs, Longs]] = []
    for column in (order.lane_before[a:b], *(w[a:b] for w in order.waits)):
        real = np.flatnonzero(column < order.size)
        # a whole column costs L lookups, most of them of slot 0; a list of pairs costs a scatter an entry. A quarter
        # full is taken as the border.
        if 4 * len(real) > len(column) or not columns:
            columns.append(slot[column])
        elif len(real):
            partly.append((real, slot[column[real]]))
    return tuple(columns), partly


def _rounds(offsets: Longs, index: Longs, distance: NDArray[np.int32]) -> tuple[tuple[Longs, Longs, int], ...]:
    """Edges of one level into items in which each offset comes once and the distance is one."""
    items = []
    for back in distinct(distance).tolist():
        mine = np.flatnonzero(distance == back)
        at = offsets[mine].astype(np.int64)
        # `at` is sorted: the r-th edge into one offset has rank r. A fancy assignment keeps only the last of several
        # writes to one index, so each round has every offset once.
        rank = np.arange(len(at)) - np.searchsorted(at, at)
        for r in range(int(rank.max(initial=-1)) + 1):
            items.append((at[rank == r], index[mine[rank == r]].astype(np.int64), int(back)))
    return tuple(items)


def _slots(order: Order, kept_ends: Longs) -> tuple[Longs, int]:
    """A slot for each position (and 0 for "nothing"), reused after the last level that reads it."""
    size = order.size
    level_of = np.repeat(np.arange(len(order.level_ptr) - 1), np.diff(order.level_ptr))
    last = level_of.copy()  # [P] the last level that reads each position's end
    source, target = _edges(order)
    np.maximum.at(last, source, level_of[target])
    last[kept_ends] = len(order.level_ptr)  # after every level: never reused within the step
    by_last = np.argsort(last, kind="stable")
    gone_ptr = np.searchsorted(last[by_last], np.arange(len(order.level_ptr) + 1))
    slot = np.zeros(size + 1, np.int64)
    # Register allocation by level: slots of positions whose last reader has run are free for the next levels.
    free: list[int] = []
    used = 1
    for level, (a, b) in enumerate(pairwise(order.level_ptr.tolist())):
        short = (b - a) - len(free)
        if short > 0:
            free += range(used, used + short)
            used += short
        cut = len(free) - (b - a)
        slot[a:b] = np.sort(free[cut:])  # ascending, so that writes of a level go through memory in one direction
        del free[cut:]
        # Given back after the level has its own slots, so a level never writes over what it reads.
        free += slot[by_last[gone_ptr[level] : gone_ptr[level + 1]]].tolist()
    return slot, used


def _needed(order: Order) -> NDArray[np.bool_]:
    """Says which edges from earlier steps are not implied by others.

    Let u -> v be an edge over d steps. If within a step u comes before the end of some stream and the head of that
    stream comes before v, then v waits for u through that stream's own order from step to step, d times if need be,
    and the edge adds nothing. Streams' own edges are never dropped, so no edge is dropped because of a dropped one. Up
    to 64 streams, the longest, are tried: one bit each.
    """
    source, target, _, _ = order.before
    heads = np.flatnonzero(order.lane_before == order.size)
    stream = np.arange(order.size)  # [P] the head of each position's stream, carried along the stream
    stream[heads] = heads
    for a, b in pairwise(order.level_ptr.tolist()):
        part = order.lane_before[a:b]
        inner = part < order.size
        stream[a:b][inner] = stream[part[inner]]
    names, counts = np.unique(stream, return_counts=True)
    chosen = names[np.argsort(-counts, kind="stable")[:64]]
    bit = np.zeros(order.size, np.uint64)
    for i, name in enumerate(chosen.tolist()):
        bit[stream == name] = np.uint64(1) << np.uint64(i)
    after_head = _reach_forward(order, bit)
    before_tail = _reach_backward(order, bit)
    own = np.zeros(len(source), bool)
    own[len(source) - len(heads) :] = True  # the streams' own edges stand last in `before`
    needed: NDArray[np.bool_] = own | ((before_tail[source] & after_head[target]) == 0)
    return needed


def _reach_forward(order: Order, bit: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bits of the streams whose head comes before each position, or is it."""
    out = np.append(bit, np.uint64(0))
    third_of, groups = _of_levels(order)
    for level, (a, b) in enumerate(pairwise(order.level_ptr.tolist())):
        # The appended item belongs to "nothing" and has no bits, so columns need no mask.
        part = out[a:b]
        for column in (order.lane_before, *order.waits):
            part |= out.take(column[a:b])
        for positions, sources in third_of.get(level, ()):
            out[positions] |= out[sources]
        if level in groups:
            members, starts = groups[level]
            out[members] = joint(out[members], starts, np.bitwise_or)
    return out[:-1]


def _reach_backward(order: Order, bit: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bits of the streams whose end comes after each position, or is it."""
    out = bit.copy()
    source, target = _edges(order)
    first = np.searchsorted(source, np.arange(order.size + 1))
    groups = {level: (members, starts) for level, members, starts in order.groups}
    ptr = order.level_ptr.tolist()
    for level in range(len(ptr) - 2, -1, -1):
        a, b = ptr[level], ptr[level + 1]
        low, high = int(first[a]), int(first[b])
        if low < high:
            # Positions that nobody waits for are left out: of an empty run `reduceat` gives the item that follows.
            starts = first[a:b][first[a:b] < first[a + 1 : b + 1]] - low
            out[source[low + starts]] |= np.bitwise_or.reduceat(out[target[low:high]], starts)
        if level in groups:
            members, starts = groups[level]
            out[members] = joint(out[members], starts, np.bitwise_or)
    return out


def _edges(order: Order) -> tuple[Longs, Longs]:
    """(source, target) of all edges within a step, sorted by source."""
    every = np.arange(order.size)
    parts = [(column.astype(np.int64), every) for column in (order.lane_before, *order.waits)]
    parts += [(sources, positions) for _, positions, sources, _ in order.further]
    source, target = (np.concatenate(side) for side in zip(*parts, strict=True))
    real = np.flatnonzero(source < order.size)
    by_source = real[np.argsort(source[real], kind="stable")]
    return source[by_source], target[by_source]
