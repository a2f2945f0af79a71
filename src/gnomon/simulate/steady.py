"""One step of the steady state: times that recur every period, with what each action then waits for.

`steady(structure, durations)` returns them for any Program. Where the clocks of a few steps already advance alike, the
next step is it. Otherwise they are the longest paths from the critical cycle, which every action that depends on it
settles to, however many steps that takes; actions that do not depend on it would run ahead for ever, and are shown as
late as their readers allow. A period that is not on the grid of time (a cycle over three steps) is rounded up to it and
the times down, so that steps never overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Order, Structure
from gnomon.simulate.causes import causes
from gnomon.simulate.durations import Durations
from gnomon.simulate.period import Period, period
from gnomon.simulate.play import Clock, Times, base_from, play
from gnomon.units import TICK_S


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steady:
    """One step of the steady state, by position; the earliest start is 0."""

    times: Times
    """Starts and ends of that step."""
    period_s: float
    """On the grid, at least `period.seconds` and less than a tick more."""
    cause: NDArray[np.int64]
    """Position each waited for; -1 where it only runs ahead."""
    cause_steps: NDArray[np.int64]
    """How many periods before its own the position that it waited for lies."""
    period: Period
    """The exact period that it recurs with."""


def steady(structure: Structure, durations: Durations) -> Steady:
    """The steady state of one scenario. Costs the plays of `period` and a few more."""
    cycle = period(structure, durations)
    clock, order = Clock.of(structure, durations), structure.order
    reach = int(order.before[2].max(initial=0))
    if cycle.proof == "repeats":
        steps = [play(clock)]
        for _ in range(cycle.plays if order.size else 0):
            steps = [*steps[-reach:], play(clock, base_from(order, steps))]
        times, ratio, parts = steps[-1], cycle.seconds, 1
    else:
        # A cycle of `parts` steps that takes `ratio` seconds has the period ratio / parts, which may be off the grid.
        # With all durations times `parts` it is `ratio` to the bit; the times are divided again at the end.
        parts, ratio = cycle.cycle_steps, cycle.cycle_seconds
        times = _from_cycle(clock.scaled(float(parts)), int(order.position[cycle.cycle[0]]), ratio, reach)
    earlier = {back: _moved(times, -back * ratio) for back in range(1, reach + 1)}
    cause, cause_steps = causes(order, times, earlier)
    times = _moved(times, -float(times.start.min(initial=np.inf) if order.size else 0.0))
    return Steady(
        times=_divided(times, parts),
        period_s=float(np.ceil(ratio / parts / TICK_S) * TICK_S),
        cause=cause,
        cause_steps=cause_steps,
        period=cycle,
    )


def _moved(times: Times, by: float) -> Times:
    lagged = times.visible is not times.end
    end = times.end + by
    return Times(start=times.start + by, end=end, visible=times.visible + by if lagged else end)


def _divided(times: Times, parts: int) -> Times:
    """Divides times by `parts`, rounded down to the grid: order is kept, and a period rounded up still holds a step."""
    if parts == 1:
        return times
    start, end, seen = (np.floor(t / parts / TICK_S) * TICK_S for t in (times.start, times.end, times.visible))
    return Times(start=start, end=end, visible=seen)


def _from_cycle(clock: Clock, critical: int, ratio: float, reach: int) -> Times:
    """Finds the longest paths from one action of the critical cycle, each crossing of a step costing `ratio`."""
    # In max-plus terms this is a column of A*, A the step's matrix with the period taken off: an eigenvector, since the
    # seed is on the critical cycle (Baccelli, Cohen, Olsder, Quadrat 1992, section 3.2.4).
    order = clock.order
    seed = np.full(order.size, -np.inf)
    seed[critical] = 0.0
    times = _settled(clock, play(clock, seed), ratio, reach)
    assert times.start[critical] == 0.0, "the cycle is not critical"
    unreached = np.isneginf(times.start)  # [positions] of bool: no path from the cycle leads here
    if not unreached.any():
        return times
    free = _settled(clock, play(clock), ratio, reach)
    by = _room(order, times, free, unreached, ratio, reach)
    start, end, seen = (
        np.where(unreached, theirs + by, ours)
        for theirs, ours in ((free.start, times.start), (free.end, times.end), (free.visible, times.visible))
    )
    return Times(start=start, end=end, visible=seen)


def _settled(clock: Clock, times: Times, ratio: float, reach: int) -> Times:
    """Finds the least times, no earlier than the given ones, that satisfy the dependencies on earlier steps too."""
    # Monotone and bounded, since no cycle is longer than `ratio` a step: it ends, with equality as the proof.
    while True:
        base = np.maximum(base_from(clock.order, [times] * reach, shift=ratio), times.start)
        if np.array_equal(base, times.start):
            return times
        times = play(clock, base)


def _room(order: Order, times: Times, free: Times, unreached: NDArray[np.bool_], ratio: float, reach: int) -> float:
    """Seconds by which actions that run ahead may move, each ready just before its readers need it."""
    size = order.size
    source = np.concatenate([order.lane_before, *order.waits, *(s for _, _, s, _ in order.further), order.before[0]])
    # every edge within the step (the stream's, two columns of waits, the rest) and then those from earlier steps
    target = np.concatenate([*[np.arange(size)] * 3, *(t for _, t, _, _ in order.further), order.before[1]])
    shift = np.zeros(len(source))
    shift[len(source) - len(order.before[2]) :] = order.before[2] * ratio
    inside = source < size
    source, target, shift = source[inside], target[inside], shift[inside]
    crossing = unreached[source] & ~unreached[target]
    source, target, shift = source[crossing], target[crossing], shift[crossing]
    # Seen is at least end, so this is room enough for either kind of edge; the tick avoids a tie that is not real.
    return float((times.start[target] + shift - free.visible[source]).min(initial=0.0)) - TICK_S
