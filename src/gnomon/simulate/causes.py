"""What each action waited for: the predecessor whose end is the action's start.

`causes(order, times, earlier)` returns a position and a distance in steps for every position, found by comparing times,
which are exact. Where several predecessors end at that moment, one that brings data is named before one that frees
space or room in a pool, and the action before on the same stream only if nothing else binds: a stream that is never
idle needs no reason to go on, and an arrival that is just in time is worth seeing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Order
from gnomon.simulate.play import Times
from gnomon.simulate.together import together

Longs = NDArray[np.int64]


def causes(order: Order, times: Times, earlier: Mapping[int, Times]) -> tuple[Longs, Longs]:
    """(position waited for or -1, steps before this one) of each position.

    earlier: distance in steps -> times of that step, on the same clock as `times`. A step that is not there binds
    nothing; an action that nothing binds started from rest.
    """
    bindings = _Found(order, times)
    waits = list(zip(order.waits, order.wait_is_data, strict=True))
    lone = np.arange(order.size)
    # Data first, then other waits, then the stream itself: of causes that end at the same moment, the one that says
    # most.
    for is_data in (True, False):
        for source, data in waits:
            mine = np.flatnonzero((source < order.size) & (data == is_data))
            bindings.offer(mine, source[mine], times.visible if is_data else times.end, 0)
        for _, positions, sources, data in order.further:
            mine = data == is_data
            bindings.offer(positions[mine], sources[mine], times.visible if is_data else times.end, 0)
        _from_earlier(order, earlier, bindings, is_data)
    mine = lone[order.lane_before < order.size]
    bindings.offer(mine, order.lane_before[mine], times.end, 0)
    _share(order, bindings)
    return bindings.cause, bindings.steps


class _Found:
    """The causes so far; the first that fits stays."""

    def __init__(self, order: Order, times: Times) -> None:
        self.start = times.start
        self.cause: Longs = np.full(order.size, -1, np.int64)
        self.steps: Longs = np.zeros(order.size, np.int64)

    def offer(
        self, target: NDArray[np.signedinteger], source: NDArray[np.signedinteger], at: NDArray[np.float64], back: int
    ) -> None:
        """Takes source[i] as the cause of target[i] where its moment fits and none is known; the first of equals."""
        # Equal to the bit: a start is a maximum of these very numbers, which are on the grid.
        fits = (at[source] == self.start[target]) & (self.cause[target] < 0)
        target, source = target[fits][::-1], source[fits][::-1]  # the last assignment of a repeated target stays
        self.cause[target] = source
        self.steps[target] = back


def _from_earlier(order: Order, earlier: Mapping[int, Times], bindings: _Found, is_data: bool) -> None:
    source, target, distance, data = order.before
    for back, times in earlier.items():
        mine = np.flatnonzero((distance == back) & (data == is_data))
        bindings.offer(target[mine], source[mine], times.visible if is_data else times.end, back)


def _share(order: Order, bindings: _Found) -> None:
    """Entries of a group start together: those that were ready before take the cause of one that was not."""
    members, starts, group = together(order)
    if not len(members):
        return
    # Any member that waited will do, as all began when the last was ready; the greatest position is the same in every
    # run.
    binding = np.maximum.reduceat(np.where(bindings.cause[members] >= 0, members, -1), starts)[group]
    lacks = (bindings.cause[members] < 0) & (binding >= 0)
    bindings.cause[members[lacks]] = bindings.cause[binding[lacks]]
    bindings.steps[members[lacks]] = bindings.steps[binding[lacks]]
