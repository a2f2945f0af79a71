"""Plays a Program once: start and end of every action, given durations and when the steps before ended.

Positions are those of the Program's `Order`; a level is a slice, so one step is a few vector operations per level.
Times of an earlier step enter as `base`, one number per position, computed at once for the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Order, Structure
from gnomon.simulate.durations import Durations
from gnomon.simulate.together import Together, group_of, together
from gnomon.simulate.walk import walk

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """One step, by position in the order of play."""

    start: Doubles
    """Seconds at which it starts."""
    end: Doubles
    """Seconds at which its stream is free again."""
    visible: Doubles
    """End plus lag: when readers on other streams may go on. The same array as `end` without lags."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clock:
    """Durations by position, ready to be played any number of times."""

    order: Order
    """The positions, and what each waits for."""
    busy: Doubles
    """[positions] seconds; members of a group have the longest of theirs."""
    lag: Doubles | None
    """[positions] seconds after its end; None where nothing has a lag."""

    @staticmethod
    def of(structure: Structure, durations: Durations) -> Clock:
        """Durations of one scenario by position."""
        order, program = structure.order, structure.program
        busy, lag = _by_position(structure, durations.busy[program.key]), None
        if durations.lag is not None and durations.lag.any():
            lag = _by_position(structure, durations.lag[program.key])
        return Clock(order=order, busy=busy, lag=lag)

    def scaled(self, factor: float) -> Clock:
        """The same clock with all durations times `factor`."""
        return Clock(order=self.order, busy=self.busy * factor, lag=None if self.lag is None else self.lag * factor)


def _by_position(structure: Structure, by_row: Doubles) -> Doubles:
    order = structure.order
    if order.size == len(by_row) and not order.groups:
        return by_row[order.rows]
    # Rows of a composite are one position: the longest of them is its duration.
    out = np.zeros(order.size)
    np.maximum.at(out, order.position, by_row)
    members, starts, group = together(order)
    if len(members):
        out[members] = np.maximum.reduceat(out[members], starts)[group]
    return out


def base_from(order: Order, steps: Sequence[Times], shift: float = 0.0) -> Doubles:
    """Earliest start of each position given earlier steps, the latest last.

    A step that is not there imposes nothing. shift: seconds subtracted per step of distance.
    """
    source, target, distance, data = order.before
    base = np.full(order.size, -np.inf)
    for back in range(1, min(len(steps), int(distance.max(initial=0))) + 1):
        times, mine = steps[-back], distance == back  # [edges] of bool: those from `back` steps ago
        # A reader of data on another stream waits for the lag too; the next entry of the same stream starts at its end.
        reached = np.where(data[mine], times.visible[source[mine]], times.end[source[mine]]) - shift * back
        np.maximum.at(base, target[mine], reached)
    return base


def play(clock: Clock, base: Doubles | None = None) -> Times:
    """Plays one step and returns when each action starts and ends. base: earliest start of each position; None starts
    from rest at 0."""
    # A walk in plain Python is faster where levels are narrow; it knows only starts of positions that wait for earlier
    # steps.
    order, size = clock.order, clock.order.size
    entries = walk(order, (clock.busy == 0).tobytes()) if clock.lag is None else None
    if entries is not None and (base is None or _only(base, entries.later)):
        end = entries.ends(clock.busy, base)
        return Times(start=end - clock.busy, end=end, visible=end)
    base = np.zeros(size) if base is None else base
    lagged = clock.lag is not None
    # [ends of all positions, -inf] and, with lags, [times seen by other streams, -inf]: the extra entry is what a
    # missing predecessor points at. `_levels` has added size + 1 to the indices that read seen times.
    ends = np.empty((2 if lagged else 1) * (size + 1))
    ends[size :: size + 1] = -np.inf
    start = np.empty(size)
    busy, lag, take, maximum = clock.busy, clock.lag, ends.take, np.maximum
    for a, b, lane, first, second, third_and_more, groups in _levels(order, lagged):
        t = start[a:b]  # a view: all that follows writes into `start`
        maximum(take(lane), base[a:b], out=t)
        maximum(t, take(first), out=t)
        if second is not None:
            maximum(t, take(second), out=t)
        for positions, sources in third_and_more:  # third and further predecessors; each position is in a pair once
            start[positions] = maximum(start[positions], take(sources))
        for members, starts, group in groups:  # rendezvous: nobody of a group starts before the last is ready
            start[members] = maximum.reduceat(start[members], starts)[group]
        np.add(t, busy[a:b], out=ends[a:b])
        if lag is not None:
            np.add(ends[a:b], lag[a:b], out=ends[size + 1 + a : size + 1 + b])
    end = ends[:size]
    return Times(start=start, end=end, visible=ends[size + 1 : -1] if lagged else end)


def play_steps(structure: Structure, durations: Durations, steps: int) -> list[Times]:
    """Times of `steps` steps, one after the other, the first from rest."""
    clock = Clock.of(structure, durations)
    played = [play(clock)]
    while len(played) < steps:
        played.append(play(clock, base_from(structure.order, played)))
    return played


def _only(base: Doubles, positions: NDArray[np.int64]) -> bool:
    """Whether nothing but these positions has an earliest start."""
    others = base.copy()
    others[positions] = -np.inf
    return bool(np.isneginf(others).all())


_Level: TypeAlias = (
    "tuple[int, int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32] | None, list[tuple[Longs, Longs]],"
    "list[Together]]"
)
"""One level: its slice of positions; what these wait for, first on their stream (the third is None where nothing waits
for so many); further (positions, what they wait for); groups."""


@lru_cache(maxsize=16)
def _levels(order: Order, lagged: bool) -> tuple[_Level, ...]:
    """Level by level, what `play` does, as indices into ends, or into ends followed by seen times."""
    lane, first, second = _columns(order, lagged)
    third_of: dict[int, list[tuple[Longs, Longs]]] = {}
    for level, positions, sources, data in order.further:
        third_of.setdefault(level, []).append((positions, sources + data * (order.size + 1) if lagged else sources))
    groups: dict[int, list[Together]] = {}
    for level, members, starts in order.groups:
        groups.setdefault(level, []).append(Together(members, starts, group_of(starts, len(members))))
    ptr, two = order.level_ptr.tolist(), _any_by_level(order, order.waits[1])
    return tuple(
        (a, b, lane[a:b], first[a:b], second[a:b] if two[at] else None, third_of.get(at, []), groups.get(at, []))
        for at, (a, b) in enumerate(zip(ptr[:-1], ptr[1:], strict=True))
    )


def _columns(order: Order, lagged: bool) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Predecessor columns as indices into ends, or into ends followed by seen times when there are lags."""
    if not lagged:
        return order.lane_before, order.waits[0], order.waits[1]
    first, second = (
        wait + np.where(data, np.int32(order.size + 1), np.int32(0))
        for wait, data in zip(order.waits, order.wait_is_data, strict=True)
    )
    return order.lane_before, first.astype(np.int32), second.astype(np.int32)


def _any_by_level(order: Order, column: NDArray[np.int32]) -> list[bool]:
    """Whether a level has any predecessor in this column."""
    if not order.size:
        return []
    flags: list[bool] = np.logical_or.reduceat(column < order.size, order.level_ptr[:-1]).tolist()
    return flags
