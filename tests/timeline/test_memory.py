"""Curves and peaks by hand, from rest and in a steady state."""

from __future__ import annotations

import pytest
from timeline.small import timeline

from gnomon.errors import InputError
from gnomon.timeline import Memory, Timeline, memory_curve, peaks


def held(repeats: bool = False, growth: float = 0) -> Timeline:
    """F 0-2 writes S (8); B 2-5 reads it and holds T (3) meanwhile; OPT 5-6 frees G (4), which B allocates. P is 16."""
    memory = Memory.of(
        worker=[0] * 6,
        buffer=[1, 2, 2, 1, 3, 3],
        span=[0, 1, 1, 1, 1, 2],
        time_s=[0, 2, 5, 5, 2, 6],
        change_bytes=[8, 3, -3, -8, 4, growth - 4],
        resident_bytes=[[16, 0, 0, 0]],
    )
    return timeline(
        [
            (0, "compute", "F", "compute", 0, 2, -1),
            (0, "compute", "B", "compute", 2, 5, 0),
            (0, "side", "OPT", "compute", 5, 6, 1),
        ],
        buffers=("P", "S", "T", "G"),
        memory=memory,
        repeats=repeats,
        period_s=5.0 if repeats else None,
    )


def test_curve_and_peak_from_rest() -> None:
    curve = memory_curve(held(), "w0")
    assert curve.time_s.tolist() == [0, 2, 5, 6]
    assert curve.bytes.tolist() == [24, 31, 20, 16]
    assert memory_curve(held(), "w0", "S").bytes.tolist() == [8, 0]
    (peak,) = peaks(held())
    assert (peak.bytes, peak.moment_s, peak.action, peak.span) == (31, 2, "B", 1)
    assert peak.by_buffer == (("P", 16), ("S", 8), ("T", 3), ("G", 4))


def test_steps_that_overlap_in_a_steady_state() -> None:
    """With a period of 5, OPT of the step before runs 0-1 while F does: its G (4) is there on top of P and S."""
    curve = memory_curve(held(repeats=True), "w0")
    assert curve.time_s.tolist() == [0, 1, 2]
    assert curve.bytes.tolist() == [28, 24, 31]
    assert memory_curve(held(repeats=True), "w0", "G").bytes.tolist() == [4, 0, 4]
    assert peaks(held(repeats=True))[0].bytes == 31


def test_frees_come_before_allocations_at_one_instant() -> None:
    memory = Memory.of(
        worker=[0, 0, 0],
        buffer=[0, 0, 0],
        span=[0, 1, 0],
        time_s=[0, 2, 2],
        change_bytes=[5, 6, -5],
        resident_bytes=[[0]],
    )
    rows = [(0, "compute", "F", "compute", 0, 2, -1), (0, "compute", "F", "compute", 2, 3, 0)]
    (peak,) = peaks(timeline(rows, buffers=("S",), memory=memory))
    assert (peak.bytes, peak.moment_s, peak.span) == (6, 2, 1)


def test_refused() -> None:
    with pytest.raises(InputError, match="has no memory"):
        peaks(timeline([(0, "compute", "F", "compute", 0, 2, -1)]))
    with pytest.raises(InputError, match="G on w0 grows by 1 bytes each step"):
        peaks(held(repeats=True, growth=1))
    with pytest.raises(InputError, match="no buffer 'Q'"):
        memory_curve(held(), "w0", "Q")
    with pytest.raises(InputError, match="no worker 'w9'"):
        memory_curve(held(), "w9")
