"""How long actions run while others of their rank do: what contention between them needs to know.

`Beside` prepares a structure for it; `Beside.seconds` plays a step and returns, for each price key, the seconds of an
action of ours during which others run on the same rank class, each second counted by the weights of those that run, 1
at most. The first step begins from rest; asked again, with other durations, it goes on from the step played last, so
that each round of a fixed point costs one play. Leaves out what running together does to either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Structure
from gnomon.simulate.durations import Durations
from gnomon.simulate.play import Clock, Times, base_from, play

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Beside:
    """One structure, with which actions are ours and what the others weigh."""

    def __init__(self, structure: Structure, ours: Mask, others: Doubles) -> None:
        """ours: [keys]. others: [keys] weight of each of the others from 0 to 1, 0 for keys that are none."""
        self.structure = structure
        program, position = structure.program, structure.order.position
        self.classes: list[tuple[Longs, Longs, Doubles]] = []
        """Of each rank class with both: positions of ours, positions of the others, their weights."""
        keys = []
        for low, high in zip(program.class_ptr[:-1].tolist(), program.class_ptr[1:].tolist(), strict=True):
            key = program.key[low:high]
            mine, theirs = np.flatnonzero(ours[key]), np.flatnonzero(others[key])
            if len(mine) and len(theirs):
                here = position[low:high].astype(np.int64)
                self.classes.append((here[mine], here[theirs], others[key[theirs]]))
                keys.append(key[mine])
        self.keys = np.concatenate(keys) if keys else np.zeros(0, np.int64)
        self.count = np.maximum(np.bincount(self.keys, minlength=len(program.keys)), 1)
        self._last: Times | None = None

    def seconds(self, durations: Durations) -> Doubles:
        """[keys] seconds, the mean over a key's actions; 0 for keys that are not ours."""
        clock, order = Clock.of(self.structure, durations), self.structure.order
        last = 0.0 if self._last is None else float(self._last.end.max(initial=0.0))
        now = play(clock, None if self._last is None else base_from(order, [self._last]))
        ahead = float(now.end.max(initial=0.0)) - last
        self._last = now
        found = [np.zeros(0)]
        for mine, theirs, weights in self.classes:
            starts, ends = now.start[mine], now.end[mine]
            at, busy = _near(now.start[theirs], now.end[theirs], weights, ahead, starts.min(), ends.max())
            found.append(np.interp(ends, at, busy) - np.interp(starts, at, busy))
        total = np.bincount(self.keys, np.concatenate(found), minlength=len(self.count))
        return total / self.count


def _near(
    begins: Doubles, ends: Doubles, weights: Doubles, ahead: float, low: float, high: float
) -> tuple[Doubles, Doubles]:
    """`covered` of intervals that recur every `ahead` seconds, between `low` and `high`: transfers of the steps before
    and after reach into this one."""
    every = [(begins, ends, weights)]
    for shift in (-ahead, ahead):
        inside = (ends + shift > low) & (begins + shift < high)
        every.append((begins[inside] + shift, ends[inside] + shift, weights[inside]))
    return covered(*(np.concatenate(part) for part in zip(*every, strict=True)))


def covered(begins: Doubles, ends: Doubles, weights: Doubles) -> tuple[Doubles, Doubles]:
    """(times, seconds until then weighted by what the intervals that cover them weigh together, 1 at most), to be
    interpolated between."""
    at, change = np.concatenate([begins, ends]), np.concatenate([weights, -weights])
    order = np.argsort(at, kind="stable")
    at = at[order]
    level = np.clip(np.cumsum(change[order])[:-1], 0.0, 1.0)
    return at, np.append(0.0, np.cumsum(level * np.diff(at)))
