"""`gnomon fleet spot` and `decisions`: the way that losses make best, and a recorded trace played again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.control import Incident, Recorder, SimulatedLauncher
from gnomon.methods import bamboo
from gnomon.plans import Mesh, Optimizer, Plan, PlanFile, Schedule, Workload, load_plan_file, save_plan_file

FILE = PlanFile(
    model="gpt2",
    on="1x4xh100-sxm",
    workload=Workload(global_batch_size=32, seq_len=512),
    plan=Plan(mesh=Mesh(pp=2, dp_replicate=2), schedule=Schedule(name="one_f_one_b", micro_batch_size=1)),
)


def spot(path: Path, *options: str) -> list[str]:
    return ["fleet", "spot", str(path), "--hours", "4", "--lists", "1", *options]


def test_frequent_losses_choose_copies_of_stages_and_rare_ones_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan_file(FILE, tmp_path / "plan.toml")
    chosen = []
    for mtbf in ("0.5", "1000"):
        out = tmp_path / f"{mtbf}.toml"
        asked = spot(tmp_path / "plan.toml", "--mtbf", mtbf, "--bulk", "0", "--json", "-o", str(out))
        assert main(asked) == 0
        said = json.loads(capsys.readouterr().out)
        at = next(one for one in said["useful_steps"] if one["mtbf_hours"] == float(mtbf))
        ours = {name: share for name, share in at["useful"].items() if name != "elastic"}
        assert said["best"] == at["best"] and ours[at["best"]] == max(ours.values())
        assert bamboo.METHOD.used(load_plan_file(out).plan) == (said["best"] == "bamboo")
        chosen.append(said["best"])
    assert chosen[0] == "bamboo" and chosen[1] != "bamboo"


def test_a_plan_that_cannot_have_copies_of_stages_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(FILE.plan, mesh=Mesh(dp_shard=4), optimizer=Optimizer(zero=3))
    save_plan_file(replace(FILE, plan=plan), tmp_path / "plan.toml")
    assert main(spot(tmp_path / "plan.toml", "--mtbf", "5")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Copies of stages: the rank before the failed one takes over its stages" in said
    assert "copies in memory every 1 steps: a rank sends " in said


def test_a_recorded_trace_is_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, plan = SimulatedLauncher("takeover", FILE.plan), FILE.plan
    recorder = Recorder(tmp_path / "decisions", controller="takeover", plan=plan, restarts=0)
    for rank in range(4):
        job.happens(Incident(what="came", process=rank, rank=rank))
        job.happens(Incident(what="ready", process=rank))
    recorder.look(*job.look())
    job.happens(Incident(what="lost", process=2))
    recorder.look(*job.look())
    assert main(["fleet", "decisions", str(tmp_path / "decisions")]) == 0
    said = capsys.readouterr().out
    assert "takeover: 2 looks, 2 decisions; the same again" in said and "0 1 0 2" in said
    text = (tmp_path / "decisions").read_text()
    (tmp_path / "forged").write_text(text.replace('"placement": [0, 1, 0, 2]', '"placement": [0, 1, 1, 2]'))
    assert main(["fleet", "decisions", str(tmp_path / "forged"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["same"] is False
    (tmp_path / "other").write_text(text[:40])
    assert main(["fleet", "decisions", str(tmp_path / "other")]) == 2
