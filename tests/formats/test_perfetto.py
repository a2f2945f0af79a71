"""The trace is what the Trace Event Format asks for, and holds what the Timeline does."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.formats.perfetto import perfetto_trace
from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.prediction import predict
from gnomon.timeline import Spans, Timeline, Worker, memory_curve

REQUIRED = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "C": {"name": str, "pid": int, "ts": float, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float},
    "f": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float, "bp": str},
}
"""Fields that each phase must have, by the Trace Event Format."""

METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"} | {
    "thread_sort_index": "sort_index"
}


def check(trace: dict[str, Any]) -> None:
    """What a reader of the format relies on."""
    again = json.loads(json.dumps(trace, allow_nan=False))
    assert again["displayTimeUnit"] in ("ms", "ns")
    events = again["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        for field, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[field], kind), (event, field)
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane in slices.values():  # on one thread nothing overlaps
        lane.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(lane, lane[1:], strict=False))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(slices) <= named
    check_flows(events, slices)


def check_flows(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    """Every arrow has one start and one end, forward in time, each inside a slice of its thread."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == sum(e["ph"] == "s" for e in events) and set(starts) == set(ends)
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"] and end["bp"] == "e"
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        for event in (start, end):
            assert any(a - 1e-6 <= event["ts"] < b for a, b in slices[event["pid"], event["tid"]])


def pipeline(schedule: str = "one_f_one_b", steady: bool = False) -> Timeline:
    job = Plan(mesh=Mesh(pp=2), schedule=Schedule(name=schedule, micro_batch_size=1))  # type: ignore[arg-type]
    prediction = predict("llama-tiny", "1x2xh100-sxm", job, Workload(global_batch_size=4, seq_len=64))
    return prediction.timeline(steady=steady)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zero_bubble_h1"])
def test_predictions_are_legal_traces(schedule: str, steady: bool) -> None:
    timeline = pipeline(schedule, steady)
    trace = perfetto_trace([timeline])
    check(trace)
    phases = Counter(event["ph"] for event in trace["traceEvents"])
    assert phases["X"] == timeline.spans.size and min(phases[entry] for entry in "CMsf") > 0


def test_slices_are_the_spans_in_microseconds() -> None:
    timeline = pipeline()
    events = perfetto_trace([timeline])["traceEvents"]
    actual = sorted((e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X")
    spans = timeline.spans
    wanted = sorted((timeline.action(i), spans.start_s[i] * 1e6, spans.duration_s[i] * 1e6) for i in range(spans.size))
    assert [name for name, *_ in actual] == [name for name, *_ in wanted]
    assert np.array([v[1:] for v in actual]) == pytest.approx(np.array([v[1:] for v in wanted]), abs=2e-3)
    forward = next(e for e in events if e["name"] == "1F0")
    assert forward["args"]["stage"] == 1 and forward["args"]["unit"] == 0 and forward["args"]["flops"] > 0
    assert "waited for" in forward["args"]


def test_arrows_lead_from_stage_to_stage() -> None:
    events = perfetto_trace([pipeline()])["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "predicted class 0", 2: "predicted class 1"}
    starts = {e["id"]: e["pid"] for e in events if e["ph"] == "s"}
    ways = {(starts[e["id"]], e["pid"]) for e in events if e["ph"] == "f"}
    assert {(1, 2), (2, 1)} <= ways


def test_the_counter_is_the_memory_curve() -> None:
    timeline = pipeline()
    events = [e for e in perfetto_trace([timeline])["traceEvents"] if e["ph"] == "C" and e["pid"] == 1]
    curve = memory_curve(timeline, "class 0")
    assert max(sum(e["args"].values()) for e in events) == curve.bytes.max()
    assert "activations" in events[0]["args"]


def test_predicted_and_measured_are_processes_of_their_own() -> None:
    one = pipeline()
    measured = Timeline(
        clock="measured",
        workers=one.workers,
        streams=one.streams,
        kinds=one.kinds,
        spans=Spans.of(
            worker=one.spans.worker,
            stream=one.spans.stream,
            kind=one.spans.kind,
            role=one.spans.role,
            stage=one.spans.stage,
            unit=one.spans.unit,
            start_s=one.spans.start_s,
            end_s=one.spans.end_s + 1e-6,
        ),
        makespan_s=1.0,
    )
    trace = perfetto_trace([one, measured])
    check(trace)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["predicted class 0", "predicted class 1", "measured class 0", "measured class 1"]
    sends = [e for e in trace["traceEvents"] if e["ph"] == "s" and e["pid"] == 3]
    assert sends, "receives without a cause are matched with their sends"


spans = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(spans)
def test_any_spans_make_a_legal_trace(given_spans: list[tuple[int, int, int]]) -> None:
    """Spans that overlap on one stream go to threads of their own."""
    start = np.array([s[1] for s in given_spans]) * 1e-4
    end = start + np.array([s[2] for s in given_spans]) * 1e-4
    timeline = Timeline(
        clock="measured",
        workers=(Worker(name="rank 0"),),
        streams=("compute", "dp"),
        kinds=("F",),
        spans=Spans.of(worker=0, stream=[s[0] for s in given_spans], kind=0, role=0, start_s=start, end_s=end, stage=0),
        makespan_s=1.0,
    )
    trace = perfetto_trace([timeline])
    check(trace)
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(given_spans)
