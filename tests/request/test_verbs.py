"""`gnomon.predict` and `gnomon.plan` as a person calls them: names as on the command line, and one error for each wrong
argument, none of them from inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gnomon
from gnomon.cli import main
from gnomon.errors import CatalogueError, GnomonError, InputError, PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Goal, Mesh, Plan, PlanFile, Schedule, Workload, save_plan_file
from gnomon.plans.workload import Lengths, RouterLoad
from gnomon.software import Stack, stack

ON = "1x2xh100-sxm"
PLAN = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=1))
WORK = Workload(global_batch_size=8, seq_len=64)
NAN, INF = float("nan"), float("inf")


def predict(**given: Any) -> Any:
    return gnomon.predict(**{"model": "llama-tiny", "cluster": ON, "plan": PLAN, "workload": WORK, **given})


def plan(**given: Any) -> Any:
    return gnomon.plan(**{"model": "llama-tiny", "cluster": ON, "workload": WORK, "top": 1, **given})


def test_names_are_what_they_stand_for() -> None:
    named = predict(model="meta-llama/Llama-3.2-1B", stack="torchtitan")
    given = predict(model=model("llama-3.2-1b"), cluster=parse_cluster(ON), stack=stack("torchtitan"))
    assert (named.step_s, named.memory) == (given.step_s, given.memory)
    assert plan(stack="torchtitan").best[0].step_s == plan(stack=stack("torchtitan")).best[0].step_s
    assert predict(stack=None).step_s == predict().step_s
    whole = Workload(global_batch_size=np.int64(8), seq_len=np.int64(64))  # type: ignore[arg-type]
    assert predict(workload=whole).step_s == predict().step_s


def test_the_command_line_answers_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": 2, "vocab_size": 256}))
    words = "--tp 2 --global-batch 8 --seq-len 64 --micro-batch-size 1 --stack megatron-lm --json"
    assert main(["predict", str(path), "--on", ON, *words.split()]) == 0
    told = json.loads(capsys.readouterr().out)
    prediction = predict(
        model=str(path), plan=Plan(mesh=Mesh(tp=2), schedule=Schedule(micro_batch_size=1)), stack="megatron"
    )
    assert told["step_s"] == prediction.step_s and told["memory"] == prediction.to_mapping()["memory"]


JOB = """\
model_name_or_path: Qwen/Qwen2.5-0.5B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
cutoff_len: 512
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""


def test_a_job_file_says_all_but_its_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(JOB)
    assert main(["predict", str(path), "--on", ON, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    prediction = gnomon.predict(str(path), ON)
    assert told["step_s"] == prediction.step_s and told["memory"] == prediction.to_mapping()["memory"]
    more = gnomon.predict(str(path), ON, workload=Workload(global_batch_size=8, seq_len=512))
    assert more.step_s > prediction.step_s
    job = gnomon.read_job(path, ON)
    assert gnomon.predict(job.graph, job.cluster, job.plan, job.workload, job.stack).step_s == prediction.step_s
    best = gnomon.plan(str(path), ON, top=1).best[0]
    assert best.prediction.step_s <= prediction.step_s
    larger = gnomon.read_job(path, ON, model="qwen2.5-1.5b")
    assert larger.graph.num_parameters() > 2 * job.graph.num_parameters()


def test_a_plan_file_is_a_job(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    save_plan_file(PlanFile(model="llama-tiny", on=ON, workload=WORK, plan=PLAN), path)
    assert gnomon.predict(str(path)).step_s == predict().step_s


WRONG: tuple[tuple[Callable[[], object], type[GnomonError], str], ...] = (
    (lambda: predict(model=SimpleNamespace()), InputError, "a model is a gnomon.graph.Graph or a name such as"),
    (lambda: predict(model="/nowhere/config.json"), InputError, "cannot read '/nowhere/config.json'"),
    (lambda: predict(cluster=8), InputError, "cluster is a gnomon.hardware.Cluster, or a name .*; not an int 8"),
    (lambda: predict(cluster=None), InputError, "give cluster: a model alone"),
    (lambda: gnomon.predict("llama-tiny", ON), InputError, "give plan and workload: a model alone"),
    (lambda: gnomon.plan("llama-tiny", ON), InputError, "give workload: a model alone"),
    (lambda: gnomon.predict("nowhere.yaml", ON), InputError, "cannot read 'nowhere.yaml'"),
    (lambda: gnomon.read_job("train.py", ON), InputError, "cannot read 'train.py'"),
    (lambda: gnomon.read_job(__file__, ON), InputError, "is Python: capture its model"),
    (lambda: predict(plan="plan.toml"), InputError, "plan is a gnomon.plans.Plan, .*; not a str 'plan.toml'"),
    (lambda: predict(plan=PlanFile(model="gpt2", on=ON, workload=WORK, plan=PLAN)), InputError, "give its plan"),
    (lambda: predict(plan=WORK, workload=PLAN), InputError, "plan is .* not a Workload"),
    (lambda: predict(workload={"seq_len": 64}), InputError, "workload is a gnomon.plans.Workload, .*; not a dict"),
    (lambda: predict(stack="torchtitn"), CatalogueError, "did you mean 'torchtitan'"),
    (lambda: predict(stack=3), InputError, "stack is a gnomon.software.Stack, or a name such as 'torchtitan'"),
    (lambda: predict(stack=Stack), InputError, "stack is a gnomon.software.Stack"),
    (lambda: predict(plan=Plan(precision="bf16")), InputError, "Expected Precision, got str - at `plan.precision`"),  # type: ignore[arg-type]
    (lambda: predict(plan=Plan(mesh=Mesh(tp=2.0))), InputError, r"Expected integer, got number 2.0 - at `plan.mesh.tp"),  # type: ignore[arg-type]
    (lambda: Plan(schedule="gpipe"), InputError, "Expected Schedule, got str - at `Plan.schedule`"),  # type: ignore[arg-type]
    (lambda: Mesh(tp="2"), InputError, 'Expected integer, got string "2" - at `Mesh.tp`'),  # type: ignore[arg-type]
    (lambda: plan(model=8), InputError, "a model is"),
    (lambda: plan(cluster=8), InputError, "cluster is"),
    (lambda: plan(workload=PLAN), InputError, "workload is"),
    (lambda: plan(stack=8), InputError, "stack is"),
    (lambda: plan(goal=80e9), InputError, "goal is a gnomon.plans.Goal"),
    (lambda: plan(goal=Goal(memory_bytes=NAN)), GnomonError, "at `goal.memory_bytes`"),  # type: ignore[arg-type]
    (lambda: plan(base="x"), InputError, "plan is"),
    (lambda: plan(fixed=["tp"]), InputError, "fixed maps fields of a plan to values"),
    (lambda: plan(fixed={"tpp": 2}), PlanError, r"fixed names 'tpp', which no plan has \(did you mean 'tp'"),
    (lambda: plan(fixed={"tp": "2"}), PlanError, "fixed tp = '2' is no whole number"),
    (lambda: plan(fixed={"tp": 0}), PlanError, "fixed tp = 0 is below 1"),
    (lambda: plan(fixed={"overlap": 1}), PlanError, "fixed overlap = 1 is no True or False"),
    (lambda: plan(fixed={"schedule": "1f1b"}), PlanError, r"unknown schedule '1f1b' \(here it is 'one_f_one_b'\)"),
    (lambda: plan(forbid=[3]), InputError, "forbid lists conditions such as 'pp>1', not 3"),
    (lambda: plan(extra_choices=["async"]), InputError, "extra_choices names 'async'"),
    (lambda: plan(top=0), InputError, "top = 0 plans are asked for"),
    (lambda: Workload(global_batch_size=8, seq_len=NAN), PlanError, "must be a whole number"),  # type: ignore[arg-type]
    (lambda: Workload(global_batch_size=INF, seq_len=64), PlanError, "must be a whole number"),  # type: ignore[arg-type]
    (lambda: Workload(global_batch_size=8, seq_len="64"), PlanError, "must be a whole number"),  # type: ignore[arg-type]
    (lambda: Workload(lengths=5), InputError, "at `Workload.lengths`"),  # type: ignore[arg-type]
    (lambda: predict(workload=Workload(lengths=[64] * 8)), InputError, "a tuple of integer, got a list"),  # type: ignore[arg-type]
    (lambda: predict(workload=Workload(global_batch_size=8, distribution="x")), InputError, "`workload.distribution`"),  # type: ignore[arg-type]
    (lambda: Lengths(values=(64,), weights=(NAN,)), PlanError, "must be finite"),
    (lambda: Lengths(values=(64,), weights=("a",)), InputError, r"Lengths.weights\[0\]"),  # type: ignore[arg-type]
    (lambda: RouterLoad(kind="zipf", s=NAN), PlanError, "a finite number"),
    (lambda: RouterLoad(capacity="2"), InputError, "RouterLoad.capacity"),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(("call", "kind", "message"), WRONG)
def test_one_clear_error(call: Callable[[], object], kind: type[GnomonError], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
