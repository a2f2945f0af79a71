"""`gnomon plan --lengths`: what it prints and writes, and what it does not go with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_place import in_place

from gnomon.cli import main
from gnomon.plans import load_plan_file

ASKED = ["plan", "llama-tiny", "--on", "1x2xa100-sxm-80gb", "--lengths", "4096,1kx3"]


def test_the_fastest_plan_of_each_way_is_printed_and_the_best_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    assert main([*ASKED, "--methods", "chunkflow", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert "4 sequences of 1024 to 4096 tokens" in out and "without a method: " in out and "with chunkflow: " in out
    assert all(f"with {peer}: " in out for peer in ("packing", "group_by_length", "padding"))
    assert load_plan_file(path).workload.lengths == (4096, 1024, 1024, 1024)
    assert main([*ASKED, "--methods", "chunkflow", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    steps = [way["prediction"]["step_s"] for way in made["ways"]]
    assert steps == sorted(steps) and {way["method"] for way in made["ways"]} == {
        "", "chunkflow", "packing", "group_by_length", "padding"
    }  # fmt: skip
    assert main(["predict", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == steps[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seq-len", "4096"], "--lengths gives every sequence of the batch"),
        (["--refine"], "--refine is for batches of one length"),
        (["--try", "2"], "--try is for batches of one length"),
        (["--pareto"], "--lengths is a question of its own"),
        (
            ["--methods", "mario"],
            "mario is not for batches of several lengths; chunkflow, group_by_length, packing, padding, skrull are",
        ),
        (["--methods", "skrull", "--stack", "megatron-lm"], "stack megatron-lm is not known to run it"),
        (["--on", "1xa100-sxm-80gb+1xh100-sxm"], "--lengths is for devices of one kind"),
    ],
)
def test_what_it_does_not_go_with(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(in_place(ASKED, *more)) == 2
    assert message in capsys.readouterr().err


def test_its_methods_want_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["plan", "llama-tiny", "--on", "1x2xa100-sxm-80gb", "--global-batch", "4", "--seq-len", "1024"]
    assert main([*one, "--methods", "chunkflow"]) == 2
    assert "give them with --lengths" in capsys.readouterr().err
