"""What a Timeline refuses, and how measured times come onto the grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from timeline.small import MESSAGE, timeline

from gnomon.errors import InputError, UnitError
from gnomon.timeline import Memory, Spans, Worker
from gnomon.units import TICK_S


def spans(**columns: Any) -> Spans:
    return Spans.of(**{"worker": 0, "stream": 0, "kind": 0, "role": 0, "start_s": [0.0], "end_s": [1.0], **columns})


def test_names_of_actions() -> None:
    result = timeline(MESSAGE, columns={"stage": [0, 0, 1, -1], "unit": [4, 4, -1, -1]})
    assert [result.action(i) for i in range(4)] == ["0F4", "0SEND4", "1RECV", "F"]
    assert result.where(2) == "1RECV on w1 (span 2)"


def test_measured_times_that_touch_still_touch_on_the_grid() -> None:
    result = spans(start_s=[0.0, 0.1, 0.3], end_s=[0.1, 0.3, 0.7])
    assert result.end_s[0] == result.start_s[1] and result.end_s[1] == result.start_s[2]
    assert abs(result.start_s[1] - 0.1) <= TICK_S / 2
    assert result.duration_s.sum() == result.end_s[2]


def test_columns_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        spans().start_s[0] = 2.0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"worker": 1}, "worker index 1 is outside its table of 1"),
        ({"kind": -1}, "kind index -1"),
        ({"role": 4}, "role index 4 is outside its table of 4"),
        ({"cause": 1}, "cause index 1 is outside its table of 1"),
        ({"path": 0}, "path index 0 is outside its table of 0"),
        ({"unit": -2}, "unit must be at least -1"),
        ({"flops": float("nan")}, "flops must be finite"),
        ({"cause_steps": 1}, "does not repeat"),
        ({"end_s": [3.0]}, "makespan is 2.0 s, but the last span ends at 3.0 s"),
    ],
)
def test_columns_that_disagree(columns: dict[str, Any], message: str) -> None:
    good = timeline([(0, "compute", "F", "compute", 0, 1, -1)], makespan=2.0)
    assert replace(good, spans=spans()) == good
    with pytest.raises(InputError, match=message):
        replace(good, spans=spans(**columns))


def test_times_that_are_none() -> None:
    with pytest.raises(UnitError, match="got -1 s"):
        spans(start_s=[-1.0])
    with pytest.raises(InputError, match="duration_s must be from 0"):
        spans(start_s=[2.0])
    with pytest.raises(InputError, match="not on the grid"):
        replace(spans(), lag_s=np.array([0.1]))


def test_names() -> None:
    good = timeline(MESSAGE)
    with pytest.raises(InputError, match="worker 'a' is named twice"):
        replace(good, workers=(Worker(name="a"), Worker(name="a")))
    with pytest.raises(InputError, match="printable text on one line"):
        replace(good, assumptions=("two\nlines",))
    with pytest.raises(InputError, match="at least 1 rank"):
        Worker(name="a", count=0)
    with pytest.raises(InputError, match="needs its period"):
        replace(good, repeats=True)


def test_memory_has_a_cell_for_each_worker_and_buffer() -> None:
    memory = Memory.of(worker=[0], buffer=[0], span=[0], time_s=[0], change_bytes=[5], resident_bytes=[[1.0]])
    good = timeline([(0, "compute", "F", "compute", 0, 1, -1)], buffers=("S",), memory=memory)
    with pytest.raises(InputError, match="resident_bytes has shape"):
        replace(good, buffers=("S", "G"))
