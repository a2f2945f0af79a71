"""Differences by hand: what changed, by how much, and that it adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timeline.small import MESSAGE, Row, timeline
from timeline.test_memory import held

from gnomon.errors import InputError
from gnomon.timeline import Worker
from gnomon.timeline.difference import difference

# The message of MESSAGE takes 2.5 seconds instead of 1.
SLOWER: list[Row] = [
    (0, "compute", "F", "compute", 0, 3, -1),
    (0, "send", "SEND", "communication", 3, 5.5, 0),
    (1, "recv", "RECV", "communication", 3, 5.5, 0),
    (1, "compute", "F", "compute", 5.5, 7.5, 2),
]


def test_a_slower_message() -> None:
    result = difference(timeline(MESSAGE), timeline(SLOWER))
    assert (result.before_s, result.after_s, result.seconds) == (6, 7.5, 1.5)
    assert [(c.worker, c.part, c.action, c.before_s, c.after_s) for c in result.changes] == [
        ("w0", "communication", "RECV", 1, 2.5),
        ("w1", "communication", "RECV", 1, 2.5),
    ]
    assert result.largest == result.changes[0]
    assert (result.memory, result.only_before, result.only_after) == ((), (), ())


def test_nothing_changed() -> None:
    result = difference(timeline(MESSAGE), timeline(MESSAGE))
    assert (result.seconds, result.changes, result.largest) == (0, (), None)


def test_a_slower_action_gains_what_others_wait_for_it() -> None:
    """F of w1 takes 3 instead of 2 seconds: busy on w1, awaited on w0; both are 1 second later."""
    slower = timeline([*MESSAGE[:3], (1, "compute", "F", "compute", 4, 7, 2)])
    result = difference(timeline(MESSAGE), slower)
    assert {(c.worker, c.part, c.busy, c.action, c.seconds) for c in result.changes} == {
        ("w0", "bubble", False, "F", 1),
        ("w1", "compute", True, "F", 1),
    }
    assert all(sum(c.seconds for c in result.of(w)) == result.seconds == 1 for w in ("w0", "w1"))


def test_memory_at_the_peaks() -> None:
    before = held()
    memory = before.memory
    assert memory is not None
    after = replace(before, memory=replace(memory, resident_bytes=memory.resident_bytes * 3))
    result = difference(before, after)
    assert [(c.buffer, c.before_bytes, c.after_bytes, c.bytes) for c in result.memory] == [("P", 16, 48, 32)]


def test_workers_that_only_one_has() -> None:
    one = timeline(MESSAGE)
    other = replace(one, workers=(Worker(name="w1"), Worker(name="w2")))
    result = difference(one, other)
    assert (result.only_before, result.only_after) == (("w0",), ("w2",))
    assert {c.worker for c in result.changes} == {"w1"}
    with pytest.raises(InputError, match="no worker is in both timelines: w0, w1 and a, b"):
        difference(one, replace(one, workers=(Worker(name="a"), Worker(name="b"))))


def test_a_makespan_is_not_compared_with_a_period() -> None:
    one = timeline(MESSAGE)
    with pytest.raises(InputError, match="shows a makespan and the second a period"):
        difference(one, replace(one, repeats=True, period_s=6.0))
