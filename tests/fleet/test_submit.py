"""Jobs for Slurm, Kueue and Ray: checked as written, and refused when they are changed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.fleet.submit import Submission, check_kubernetes, check_ray, check_slurm, kubernetes, ray, slurm

JOB = Submission(name="llama", plan="/data/llama plan.toml", nodes=4, per_node=8, hours=36, queue="gpu")


def test_a_slurm_script() -> None:
    script = slurm(JOB)
    check_slurm(script, 32)
    assert "#SBATCH --time=36:00:00" in script and "#SBATCH --partition=gpu" in script
    assert "--nnodes=4 --nproc-per-node=8" in script and "'/data/llama plan.toml'" in script
    for before, after, message in (
        ("--nodes=4", "--nodes=3", "asks for 24 devices, the plan has 32"),
        ("--nodes=4", "--nodez=4", "no option '--nodez=4'"),
        ("--nodes=4", "--nodes=four", "--nodes must be a whole number"),
        ("36:00:00", "36:70:00", "--time must be"),
        ("#!/bin/bash", "bash", "begins with #!"),
    ):
        with pytest.raises(InputError, match=message):
            check_slurm(script.replace(before, after), 32)


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(job: dict[str, Any]) -> None:
        *keys, last = path.split(".")
        for key in keys:
            job = job[key]
        job[last] = value

    return change


def test_a_kueue_job() -> None:
    made = kubernetes(JOB, queued=True)
    check_kubernetes(made, 32, queued=True)
    assert [item["kind"] for item in made["items"]] == ["Service", "Job"]
    assert [
        item["kind"] for item in kubernetes(Submission(name="a", plan="p", nodes=1, per_node=2), queued=True)["items"]
    ] == ["Job"]
    for path, value, message in (
        ("spec.suspend", False, "created suspended"),
        ("spec.completions", 3, "asks for 24 devices"),
        ("spec.completions", "4", "spec.completions must be of type int"),
        ("spec.template.spec.restartPolicy", "Always", "restartPolicy"),
        ("metadata.labels", {}, "queue-name"),
        ("metadata.name", "No_Name", "no name of Kubernetes"),
        ("spec.paralelism", 4, "a Job has no field spec.paralelism"),
        ("spec.backoffLimit", True, "spec.backoffLimit must be of type int, got True"),
        ("spec.template.spec", {}, "spec.template.spec.restartPolicy is missing"),
        ("spec.template.spec.containers", [], "spec.template.spec.containers is empty"),
        ("spec.template.spec.containers", [7], "spec.template.spec.containers.0 must be of type dict, got 7"),
    ):
        wrong = json.loads(json.dumps(made))
        changed(path, value)(wrong["items"][1])
        with pytest.raises(InputError, match=message):
            check_kubernetes(wrong, 32, queued=True)


def test_names_that_kubernetes_refuses_later_are_refused_at_once() -> None:
    """Of the Service, of the last pod and of the queue's label."""
    for name, nodes, queue, message in (
        ("7b", 2, "", "'7b' begins with a digit"),
        ("x" * 62, 1, "", "has 62 characters; its last pod would be '" + "x" * 62 + "-0'"),
        ("x" * 61, 11, "", "a name of at most 63: give a shorter --name"),
        ("a", 1, "my queue", "queue 'my queue' is no label"),
    ):
        with pytest.raises(InputError, match=message):
            kubernetes(Submission(name=name, plan="p", nodes=nodes, per_node=8, queue=queue), queued=True)
    for name, nodes, queue in (("7b", 1, ""), ("x" * 61, 10, "team_a.gpu")):
        job = Submission(name=name, plan="p", nodes=nodes, per_node=8, queue=queue)
        check_kubernetes(kubernetes(job, queued=True), 8 * nodes, queued=True)


def test_a_ray_job_is_of_one_node() -> None:
    with pytest.raises(InputError, match="on one node, and the plan has 4"):
        ray(JOB)
    made = ray(Submission(name="a", plan="p.toml", nodes=1, per_node=8))
    check_ray(made, 8)
    with pytest.raises(InputError, match="no field 'gpus'"):
        check_ray({**made, "gpus": 8}, 8)


def test_submit_prints_the_job(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    plan = tmp_path / "Tiny_1.toml"
    text = 'schema = "gnomon.planfile/1"\nmodel = "llama-tiny"\non = "2x4xa100-sxm-80gb"\n[workload]\n'
    plan.write_text(text + "global_batch_size = 8\nseq_len = 64\n[plan]\nmesh = {dp_shard = 8}\n")
    assert main(["fleet", "submit", str(plan), "--via", "slurm", "--dry-run"]) == 0
    script = capsys.readouterr().out
    check_slurm(script, 8)
    assert "--job-name=tiny-1" in script
    assert main(["fleet", "submit", str(plan), "--via", "kueue", "--dry-run"]) == 0
    check_kubernetes(json.loads(capsys.readouterr().out), 8, queued=True)
    assert main(["fleet", "submit", str(plan), "--via", "slurm", "--name", "A b", "--dry-run"]) == 2
    assert "must be of small letters" in capsys.readouterr().err


def test_launch_prints_or_starts_what_submit_does(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """One code for both; Kubernetes without a queue starts at once."""
    plan = tmp_path / "tiny.toml"
    text = 'schema = "gnomon.planfile/1"\nmodel = "llama-tiny"\non = "2x4xa100-sxm-80gb"\n[workload]\n'
    plan.write_text(text + "global_batch_size = 8\nseq_len = 64\n[plan]\nmesh = {dp_shard = 8}\n")
    assert main(["launch", str(plan), "--via", "kubernetes", "--dry-run"]) == 0
    made = json.loads(capsys.readouterr().out)
    check_kubernetes(made, 8, queued=False)
    assert made["items"][1]["spec"]["suspend"] is False
    with pytest.raises(InputError, match="created suspended"):
        check_kubernetes(made, 8, queued=True)
    assert main(["launch", str(plan), "--via", "slurm", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert main(["fleet", "submit", str(plan), "--via", "slurm", "--dry-run"]) == 0
    assert capsys.readouterr().out == script
    assert main(["launch", str(plan), "--via", "torchrun", "--dry-run"]) == 0
    assert "torchrun --nnodes=2 --nproc-per-node=4 " in capsys.readouterr().out
    assert main(["launch", str(plan), "--via", "torchrun"]) == 2
    assert "torchrun is started on each of them" in capsys.readouterr().err


class _Api(BaseHTTPRequestHandler):
    """Answers as Ray's job API does; Ray itself is too large to be installed for tests."""

    sent: list[dict[str, object]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        again = any(one["submission_id"] == request["submission_id"] for one in self.sent)
        self.sent.append(request)
        answer = (
            "Traceback …\nValueError: Job with submission_id tiny already exists." if again else json.dumps(request)
        )
        self.send_response(500 if again or self.path != "/api/jobs/" else 200)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *parts: object) -> None:
        """Nothing."""


def test_a_plan_is_sent_to_rays_job_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "tiny.toml"
    plan.write_text(
        'schema = "gnomon.planfile/1"\nmodel = "llama-tiny"\non = "local:2"\nstack = "gnomon"\n'
        "[workload]\nglobal_batch_size = 8\nseq_len = 64\n[plan]\nmesh = {dp_replicate = 2}\n"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), _Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{server.server_port}/")
        assert main(["launch", str(plan), "--via", "ray"]) == 0
        assert "as tiny; `ray job logs tiny" in " ".join(capsys.readouterr().out.split())
        assert _Api.sent[0]["entrypoint_num_cpus"] == 2 and f"gnomon run {plan}" in str(_Api.sent[0]["entrypoint"])
        assert main(["launch", str(plan), "--via", "ray"]) == 2
        assert "refused the job: ValueError: Job with" in " ".join(capsys.readouterr().err.split())
        server.shutdown()
    assert main(["launch", str(plan), "--via", "ray"]) == 2
    assert "start it with `ray start --head`" in " ".join(capsys.readouterr().err.split())
