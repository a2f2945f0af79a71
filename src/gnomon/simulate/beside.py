"""How long actions run while others of their rank do: what contention between them needs to know.

`beside(structure, durations, ours, others)` plays a step that follows another and returns, for each price key, the
seconds of an action of ours during which at least one of the others runs on the same rank class. Leaves out what that
does to either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Structure
from gnomon.simulate.durations import Durations
from gnomon.simulate.play import Clock, base_from, play

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]


def beside(structure: Structure, durations: Durations, ours: Mask, others: Mask) -> Doubles:
    """[keys] seconds, the mean over a key's actions; 0 for keys that are not ours. ours, others: [keys]."""
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
        at, busy = _covered(begins, ends)
        seconds = np.interp(end[mine], at, busy) - np.interp(start[mine], at, busy)
        np.add.at(total, program.key[mine], seconds)
        np.add.at(count, program.key[mine], 1.0)
    return total / np.maximum(count, 1.0)


def _covered(begins: Doubles, ends: Doubles) -> tuple[Doubles, Doubles]:
    """(times, seconds until then that any interval covers), to be interpolated between."""
    by_start = np.argsort(begins, kind="stable")
    begins, ends = begins[by_start], np.maximum.accumulate(ends[by_start])
    new = np.append(True, begins[1:] > ends[:-1])
    first, last = begins[new], ends[np.append(np.flatnonzero(new)[1:] - 1, len(ends) - 1)]
    until = np.cumsum(last - first)
    at = np.column_stack([first, last]).ravel()
    return at, np.column_stack([until - (last - first), until]).ravel()
