"""`gnomon fleet` on small traces: tables, JSON, what is left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main

PLAIN = """\
job_id,submit_s,duration_s,num_gpus
a,0,7200,8
b,60,3600,16
c,120,600,1
d,180,600,0
e,240,1200,2
"""


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.csv"
    path.write_text(PLAIN)
    return str(path)


def message(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_replay_prints_a_table_and_where_device_hours_went(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["fleet", "replay", jobs, "--on", "2x8xv100-sxm-32gb", "--policy", "fifo", "--compare", "sjf,srtf"]) == 0
    )
    out = message(capsys)
    assert "4 jobs submitted in 240 s, on 2 x 8 v100-sxm-32gb" in out
    assert "1 rows of" in out and "line 5: asks for no device" in out
    assert "a job without a model scales linearly" in out
    assert all(f"{name} " in out for name in ("fifo", "sjf", "srtf"))


def test_json_has_every_figure(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "replay", jobs, "--on", "2x8xv100-sxm-32gb", "--policy", "sjf", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    [one] = document["policies"]
    assert document["jobs"] == 4 and document["left_out"] == [{"line": 5, "reason": "asks for no device"}]
    assert sum(one["device_s"].values()) == pytest.approx(16 * one["makespan_s"])
    # c and e pass b, which waits for a's node.
    assert one["jct_mean_s"] == pytest.approx((7200 + (7200 - 60 + 3600) + 600 + 1200) / 4)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("--on 1x8xv100-sxm-32gb", "line 3: job 'b' needs 16 devices"),
        ("--on 2x8xv100-sxm-32gb --policy sfj", "unknown policy 'sfj' (did you mean 'sjf'"),
        ("--on 2x8xv100-sxm-32gb --inference 1x8xt4-16gb", "--demand FILE"),
        ("--on 2x8xv100-sxm-32gb --format slurm", "unknown format 'slurm'"),
        ("--on 2x8xv100-sxm-32gb --elastic 2", "2 is not between 0 and 1"),
    ],
)
def test_what_is_refused(jobs: str, more: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "replay", jobs, *more.split()]) == 2
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_failures_elastic_jobs_and_days(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = "--node-mtbf 0.1 --repair 1 --elastic 1 --pack --no-notice --skip-larger --days 1 --restart 5"
    assert main(["fleet", "replay", jobs, "--on", "2x8xv100-sxm-32gb", *more.split()]) == 0
    out = message(capsys)
    assert "jobs were made elastic" in out and "a node fails every 0.1 days" in out and "down" in out


def test_policies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "policies", "--json"]) == 0
    assert {"fifo", "sjf", "srtf", "las", "tiresias"} <= {load["name"] for load in json.loads(capsys.readouterr().out)}


def test_the_page_and_the_trace_hold_every_job(jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "fleet.html", tmp_path / "fleet.json"
    more = ["--policy", "srtf", "--compare", "fifo,lyra", "-o", str(page), "--trace", str(trace)]
    assert main(["fleet", "replay", jobs, "--on", "2x8xv100-sxm-32gb", *more]) == 0
    assert f"wrote {page}" in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    for title in ("Policies", "Job completion times", "the cluster over time", "Why jobs waited", "What was assumed"):
        assert title in html
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    assert html.count("<polyline") == 3 * 3  # JCTs, queue and devices of three policies
    assert all(f"<title>{job}: " in html for job in "abce")
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} == set("abce")
    # Device-seconds of the spans are those of the replay: a ran twice, for it was preempted.
    useful = 7200 * 8 + 3600 * 16 + 600 + 1200 * 2
    held = sum(event["dur"] / 1e6 * event["args"]["devices"] for event in spans)
    assert useful <= held <= useful + 3 * 60 * 16


def test_what_if_answers_machines_or_policy(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["fleet", "what-if", jobs, "--on", "2x8xh100-sxm"]
    assert main([*base, "--add", "1x8xh100-sxm", "--compare", "sjf", "--price", "2"]) == 0
    out = message(capsys)
    assert "policy sjf in place of fifo: " in out and "more machines under fifo: " in out
    assert "for $16 an hour more" in out
    assert main(base) == 2
    assert "--add CLUSTER, --compare POLICIES" in capsys.readouterr().err


def test_points_pairs_and_pollux_workloads_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, points, pairs = tmp_path / "g.trace", tmp_path / "p.csv", tmp_path / "q.csv"
    lines = [f"net\tpython3\t-n\t0\t{steps}\t{scale}\t1\t-1\t{at}\n" for steps, scale, at in ((600, 1, 0), (600, 2, 1))]
    trace.write_text("".join(lines))
    points.write_text(
        "job_type,scale_factor,gpu,steps_per_s\nnet,1,v100,1.0\nnet,2,v100,1.5\nnet,2,v100_unconsolidated,1\n"
    )
    head = "job_type_a,job_type_b,scale_factor,gpu,steps_per_s_a,steps_per_s_b\n"
    pairs.write_text(head + "net,net,1,v100,0.8,0.8\n")
    more = ["--on", "1x2xv100-sxm-16gb", "--points", str(points), "--pairs", str(pairs), "--policy", "gandiva"]
    assert main(["fleet", "replay", str(trace), *more, "--memory", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert any("1 points of devices spread over nodes" in note for note in document["notes"])
    # 600 steps at 1 a second, then 600 at 1.5 on both devices: the second waits for the first.
    assert document["policies"][0]["makespan_s"] == pytest.approx(1000)
    assert not any("no point is of" in note for note in document["notes"])  # v100 is measured, and v100-sxm-16gb is one
    assert main(["fleet", "replay", str(trace), "--on", "1x2xt4-16gb", "--points", str(points), "--json"]) == 0
    assert any("no point is of t4-16gb" in note for note in json.loads(capsys.readouterr().out)["notes"])
    assert main(["fleet", "replay", str(trace), "--on", "1x2xv100-sxm-16gb"]) == 2
    assert "--points" in capsys.readouterr().err


def test_jobs_learn_their_speeds_from_a_folder_of_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = {
        "validation": [
            "app,batch_size,progress,iteration,grad_sqr,grad_var",
            *(f"cnn,{batch},{p},{p},1,{noise}" for batch in (32, 256) for p, noise in ((2000, 4), (4000, 64))),
        ],
        "placements": [
            "app,placement,local_bsz,step_time,sync_time",
            *(
                f"cnn,{shape},{local},{0.1 + local / 50 + sync},{sync}"
                for shape, sync in (("1", 0), ("2", 0.3), ("4", 0.9))
                for local in (8, 64)
            ),
        ],
        "scalability": [
            "app,num_nodes,num_replicas,local_bsz,step_time,sync_time", "cnn,2,8,8,1.3,1", "cnn,2,8,64,2.4,1"
        ],
    }  # fmt: skip
    for name, lines in tables.items():
        (tmp_path / f"pollux_{name}.csv").write_text("\n".join(lines) + "\n")
    jobs = tmp_path / "workload-1.csv"
    jobs.write_text("name,time,application,num_replicas,batch_size\ncnn-0,0,cnn,1,32\ncnn-1,70,cnn,1,32\n")
    more = ["--on", "1x4xt4-16gb", "--policy", "pollux", "--json"]
    means = []
    for learned in ([], ["--learned"]):
        assert main(["fleet", "replay", str(jobs), *more, "--points", str(tmp_path), *learned]) == 0
        document = json.loads(capsys.readouterr().out)
        means.append(document["policies"][0]["jct_mean_s"])
        assert any("learn their speeds" in note for note in document["notes"]) == bool(learned)
    assert means[0] < means[1]  # those that learn also try what does not pay
    assert main(["fleet", "replay", str(jobs), *more, "--learned"]) == 2
    assert "--points" in capsys.readouterr().err


def test_forecast_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    text = 'schema = "gnomon.planfile/1"\nmodel = "llama-tiny"\non = "2x8xa100-sxm-80gb"\n[workload]\n'
    plan.write_text(text + "global_batch_size = 64\nseq_len = 512\n[plan]\nmesh = {dp_shard = 8, tp = 2}\n")
    assert main(["fleet", "forecast", str(plan), "--devices", "2..32", "--price", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rates = {entry["devices"]: entry["samples_per_s"] for entry in document["forecasts"]}
    assert list(rates) == [2, 4, 8, 16, 32] and rates[4] > rates[2]
    for entry in document["forecasts"]:
        assert entry["band_s"][0] <= entry["step_s"] <= entry["band_s"][1] and entry["resize_s"] > 60
        assert entry["samples_per_s"] == pytest.approx(64 / entry["step_s"])
        cost = 1e6 / entry["samples_per_s"] / 3600 * 2 * entry["devices"]
        assert entry["dollars_per_million_samples"] == pytest.approx(cost)
    assert main(["fleet", "forecast", str(plan), "--devices", "2,3,12"]) == 0
    out = message(capsys)
    assert "3 devices: 3 devices are not a multiple of tp x pp x cp = 2" in out and "not whole nodes of 8" in out
    assert main(["fleet", "forecast", str(plan), "--devices", "8...64"]) == 2
