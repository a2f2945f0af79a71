"""Scores and summaries, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evidence import validation as module
from evidence.folds import MODEL_FOLDS, Fold, Folds
from evidence.published import Refused, Run, read_runs
from evidence.validation import (
    Score,
    errors,
    rank_correlation,
    score,
    spearman,
    summarise,
    summary_text,
)
from gnomon.prediction import Prediction, predict
from gnomon.prediction.band import Ratios
from gnomon.prediction.measured import predicted_s
from gnomon.prices import Provenance
from gnomon.prices.fitted import ANY, FittedRates, StackNumber, StackRecord

TABLE = """\
id,family,model,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,device,num_devices,devices_per_node,precision,framework,\
tp,pp,dp,micro_batch,global_batch,recompute,metric,value,mem_gib,notes
r1,f,gpt-tiny,4,512,8,8,2048,50304,1024,a100-sxm-80gb,8,8,bf16,Somebody's,1,1,8,2,16,none,s_per_step,0.1,10,
r2,f,gpt-tiny,4,512,8,8,2048,50304,1024,a100-sxm-80gb,8,8,bf16,X,1,2,4,1,16,none,s_per_step,0.1,,no optimizer step
r3,f,gpt-tiny,1,512,8,8,2048,50304,1024,a100-sxm-80gb,8,8,bf16,Somebody's,1,8,1,1,16,none,s_per_step,0.1,,
"""


def scored(predicted: float, measured: float, *, group: str = "m", family: str = "f", fits: bool = True) -> Score:
    return Score(
        id="x",
        family=family,
        group=(family, group, 8),
        measured_s=measured,
        predicted_s=predicted,
        measured_bytes=None,
        predicted_bytes=1,
        fits=fits,
        notes=(),
        without_model=predicted / measured - 1 + 0.01,
        without_source=predicted / measured - 1 + 0.02,
        band=Ratios(low=0.9, high=1.2),
        chosen=False,
        first_error=predicted / measured - 1,
        first_bytes=1,
        without_source_chosen=predicted / measured - 1 + 0.02,
        fits_chosen=fits,
    )


def test_errors_by_hand() -> None:
    result = errors([0.1, -0.2, 0.3, -0.4])
    assert result is not None
    assert result.median == pytest.approx(0.25)
    assert result.mean == pytest.approx(0.25)
    assert result.worst == pytest.approx(0.4)
    assert result.p90 == pytest.approx(0.37)  # 0.3 + 0.7 x 0.1
    assert result.bias == pytest.approx(-0.05)
    assert errors([]) is None


def test_spearman_by_hand() -> None:
    """Ranks 1 2 3 4 against 2 1 4 3: differences 1 each, 1 - 6 x 4 / (4 x 15) = 0.6."""
    assert spearman([1, 2, 3, 4], [20, 10, 40, 30]) == pytest.approx(0.6)
    assert spearman([1, 2], [5, 5]) is None
    # Ties share a rank: 1.5 1.5 3 against 1 2 3 correlate by sqrt(3)/2.
    assert spearman([7, 7, 9], [1, 2, 3]) == pytest.approx(3**0.5 / 2)


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=20, unique=True), st.randoms(use_true_random=False))
def test_spearman_sees_only_order(values: list[int], random: object) -> None:
    other = list(values)
    random.shuffle(other)  # type: ignore[attr-defined]
    result = spearman(values, other)
    assert result is not None
    assert -1 - 1e-9 <= result <= 1 + 1e-9
    assert spearman(values, [float(np.log(v)) for v in values]) == pytest.approx(1)
    assert spearman([v**3 for v in values], other) == pytest.approx(result)


def test_rank_correlation_within_groups() -> None:
    """Two groups of four, one in order and one reversed: 0 over 8 runs; a group of three says nothing."""
    good = [scored(i, i * 2.0) for i in range(1, 5)]
    bad = [scored(i, -i + 9.0, group="n") for i in range(1, 5)]
    small = [scored(i, 1.0 / i, group="o") for i in range(1, 4)]
    assert rank_correlation(good) == (pytest.approx(1), 4)
    assert rank_correlation([*good, *bad, *small]) == (pytest.approx(0), 8)
    assert rank_correlation(small) == (None, 0)


def test_summary_counts_everything() -> None:
    scores = [scored(1.1, 1.0), scored(0.8, 1.0, fits=False), scored(2, 1, family="g")]
    refused = [Refused(id="a", family="f", reason="why"), Refused(id="b", family="h", reason="why")]
    families = summarise(scores, refused)
    assert [s.family for s in families] == ["f", "g", "h", "all"]
    first, _, third, every = families
    assert (first.rows, first.predicted, first.false_out_of_memory) == (3, 2, 1)
    assert first.refused == (("why", 1),)
    assert first.time is not None and first.time.worst == pytest.approx(0.2)
    assert first.without_source is not None and first.without_source.median == pytest.approx(0.15)
    assert first.without_model is not None and first.without_model.worst == pytest.approx(0.19)
    # Measured over predicted without the source: 1 / 1.12 is under 0.9, 1 / 0.82 over 1.2.
    assert first.in_band == 0.0 and first.band_width == pytest.approx(0.3)
    assert (third.rows, third.predicted, third.time) == (1, 0, None)
    assert (every.rows, every.predicted, every.refused) == (5, 3, (("why", 2),))
    lines = summary_text(families)
    assert max(len(line) for line in lines) <= 80
    assert lines[1].split()[:3] == ["f", "3", "2"]
    assert every.to_mapping()["time"]["worst"] == pytest.approx(1.0)


def test_families_whose_readings_see_the_outcome_are_shown_with_and_without() -> None:
    plain = scored(1.1, 1.0)
    read = replace(
        scored(1.05, 1.0, family="g"), chosen=True, first_error=-0.4, without_source=0.6, fits=False, fits_chosen=True
    )
    families = summarise([plain, read, read], [])
    other = next(s for s in families if s.family == "g")
    assert (other.chosen, other.false_out_of_memory, other.false_out_of_memory_chosen) == (2, 2, 0)
    assert other.first is not None and other.first.median == pytest.approx(0.4)
    lines = summary_text(families)
    at = next(i for i, line in enumerate(lines) if "reading" in line)
    assert max(len(line) for line in lines) <= 80
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["g", "fitted", "2", "5.0", "5.0", "7.0", "7.0", "-", "-", "0"],
        ["first", "40.0", "40.0", "60.0", "60.0", "-", "-", "2"],
    ]
    assert lines[at + 3].split()[:2] == ["all", "fitted"] and len(lines) == at + 5


def test_a_run_is_scored_by_predict() -> None:
    (run, *others), refused = read_runs(TABLE)
    assert not refused
    result = score(run)
    assert isinstance(result, Score)
    prediction = predict(run.graph, run.cluster, run.plan, run.workload, run.stack)
    assert result.predicted_s == prediction.step_s
    assert result.error == pytest.approx(prediction.step_s / 0.1 - 1)
    assert result.without_model == result.without_source == result.error  # nothing was fitted to this source
    assert result.measured_bytes == 10 * 2**30
    assert result.predicted_bytes == max(rank.peak_bytes for rank in prediction.memory)
    # Without the update the time is shorter by exactly the update and the norm before it.
    without = score(others[0])
    whole = score(replace(others[0], covers="step"))
    assert isinstance(without, Score) and isinstance(whole, Score)
    assert 0 < without.predicted_s < whole.predicted_s


def test_columns_of_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its model all kernels are half as fast, without its source a quarter: the errors say so, and a source
    that is left out of nothing keeps its error."""
    (run, *_), _ = read_runs(TABLE)

    def slow(share: float) -> FittedRates:
        number = StackNumber(stack=ANY, name="compute", value=share)
        source = Provenance(data="a test", date="2026-11-21", error="none", range="this test")
        return FittedRates(universal=StackRecord(numbers=(number,), provenance=source))

    models = tuple(Fold(left_out=str(i), numbers=slow(0.8)) for i in range(MODEL_FOLDS))
    made = Folds(models=models, sources=(Fold(left_out="f", numbers=slow(0.4)),))
    monkeypatch.setattr(module, "folds", lambda: made)
    here, other = score(run), score(replace(run, family="g"))
    assert isinstance(here, Score) and isinstance(other, Score)
    assert here.without_source > here.without_model
    assert 1 + here.without_model == pytest.approx(predicted_s(run, predict_run(run), slow(0.8)) / 0.1)
    assert 1 + here.without_source == pytest.approx(predicted_s(run, predict_run(run), slow(0.4)) / 0.1)
    assert other.without_model == other.without_source == other.error


def predict_run(run: Run) -> Prediction:
    return predict(run.graph, run.cluster, run.plan, run.workload, run.stack)


def test_the_worst_reading_counts() -> None:
    (run, *_), _ = read_runs(TABLE)
    alone = score(run)
    assert isinstance(alone, Score)
    near, far = alone.predicted_s * 1.1, alone.predicted_s * 2
    both = score(replace(run, readings_s=(near, far)))
    assert isinstance(both, Score)
    assert both.measured_s == far


def test_what_cannot_run_is_refused_by_predict() -> None:
    """One layer cannot be cut into eight stages."""
    runs, _ = read_runs(TABLE)
    result = score(runs[2])
    assert isinstance(result, Refused)
    assert "8 stages" in result.reason
