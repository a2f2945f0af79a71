"""The advice under a verdict of not fitting is that of `gnomon fit`: what fits is offered, and that nothing does is
said only where all was looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.plans import Mesh, Optimizer, Overlap, Plan, Saved, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.report.prediction import prediction_text
from gnomon.request.fit import ladder
from gnomon.search.fit.advice import advice
from gnomon.search.fit.ladder import Fitting
from gnomon.software import stack, unsupported

ONE = Schedule(micro_batch_size=1)


def long_sequences() -> Prediction:
    """8B on sequences of 32k under ZeRO 3 with full recompute: only more ranks a sequence help."""
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=ONE, optimizer=Optimizer(zero=3), saved=Saved(preset="full"))
    work = Workload(global_batch_size=8, seq_len=32768)
    return predict("qwen3-8b", "1x8xa100-sxm-80gb", plan, work, stack("pytorch-fsdp"))


def buckets() -> Prediction:
    """13B under ZeRO 2 with the gradient buckets that a program has by default."""
    plan = Plan(
        mesh=Mesh(dp_shard=8), schedule=ONE, optimizer=Optimizer(zero=2), overlap=Overlap(bucket_bytes=500_000_000)
    )
    return predict("llama-2-13b", "1x8xa100-sxm-40gb", plan, Workload(global_batch_size=8, seq_len=2048))


@pytest.mark.parametrize("make", [long_sequences, buckets])
def test_predict_offers_what_fit_finds(make: object) -> None:
    base = make()  # type: ignore[operator]
    given = advice(base)
    fitting = Fitting(base=base)
    found = ladder(fitting, tuple(fitting.single_changes()))
    assert not base.fits and given.ways and found.combined
    assert given.ways[0].step_s <= 1.1 * min(rung.step_s for rung in found.combined)
    alone = {rung.what for rung in found.single_changes if rung.fits}
    assert alone or len(given.ways[0].what.split(" and ")) > 1
    assert "use more devices" not in " ".join(prediction_text(base, advice=given))


def test_what_the_program_does_not_run_is_not_offered() -> None:
    base = long_sequences()
    for way in advice(base).ways:
        assert set(unsupported(base.pricing.stack, way.plan)) <= set(unsupported(base.pricing.stack, base.plan))
    rungs = {rung.what: rung for rung in Fitting(base=base).single_changes()}
    assert rungs["tp 1 -> 2"].why_not.startswith("pytorch-fsdp does not run tp")


def test_a_change_takes_with_it_what_it_does_not_go_with() -> None:
    """Gradient buckets are below ZeRO 3 only, and no reason not to offer it."""
    base = buckets()
    rungs = {rung.what: rung for rung in Fitting(base=base).single_changes()}
    third = rungs["ZeRO stage 3 without gradient buckets"]
    assert third.prediction is not None and third.plan.overlap.bucket_bytes is None
    plain = replace(base.plan, overlap=Overlap(), optimizer=Optimizer(zero=3))
    assert third.plan == plain and third.peak_bytes < 0.8 * base.tightest.peak_bytes
    assert any("ZeRO stage 3" in way.what for way in advice(base).ways)


def test_use_more_devices_is_said_only_after_all_was_looked_at() -> None:
    """405B on one GPU: its states are too large for the host too."""
    work = Workload(global_batch_size=1, seq_len=512)
    base = predict("llama-3.1-405b", "1x1xh100-sxm", Plan(schedule=ONE), work)
    given = advice(base)
    assert not given.ways and given.complete
    assert "use more devices" in " ".join(prediction_text(base, advice=given))
    fitting = Fitting(base=base)
    assert not fitting.enough() and not fitting.incomplete


def test_many_devices_are_given_fewer_tries_and_no_verdict() -> None:
    """What was not looked at is not said to be impossible."""
    plan = Plan(mesh=Mesh(dp_shard=4096), schedule=ONE)
    work = Workload(global_batch_size=4096, seq_len=512)
    given = advice(predict("llama-3.1-405b", "512x8xa100-sxm-40gb", plan, work))
    assert given.tried <= 60
    assert given.ways or not given.complete


def test_a_plan_that_takes_minutes_to_play_is_said_not_to_be_looked_at() -> None:
    """Microbatches of 4,096 sequences cut to one: half a million rows, in each of some hundred combinations."""
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=4096), optimizer=Optimizer(zero=3))
    base = predict("llama-3.1-8b", "1x8xh100-sxm", plan, Workload(global_batch_size=32768, seq_len=2048))
    fitting = Fitting(base=base)
    rung = fitting.rung(("micro batch",), ("micro batch 1",), replace(plan, schedule=ONE))
    assert "4,096 microbatches" in rung.why_not and fitting.incomplete and not fitting.count


def test_changes_that_leave_more_stages_than_layers_add_nothing() -> None:
    """Virtual stages stay as they are while pp is raised, and of 32 layers no 128 stages are made."""
    plan = Plan(
        mesh=Mesh(pp=4, dp_shard=8),
        schedule=Schedule(name="interleaved_one_f_one_b", virtual_stages=8, micro_batch_size=1),
        optimizer=Optimizer(zero=1),
    )
    work = Workload(global_batch_size=64, seq_len=32768)
    base = predict("llama-3.1-8b", "4x8xa100-sxm-40gb", plan, work)
    options = [
        option for option in Fitting(base=base).options if option.name in ("pp", "bucket_bytes", "sequence_parallel")
    ]
    assert not base.fits and Fitting(base=base, options=options).enough() == []
