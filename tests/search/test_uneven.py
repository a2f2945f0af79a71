"""The pass after the search: never worse, what it says, what it leaves alone."""

from __future__ import annotations

import pytest

import gnomon
from gnomon.errors import PlanError
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Goal, Saved, Workload
from gnomon.prediction import predict
from gnomon.search import Result
from gnomon.search.stages.uneven import Uneven, uneven
from gnomon.software import stack

HEAVY = gpt(
    GptConfig(name="heavy", num_layers=8, hidden_size=2048, num_heads=16, vocab_size=131072, max_positions=2048)
)
"""A head worth several layers."""
WORK = Workload(global_batch_size=32, seq_len=2048)


def searched(**more: object) -> Result:
    return gnomon.plan(HEAVY, "1x4xh100-sxm", WORK, **more)  # type: ignore[arg-type]


def test_a_pipeline_with_a_heavy_head() -> None:
    result = searched(fixed={"pp": 4, "virtual_stages": 1, "schedule": "one_f_one_b", "micro_batch_size": 1})
    better = uneven(result)
    assert better.best is not None and better.exact_s == result.best[0].step_s and better.gain > 0.05
    again = predict(HEAVY, result.cluster, better.best.plan, WORK, result.stack)
    assert again.step_s == better.best.step_s and again.fits
    assert any(line.startswith("stage 3 holds head: ") and line.endswith("fewer") for line in better.reasons)
    merged = better.merged(result)
    assert merged.best[0] is better.best and merged.counts == result.counts and len(merged.best) == len(result.best)
    assert all(trial.point.pp == 4 and trial.point.schedule == "one_f_one_b" for trial in better.tried)


def test_nothing_to_gain_changes_nothing() -> None:
    result = searched(fixed={"pp": 1})
    better = uneven(result)
    assert better.best is None and better.gain == 0.0 and better.merged(result) is result


def test_a_limit_of_memory_is_kept() -> None:
    """Where only full recomputation fits in every layer, some layers go without."""
    peak = searched(fixed={"pp": 2, "tp": 1, "recompute": "none"}, top=1).best[0].prediction
    limit = int(0.8 * peak.tightest.peak_bytes)
    from_limit = gnomon.plan(HEAVY, "1x4xh100-sxm", WORK, goal=Goal(memory_bytes=limit), fixed={"pp": 2, "tp": 1})
    better = uneven(from_limit)
    assert better.best is not None
    assert better.best.prediction.tightest.peak_bytes <= limit and better.best.step_s < from_limit.best[0].step_s


def test_a_cut_that_is_given() -> None:
    result = searched(fixed={"pp": 2, "virtual_stages": 1})
    forced = uneven(result, cut=(7, 1))
    assert forced.best is not None and forced.best.plan.schedule.layers_per_stage == (7, 1)
    with pytest.raises(PlanError, match="adds up to 36 layers"):
        uneven(gnomon.plan(HEAVY, "1x4xh100-sxm", WORK, fixed={"pp": 4}), cut=(9, 9, 9, 9))


def test_a_program_with_a_rule_of_its_own_keeps_equal_stages() -> None:
    result = searched(fixed={"pp": 4}, stack=stack("nanotron"))
    better = uneven(result)
    assert better.best is None and not better.tried


def test_fixed_recompute_stays() -> None:
    result = searched(fixed={"pp": 4, "recompute": "full"})
    better = uneven(result)
    assert better.best is not None and better.best.plan.saved == Saved(preset="full")


def test_an_empty_answer() -> None:
    assert Uneven(best=None, exact_s=None, tried=()).gain == 0.0
