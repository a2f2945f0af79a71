"""A predicted Timeline's memory over time reaches the predicted peak, class by class; its bytes and FLOPs add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prediction.jobs import plan, small

from gnomon.plans import Optimizer, Plan, Schedule
from gnomon.timeline import memory_curve, peaks

MESSAGE = 2 * 1024 * 1024
"""fp16 activations of one sequence of 1024 tokens and width 1024."""


def jobs() -> list[tuple[str, Plan, str]]:
    pipeline = plan(pp=4)
    return [
        ("one device", plan(), "1x1xh100-sxm"),
        ("full recompute", plan("full", micro=2), "1x1xh100-sxm"),
        ("pipeline", pipeline, "1x4xh100-sxm"),
        (
            "zero bubble",
            replace(pipeline, schedule=Schedule(name="zero_bubble_h1", micro_batch_size=1)),
            "1x4xh100-sxm",
        ),
        ("ZeRO 1", replace(plan(dp_shard=4), optimizer=Optimizer(zero=1)), "1x4xh100-sxm"),
        ("tp and pp", plan(tp=2, pp=2, sequence_parallel=True), "1x4xh100-sxm"),
    ]


@pytest.mark.parametrize(("name", "job", "machines"), jobs(), ids=[name for name, *_ in jobs()])
def test_the_curve_reaches_the_peak_class_by_class(name: str, job: Plan, machines: str) -> None:
    result = small(job, machines)
    for rank, peak in zip(result.memory, peaks(result.timeline(steady=False)), strict=True):
        on_the_way = 2 * MESSAGE if job.mesh.pp > 1 else 0  # in time, messages may be there longer than as issued
        assert 0 <= peak.bytes - rank.peak_bytes <= on_the_way
        assert dict(peak.by_buffer) == pytest.approx(dict(rank.by_class), abs=on_the_way)


def test_zero_3_gathers_ahead_in_time() -> None:
    """In time a gathered block may be there before the order of issue says so, but not by more than a few blocks."""
    job = replace(plan(dp_shard=4), optimizer=Optimizer(zero=3))
    result = small(job, "1x4xh100-sxm")
    peak = peaks(result.timeline(steady=False))[0]
    assert 0.9 < peak.bytes / result.memory[0].peak_bytes < 1.5


def test_memory_of_the_steady_step_is_that_of_a_step_from_rest() -> None:
    result = small(plan(pp=2), "1x2xh100-sxm")
    rest, steady = (peaks(result.timeline(steady=which)) for which in (False, True))
    assert [p.bytes for p in rest] == pytest.approx([p.bytes for p in steady])
    curve = memory_curve(result.timeline(), "class 0", "activations")
    assert curve.bytes.min() >= 0


def test_flops_of_all_ranks_are_those_of_the_model() -> None:
    """Without recompute, forwards and backwards together do the FLOPs that MFU counts."""
    result = small(plan(tp=2, pp=2), "1x4xh100-sxm")
    timeline = result.timeline(steady=False)
    spans = timeline.spans
    counts = [timeline.workers[w].count for w in spans.worker.tolist()]
    total = sum(f * n for f, n in zip(spans.flops.tolist(), counts, strict=True) if f > 0)
    assert total == pytest.approx(result.model_flops, rel=1e-6)


def test_bytes_of_messages() -> None:
    timeline = small(plan(pp=2), "1x2xh100-sxm").timeline(steady=False)
    spans = timeline.spans
    sent = {timeline.kinds[k]: b for k, b in zip(spans.kind.tolist(), spans.nbytes.tolist(), strict=True)}
    assert sent["SEND_F"] == sent["SEND_B"] == MESSAGE
    assert sent["F"] == -1
