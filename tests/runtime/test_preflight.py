"""Before a run: what is missing or slow is named by rank, and a plan that can run is ready."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import FP32  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.plans import Mesh, Plan, PlanFile, Schedule, Workload, save_plan_file  # noqa: E402
from gnomon.runtime.checks.preflight import Report, Verdict, judge  # noqa: E402

pytestmark = pytest.mark.torch

GIB = 2**30
RANK = Report(
    rank=0,
    host="node-0",
    software="Python 3.11, torch 2.13",
    device="x86_64",
    free_bytes=8 * GIB,
    disk_bytes=100 * GIB,
    busy_s=1e-3,
    all_reduce_s=(1e-4, 1e-3, 1e-2),
    link_s=2e-3,
)
FOUR = [replace(RANK, rank=rank, host=f"node-{rank // 2}") for rank in range(4)]


def judged(reports: list[Report], *, peak: int = GIB, shared: bool = True) -> Verdict:
    return judge(
        reports, peak_bytes=dict.fromkeys(range(4), peak), checkpoint_bytes=10 * GIB, folder="saved", shared=shared
    )


def test_ranks_that_have_what_they_need_are_ready() -> None:
    assert judged(FOUR) == Verdict(problems=(), warnings=())


def test_what_is_missing_is_named() -> None:
    """Ranks of one host share its memory on CPUs; a GPU is one rank's."""
    (message,) = judged(FOUR, peak=5 * GIB).problems[:1]
    assert message.startswith("ranks 0, 1 on node-0 need 10.0 GiB and 8.00 GiB are free: ")
    assert not judged(FOUR, peak=5 * GIB, shared=False).problems
    other = [*FOUR[:3], replace(FOUR[3], software="Python 3.11, torch 2.12")]
    assert judged(other).problems[0].startswith("rank 3 on node-1 has Python 3.11, torch 2.12, and others have ")
    full = [*FOUR[:3], replace(FOUR[3], disk_bytes=15 * GIB)]
    assert "2 checkpoints are 20.0 GiB, and saved of node-1 has 15.0 GiB free" in judged(full).problems[0]


def test_a_slow_rank_and_a_slow_link_are_named() -> None:
    slow = [FOUR[0], replace(FOUR[1], link_s=9e-3), replace(FOUR[2], busy_s=3e-3), FOUR[3]]
    assert [message.partition(" than")[0].partition(" as long")[0] for message in judged(slow).warnings] == [
        "rank 2 on node-1 computes 3.0 times slower",
        "the link from rank 1 on node-0 to rank 2 takes 4.5 times",
    ]


def test_check_looks_at_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(num_microbatches=1), precision=FP32)
    work = Workload(global_batch_size=4, seq_len=32)
    file = PlanFile(model="llama-mini", on="2xcpu-process", workload=work, plan=plan)
    save_plan_file(file, tmp_path / "plan.toml")
    assert main(["check", str(tmp_path / "plan.toml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in document["ranks"]] == [0, 1] and not document["problems"]
    assert [row["what"].partition(" of")[0] for row in document["links"]] == ["all-reduce"] * 3 + ["message"]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in document["links"])
    job = tmp_path / "sft.yaml"
    job.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n"
        "cutoff_len: 512\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nbf16: true\n"
    )
    assert main(["check", str(job), "--on", "1x2xh100-sxm", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen2.5-0.5b+lora8 on 1x2xh100-sxm: 2 ranks, Python ") and "\nready: looked for " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what is to be checked: gnomon check plan.toml, or a job file"),
        (("PLAN", "--on", "1xh100-sxm"), "--on is for a job file, and a plan file says all of it"),
        (("PLAN", "--set", "a=1"), "--set is for a job file"),
        (("nowhere.yaml", "--on", "1xh100-sxm"), "cannot read 'nowhere.yaml'"),
        (("nowhere.toml",), "cannot read 'nowhere.toml'"),
    ],
)
def test_what_cannot_be_checked_is_said(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(num_microbatches=1), precision=FP32)
    work = Workload(global_batch_size=4, seq_len=32)
    save_plan_file(PlanFile(model="llama-mini", on="2xcpu-process", workload=work, plan=plan), tmp_path / "plan.toml")
    assert main(["check", *(str(tmp_path / "plan.toml") if word == "PLAN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
