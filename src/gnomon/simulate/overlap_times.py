"""How long actions run while others of their rank do: what contention between them needs to know.

`OverlapTimes` prepares a structure for it; its `seconds` plays a step and returns, for each price key, the seconds of
an action of ours during which others run on the same rank class, each second counted by the weights of those that
run, 1 at most. The first step begins from rest; asked again, with other durations, it goes on from the step played
last, so that each round of a fixed point costs one play. Leaves out what running together does to either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Structure
from gnomon.program.dependencies import lanes
from gnomon.simulate.durations import Durations
from gnomon.simulate.play import Clock, Times, base_from, play

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]
Mask = NDArray[np.bool_]


class OverlapTimes:
    """One structure, with which actions are ours and what the others weigh."""

    def __init__(self, structure: Structure, ours: Mask, others: Doubles) -> None:
        """Prepares to weigh what is overlapped. ours: [keys]. others: [keys] weight of each of the others from 0 to 1,
        0 for keys that are none."""
        self.structure, self.sides = structure, _sides(structure, ours.tobytes(), (others != 0).tobytes())
        self.weights = others[self.sides.their_keys]
        self.last: Times | None = None
        """The step played last."""

    def seconds(self, durations: Durations) -> Doubles:
        """[keys] seconds, the mean over a key's actions; 0 for keys that are not ours."""
        clock, sides, last = Clock.of(self.structure, durations), self.sides, self.last
        now = play(clock, None if last is None else base_from(self.structure.order, [last]))
        # seconds by which this step is ahead of the one before: the steps around it are this one, moved by so much
        ahead = float(now.end.max(initial=0.0)) - (0.0 if last is None else float(last.end.max(initial=0.0)))
        self.last = now
        total = np.zeros(len(sides.count))
        if len(sides.first):
            starts, ends, begins, stops = (
                now.start[sides.ours], now.end[sides.ours], now.start[sides.theirs], now.end[sides.theirs],
            )  # fmt: skip
            low, high = np.minimum.reduceat(starts, sides.first), np.maximum.reduceat(ends, sides.first)
            # one class after another, so far apart that nothing of one reaches into the next
            apart = 2.0 ** np.ceil(np.log2(max(float(high.max()), float(stops.max())) + 2 * abs(ahead) + 1.0))
            moved = apart * np.arange(len(low))
            begins, stops = begins + moved[sides.their_class], stops + moved[sides.their_class]
            every = [(begins, stops, self.weights)]
            low, high = (low + moved)[sides.their_class], (high + moved)[sides.their_class]
            for shift in (-ahead, ahead):  # transfers of the steps before and after reach into this one
                inside = (stops + shift > low) & (begins + shift < high)
                every.append((begins[inside] + shift, stops[inside] + shift, self.weights[inside]))
            at, busy = covered(*(np.concatenate(part) for part in zip(*every, strict=True)))
            starts, ends = starts + moved[sides.our_class], ends + moved[sides.our_class]
            # the integral of what covers each of ours: busy(t) is the weighted time covered until t
            overlapped = np.interp(ends, at, busy) - np.interp(starts, at, busy)
            total += np.bincount(sides.keys, overlapped, len(total))
        return total / sides.count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sides:
    """Positions of ours and of the others in rank classes that have both, class after class."""

    ours: Longs
    our_class: Longs
    first: Longs
    """[classes] the first of ours of each class."""
    theirs: Longs
    their_class: Longs
    their_keys: Longs
    keys: Longs
    """Of ours."""
    count: Longs
    """[keys] how many of ours have it, at least 1."""


@lru_cache(maxsize=16)
def _sides(structure: Structure, ours: bytes, others: bytes) -> _Sides:
    """Finds where rows of both sides meet. ours, others: bytes of [keys] of bool, hashable for the memo."""
    program, position = structure.program, structure.order.position
    mine = np.flatnonzero(np.frombuffer(ours, bool)[program.key])
    theirs = np.flatnonzero(np.frombuffer(others, bool)[program.key])
    size = len(program.class_ptr) - 1
    of_class = np.repeat(np.arange(size), np.diff(program.class_ptr))
    both = (np.bincount(of_class[mine], minlength=size) > 0) & (np.bincount(of_class[theirs], minlength=size) > 0)
    mine, theirs = mine[both[of_class[mine]]], theirs[both[of_class[theirs]]]
    theirs = theirs[np.argsort(lanes(program)[theirs], kind="stable")]  # those of a stream come one after another
    number = np.cumsum(both) - 1  # [classes] -> number among those that have both
    keys, our_class = program.key[mine], number[of_class[mine]]
    return _Sides(
        ours=position[mine].astype(np.int64),
        our_class=our_class,
        first=np.searchsorted(our_class, np.arange(int(both.sum()))),
        theirs=position[theirs].astype(np.int64),
        their_class=number[of_class[theirs]],
        their_keys=program.key[theirs].astype(np.int64),
        keys=keys.astype(np.int64),
        count=np.maximum(np.bincount(keys, minlength=len(program.keys)), 1),
    )


def covered(begins: Doubles, ends: Doubles, weights: Doubles) -> tuple[Doubles, Doubles]:
    """(times, seconds until then weighted by what the intervals that cover them weigh together, 1 at most), to be
    interpolated between."""
    at, change = np.stack([begins, ends], axis=1).ravel(), np.stack([weights, -weights], axis=1).ravel()
    order = np.argsort(at, kind="stable")  # a sweep: weights are added where intervals begin and taken off at ends
    at = at[order]
    level = np.clip(np.cumsum(change[order])[:-1], 0.0, 1.0)
    return at, np.append(0.0, np.cumsum(level * np.diff(at)))
