"""How long actions run while others of their rank do: what contention between them needs to know.

`beside(structure, durations, ours, others)` plays a step that follows another and returns, for each price key, the
seconds of an action of ours during which others run on the same rank class, each second counted by the weights of
those that run, 1 at most. Leaves out what that does to either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Structure
from gnomon.simulate.durations import Durations
from gnomon.simulate.play import Clock, base_from, play

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]


def beside(structure: Structure, durations: Durations, ours: Mask, others: Doubles) -> Doubles:
    """[keys] seconds, the mean over a key's actions; 0 for keys that are not ours. ours: [keys]. others: [keys] weight
    of each of the others from 0 to 1, 0 for keys that are none."""
    program, order = structure.program, structure.order
    clock = Clock.of(structure, durations)
    first = play(clock)
    second = play(clock, base_from(order, [first]))
    ahead = float(second.end.max(initial=0.0) - first.end.max(initial=0.0))
    start, end = second.start[order.position], second.end[order.position]
    total, count = np.zeros(len(program.keys)), np.zeros(len(program.keys))
    for low, high in zip(program.class_ptr[:-1].tolist(), program.class_ptr[1:].tolist(), strict=True):
        key = program.key[low:high]
        mine, theirs = np.flatnonzero(ours[key]) + low, np.flatnonzero(others[key]) + low
        if not len(mine) or not len(theirs):
            continue
        # transfers of the steps before and after reach into this one
        begins = np.concatenate([start[theirs] + shift for shift in (-ahead, 0.0, ahead)])
        ends = np.concatenate([end[theirs] + shift for shift in (-ahead, 0.0, ahead)])
        at, busy = covered(begins, ends, np.tile(others[program.key[theirs]], 3))
        seconds = np.interp(end[mine], at, busy) - np.interp(start[mine], at, busy)
        np.add.at(total, program.key[mine], seconds)
        np.add.at(count, program.key[mine], 1.0)
    return total / np.maximum(count, 1.0)


def covered(begins: Doubles, ends: Doubles, weights: Doubles) -> tuple[Doubles, Doubles]:
    """(times, seconds until then weighted by what the intervals that cover them weigh together, 1 at most), to be
    interpolated between."""
    at, change = np.concatenate([begins, ends]), np.concatenate([weights, -weights])
    order = np.argsort(at, kind="stable")
    at = at[order]
    level = np.clip(np.cumsum(change[order])[:-1], 0.0, 1.0)
    return at, np.append(0.0, np.cumsum(level * np.diff(at)))
