"""`gnomon plan --try` with real runs of two processes: what it keeps and leaves; the next plan is nearer to it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from gnomon import schema  # noqa: E402
from gnomon.cli import main, plan_try  # noqa: E402
from gnomon.cli.plan_try import ProcessEnd, attempt  # noqa: E402
from gnomon.hardware import NodeGroup, parse_cluster  # noqa: E402
from gnomon.plans import load_plan_file, save_plan_file  # noqa: E402

pytestmark = pytest.mark.torch


def slow_machine(path: Path) -> None:
    """Two processes as the catalogue guesses them, ten thousand times slower: every prediction of them is far off,
    whatever else this machine does meanwhile, and on the same side."""
    guess = parse_cluster("1x2xcpu-process")
    node = guess.groups[0].node
    peaks = {name: rate / 10_000 for name in ("fp32", "bf16") if (rate := getattr(node.device.dense_peak, name))}
    device = replace(node.device, dense_peak=replace(node.device.dense_peak, **peaks))
    schema.save_file(replace(guess, groups=(NodeGroup(node=replace(node, device=device)),)), path)


def test_two_are_tried_and_the_next_plan_is_nearer_to_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of four cannot run: its plan file is spoilt before it is read, as by a full disk. The others calibrate
    predictions of this machine: the next command takes what they say by itself."""
    monkeypatch.setenv("GNOMON_HOME", str(tmp_path / "home"))
    slow_machine(tmp_path / "machine.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spoilt: list[Path] = []

    def once(plan: Path, *, steps: int, limit_s: float) -> ProcessEnd:
        if not spoilt:
            spoilt.append(plan)
            save_plan_file(replace(load_plan_file(plan), model="mamba2-2.7b"), plan)
        return attempt(plan, steps=steps, limit_s=limit_s)

    monkeypatch.setattr(plan_try, "attempt", once)
    words = ("plan", "llama-mini", "--on", "machine.toml", "--global-batch", "4", "--seq-len", "32")
    words += ("--precision", "fp32", "--json")
    assert main([*words, "--try", "4", "--try-steps", "2", "--try-dir", "tries", "-o", "best.toml"]) == 0
    whole = json.loads(capsys.readouterr().out)
    result = whole["tried"]
    assert [entry["ended"] for entry in result["attempts"]] == ["refused", "ran", "ran", "ran"], result
    assert "the runtime does not run 'mamba2-2.7b'" in result["attempts"][0]["reason"]
    ran = result["attempts"][1:]
    best = min(ran, key=lambda entry: entry["measured_step_s"])
    kept = load_plan_file("best.toml")
    assert kept.measured is not None and kept.predicted is not None
    assert kept.measured.step_s == pytest.approx(best["measured_step_s"]) and kept.measured.steps == 2
    assert kept.plan == load_plan_file(best["file"]).plan
    for entry in ran:
        words_again = ("predict", "--plan", entry["file"], "--json")
        assert main((*words_again, "--stack", result["stack"])) in (0, 1)
        entry["again_s"] = json.loads(capsys.readouterr().out)["step_s"]
        assert main(words_again) in (0, 1)
        taken = json.loads(capsys.readouterr().out)
        assert taken["step_s"] == pytest.approx(entry["again_s"])
        assert "calibrated from 3 runs of" in taken["assumptions"][0]
    before = sum(abs(log(entry["predicted_step_s"] / entry["measured_step_s"])) for entry in ran)
    after = sum(abs(log(entry["again_s"] / entry["measured_step_s"])) for entry in ran)
    assert after < before, ran
    assert result["calibration"]["taken"] and len(whole["ranked_again"]) >= 4
    assert sum(entry["measured_step_s"] is not None for entry in whole["ranked_again"]) >= 1
    assert main([*words, "--stack", result["stack"], "--top", "1"]) == 0
    assert "step_s" in json.loads(capsys.readouterr().out)["best"][0]["prediction"]
