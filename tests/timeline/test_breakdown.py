"""Breakdowns worked out by hand: 1F1B, messages, lags, launches, copies, a steady state; and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timeline.small import MESSAGE, Row, timeline

from gnomon.errors import InputError
from gnomon.timeline import Timeline, breakdown, exposed_communication, idle_intervals

Found = tuple[str, bool, str, str, bool, float]


def shares(value: Timeline, worker: str) -> set[Found]:
    """(part, busy, action, arrival, at the end, seconds) of a worker."""
    return {(s.part, s.busy, s.action, s.arrival, s.at_end, s.seconds) for s in breakdown(value).of(worker)}


# 1F1B, two stages, three microbatches, F 1, B 2, messages free: 12 = (3 + 1)·3 seconds, of which each works 9.
#   w0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
#   w1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
ONE_F_ONE_B: list[Row] = [
    (0, "compute", "F", "compute", 0, 1, -1),
    (0, "compute", "F", "compute", 1, 2, 0),
    (0, "compute", "B", "compute", 4, 6, 7),
    (0, "compute", "F", "compute", 6, 7, 2),
    (0, "compute", "B", "compute", 7, 9, 9),
    (0, "compute", "B", "compute", 10, 12, 11),
    (1, "compute", "F", "compute", 1, 2, 0),
    (1, "compute", "B", "compute", 2, 4, 6),
    (1, "compute", "F", "compute", 4, 5, 7),
    (1, "compute", "B", "compute", 5, 7, 8),
    (1, "compute", "F", "compute", 7, 8, 9),
    (1, "compute", "B", "compute", 8, 10, 10),
]


def test_one_f_one_b() -> None:
    value = timeline(ONE_F_ONE_B)
    assert shares(value, "w0") == {
        ("compute", True, "F", "", False, 3),
        ("compute", True, "B", "", False, 6),
        ("bubble", False, "B", "B", False, 3),
    }
    assert shares(value, "w1") == {
        ("compute", True, "F", "", False, 3),
        ("compute", True, "B", "", False, 6),
        ("bubble", False, "F", "F", False, 1),
        ("bubble", False, "B", "B", True, 2),
    }
    parts = breakdown(value)
    assert (parts.step_s, parts.window) == (12, "makespan")
    assert parts.idle_s("w0") == parts.seconds("w0", "bubble") == 3
    assert exposed_communication(value) == {"w0": 0, "w1": 0}


def test_every_idle_interval_names_its_arrival() -> None:
    value = timeline(ONE_F_ONE_B)
    idle = idle_intervals(value)
    rows = zip(
        *(c.tolist() for c in (idle.worker, idle.start_s, idle.end_s, idle.until, idle.arrival, idle.arrival_steps)),
        strict=True,
    )
    assert list(rows) == [(0, 2, 4, 2, 7, 0), (0, 9, 10, 5, 11, 0), (1, 0, 1, 6, 0, 0), (1, 10, 12, -1, 5, 0)]


def test_a_message_is_split_from_what_it_waited_for() -> None:
    value = timeline(MESSAGE)
    assert shares(value, "w0") == {
        ("compute", True, "F", "", False, 3),
        ("bubble", False, "F", "F", True, 2),
        ("communication", False, "RECV", "F", True, 1),
    }
    assert shares(value, "w1") == {
        ("compute", True, "F", "", False, 2),
        ("bubble", False, "F", "RECV", False, 3),
        ("communication", False, "RECV", "RECV", False, 1),
    }
    assert exposed_communication(value) == {"w0": 1, "w1": 1}


def test_a_lag_is_communication_and_names_its_action() -> None:
    rows: list[Row] = [(0, "compute", "F", "compute", 0, 3, -1), (1, "compute", "B", "compute", 4, 6, 0)]
    value = timeline(rows, columns={"lag_s": [1, 0]})
    assert shares(value, "w1") == {
        ("compute", True, "B", "", False, 2),
        ("communication", False, "F", "F", False, 1),
        ("bubble", False, "F", "F", False, 3),
    }


def test_communication_that_holds_the_compute_stream_is_exposed() -> None:
    rows: list[Row] = [
        (0, "compute", "F", "compute", 0, 3, -1),
        (0, "compute", "AR", "communication", 3, 5, 0),
        (0, "compute", "B", "compute", 5, 6, 1),
    ]
    assert exposed_communication(timeline(rows)) == {"w0": 2}
    assert shares(timeline(rows), "w0") >= {("communication", True, "AR", "", False, 2)}


def test_only_the_part_of_a_wait_that_lies_in_the_interval_counts() -> None:
    """B waits for a gather of 5 seconds, of which 3 are hidden behind F; the copy before it is hidden altogether."""
    rows: list[Row] = [
        (0, "h2d", "LOAD", "copy", 0, 1, -1),
        (0, "gather", "AG", "communication", 1, 6, 0),
        (0, "compute", "F", "compute", 0, 4, -1),
        (0, "compute", "B", "compute", 6, 7, 1),
    ]
    assert exposed_communication(timeline(rows)) == {"w0": 2}
    assert {s[0] for s in shares(timeline(rows), "w0")} == {"compute", "communication"}


def test_copies_and_the_host() -> None:
    """Offloaded optimizer: gradients down 1, Adam on the host 3, parameters up 1, all exposed before F."""
    rows: list[Row] = [
        (0, "d2h", "DOWN", "copy", 0, 1, -1),
        (0, "host", "ADAM", "host", 1, 4, 0),
        (0, "h2d", "UP", "copy", 4, 5, 1),
        (0, "compute", "F", "compute", 5, 7, 2),
    ]
    assert shares(timeline(rows), "w0") == {
        ("copy", False, "DOWN", "UP", False, 1),
        ("host", False, "ADAM", "UP", False, 3),
        ("copy", False, "UP", "UP", False, 1),
        ("compute", True, "F", "", False, 2),
    }


def test_a_measured_launch_is_the_hosts() -> None:
    """B could start at 3 but starts at 3.5; C has no cause on record; the step ends a quarter after it."""
    rows: list[Row] = [
        (0, "compute", "F", "compute", 0, 3, -1),
        (0, "compute", "B", "compute", 3.5, 5, 0),
        (0, "compute", "C", "compute", 7, 8, -1),
    ]
    assert shares(timeline(rows, 8.25, clock="measured"), "w0") == {
        ("compute", True, "F", "", False, 3),
        ("compute", True, "B", "", False, 1.5),
        ("compute", True, "C", "", False, 1),
        ("host", False, "B", "F", False, 0.5),
        ("host", False, "C", "C", False, 2),
        ("host", False, "C", "C", True, 0.25),
    }


def test_a_steady_state_is_cut_at_each_workers_first_action() -> None:
    """Period 10. OPT 8-10 ends the step; the gather it allows runs 10-12 and the next F waits for it, from 10 to 12."""
    rows: list[Row] = [
        (0, "gather", "AG", "communication", 0, 2, 3),
        (0, "compute", "F", "compute", 2, 5, 0),
        (0, "compute", "B", "compute", 5, 8, 1),
        (0, "compute", "OPT", "compute", 8, 10, 2),
    ]
    value = timeline(rows, period_s=10.0, repeats=True, columns={"cause_steps": [1, 0, 0, 0]})
    assert shares(value, "w0") == {
        ("compute", True, "F", "", False, 3),
        ("compute", True, "B", "", False, 3),
        ("compute", True, "OPT", "", False, 2),
        ("communication", False, "AG", "AG", True, 2),
    }
    assert breakdown(value).window == "period"


def test_a_worker_that_does_not_depend_on_the_others_runs_ahead() -> None:
    rows: list[Row] = [(0, "compute", "F", "compute", 0, 8, 0), (1, "compute", "F", "compute", 0, 3, -1)]
    value = timeline(rows, period_s=8.0, repeats=True, columns={"cause_steps": [1, 0]})
    assert shares(value, "w1") == {("compute", True, "F", "", False, 3), ("ahead", False, "F", "F", True, 5)}
    assert shares(value, "w0") == {("compute", True, "F", "", False, 8)}


def test_a_worker_without_actions_waits_for_the_end() -> None:
    value = timeline([(1, "compute", "F", "compute", 0, 3, -1)])
    assert shares(value, "w0") == {("bubble", False, "F", "F", True, 3)}
    assert breakdown(timeline([], streams=("compute",))).shares == ()


def test_an_operation_is_told_from_the_action_around_it() -> None:
    value = timeline(MESSAGE, paths=("layer.0.mlp",), columns={"path": [0, -1, -1, -1]})
    assert {(s.part, s.path) for s in breakdown(value).of("w1")} == {
        ("bubble", "layer.0.mlp"),
        ("communication", ""),
        ("compute", ""),
    }


def test_refused() -> None:
    value = timeline(MESSAGE)
    with pytest.raises(InputError, match=r"no stream 'comput' .*did you mean 'compute'"):
        breakdown(value, "comput")
    with pytest.raises(InputError, match=r"no worker 'w7'"):
        breakdown(value).of("w7")
    over = timeline([(0, "compute", "F", "compute", 0, 3, -1), (0, "compute", "B", "compute", 2, 4, -1)])
    with pytest.raises(InputError, match=r"F on w0 \(span 0\) and B on w0 \(span 1\) overlap on stream 'compute'"):
        breakdown(over)
    with pytest.raises(InputError, match="w0 is longer at work than a period of 2.0 s"):
        breakdown(replace(value, repeats=True, period_s=2.0))
    circle: list[Row] = [
        (0, "send", "A", "communication", 5, 5, 1),
        (0, "recv", "A", "communication", 5, 5, 0),
        (0, "compute", "F", "compute", 5, 6, 0),
    ]
    with pytest.raises(InputError, match="causes form a cycle, met at A on w0"):
        breakdown(timeline(circle))
