"""Waits in a measured Timeline are told from work: two stages and one microbatch, written out by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from timeline.small import Row, timeline  # noqa: E402

from gnomon.runtime.watch.causes import with_causes  # noqa: E402
from gnomon.timeline import NONE, Timeline, breakdown  # noqa: E402

pytestmark = pytest.mark.torch

# Receives are posted early; B of worker 0 waited for its receive (span 2), F of worker 1 for its own (span 6).
ROWS: list[Row] = [
    (0, "compute", "F", "compute", 0.0, 1.0, NONE),
    (0, "pp", "SEND_F", "communication", 1.0, 1.25, NONE),
    (0, "pp", "RECV_B", "communication", 1.0, 5.0, NONE),
    (0, "compute", "B", "compute", 5.0, 7.0, 2),
    (0, "compute", "NORM", "communication", 7.0, 7.5, NONE),
    (0, "compute", "OPT", "compute", 7.5, 8.0, NONE),
    (1, "pp", "RECV_F", "communication", 0.0, 1.25, NONE),
    (1, "compute", "F", "compute", 1.25, 3.0, 6),
    (1, "compute", "B", "compute", 3.0, 4.75, NONE),
    (1, "pp", "SEND_B", "communication", 4.75, 5.0, NONE),
    (1, "compute", "NORM", "communication", 4.75, 7.5, NONE),
    (1, "compute", "OPT", "compute", 7.5, 8.0, NONE),
]
STAGES = [0, 0, 0, 0, NONE, 0, 1, 1, 1, 1, NONE, 1]
UNITS = [0, 0, 0, 0, NONE, NONE, 0, 0, 0, 0, NONE, NONE]


def measured() -> Timeline:
    return timeline(ROWS, columns={"stage": STAGES, "unit": UNITS}, clock="measured")


def settled() -> Timeline:
    raw = measured()
    return timeline(
        ROWS, columns={"stage": STAGES, "unit": UNITS}, clock="measured", spans=with_causes(raw.spans, raw.kinds)
    )


def test_a_receive_begins_with_its_send_and_the_norm_with_the_last_rank() -> None:
    starts = settled().spans.start_s.tolist()
    assert starts == [0.0, 1.0, 4.75, 5.0, 7.0, 7.5, 1.0, 1.25, 3.0, 4.75, 7.0, 7.5]
    assert settled().spans.end_s.tolist() == measured().spans.end_s.tolist()


def test_waiting_for_another_stage_is_a_bubble_and_adds_up() -> None:
    """Worker 0 idles from 1 to 5: 0.25 s of message, F and B of worker 1, 0.25 s of message. Worker 1 idles until 1.25
    for F of worker 0 and its message, and from 4.75 to 7 for the message to and B of worker 0."""
    parts = breakdown(settled())
    for worker, compute, bubble, communication in (
        ("w0", 1 + 2 + 0.5, 1.75 + 1.75, 0.25 + 0.25 + 0.5),
        ("w1", 1.75 + 1.75 + 0.5, 1.0 + 2.0, 0.25 + 0.25 + 0.5),
    ):
        assert parts.seconds(worker, "compute") == compute
        assert parts.seconds(worker, "bubble") == bubble
        assert parts.seconds(worker, "communication") == communication
        assert parts.seconds(worker, "host") == 0
        assert compute + bubble + communication == parts.step_s == 8.0


def test_a_receive_whose_sender_is_not_shown_stays_as_it_is() -> None:
    rows = ROWS[6:9]
    alone = timeline(
        [(0, *row[1:]) for row in [(*r[:6], NONE) for r in rows]], columns={"stage": [1, 1, 1], "unit": [0, 0, 0]}
    )
    assert with_causes(alone.spans, alone.kinds).start_s.tolist() == alone.spans.start_s.tolist()
