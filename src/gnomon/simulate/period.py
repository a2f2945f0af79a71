"""The steady-state time per step: the maximum cycle ratio of a Program's dependencies across steps, exact and proved.

A step maps the ends of the steps before to its own ends using maxima and sums only, so the time per step tends to the
largest (duration of a cycle) / (steps it spans) over all cycles of dependencies. Two ways to it:
- if all clocks advance by the same amount from one step to the next, that amount is it (an eigenvector of the map);
- else follow what each action waited for backwards until an action repeats some steps earlier: that cycle is a lower
  bound. It is proved to be the maximum by times y with y >= f(y) - ratio for every action, found by a few more plays.
Waiting until clocks repeat is not enough: that can take thousands of steps, or for ever when streams have rates of
their own. All numbers are on the dyadic grid, ratios are kept as (seconds, steps), so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import ProgramError
from gnomon.program import Order, Structure
from gnomon.simulate.durations import Durations
from gnomon.simulate.play import Clock, Times, base_from, play

_QUICK = 4  # plays before looking for a cycle: pipelines repeat after two
_MOST = 4096  # steps after which a period that is still unproved is our bug
_WINDOW_BYTES = 1 << 28  # of the steps remembered for following a cycle back


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Steady-state time per step."""

    seconds: float
    """Seconds per step: cycle_seconds / cycle_steps."""
    cycle_seconds: float
    """Length of the critical cycle, exact."""
    cycle_steps: int
    """Steps it spans."""
    proof: Literal["repeats", "fixed point"]
    """`repeats`: all clocks advance alike. `fixed point`: times that satisfy every dependency at this ratio exist."""
    plays: int
    """Steps played to find and prove it."""
    cycle: tuple[int, ...]
    """Rows on the critical cycle that wait for an earlier step; empty when proved by repetition."""


def makespan(structure: Structure, durations: Durations) -> float:
    """Seconds of one step from rest."""
    return float(play(Clock.of(structure, durations)).end.max(initial=0.0))


def period(structure: Structure, durations: Durations, after: Times | None = None) -> Period:
    """Steady-state time per step of one scenario. Exact for durations on the grid.

    after: a step played before, with any durations, to go on from, which may save a play; otherwise from rest.
    """
    clock = Clock.of(structure, durations)
    order = structure.order
    if not order.size:
        return _repeats(0.0, 0)
    reach = int(order.before[2].max())  # how many steps back a dependency goes, at most
    if after is not None:
        continued = _going_on(clock, after) if reach == 1 else None
        return continued or period(structure, durations)
    steps, plays = [play(clock)], 1
    # 24 bytes a position and step: start, end and visible as doubles.
    window = max(_QUICK + reach, int(_WINDOW_BYTES // (24 * order.size)))
    # Play until clocks advance alike; if they have not after `target` plays, look for a cycle and try to prove it; the
    # wait before the next look trebles, since following a cycle back costs as much as some plays.
    target = _QUICK
    while plays <= _MOST:
        while plays < target:
            steps = [*steps[-window + 1 :], play(clock, base_from(order, steps))]
            plays += 1
            advance = _common_advance(order, steps, reach)
            if advance is not None:
                return _repeats(advance, plays)
        ratio, cycle = _cycle(structure, steps)
        proved, extra = _prove(clock, steps[-1], ratio, reach) if ratio is not None else (False, 0)
        plays += extra
        if proved and ratio is not None:
            return Period(
                seconds=float(ratio[0] / ratio[1]),
                cycle_seconds=ratio[0],
                cycle_steps=ratio[1],
                proof="fixed point",
                plays=plays,
                cycle=cycle,
            )
        target = plays + 2 * target
    raise ProgramError(f"no period was proved within {_MOST} steps of {order.size} actions; this is a mistake of ours")


def _repeats(seconds: float, plays: int) -> Period:
    return Period(seconds=seconds, cycle_seconds=seconds, cycle_steps=1, proof="repeats", plays=plays, cycle=())


def _going_on(clock: Clock, after: Times) -> Period | None:
    """The period where the steps that follow `after` soon advance alike, each waiting for the one before it only.

    A step's entries start when the last of what they wait for is over. Where the earliest starts that held any of them
    up are all later by the same for the next step, and no other one is late enough to hold anything up then, the next
    step is this one so much later, and so is every one after it.
    """
    order = clock.order
    target, base = order.before[1], base_from(order, [after])
    for plays in range(1, _QUICK + 1):
        now = play(clock, base)
        following = base_from(order, [now])
        # then: earliest start in this step; start: actual one; late: earliest start in the next step. An edge held its
        # target up where then == start.
        then, start, late = base[target], now.start[target], following[target]
        advance = float((late - then)[then == start].max(initial=-np.inf))
        if (late[then == start] == then[then == start] + advance).all() and (late <= start + advance).all():
            return _repeats(advance, plays)
        base = following
    return None


def _common_advance(order: Order, steps: Sequence[Times], reach: int) -> float | None:
    """The amount by which everything that later steps see advanced, in each of the last `reach` steps, if it is one."""
    if len(steps) <= reach:
        return None
    source = order.before[0]
    # f(y + c) = f(y) + c for a map of maxima and sums: once all that crosses has moved by c, it does so for ever, and c
    # is the eigenvalue.
    first = float(steps[-1].end[source[0]] - steps[-2].end[source[0]])
    for back in range(1, reach + 1):
        if not np.all(steps[-back].end[source] - steps[-back - 1].end[source] == first):
            return None
    return first


class _Waits:
    """What each position may have waited for, for following one chain backwards."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.further: dict[int, list[tuple[int, bool]]] = {}
        for _, positions, sources, data in order.further:
            for p, s, d in zip(positions.tolist(), sources.tolist(), data.tolist(), strict=True):
                self.further.setdefault(p, []).append((s, d))
        self.together: dict[int, list[int]] = {}
        for _, members, starts in order.groups:
            for part in np.split(members, starts[1:]):
                self.together.update((p, part.tolist()) for p in part.tolist())
        self.sorted = np.argsort(order.before[1], kind="stable")
        self.targets = order.before[1][self.sorted]

    def binding(self, steps: Sequence[Times], step: int, position: int) -> tuple[int, int, int] | None:
        """(step, position, position that crossed) of what `position` waited for in `step`; None if for nothing.

        The third item is the member of a group whose wait from an earlier step bound, or -1 within the step.
        """
        order, now = self.order, steps[step]
        start = now.start[position]
        members = self.together.get(position, [position])
        for member in members:
            near = [(int(order.lane_before[member]), False)]
            near += [(int(w[member]), bool(d[member])) for w, d in zip(order.waits, order.wait_is_data, strict=True)]
            for source, data in near + self.further.get(member, []):
                # Times are exact sums on the grid, so the wait that bound is equal to the start to the last bit.
                if source < order.size and (now.visible if data else now.end)[source] == start:
                    return step, source, -1
        for member in members:
            low, high = np.searchsorted(self.targets, [member, member + 1])
            for edge in self.sorted[low:high].tolist():
                source, back = int(order.before[0][edge]), int(order.before[2][edge])
                late = bool(order.before[3][edge])
                if back <= step and (steps[step - back].visible if late else steps[step - back].end)[source] == start:
                    return step - back, source, member
        return None


def _cycle(structure: Structure, steps: Sequence[Times]) -> tuple[tuple[float, int] | None, tuple[int, ...]]:
    """Best (seconds, steps) among the cycles met when walking back from what advanced most, and its crossing rows."""
    order = structure.order
    waits, source = _Waits(order), order.before[0]
    advance = steps[-1].end[source] - steps[-2].end[source]
    # From what advanced most: the critical cycle holds it up, or will. Each wait that bound is followed back; an entry
    # that is met again some steps earlier closes a cycle, whose seconds are the difference of its two starts.
    step, position = len(steps) - 1, int(source[int(np.argmax(advance))])
    crossings: dict[int, list[tuple[int, float]]] = {}
    path: list[int] = []
    best: tuple[float, int] | None = None
    rows: tuple[int, ...] = ()
    while (binding := waits.binding(steps, step, position)) is not None:
        before, at, crossed = binding
        if crossed >= 0:
            start = float(steps[step].start[position])
            for later, then in crossings.get(crossed, ()):
                ratio = (then - start, later - step)
                # Fractions: a ratio of two numbers on the grid is on no grid.
                if best is None or Fraction(ratio[0]) * best[1] > Fraction(best[0]) * ratio[1]:
                    best, rows = ratio, _between(path, crossed)
            crossings.setdefault(crossed, []).append((step, start))
            path.append(crossed)
        step, position = before, at
    return best, tuple(int(order.rows[p]) for p in rows)


def _between(path: Sequence[int], crossed: int) -> tuple[int, ...]:
    """The crossings since `crossed` was last met, itself first, in the order in which they happen."""
    last = len(path) - 1 - path[::-1].index(crossed)
    return (crossed, *reversed(path[last + 1 :]))


def _prove(clock: Clock, times: Times, ratio: tuple[float, int], reach: int) -> tuple[bool, int]:
    """Whether times exist that satisfy all dependencies at this ratio; and the plays that took.

    Durations are multiplied by the cycle's steps so that the ratio is a number on the grid. Each round raises the times
    to what the dependencies from earlier steps ask; if a larger cycle exists they rise for ever, and we give up.
    """
    # y >= f(y) - ratio for every action is a certificate: along any cycle of s steps the inequalities add up to
    # seconds(cycle) <= s * ratio, so no cycle is larger.
    seconds, steps = ratio
    scaled = clock.scaled(float(steps))
    start: NDArray[np.float64] = times.start * steps
    now = play(scaled, start)
    # The times of `reach` steps are taken to be the same ones, each a ratio earlier than the next: `shift` takes off as
    # many ratios as an edge goes back steps.
    for round_ in range(1, 65):
        base = base_from(clock.order, [now] * reach, shift=seconds)
        if np.all(base <= now.start):
            return True, round_
        now = play(scaled, np.maximum(base, now.start))
    return False, 65
