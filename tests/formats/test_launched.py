"""Scripts and recipes of trainers that start Megatron, FSDP or DeepSpeed under names of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gnomon.errors import GnomonError, InputError
from gnomon.formats import programs
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job

NEMO = """
import nemo_run as run
from nemo.collections import llm
def trainer(tensor_parallelism: int = 2, num_nodes=1, sequence_parallelism: bool = False):
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        sequence_parallel=sequence_parallelism,
        ddp=run.Config(DistributedDataParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True),
    )
    return run.Config(nl.Trainer, devices=8, num_nodes=num_nodes, plugins=bf16_mixed(), strategy=strategy)
def faster(recipe):
    recipe.trainer.strategy.tensor_model_parallel_size = 8
    return recipe
def pretrain_recipe(num_nodes: int = 2, performance_mode: bool = False):
    recipe = run.Partial(
        pretrain,
        model=run.Config(LlamaModel, config=run.Config(Llama31Config8B)),
        trainer=trainer(num_nodes=num_nodes, sequence_parallelism=True),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
    )
    recipe.model.config.recompute_granularity = "selective"
    if performance_mode:
        recipe = faster(recipe)
    return recipe
"""

BRIDGE = """
from megatron.bridge.training.config import ConfigContainer
LONG = 2 * 4096
def layout(model):
    stages = {(2, 1): [["embedding"] + ["decoder"] * 17, ["decoder"] * 15 + ["loss"]]}
    model.pipeline_model_parallel_layout = stages[(model.pipeline_model_parallel_size, 1)]
def llama_pretrain_16gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = LONG
    cfg.train.global_batch_size = 128
    cfg.train.micro_batch_size = 1
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    cfg.optimizer.exp_avg_sq_dtype = torch.bfloat16
    layout(cfg.model)
    return cfg
"""

VERL = """
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "$DEVICE" in gpu) N=8 ;; npu) N=16 ;; esac
DATA=(
    data.max_prompt_length=1024
    data.max_response_length=$((1024 * 3))
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    actor_rollout_ref.model.path="$MODEL_PATH" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.n=5 trainer.nnodes=2 trainer.n_gpus_per_node=$N """

OPENRLHF = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --{length} 2048 --{batch} 256 --{micro} 2 --{model} meta-llama/Meta-Llama-3-8B --{zero} 2 {bf16} {recompute}
EOF
deepspeed --num_nodes 2 --num_gpus 8 --module $training_commands
"""
NEWER = OPENRLHF.format(
    length="data.max_len",
    batch="train.batch_size",
    micro="train.micro_batch_size",
    model="model.model_name_or_path",
    zero="ds.zero_stage",
    bf16="--ds.param_dtype bf16",
    recompute="--model.gradient_checkpointing_enable",
)
OLDER = OPENRLHF.format(
    length="max_len",
    batch="train_batch_size",
    micro="micro_train_batch_size",
    model="pretrain",
    zero="zero_stage",
    bf16="--bf16",
    recompute="--gradient_checkpointing",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, and what is in it."""

    format: str
    text: str
    name: str = "run.sh"
    given: dict[str, str] = field(default_factory=dict)
    network: str
    devices: int
    mesh: str
    batch: tuple[int, int, int]
    """Sequences of a microbatch, of a step, tokens of a sequence."""
    zero: int
    saved: str = "none"
    dtypes: str = "bf16 bf16 fp32 fp32"
    """Parameters, compute, what is reduced, states."""


FSDP = "fp32 bf16 fp32 fp32"
MEGATRON = " actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
CASES = {
    "nemo 2": Case(
        format="nemo2",
        text=NEMO,
        name="recipe.py",
        network="llama-3.1-8b",
        devices=16,
        mesh="dp_shard=8 tp=2",
        batch=(1, 512, 8192),
        zero=1,
        saved="selective",
    ),
    "nemo 2, with arguments": Case(
        format="nemo2",
        text=NEMO.replace("performance_mode: bool = False", "performance_mode: bool = True"),
        name="recipe.py",
        given={"num_nodes": "4", "model.seq_length": "4096"},
        network="llama-3.1-8b",
        devices=32,
        mesh="dp_shard=4 tp=8",
        batch=(1, 512, 4096),
        zero=1,
        saved="selective",
    ),
    "megatron-bridge": Case(
        format="megatron-bridge",
        text=BRIDGE,
        name="recipe.py",
        network="llama-3.1-8b",
        devices=16,
        mesh="pp=2 dp_shard=4 tp=2",
        batch=(1, 128, 8192),
        zero=1,
        dtypes="bf16 bf16 fp32 bf16",
    ),
    "verl": Case(
        format="verl",
        text=VERL,
        network="qwen3-8b",
        devices=16,
        mesh="dp_shard=16",
        batch=(4, 1280, 4096),
        zero=3,
        saved="full",
        dtypes=FSDP,
    ),
    "verl, packed on four ranks a sequence": Case(
        format="verl",
        text=VERL.replace("actor.ppo_micro_batch_size_per_gpu=4", "actor.use_dynamic_bsz=True")
        + " actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 actor_rollout_ref.actor.fsdp_config.fsdp_size=8",
        given={"DEVICE": "npu"},
        network="qwen3-8b",
        devices=32,
        mesh="dp_replicate=4 dp_shard=2 cp=4",
        batch=(16, 1280, 4096),
        zero=3,
        saved="full",
        dtypes=FSDP,
    ),
    "verl on Megatron": Case(
        format="verl",
        text=VERL + "model_engine=megatron" + MEGATRON,
        network="qwen3-8b",
        devices=16,
        mesh="dp_shard=4 tp=4",
        batch=(4, 1280, 4096),
        zero=1,
    ),
    "openrlhf": Case(
        format="openrlhf",
        text=NEWER,
        network="llama-3.1-8b",
        devices=16,
        mesh="dp_shard=16",
        batch=(2, 256, 2048),
        zero=2,
        saved="full",
        dtypes="bf16 bf16 bf16 fp32",
    ),
    "openrlhf until 0.9": Case(
        format="openrlhf",
        text=OLDER,
        network="llama-3.1-8b",
        devices=16,
        mesh="dp_shard=16",
        batch=(2, 256, 2048),
        zero=2,
        saved="full",
        dtypes="bf16 bf16 bf16 fp32",
    ),
}


def read(folder: Path, case: Case, **more: object) -> Job:
    path = folder / case.name
    path.write_text(case.text, encoding="utf-8")
    result = programs.recognised(path)
    assert result is not None and result.name == case.format
    return result.read(path, ReadContext(settings=case.given, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    job = read(tmp_path, case)
    plan = job.plan
    assert (job.model, job.devices, job.stated_devices) == (case.network, case.devices, case.devices)
    axes = {axis: getattr(plan.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    assert " ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) == case.mesh
    assert (plan.schedule.micro_batch_size, job.workload.batch_size, job.workload.seq_len) == case.batch
    assert (plan.optimizer.zero, plan.saved.preset) == (case.zero, case.saved)
    p = plan.precision
    assert f"{p.param} {p.compute} {p.reduce} {p.states}" == case.dtypes


def test_what_a_reader_cannot_say_is_listed(tmp_path: Path) -> None:
    case = CASES["verl"]
    text = case.text + " actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.frobnicate=3"
    job = read(tmp_path, Case(**{**{k: getattr(case, k) for k in case.__dataclass_fields__}, "text": text}))
    listed = {one.field: one.why for one in job.unexpressed}
    assert "only the update" in listed["algorithm"] and "the transfers" in next(
        why for key, why in listed.items() if key.endswith("param_offload")
    )
    assert "no reader knows it" in listed["actor_rollout_ref.actor.frobnicate"]
    assert "prints npu or gpu: taken as gpu" in [one.value for one in job.unexpressed if one.field == "script"][0]


def test_stages_of_a_recipe_are_its_layout(tmp_path: Path) -> None:
    assert read(tmp_path, CASES["megatron-bridge"]).plan.schedule.layers_per_stage == (17, 15)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", VERL.replace("verl.trainer.main_ppo", "x") + "model_engine=veomni", "engine 'veomni' is not read"),
        ("run.sh", VERL.replace("per_gpu=4", "per_gpu=$M"), r"give --set M=…"),
        (
            "run.sh",
            VERL.replace("nnodes=2", "nnodes=2 \\\n").replace("n_gpus_per_node=$N", "n_gpus_per_node=6"),
            "multiple",
        ),
        (
            "recipe.py",
            NEMO.replace("Llama31Config8B", "Odd9B"),
            "the recipe's network, Odd9B, is not known; give --model",
        ),
        (
            "recipe.py",
            "from nemo.collections import llm\nr = llm.llama9.pretrain_recipe()",
            "--set recipes=path/to/NeMo",
        ),
        (
            "run.sh",
            "torchrun scripts/training/run_recipe.py --recipe odd_config",
            "--set recipes=path/to/Megatron-Bridge",
        ),
    ],
)
def test_refusals_say_the_way_on(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    result = programs.recognised(path)
    assert result is not None
    with pytest.raises(GnomonError, match=message):
        result.read(path, ReadContext())


def test_advice_works_when_typed(tmp_path: Path) -> None:
    looped = (
        'for c in 2,1 4,2; do\n IFS=, read -r TP PP <<< "$c"\n torchrun --nproc_per_node 8 run_recipe.py --recipe r '
        "model.tensor_model_parallel_size=$TP model.pipeline_model_parallel_size=$PP model.seq_length=4096\ndone\n"
    )
    path = tmp_path / "run.sh"
    path.write_text(looped, encoding="utf-8")
    result = programs.find("megatron-bridge")
    with pytest.raises(InputError, match="a loop gives it several values: --set c=2,1"):
        result.read(path, ReadContext(model="llama-3.1-8b", devices=8))
    job = result.read(path, ReadContext(model="llama-3.1-8b", devices=8, settings={"c": "4,2"}))
    assert (job.plan.mesh.tp, job.plan.mesh.pp) == (4, 2)
