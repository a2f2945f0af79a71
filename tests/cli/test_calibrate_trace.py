"""`gnomon calibrate --from-trace`: numbers from where a recorded step went, on traces whose every second is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.plans import Mesh, Optimizer, Plan, PlanFile, Schedule, Workload, save_plan_file
from gnomon.prediction import predict
from gnomon.software import stack
from tests.profile.device import Device

MODEL, ON = "llama-3.2-1b", "2xh100-sxm"
PLAN = Plan(mesh=Mesh(tp=2), optimizer=Optimizer(zero=0), schedule=Schedule(micro_batch_size=2))
WORK = Workload(global_batch_size=8, seq_len=4096)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    save_plan_file(PlanFile(model=MODEL, on=ON, stack="megatron-lm", workload=WORK, plan=PLAN), path)
    return path


def recorded(folder: Path, compute_s: float, exposed_s: float, loading_s: float = 0.0, world_size: int = 2) -> Path:
    """Three steps of rank 0: a matmul, and a collective that nothing overlaps."""
    device = Device(world_size=world_size)
    for index in range(4):
        start = device.host
        if loading_s:
            device.busy("user_annotation", "enumerate(DataLoader)#next", 1e6 * loading_s)
        done = device.kernel("aten::mm", "sm90_xmma_gemm_bf16bf16_bf16f32_tn", 1e6 * compute_s)
        if exposed_s:
            device.kernel(
                "nccl:all_reduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1e6 * exposed_s, 20, after=done
            )
        device.wait()
        device.step(index, start)
    return device.write(folder).parent


def test_kernels_and_collectives_get_their_own_factors(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = predict(MODEL, ON, PLAN, WORK, stack("megatron-lm"))
    exposed = sum(s for name, s in now.breakdown.items() if name.endswith("communication"))
    compute = now.step_s - exposed - now.breakdown.get("launch", 0.0)
    assert exposed > 0.01 * now.step_s
    traces = recorded(tmp_path / "traces", 1.3 * compute, 1.6 * exposed)
    own = tmp_path / "own.toml"
    asked = ["calibrate", "--from-trace", str(traces), "--job", str(job), "-o", str(own)]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    factors = found["factors"]
    assert factors["kernels"] == pytest.approx(1.3, rel=0.05) and factors["attention"] == 1.0
    assert factors["collectives"] > 1.1
    assert found["before"] < -0.2 and abs(found["after"]) < 0.05
    measured = sum(found["parts_s"].values())
    assert main(["predict", str(job), "--stack", str(own), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(measured, rel=0.05)
    assert main(asked) == 0
    assert f"--stack {own}" in capsys.readouterr().out


def test_what_no_prediction_has_is_left_out(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = predict(MODEL, ON, PLAN, WORK, stack("megatron-lm"))
    traces = recorded(tmp_path / "traces", now.step_s, 0.0, loading_s=0.5 * now.step_s)
    asked = ["calibrate", "--from-trace", str(traces), "--job", str(job), "-o", str(tmp_path / "own.toml")]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out_s"]["data loading"] == pytest.approx(0.5 * now.step_s, rel=0.05)
    assert found["factors"]["kernels"] == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from-trace", "TRACES"], "a trace says nothing without its job"),
        (["--job", "JOB"], "a trace says nothing without its job"),
        (["--from-trace", "TRACES", "--job", "JOB", "--from", "runs.csv"], "use one of them"),
        (["--on", "2xh100-sxm"], "--on and --model are of the job of a trace"),
        (["--from-trace", "TRACES", "--job", "JOB", "--seconds", "9"], "--seconds is for measuring this machine"),
        (["--from-trace", "none", "--job", "JOB"], "cannot read 'none': no such file"),
        (["--from-trace", "OTHER", "--job", "JOB"], "the trace is of 8 ranks and the job of 2"),
        (["--from-trace", "TRACES", "--job", "JOB", "-o", "no/x.toml"], "cannot write"),
    ],
)
def test_wrong_requests(
    words: list[str],
    said: str,
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"JOB": str(job), "TRACES": str(recorded(tmp_path / "t", 0.1, 0.0))}
    paths["OTHER"] = str(recorded(tmp_path / "o", 0.1, 0.0, world_size=8))
    assert main(["calibrate", *(paths.get(word, word) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "own.toml").exists()
