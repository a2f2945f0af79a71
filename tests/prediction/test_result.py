"""What a Prediction gives back: its mapping for JSON, its timeline, its advice."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module

import pytest
from prediction.jobs import plan, small

import gnomon
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.search.fit.advice import NOTHING, advice

WORK = Workload(global_batch_size=64, seq_len=4096)


def too_big(**fields: object) -> Prediction:
    """Llama 3.1 8B in replicas, which takes 16 bytes and more a parameter of each device."""
    job = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=4), **fields)  # type: ignore[arg-type]
    return predict("llama-3.1-8b", "1x8xh100-sxm", job, WORK)


def test_mapping_is_json_and_complete() -> None:
    result = small(plan(pp=2, tp=2), "1x4xh100-sxm")
    mapping = json.loads(json.dumps(result.to_mapping()))
    assert mapping["schema"] == "gnomon.prediction/1"
    assert mapping["step_s"] == result.step_s
    assert sum(mapping["breakdown_s"].values()) == result.step_s
    assert (mapping["plan"]["mesh"]["pp"], mapping["plan"]["mesh"]["tp"]) == (2, 2)
    assert mapping["workload"]["global_batch_size"] == 16
    assert (mapping["devices"], mapping["microbatches"]) == (4, 16)
    assert [rank["peak_bytes"] for rank in mapping["memory"]] == [rank.peak_bytes for rank in result.memory]
    assert mapping["verdict"] == result.verdict
    assert sorted(mapping["memory"][0]["ranks"] + mapping["memory"][1]["ranks"]) == [0, 1, 2, 3]


def test_timeline_is_one_period() -> None:
    result = small(plan(pp=2, tp=2), "1x4xh100-sxm")
    timeline = result.timeline()
    assert timeline.step_s == result.step_s
    assert result.timeline(steady=False).makespan_s == result.makespan_s


def test_the_verb() -> None:
    prediction = gnomon.predict("llama-tiny", "1x1xh100-sxm", plan(), Workload(global_batch_size=4, seq_len=64))
    assert prediction.fits


def test_advice_fits_and_says_what_it_costs() -> None:
    """Static memory alone is too much for recompute or smaller microbatches: ZeRO has to divide it."""
    result = too_big(optimizer=Optimizer(zero=1))
    given = advice(result).ways
    assert not result.fits and given
    for entry in given:
        again = predict("llama-3.1-8b", "1x8xh100-sxm", entry.plan, WORK)
        assert again.fits and again.step_s == entry.step_s
        assert again.tightest.peak_bytes == entry.peak_bytes <= entry.limit_bytes


def test_advice_is_the_fastest_first() -> None:
    """Replicas of 8B on 8 H100: ZeRO 3 needs smaller microbatches too, and is faster than tp 4 alone."""
    for mesh in (Mesh(dp_shard=8), Mesh(dp_replicate=8)):
        job = Plan(mesh=mesh, schedule=Schedule(micro_batch_size=4))
        given = advice(predict("llama-3.1-8b", "1x8xh100-sxm", job, Workload(global_batch_size=64, seq_len=8192))).ways
        assert "ZeRO stage 3" in given[0].what and given[0].plan.mesh.dp_shard == 8
        assert [entry.step_s for entry in given] == sorted(entry.step_s for entry in given)


def test_advice_may_take_two_changes_or_none() -> None:
    job = Plan(mesh=Mesh(dp_shard=32), schedule=Schedule(micro_batch_size=1))
    prediction = predict("llama-3.1-70b", "4x8xh100-sxm", job, WORK)
    assert "recompute full and ZeRO stage 3" in [entry.what for entry in advice(prediction).ways]
    alone = replace(WORK, global_batch_size=1)
    hopeless = predict("llama-3.1-405b", "1x1xh100-sxm", Plan(schedule=Schedule(micro_batch_size=1)), alone)
    assert advice(hopeless).ways == ()
    assert advice(small(plan(), "1x1xh100-sxm")) == NOTHING


def test_an_optimizer_on_the_host_is_tried_where_that_takes_no_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    job, work = (
        Plan(mesh=Mesh(tp=8), schedule=Schedule(micro_batch_size=1)),
        Workload(global_batch_size=4, seq_len=4096),
    )
    prediction = predict("llama-3.1-70b", "1x8xh100-sxm", job, work)
    assert any("optimizer on the host" in entry.what for entry in advice(prediction).ways)
    monkeypatch.setattr(import_module("gnomon.search.fit.advice"), "MOST_STREAMED", 80 * 4 - 1)
    assert not any("optimizer on the host" in entry.what for entry in advice(prediction).ways)


@pytest.mark.parametrize("zero", [0, 3])
def test_assumptions_are_said(zero: int) -> None:
    result = small(replace(plan(dp_shard=8), optimizer=Optimizer(zero=zero)), "1x8xh100-sxm")  # type: ignore[arg-type]
    assert any("flash attention" in line for line in result.assumptions)
