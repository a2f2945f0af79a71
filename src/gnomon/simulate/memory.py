"""Memory in time order: what is held when, given when actions really run.

A buffer is held from the start of the action that allocates it to the end of the action that frees it; at one instant
frees come before allocations. Steps are played one after the other, so that what prefetch and delayed updates carry
over a step boundary is seen. The peak in issue order is a property of the structure: see `program.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Structure, moves
from gnomon.simulate.durations import Durations
from gnomon.simulate.play import Clock, Times, base_from, play

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePeak:
    """Peak memory of one rank class in time order."""

    rank_class: int
    bytes: float
    """Peak, carried buffers included."""
    moment: float
    """Seconds from the start of the first step at which it is first reached."""
    row: int
    """The action that allocates at that moment; -1 for a class that allocates nothing."""


def play_steps(structure: Structure, durations: Durations, steps: int) -> list[Times]:
    """Times of `steps` steps, one after the other, the first from rest."""
    clock = Clock.of(structure, durations)
    played = [play(clock)]
    while len(played) < steps:
        played.append(play(clock, base_from(structure.order, played)))
    return played


def memory_events(
    structure: Structure, played: list[Times], sizes: Mapping[str, float], rank_class: int
) -> tuple[Doubles, Doubles, NDArray[np.int64]]:
    """(moments, change in bytes, row) of one rank class, sorted; at one moment frees come first."""
    program = structure.program
    change = moves(program, structure.deps, sizes)
    part = np.arange(int(program.class_ptr[rank_class]), int(program.class_ptr[rank_class + 1]))
    at = structure.order.position[part]
    moment = np.concatenate([t for times in played for t in (times.start[at], times.end[at])])
    delta = np.concatenate([d for _ in played for d in (change.allocated[part], -change.freed[part])])
    row = np.tile(part, 2 * len(played))
    real = delta != 0
    moment, delta, row = moment[real], delta[real], row[real]
    order = np.lexsort((delta > 0, moment))
    return moment[order], delta[order], row[order]


def time_order_peak(
    structure: Structure, durations: Durations, sizes: Mapping[str, float], *, steps: int = 1
) -> tuple[TimePeak, ...]:
    """Peak of each rank class over `steps` steps from rest. sizes as in `program.buffer_bytes`."""
    played = play_steps(structure, durations, steps)
    resident = moves(structure.program, structure.deps, sizes).resident
    peaks = []
    for cls in range(structure.program.num_classes):
        moment, delta, row = memory_events(structure, played, sizes, cls)
        base = float(resident[cls])
        if not len(delta):
            peaks.append(TimePeak(rank_class=cls, bytes=base, moment=0.0, row=-1))
            continue
        held = np.cumsum(delta)
        top = int(np.argmax(held))
        peaks.append(
            TimePeak(rank_class=cls, bytes=base + float(held[top]), moment=float(moment[top]), row=int(row[top]))
        )
    return tuple(peaks)
