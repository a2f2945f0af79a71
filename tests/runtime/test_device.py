"""What can be checked about a GPU without one: every tensor of a step lies on the device, and clocks of events."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Plan, Saved  # noqa: E402
from gnomon.program import NO_UNIT  # noqa: E402
from gnomon.runtime import Executor, Recorder  # noqa: E402
from gnomon.runtime.processes.launch import own_device  # noqa: E402
from gnomon.runtime.watch.measure import EventClock, HostClock, clock_of  # noqa: E402

pytestmark = pytest.mark.torch

PLANS = {
    "whole backward": Plan(schedule=parity.schedule("one_f_one_b"), precision=parity.FP32),
    "mixed precision": Plan(schedule=parity.schedule("one_f_one_b")),
    "split backward": Plan(schedule=parity.schedule("zero_bubble_h1"), precision=parity.FP32),
    "recompute": Plan(schedule=parity.schedule("gpipe"), saved=Saved(preset="full"), precision=parity.FP32),
}


def step_on_meta(name: str) -> set[str]:
    """Devices of all that a rank holds after a step on tensors without values: torch refuses to mix devices."""
    executor = Executor(llama(parity.CONFIG), PLANS[name], parity.WORKLOAD, device=torch.device("meta"))
    result = executor.step(parity.batch(0))
    actual = [result.loss, result.grad_norm]
    for held, adam in executor.parameters():
        actual += [t for t in (held.flat, held.master, adam.first, adam.second) if t is not None]
    return {str(tensor.device) for tensor in actual}


def steps_on_meta() -> dict[str, set[str]]:
    return {name: step_on_meta(name) for name in PLANS}


def test_everything_of_a_step_lies_on_the_device() -> None:
    results = launch(steps_on_meta, 1)[0]
    assert results == {name: {"meta"} for name in PLANS}


def test_each_process_has_the_device_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cpu:gloo,cuda:nccl") == torch.device("cuda", 3)
    assert own_device("gloo") == torch.device("cpu")
    assert isinstance(clock_of(torch.device("cuda", 3)), EventClock)
    assert isinstance(clock_of(torch.device("cpu")), HostClock)


def test_spans_of_events_are_seconds_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events as CUDA has them, 2 ms apart: a span opened at the third and closed at the sixth lasts 6 ms."""

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at_ms = math.nan

        def record(self) -> None:
            self.at_ms = 2.0 * Event.made
            Event.made += 1

        def elapsed_time(self, later: Event) -> float:
            return later.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    recorder = Recorder(clock=EventClock())
    recorder.begin()
    first = recorder.open(NO_UNIT)
    second = recorder.open(NO_UNIT)
    recorder.close(first)
    recorder.open(NO_UNIT)
    recorder.close(second)
    start, end = recorder.seconds()
    assert end[second] - start[second] == pytest.approx(0.006)
    assert start[0] - recorder.origin_s == pytest.approx(0.002)
    assert math.isnan(end[2])
