"""An oracle: the peak of memory in the order of time, straight from the starts and ends of actions.

`time_order_peaks` plays a Program and adds up what each action allocates when it starts and frees when it ends; at one
instant frees come first. What the package shows comes from a Timeline (`gnomon.timeline.peaks`), by another way.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.program import Structure, moves
from gnomon.simulate import Durations, play_steps


def time_order_peaks(
    structure: Structure, durations: Durations, sizes: Mapping[str, float], steps: int
) -> list[tuple[float, float]]:
    """(bytes, seconds from the start of the first step when they are first reached) of each rank class, over `steps`
    steps from rest. sizes as in `program.buffer_bytes`."""
    program, played = structure.program, play_steps(structure, durations, steps)
    change = moves(program, structure.deps, sizes)
    peaks = []
    for rank_class in range(program.num_classes):
        events = []
        for row in range(int(program.class_ptr[rank_class]), int(program.class_ptr[rank_class + 1])):
            at = int(structure.order.position[row])
            for times in played:
                events.append((float(times.start[at]), float(change.allocated[row])))
                events.append((float(times.end[at]), -float(change.freed[row])))
        held, most, moment = 0.0, 0.0, 0.0
        for when, delta in sorted(events, key=lambda event: (event[0], event[1] > 0)):
            held += delta
            if held > most:
                most, moment = held, when
        peaks.append((float(change.resident[rank_class]) + most, moment))
    return peaks
