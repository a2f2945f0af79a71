"""Jobs that say what they train get their rate and memory from predictions, in `replay` and in `what-if`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.fleet.forecast import Curve
from gnomon.fleet.job import Job
from gnomon.fleet.machines import machines
from gnomon.fleet.predicted import PredictedForecasts, Predictions
from gnomon.hardware import parse_cluster
from gnomon.plans import load_plan_file
from gnomon.prediction import predict
from gnomon.request.model import read_model
from gnomon.software import stack

PLAN = """schema = "gnomon.planfile/1"
model = "llama-tiny"
on = "2xa100-sxm-40gb"
[workload]
global_batch_size = 16
seq_len = 128
[plan]
mesh = {dp_shard = 2}
schedule = {num_microbatches = 1}
"""
MIXED = machines("2x4xa100-sxm-40gb+1x4xh100-sxm-80gb")


def job(**more: object) -> Job:
    return Job(**{"id": "a", "submit_s": 0, "work_s": 100, "devices": 2, "line": 2, **more})  # type: ignore[arg-type]


def test_a_plan_file_is_predicted_on_every_kind_and_number_of_devices(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(PLAN)
    told = PredictedForecasts(MIXED, Predictions(MIXED), Curve(MIXED))
    planned = job(plan=str(tmp_path / "p.toml"))
    file, (graph, *_) = load_plan_file(tmp_path / "p.toml"), read_model("llama-tiny")
    step_s = {}
    for kind in ("a100-sxm-40gb", "h100-sxm-80gb"):
        cluster = parse_cluster(f"2x{kind}")
        step_s[kind] = predict(graph, cluster, file.plan, file.workload, stack("gnomon")).step_s
    assert told.phase(planned, 0, ((0, 2),))[0] == 1.0
    rate = told.phase(planned, 0, ((2, 2),))[0]
    assert rate == pytest.approx(step_s["a100-sxm-40gb"] / step_s["h100-sxm-80gb"])
    assert rate != pytest.approx(Curve(MIXED).phase(planned, 0, ((2, 2),))[0])
    four, three = told.phase(planned, 0, ((0, 4),))[0], told.phase(planned, 0, ((0, 3),))[0]
    assert three == 1.0 != four  # 16 sequences on 3 ranks: one stands idle
    other = job(id="b", model="vgg19", batch_size=64)
    assert told.phase(other, 0, ((2, 2),)) == Curve(MIXED).phase(other, 0, ((2, 2),))


def test_a_model_and_its_batch_have_the_fastest_plan() -> None:
    told = PredictedForecasts(MIXED, Predictions(MIXED), Curve(MIXED))
    small = job(model="llama-tiny", batch_size=16, seq_len=64)
    assert told.predictions.planned_job(small).plan.world_size == 2
    assert told.phase(small, 0, ((0, 2),))[0] == 1.0
    assert 0 < told.memory_bytes(small, 2) < 2**33


def test_a_job_of_which_no_plan_fits_is_named(tmp_path: Path) -> None:
    told = PredictedForecasts(MIXED, Predictions(MIXED), Curve(MIXED))
    huge = job(id="huge", model="llama-3.1-405b", batch_size=64, devices=1)
    assert "no plan of llama-3.1-405b" in told.impossible([huge])["huge"]
    (tmp_path / "p.toml").write_text(PLAN.replace("llama-tiny", "llama-3.1-70b"))
    with pytest.raises(InputError, match="job 'a' cannot run on .*: its plan takes .* GiB on the fullest of 2 devices"):
        told.predictions.at_reference(job(plan=str(tmp_path / "p.toml")))
    with pytest.raises(InputError, match="job 'a': cannot read"):
        told.predictions.at_reference(job(plan=str(tmp_path / "none.toml")))


def test_replay_and_what_if_take_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.toml").write_text(PLAN)
    table = tmp_path / "jobs.csv"
    head = "job_id,submit_s,duration_s,num_gpus,model,batch_size,seq_len,plan,steps\n"
    table.write_text(f"{head}a,0,,2,,,,{tmp_path}/p.toml,1000\nb,0,60,2,llama-tiny,16,64,,\n")
    assert main(["fleet", "replay", str(table), "--on", "1x4xa100-sxm-40gb"]) == 0
    out = capsys.readouterr().out
    assert "rates and memory of 2 jobs are predicted" in out
    assert main(["fleet", "what-if", str(table), "--on", "1x4xa100-sxm-40gb", "--compare", "sjf", "--price", "1"]) == 0
    assert "rates and memory of 2 jobs are predicted" in capsys.readouterr().out
    table.write_text(f"{head}a,0,,2,vgg19,64,,,1000\n")
    assert main(["fleet", "replay", str(table), "--on", "1x4xa100-sxm-40gb"]) == 2
    assert "line 2: duration_s is missing, and job 'a' gives neither a plan file" in capsys.readouterr().err
    table.write_text(f"{head}a,0,9,1,llama-3.1-405b,64,,,\nb,0,60,2,llama-tiny,16,64,,\n")
    assert main(["fleet", "replay", str(table), "--on", "1x4xa100-sxm-40gb"]) == 2
    assert "line 2: job 'a': no plan of llama-3.1-405b on 1xa100-sxm-40gb fits" in capsys.readouterr().err
    assert main(["fleet", "replay", str(table), "--on", "1x4xa100-sxm-40gb", "--skip-larger"]) == 0
    assert "left out: job 'a'" in capsys.readouterr().out
