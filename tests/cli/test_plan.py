"""`gnomon plan`: what it prints and writes, and what it says to requests that cannot be met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.plans import load_plan_file

SMALL = ["plan", "llama-tiny", "--on", "1x2xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "128"]


def test_the_best_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    assert main([*SMALL, "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert "the best plans" in out and "predicted +" in out and all(len(line) <= 80 for line in out.splitlines()[:-1])
    file = load_plan_file(path)
    assert file.model == "llama-tiny" and file.predicted is not None
    assert main(["predict", "--plan", str(path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_s"] == pytest.approx(file.predicted.step_s, rel=1e-9)
    assert again["memory"][0]["peak_bytes"] <= file.predicted.peak_memory_bytes


def test_json_has_the_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--top", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    points = found["points"]
    assert points.pop("space") == sum(points.values())
    assert len(found["best"]) == 2 and found["best"][0]["loses_s"] == 0.0


def test_options_fix_and_forbid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--tp", "2", "--forbid", "zero>0", "--forbid", "recompute!=full"]) == 0
    points = [each["point"] for each in json.loads(capsys.readouterr().out)["best"]]
    assert {(p["tp"], p["zero"], p["recompute"]) for p in points} == {(2, 0, "full")}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--memory", "1GiB"], "no plan of llama-tiny on 1x2xa100-sxm-80gb fits in 1.00 GiB"),
        (["--tp", "4"], "tp=4 is 4 ranks, but 1x2xa100-sxm-80gb has 2"),
        (["--forbid", "pq>1"], "did you mean"),
        (["--forbid", "tp"], "has no comparison"),
        (["--forbid", "schedule>gpipe"], "has no order"),
        (["--zero", "3", "--forbid", "zero>2"], "no choice of zero is left"),
    ],
)
def test_what_cannot_be_met_is_said(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *more]) == 2
    assert said in capsys.readouterr().err


def test_a_batch_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-tiny", "--on", "1x2xa100-sxm-80gb"]) == 2
    assert "--global-batch" in capsys.readouterr().err


def test_a_plan_file_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.toml")
    assert main([*SMALL, "-o", path]) == 0
    capsys.readouterr()
    assert main(["explain", path]) == 0
    out = capsys.readouterr().out
    assert "bounded by" in out and "one change" in out and "is the network the problem?" in out
    assert main(["explain", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"] and all(each["step_s"] or each["why_not"] for each in found["changes"])
