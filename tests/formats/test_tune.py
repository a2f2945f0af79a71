"""Fine-tuning jobs written for other trainers: adapters, quantisation, sharding, loss and batch are read back the same.

The job is LLaMA-Factory's YAML, made of options at random; what comes back of each program's file is compared with it
field by field, and for some by what it is predicted to take.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.cli.export import export_file, export_job
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.options.tools import ExportOptions
from gnomon.cli.request import read_request
from gnomon.errors import InputError, PlanError
from gnomon.formats import programs
from gnomon.formats.export import Export
from gnomon.plans import Mesh, Optimizer, Plan, PlanFile, Schedule, Workload
from gnomon.prediction import predict

ON = "1x8xa100-sxm-80gb"

SHIPPED = tuple(
    f"deepspeed: examples/deepspeed/ds_{name}_config.json" for name in ("z2", "z3", "z2_offload", "z3_offload")
)

OPTIONS: tuple[tuple[str, ...], ...] = (
    (
        "finetuning_type: full",
        "finetuning_type: lora\nlora_rank: 8\nlora_target: all",
        "finetuning_type: lora\nlora_rank: 16\nlora_target: q_proj,v_proj",
        "finetuning_type: lora\nlora_target: all\nquantization_bit: 4",
        "finetuning_type: lora\nlora_target: all\nquantization_bit: 8",
    ),
    ("", "fsdp: full_shard auto_wrap", "fsdp: shard_grad_op auto_wrap offload", *SHIPPED),
    ("", "enable_liger_kernel: true"),
    ("disable_gradient_checkpointing: true", ""),
    ("optim: adamw_torch", "optim: adamw_8bit", "optim: lion_8bit", "optim: adafactor"),
    ("bf16: true", "bf16: true\npure_bf16: true", "fp16: true"),
    ("per_device_train_batch_size: 1", "per_device_train_batch_size: 4"),
    ("gradient_accumulation_steps: 1", "gradient_accumulation_steps: 8"),
    ("cutoff_len: 1024", "cutoff_len: 4096"),
    ("", "max_grad_norm: 0.0"),
)
"""Of each setting some values."""


def job(draw: random.Random, path: Path, model: str = "Qwen/Qwen2.5-7B") -> Path:
    lines = [f"model_name_or_path: {model}", "stage: sft", "template: qwen", "packing: true"]
    path.write_text("\n".join([*lines, *(draw.choice(values) for values in OPTIONS)]) + "\n")
    return path


def exported_to(program: str, path: Path) -> Export:
    return export_job(ExportOptions(plan=str(path), to=program, on=ON))


@pytest.mark.parametrize("program", ["llama-factory", "axolotl", "trl", "swift"])
def test_a_job_of_random_options_comes_back_from_another_program(program: str, tmp_path: Path) -> None:
    draw = random.Random(program)
    for number in range(12):
        export = exported_to(program, path := job(draw, tmp_path / f"{number}.yaml"))
        lost = {one.field for one in export.unwritten}
        if program == "axolotl":  # which loads the model in bf16, whatever is trained
            lost -= {"precision.param", "precision.grad", "precision.reduce", "precision.states"}
        assert lost == set(), path.read_text()


@pytest.mark.parametrize("program", ["llama-factory", "trl", "swift"])
def test_what_comes_back_takes_as_long_and_as_much(program: str, tmp_path: Path) -> None:
    path = job(random.Random(7), tmp_path / "job.yaml")
    (written := tmp_path / ("job.sh" if program == "swift" else "out.yaml")).write_text(exported_to(program, path).text)
    steps = []
    for one in (path, written):
        source = (program, str(one)) if one is written and program == "trl" else None
        asked = read_request(TrainingOptions(model=None if source else str(one), source=source, on=ON))
        made = predict(asked.graph, asked.cluster, asked.plan, asked.workload, asked.stack)
        steps.append((made.step_s, made.tightest.peak_bytes))
    assert steps[0][0] == pytest.approx(steps[1][0], rel=1e-3)
    assert steps[0][1] == pytest.approx(steps[1][1], rel=1e-3)


TUNE = """
model: {_component_: torchtune.models.qwen2_5.KINDqwen2_5_7b_base, lora_attn_modules: [q_proj, v_proj, output_proj],
  apply_lora_to_mlp: True, lora_rank: 32}
tokenizer: {max_seq_len: 2048}
dataset: {packed: True}
batch_size: 2
gradient_accumulation_steps: 8
optimizer: {_component_: OPTIMIZER}
loss: {_component_: torchtune.modules.loss.LOSS}
enable_activation_checkpointing: True
dtype: bf16
compile: COMPILE
clip_grad_norm: 1.0
"""


@pytest.mark.parametrize(
    ("kind", "optimizer", "loss", "compiled"),
    [
        ("lora_", "torch.optim.AdamW", "LinearCrossEntropyLoss", "True"),
        ("qlora_", "bitsandbytes.optim.AdamW8bit", "CEWithChunkedOutputLoss", "False"),
        ("", "torch.optim.SGD", "LinearCrossEntropyLoss", "False"),
    ],
)
def test_a_job_of_torchtune_comes_back(kind: str, optimizer: str, loss: str, compiled: str, tmp_path: Path) -> None:
    text = TUNE.replace("KIND", kind).replace("OPTIMIZER", optimizer).replace("LOSS", loss).replace("COMPILE", compiled)
    (path := tmp_path / "tune.yaml").write_text(text)
    assert exported_to("torchtune", path).unwritten == ()


def test_parameters_that_torchtune_keeps_gathered_stay_so(tmp_path: Path) -> None:
    text = TUNE.replace("KIND", "").replace("OPTIMIZER", "torch.optim.AdamW").replace("COMPILE", "False")
    text = text.replace("LOSS", "LinearCrossEntropyLoss")
    (path := tmp_path / "tune.yaml").write_text(text + "fsdp_reshard_after_forward: False\n")
    asked = read_request(TrainingOptions(model=str(path), on=ON))
    assert asked.plan.optimizer.zero == 3 and not asked.plan.optimizer.reshard_after_forward
    made = exported_to("torchtune", path)
    assert made.unwritten == () and "fsdp_reshard_after_forward: false" in str(made).lower()


def test_a_loss_of_torchtune_that_has_no_logits_frees_them(tmp_path: Path) -> None:
    """Logits of a microbatch are 2 x 2048 x 152,064 x 4 bytes in fp32, and as much again for their gradient."""
    peaks = []
    for loss in ("CrossEntropyLoss", "LinearCrossEntropyLoss"):
        text = TUNE.replace("KIND", "lora_").replace("OPTIMIZER", "torch.optim.AdamW").replace("COMPILE", "False")
        (path := tmp_path / f"{loss}.yaml").write_text(text.replace("LOSS", loss))
        asked = read_request(TrainingOptions(model=str(path), on=ON))
        made = predict(asked.graph, asked.cluster, asked.plan, asked.workload, asked.stack)
        peaks.append(made.tightest.peak_bytes)
    assert peaks[0] - peaks[1] > 2 * 2 * 2048 * 152064 * 4


def test_a_plan_file_and_what_a_trainer_has_not() -> None:
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3))
    file = PlanFile(
        model="llama-3.1-8b+qlora16:q_proj", on=ON, plan=plan, workload=Workload(global_batch_size=16, seq_len=2048)
    )
    text = export_file(file, "trl").text
    assert "model_name_or_path: meta-llama/Llama-3.1-8B" in text and "load_in_4bit: true" in text
    assert 'lora_target_modules: ["q_proj"]' in text and 'fsdp: "full_shard auto_wrap"' in text
    with pytest.raises(PlanError, match="no place for tp = 2"):
        export_file(replace(file, plan=replace(plan, mesh=Mesh(dp_shard=4, tp=2))), "llama-factory")
    with pytest.raises(PlanError, match="names its models by components"):
        export_file(replace(file, model="qwen3-8b"), "torchtune")
    with pytest.raises(InputError, match="known: accelerate, axolotl"):
        export_file(file, "lama-factory")
    assert set(programs.writable_programs()) < set(programs.exported_to())
