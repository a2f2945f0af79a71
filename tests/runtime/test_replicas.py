"""Experts that several ranks hold, and that move between steps, against the same model with one of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.ranks import launch  # noqa: E402
from runtime.replicas import AHEAD, BOTH, GIVEN, MOVING, STATIC, STEPS, SWAPPED, trained  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.models.presets import model  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Saved, Workload, check  # noqa: E402
from gnomon.runtime.launch.train import TrainingJob  # noqa: E402
from gnomon.software import own  # noqa: E402

pytestmark = pytest.mark.torch


def same(one: dict[str, Any], other: dict[str, Any], *, steps: int = STEPS) -> None:
    for what in ("losses", "norms"):
        assert other[what] == pytest.approx(one[what][-steps:], abs=1e-10)
    assert one["parameters"].keys() == other["parameters"].keys()
    for name, value in one["parameters"].items():
        assert torch.allclose(value, other["parameters"][name], rtol=0, atol=1e-10), name


def test_replicas_placements_and_moves_train_as_the_plain_plan_does() -> None:
    """Losses, norms of gradients (each element counted once) and parameters after several updates; every rank computes
    the same of them."""
    plans = (STATIC, *(replace(STATIC, experts=asked) for asked in (GIVEN, MOVING, SWAPPED)))
    results = launch(trained, 2, plans)
    for plain, given, moving, swapped in results.values():
        for other in (given, moving, swapped):
            same(plain, other)
        assert moving["moved"] > 0 and given["moved"] == swapped["moved"] == 0
    assert results[0][2]["losses"] == results[1][2]["losses"]


def test_rows_that_are_sent_ahead_are_the_same_rows() -> None:
    """To the bit, whether the guess was right, too high or, as in each layer's first dispatch, nothing at all; with
    recomputation, where a dispatch is repeated, and placed experts."""
    full = Saved(preset="full")
    cases = (STATIC, replace(STATIC, experts=AHEAD), replace(STATIC, experts=AHEAD, saved=full))
    cases += tuple(replace(STATIC, experts=asked) for asked in (SWAPPED, BOTH))
    for plain, ahead, again, swapped, both in launch(trained, 2, cases).values():
        for one, other in ((plain, ahead), (plain, again), (swapped, both)):
            assert one["losses"] == other["losses"] and one["norms"] == other["norms"]
            assert all(torch.equal(x, other["parameters"][name]) for name, x in one["parameters"].items())
        assert 0 < ahead["missed"][0] < ahead["missed"][1]


def test_a_checkpoint_of_moved_experts_goes_on_under_other_plans(tmp_path: Path) -> None:
    """Weights and moments are the model's, whoever held them: under another placement, and without replicas."""
    plans = (replace(STATIC, experts=MOVING), STATIC, replace(STATIC, experts=GIVEN))
    moving, plain, given = launch(trained, 2, plans, str(tmp_path / "run"))[0]
    assert moving["moved"] > 0
    for other in (plain, given):
        same(moving, other, steps=STEPS // 2)


def test_what_is_not_run_is_said() -> None:
    sharded = replace(STATIC, mesh=Mesh(dp_shard=4, ep=2), optimizer=Optimizer(zero=1), experts=MOVING)
    assert "beside edp > 1" in (own.plan_reason(sharded) or "")
    assert "all matrices" in (own.plan_reason(replace(STATIC, experts=GIVEN, optimizer=Optimizer(kind="muon"))) or "")
    with pytest.raises(PlanError, match="use checkpoints in files"):
        TrainingJob(
            graph=model("mixtral-8x7b"), plan=replace(STATIC, experts=MOVING), steps=1, memory_checkpoint_every=1,
            workload=Workload(global_batch_size=4, seq_len=8),
        )  # fmt: skip
    with pytest.raises(PlanError, match="experts.rebalance_every = 1 is about routed experts, and 'llama"):
        check(replace(STATIC, experts=replace(MOVING, replicas=0)), model("llama-3.2-1b"))
