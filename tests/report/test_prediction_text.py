"""The text of a prediction: fits 80 columns, says what the values say, adds up."""

from __future__ import annotations

import pytest

from gnomon.plans import Mesh, Optimizer, Plan, Saved, SavedRule, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.report.prediction import describe, prediction_text
from gnomon.search.fit.advice import Advice, FitAdvice


def plan(**changes: object) -> Plan:
    values: dict[str, object] = {"mesh": Mesh(dp_shard=8), "schedule": Schedule(micro_batch_size=1)}
    return Plan(**(values | changes))  # type: ignore[arg-type]


def llama_on_eight(**changes: object) -> Prediction:
    return predict("llama-3.1-8b", "8xh100-sxm", plan(**changes), Workload(global_batch_size=8, seq_len=4096))


def test_lines_fit_80_columns_and_name_the_verdict() -> None:
    result = llama_on_eight(optimizer=Optimizer(zero=3))
    lines = prediction_text(result, assumed=("sequence length not given: 4096 tokens",))
    assert max(len(line) for line in lines) <= 80
    text = "\n".join(lines)
    assert "fits: " in text and result.fits
    assert "- sequence length not given: 4096 tokens" in text
    assert "forward" in text and "backward" in text


def test_small_sizes_are_read_without_an_exponent() -> None:
    """A model of MiB on a device of GiB: each size in its own unit."""
    job = plan(mesh=Mesh(), schedule=Schedule(micro_batch_size=2))
    prediction = predict("llama-tiny", "1xh100-sxm", job, Workload(global_batch_size=2, seq_len=64))
    peak = f"{prediction.tightest.peak_bytes / 2**20:.1f} MiB"
    assert prediction.tightest.peak_bytes < 2**30
    assert prediction.verdict.startswith(f"fits: {peak} of 79.1 GiB (rank 0, ")
    assert any(line.split()[:4] == ["peak", "memory", *peak.split()] for line in prediction_text(prediction))


def test_memory_of_a_row_adds_up_to_its_peak() -> None:
    lines = prediction_text(llama_on_eight(optimizer=Optimizer(zero=3)))
    heading = next(i for i, line in enumerate(lines) if line.startswith("GiB on ranks"))
    ranks, *cells = lines[heading + 1].split()
    values = [float(cell) for cell in cells]
    assert ranks == "0-7"
    assert sum(values[:-2]) == pytest.approx(values[-2], abs=0.05 * len(values))


def test_the_step_adds_up() -> None:
    result = llama_on_eight(optimizer=Optimizer(zero=1))
    lines = prediction_text(result)
    start = next(i for i, line in enumerate(lines) if line.startswith("step of the busiest rank"))
    shares = [float(line.split()[-1]) for line in lines[start + 1 : lines.index("", start)]]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


def test_only_the_tightest_rank_classes_are_listed() -> None:
    p = plan(mesh=Mesh(pp=16), schedule=Schedule(micro_batch_size=1))
    prediction = predict("llama-3.1-8b", "2x8xh100-sxm", p, Workload(global_batch_size=32, seq_len=2048))
    assert len(prediction.memory) == 16
    lines = prediction_text(prediction)
    assert "… and 8 classes of ranks with more room; --json lists all" in lines


def test_describe() -> None:
    p = plan(mesh=Mesh(pp=2, dp_shard=4), optimizer=Optimizer(zero=1), saved=Saved(preset="full"))
    text = describe(p, Workload(global_batch_size=16, seq_len=2048))
    assert text == "pp=2 x dp_shard=4; ZeRO 1; one_f_one_b, 4 microbatches of 1 x 2048 tokens; bf16; recompute full"


@pytest.mark.parametrize(
    ("preset", "action", "tensors", "message"),
    [
        ("full", "keep", ("self_attn.core*", "self_attn.q_proj"), "recompute full but core, q_proj"),
        ("full", "keep", ("a.p", "a.q", "a.r", "a.s"), "recompute full but p, q, r, …"),
        ("none", "recompute", ("mlp.act",), "recompute none and act"),
        ("none", "keep", ("mlp.act",), "recompute none"),
    ],
)
def test_tensors_saved_otherwise_are_named(preset: str, action: str, tensors: tuple[str, ...], message: str) -> None:
    rule = SavedRule(calls="*", tensors=tensors, action=action)  # type: ignore[arg-type]
    saved = Saved(preset=preset, rules=(rule,))  # type: ignore[arg-type]
    p = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), saved=saved)
    assert describe(p, Workload(global_batch_size=16, seq_len=2048)).endswith(f"; {message}")


def test_advice_stands_under_a_verdict_of_not_fitting() -> None:
    """8B with every state on each rank takes 18 x 8.03e9 bytes = 135 GiB of 79."""
    result = llama_on_eight()
    assert not result.fits
    change = Advice(
        what="ZeRO stage 2", plan=result.plan, step_s=0.5, peak_bytes=70 * 2**30, limit_bytes=80 * 2**30, lines=()
    )
    lines = prediction_text(result, advice=FitAdvice(ways=(change,), tried=1, complete=True))
    verdict = next(i for i, line in enumerate(lines) if line.startswith("does not fit: "))
    title = lines.index("what would fit, fastest first")
    assert verdict < title
    assert lines[title + 2].split() == ["ZeRO", "stage", "2", "500", "ms", "70.0"]
    for complete, said in (
        (True, "no combination of the changes"),
        (False, "none of the 24 changes that"),
    ):
        none = FitAdvice(ways=(), tried=24, complete=complete)
        text = " ".join(prediction_text(result, advice=none))
        assert said in text and ("use more devices" in text) == complete
        assert said not in " ".join(prediction_text(result))


def test_how_attention_is_counted_is_said_where_it_matters() -> None:
    """Half of the scores of a causal mask are no work: over 32k tokens an eighth of an 8B model's FLOPs and more."""
    made = {
        seq: predict(
            "llama-3.1-8b",
            "1x8xh100-sxm",
            plan(mesh=Mesh(cp=8), optimizer=Optimizer(zero=3), saved=Saved(preset="full")),
            Workload(global_batch_size=1, seq_len=seq),
        )
        for seq in (512, 32768)
    }
    layers, hidden, long = 32, 4096, made[32768]
    full = 12 * layers * hidden * 32768 * 32768  # QK^T and (QK^T)V, forward and twice backward
    assert long.model_flops * (1 - long.causal_mfu / long.mfu) == pytest.approx(full / 2, rel=0.01)
    lines = {seq: next(x for x in prediction_text(p) if x.startswith("MFU")) for seq, p in made.items()}
    assert f"(attention in full; {long.causal_mfu * 100:.1f} % by its causal half)" in lines[32768]
    assert "causal" not in lines[512]
