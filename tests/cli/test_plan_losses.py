"""`gnomon plan --mtbf`: copies of stages are chosen where losses make them pay, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.methods import bamboo
from gnomon.plans import load_plan_file

ASKED = (
    "plan", "gpt2", "--on", "1x4xh100-sxm", "--global-batch", "32", "--seq-len", "512", "--no-refine", "--equal-stages",
    "--tp", "1", "--cp", "1", "--recompute", "none", "--micro-batch-size", "8",
)  # fmt: skip


def test_frequent_losses_make_a_plan_with_copies_of_stages_and_rare_ones_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hours, pays in (("0.5", True), ("1000", False)):
        out = tmp_path / f"{hours}.toml"
        assert main([*ASKED, "--mtbf", hours, "-o", str(out), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)["losses"]
        without, copied = (said[name]["useful_steps_per_hour"] for name in ("without", "copied"))
        assert said["copies_pay"] == (copied > without) == pays
        for name, useful in (("without", without), ("copied", copied)):
            assert useful <= 3600 / said[name]["step_s"] * (1 + 1e-9), "all that it would do without losses, at most"
        plan = load_plan_file(out).plan
        assert bamboo.METHOD.used(plan) == pays
        assert not pays or (plan.mesh.pp > 1 and plan.optimizer.zero == 0)


def test_where_no_plan_can_have_copies_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--zero", "1", "--mtbf", "1"]) == 0
    output = capsys.readouterr().out
    assert "no plan has copies of stages: zero = 1 is fixed, and they need zero = 0" in output
    assert "<- taken" in output


def test_it_is_refused_beside_other_questions_and_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for more, says in (
        (("--try", "2"), "--mtbf is for the fastest plan on devices of one kind"),
        (("--stack", "megatron-lm"), "which megatron-lm does not run"),
    ):
        assert main([*ASKED, "--mtbf", "1", *more]) == 2
        assert says in capsys.readouterr().err


def test_bamboo_is_planned_where_the_rate_of_losses_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "planned" in bamboo.METHOD.marks
    assert main([*(one for one in ASKED if one != "--no-refine"), "--methods", "bamboo"]) == 2
    assert "say how often (--mtbf)" in capsys.readouterr().err
