"""`gnomon plan` on a cluster of heterogeneous devices: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.plans import load_plan_file
from gnomon.schema import save_file
from gnomon.software import stack as named_stack

FILE = """\
schema = "gnomon.cluster/1"
name = "fast and slow"

[[groups]]
node = { base = "local", count = 1, nic = "ethernet-25", nics = 1, device = "cpu-process" }

[[groups]]
node = { base = "local", count = 1, nic = "ethernet-25", nics = 1, device = { base = "cpu-process", name = "slow", \
dense_peak = { fp64 = "24 GFLOP/s", fp32 = "48 GFLOP/s" } } }
"""
FEW = [
    "--global-batch",
    "6",
    "--seq-len",
    "128",
    "--pp",
    "1",
    "--tp",
    "1",
    "--recompute",
    "none",
    "--precision",
    "fp32",
]


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return ["plan", "llama-tiny", "--on", str(path), *FEW]


def test_shares_by_speed_are_printed_and_written(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    assert main([*asked, "--stack", "gnomon", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert "4 each" in out and "2 each" in out and "slow alone, the others left out" in out
    assert "none of them is faster than the best" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines()[:-2])
    file = load_plan_file(path)
    assert file.predicted is not None and [stage.shares for stage in file.plan.stages] == [(4, 2)]
    assert main(["predict", "--plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(file.predicted.step_s, rel=1e-9)


def test_a_stack_of_ones_own_is_found_again_from_the_plan_file(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is in no catalogue, so the file names the file that it was read from."""
    stack, path = tmp_path / "mine.toml", tmp_path / "plan.toml"
    save_file(replace(named_stack("gnomon"), name="mine"), stack)
    assert main([*asked, "--stack", str(stack), "-o", str(path)]) == 0
    assert load_plan_file(path).stack == str(stack)
    capsys.readouterr()
    assert main(["predict", "--plan", str(path)]) == 0


def test_json_says_what_is_gained_and_points_add_up(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked, "--json", "--top", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    points = document["points"]
    assert points.pop("space") == sum(points.values())
    best = document["best"][0]["prediction"]["step_s"]
    others = [document["equal"], *document["alone"].values()]
    assert document["proved"] and all(other["prediction"]["step_s"] > best for other in others)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vary", "nodes=1,2"], "a number of them does not say which; write the choices, as in --vary on="),
        (["--try", "2"], "--try is for equal devices"),
        (["--ep", "2"], "ep = 2 is asked for, and llama-tiny has no experts"),
        (["--cp", "2"], "tp x cp must divide the devices of a node, 1 of cpu-process and 1 of slow"),
        (["--memory", "1MiB"], "no plan of llama-tiny fits on fast and slow"),
        (["--forbid", "tp>=1"], "tp = 1 is asked for, but forbidden are tp>=1"),
    ],
)
def test_what_cannot_be_met_is_said(
    asked: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*asked, *more]) == 2
    assert message in capsys.readouterr().err


def test_other_questions_and_reasons(asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked, "--max-devices", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [case["devices"] for case in document["cases"]] == [1, 1, 2]
    assert document["answer"].startswith("fastest on at most 2 devices, in whole nodes: 2")
    path = tmp_path / "plan.toml"
    assert main([*asked, "--stack", "gnomon", "-o", str(path)]) == 0
    assert len(load_plan_file(path).runners_up) >= 2
    capsys.readouterr()
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert "a sequence from slow to cpu-process" in out and "uneven shares: +" in out
