"""`gnomon export`: where the file goes, what is said beside it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.formats.torchtitan.read import read_torchtitan
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Mesh, Optimizer, Plan, PlanFile, Precision, Schedule, Workload, save_plan_file
from gnomon.search.mixed.space import MixedPoint, make_mixed_space

FILE = PlanFile(
    model="llama-3.1-8b",
    on="1x8xh100-sxm",
    workload=Workload(global_batch_size=64, seq_len=4096),
    plan=Plan(
        mesh=Mesh(dp_shard=8),
        schedule=Schedule(micro_batch_size=2),
        optimizer=Optimizer(zero=3),
        precision=Precision(param="fp32", compute="bf16", grad="fp32", reduce="fp32", master="none", states="fp32"),
    ),
)

Out = pytest.CaptureFixture[str]


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.toml"
    save_plan_file(FILE, path)
    return str(path)


def test_the_file_goes_to_standard_output_and_what_is_beside_it_to_the_other(plan: str, capsys: Out) -> None:
    assert main(["export", plan, "--to", "torchtitan", "--strict"]) == 0
    out, err = capsys.readouterr()
    result = read_torchtitan(out).plan
    assert (result.mesh, result.optimizer, result.precision) == (
        FILE.plan.mesh,
        FILE.plan.optimizer,
        FILE.plan.precision,
    )
    assert err.startswith("torchtitan v0.2.2") and "not expressed" not in err and "to be said elsewhere" in err


def test_a_file_is_not_written_over_unless_told(plan: str, tmp_path: Path, capsys: Out) -> None:
    target = tmp_path / "job.toml"
    words = ["export", plan, "--to", "torchtitan", "-o", str(target)]
    assert main(words) == 0
    before = target.read_text()
    assert capsys.readouterr().out == "" and "torchtitan v0.2.2" in before
    target.write_text("mine")
    assert main(words) == 2 and target.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0 and target.read_text() == before
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_strict_refuses_what_is_not_expressed_and_writes_nothing(plan: str, tmp_path: Path, capsys: Out) -> None:
    target = tmp_path / "job.yaml"
    pytest.importorskip("yaml")
    assert main(["export", plan, "--to", "nanotron", "--strict", "-o", str(target)]) == 2
    assert not target.exists()
    assert "optimizer.zero = 3 becomes 1" in capsys.readouterr().err
    assert main(["export", plan, "--to", "nanotron", "-o", str(target)]) == 0 and target.exists()


def test_json_has_the_text_and_the_lists(plan: str, capsys: Out) -> None:
    assert main(["export", plan, "--to", "deepspeed", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads(document["text"])["zero_optimization"]["stage"] == 3
    assert [one["field"] for one in document["unwritten"]] == ["precision.param", "precision.master"]
    assert document["program"] == "DeepSpeed 0.19.6" and document["elsewhere"]


def test_what_cannot_be_exported_says_why(plan: str, tmp_path: Path, capsys: Out) -> None:
    assert main(["export", plan, "--to", "megatrn"]) == 2
    assert "megatron" in capsys.readouterr().err
    other = tmp_path / "other.toml"
    save_plan_file(replace(FILE, plan=replace(FILE.plan, mesh=Mesh(pp=2, dp_shard=4))), other)
    assert main(["export", str(other), "--to", "deepspeed"]) == 2
    assert "no place for pp = 2" in capsys.readouterr().err
    save_plan_file(replace(FILE, plan=replace(FILE.plan, mesh=Mesh(dp_shard=4))), other)
    assert main(["export", str(other), "--to", "megatron"]) == 2  # of eight devices four are used
    assert "Traceback" not in capsys.readouterr().err


def test_plans_over_kinds_say_what_no_job_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers by kind go to Megatron-LM, with the order of the machines; shares and meshes by kind do not."""
    on, work = "1x2xh100-sxm+1x2xa100-sxm-80gb", Workload(global_batch_size=8, seq_len=2048)
    graph = model("llama-3.2-1b")
    space = make_mixed_space(graph, parse_cluster(on), work, fixed={"zero": 0, "cp": 1, "recompute": "none"})
    stages = MixedPoint("stages", (0, 1), (1, 1), (6, 3, 4, 3), (), 4, False, "none", 0, "interleaved_one_f_one_b",
                        virtual=2)  # fmt: skip
    unlike = MixedPoint("stages", (0, 1), (1, 2), (11, 5), (), 4, False, "none", 0, "one_f_one_b")
    shares = MixedPoint("replicas", (0, 1), (1, 1), (16,), (6, 2), 1, False, "none", 0, "one_f_one_b")
    for point, message in (
        (stages, "the machines in the order of 1x2xh100-sxm+1x2xa100-sxm-80gb"),
        (unlike, "some have dp_shard=2, others tp=2"),
        (shares, "data-parallel ranks take 3 and 1 sequences of a microbatch"),
    ):
        path = tmp_path / "plan.toml"
        save_plan_file(PlanFile(model="llama-3.2-1b", on=on, workload=work, plan=space.plan(point)), path)
        assert main(["export", str(path), "--to", "megatron"]) == (0 if point is stages else 2)
        assert message in " ".join(capsys.readouterr().err.split())
