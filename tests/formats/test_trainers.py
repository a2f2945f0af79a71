"""Files of trainers: what is in them becomes a network and a plan, and one format recognises each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from gnomon.errors import InputError
from gnomon.formats import programs
from gnomon.formats.given import ReadContext
from gnomon.formats.hub import network_called, plain_name
from gnomon.formats.job import Job
from gnomon.formats.references import resolved
from gnomon.formats.torchtune import spellings


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, and what is in it."""

    text: str
    parameters: float
    """Billions, frozen ones included, to three digits."""
    trained: float | None = None
    """Billions, where fewer."""
    devices: int = 8
    batch: tuple[int, int, int]
    """Sequences of a microbatch, of a step, tokens of a sequence."""
    mesh: str = "dp_shard=8"
    zero: int = 0
    recompute: str = "none"
    dtypes: str = "bf16 bf16 bf16"
    """Parameters, compute, states."""
    name: str = "file.yaml"


CASES = {
    "axolotl": Case(
        text="""
base_model: NousResearch/Meta-Llama-3.1-8B
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
optimizer: adamw_torch
bf16: auto
""",
        parameters=8.11,
        trained=0.0839,
        batch=(2, 64, 4096),
        recompute="full",
    ),
    "colossalai": Case(
        text="""
colossalai run --nproc_per_node 8 benchmark.py -c 13b -p 3d --tp 2 --pp 2 --mbs 1 -b 8 -l 4096 -g -x --zero 1
""",
        parameters=13.0,
        batch=(1, 16, 4096),
        mesh="pp=2 x dp_shard=2 x tp=2",
        zero=1,
        recompute="full",
        dtypes="bf16 bf16 fp32",
        name="run.sh",
    ),
    "llama-factory": Case(
        text="""
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
finetuning_type: full
template: qwen
cutoff_len: 2048
packing: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
deepspeed: examples/deepspeed/ds_z3_config.json
""",
        parameters=7.62,
        batch=(1, 16, 2048),
        zero=3,
        recompute="full",
        dtypes="bf16 bf16 fp32",
    ),
    "trl": Case(
        text="""
model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
bf16: true
packing: true
max_seq_length: 2048
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
fsdp: full_shard auto_wrap
fsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}
""",
        parameters=7.24,
        batch=(4, 64, 2048),
        zero=3,
        recompute="full",
        dtypes="fp32 bf16 fp32",
    ),
    "torchtune": Case(
        text="""
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj], lora_rank: 8}
tokenizer: {max_seq_len: 2048}
dataset: {packed: true}
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
batch_size: 2
gradient_accumulation_steps: 8
enable_activation_checkpointing: true
dtype: bf16
""",
        parameters=8.03,
        trained=0.00419,
        batch=(2, 128, 2048),
        zero=3,
        recompute="full",
    ),
    "litgpt": Case(
        text="""
checkpoint_dir: checkpoints/meta-llama/Llama-3.2-3B
precision: bf16-true
devices: 4
train: {global_batch_size: 66, micro_batch_size: 4, max_seq_length: 512}
optimizer: {class_path: torch.optim.AdamW}
""",
        parameters=3.21,
        devices=4,
        batch=(4, 64, 512),
        mesh="dp_shard=4",
        zero=3,
        recompute="full",
    ),
    "llama-factory-v1": Case(
        text="""
model: meta-llama/Llama-2-7b-hf
model_class: llm
train_dataset: d.yaml
peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}
quant_config: {name: bnb, quantization_bit: 4}
dist_config: {name: fsdp2}
kernel_config: {name: auto}
micro_batch_size: 2
global_batch_size: 64
cutoff_len: 2048
""",
        parameters=6.78,
        trained=0.04,
        batch=(2, 64, 2048),
        mesh="dp_shard=8",
        zero=3,
        recompute="full",
    ),
    "llm-foundry": Case(
        text="""
variables: {length: 2048}
max_seq_len: ${variables.length}
model: {name: mpt_causal_lm, d_model: 768, n_heads: 12, n_layers: 12, expansion_ratio: 4, max_seq_len: 2048,
  vocab_size: 50368}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}}
optimizer: {name: decoupled_adamw}
global_train_batch_size: 256
device_train_microbatch_size: 16
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: false}
""",
        parameters=0.1253,
        batch=(16, 256, 2048),
        zero=3,
        dtypes="fp32 bf16 fp32",
    ),
    "maxtext": Case(
        text="""
base_config: base.yml
model_name: llama3-8b
per_device_batch_size: 2
max_target_length: 8192
remat_policy: minimal
ici_tensor_parallelism: 2
""",
        parameters=8.03,
        batch=(4, 16, 8192),
        mesh="dp_shard=4 tp=2",
        zero=3,
        dtypes="fp32 bf16 fp32",
    ),
    "levanter": Case(
        text="""
data: !include data/openwebtext.yaml
model: {type: gpt2, hidden_dim: 768, num_heads: 12, num_layers: 12, seq_len: 1024}
trainer:
  mp: p=f32,c=bfloat16
  train_batch_size: 256
  fsdp_axis: embed
""",
        parameters=0.124,
        batch=(32, 256, 1024),
        zero=3,
        recompute="full",
        dtypes="fp32 bf16 fp32",
    ),
    "gpt-neox": Case(
        text="""
{ "pipe-parallel-size": 2, "model_parallel_size": 2, "num_layers": 16, "hidden_size": 2048, "num_attention_heads": 8,
  "seq_length": 2048, "max_position_embeddings": 2048, "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": true,
  "gpt_j_residual": true, "tokenizer_type": "HFTokenizer", "zero_optimization": {"stage": 1},
  "fp16": {"enabled": true, "type": "bfloat16"}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
  "checkpoint_activations": true, "optimizer": {"type": "Adam"}, "gradient_clipping": 1.0 }
""",
        parameters=1.01,
        batch=(4, 32, 2048),
        mesh="pp=2 dp_shard=2 tp=2",
        zero=1,
        recompute="full",
        dtypes="bf16 bf16 fp32",
    ),
    "nemo": Case(
        text="""
trainer: {num_nodes: 1, devices: 8, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 4
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 32
  num_query_groups: 8
  activation: fast-swiglu
  normalization: rmsnorm
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  sequence_parallel: true
  tokenizer: {library: megatron, type: GPT2BPETokenizer}
  optim: {name: mcore_distributed_optim, overlap_grad_sync: true}
""",
        parameters=8.2,
        batch=(1, 128, 4096),
        mesh="dp_shard=2 tp=4",
        zero=1,
        dtypes="bf16 bf16 fp32",
    ),
    "primus": Case(
        text="""
modules:
  pre_trainer:
    framework: megatron
    model: ${PRIMUS_MODEL:llama3.1_70B}.yaml
    overrides: {micro_batch_size: 1, global_batch_size: 16, seq_length: 8192,
      tensor_model_parallel_size: "${PRIMUS_TP:8}",
      sequence_parallel: 1, recompute_granularity: full, recompute_method: block, recompute_num_layers: 80}
""",
        parameters=70.6,
        batch=(1, 16, 8192),
        mesh="dp_shard=1 tp=8",
        zero=1,
        recompute="full",
        dtypes="bf16 bf16 fp32",
    ),
    "xtuner": Case(
        name="file.py",
        text="""
from xtuner.model import SupervisedFinetune
llm_name_or_path = "meta-llama/Llama-2-7b-hf"
max_length = 2048
pack_to_max_length = True
batch_size = 1
accumulative_counts = 4 * 4
optim_type = AdamW
max_norm = 1
model = dict(type=SupervisedFinetune, llm=dict(torch_dtype=torch.float16, quantization_config=dict(load_in_4bit=True)),
    lora=dict(type=LoraConfig, r=64))
""",
        parameters=6.9,
        trained=0.16,
        batch=(1, 128, 2048),
        recompute="full",
    ),
}
"""Format -> one of its files."""


def read(folder: Path, name: str, **more: object) -> Job:
    case = CASES[name]
    path = folder / case.name
    path.write_text(case.text, encoding="utf-8")
    result = programs.recognised(path)
    assert result is not None and result.name == name
    return result.read(path, ReadContext(devices=case.devices, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    case, job = CASES[name], read(tmp_path, name)
    plan, graph = job.plan, job.graph()
    total = graph.num_parameters() + graph.num_frozen()
    assert total / 1e9 == pytest.approx(case.parameters, rel=0.005)
    if case.trained is not None:
        assert graph.num_parameters() / 1e9 == pytest.approx(case.trained, rel=0.005)
    else:
        assert graph.num_frozen() == 0
    assert (plan.schedule.micro_batch_size, job.workload.batch_size, job.workload.seq_len) == case.batch
    axes = {axis: getattr(plan.mesh, axis) for axis in ("pp", "dp_shard", "tp")}
    assert {k: v for k, v in axes.items() if v > 1} == {
        k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", case.mesh) if int(v) > 1
    }
    assert plan.mesh.world_size == case.devices
    assert plan.optimizer.zero == case.zero
    assert plan.saved.preset == case.recompute or (case.recompute == "full" and plan.saved.rules)
    assert f"{plan.precision.param} {plan.precision.compute} {plan.precision.states}" == case.dtypes


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_nobody_knows_is_listed_and_strict_refuses_it(name: str, tmp_path: Path) -> None:
    if name in ("primus", "nemo"):
        pytest.skip("its overrides are a section of the file")
    case = CASES[name]
    text = case.text.rstrip()
    inside = name == "gpt-neox"
    text = f'{text[:-1]}, "frobnicate": 3 }}' if inside else f"{text}\nfrobnicate: 3\n"
    text = text.replace("frobnicate: 3", "frobnicate = 3") if name == "xtuner" else text
    text = text.replace("\nfrobnicate: 3", " --frobnicate 3") if case.name.endswith(".sh") else text
    path = tmp_path / case.name
    path.write_text(text, encoding="utf-8")
    result = programs.find(name)
    job = result.read(path, ReadContext(devices=case.devices))
    assert any(str(field).startswith("frobnicate = 3") for field in job.unexpressed)
    with pytest.raises(InputError, match="frobnicate"):
        result.read(path, ReadContext(devices=case.devices, strict=True))


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("swift", "swift sft --model Qwen/Qwen3-8B --max_length 1024"),
        ("swift", "swift sft --model Qwen/Qwen3-8B"),
        ("swift", "megatron sft --model Qwen/Qwen3-8B --max_length 1024 --global_batch_size 8"),
        (
            "openrlhf",
            "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path Qwen/Qwen3-8B --data.max_len 96",
        ),
        ("llama-factory", "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ntemplate: qwen\ncutoff_len: 1024\n"),
        ("axolotl", "base_model: Qwen/Qwen3-8B\nsequence_len: 1024\nmicro_batch_size: 1\n"),
    ],
)
@pytest.mark.parametrize("seq_len", [None, 384])
def test_what_unpacked_samples_are_priced_as_is_what_is_said(
    program: str, text: str, seq_len: int | None, tmp_path: Path
) -> None:
    """The note said the file's length where `--seq-len` had taken its place."""
    path = tmp_path / ("job.yaml" if ": " in text else "job.sh")
    path.write_text(text, encoding="utf-8")
    job = programs.find(program).read(path, ReadContext(devices=8, seq_len=seq_len))
    (said,) = (line.why for line in job.unexpressed if "may be shorter" in line.why)
    assert said == f"samples may be shorter: each is priced as {job.workload.seq_len} tokens"
    assert seq_len in (None, job.workload.seq_len)


REGISTRY = """
def base() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192),
        activation_checkpoint=SelectiveAC.Config(),
    )

def large() -> Trainer.Config:
    config = base()
    config.model_spec = model_registry("70B")
    config.parallelism.tensor_parallel_degree = 4
    config.activation_checkpoint = FullAC.Config()
    return config
"""


def test_torchtitans_registry_is_read_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "llama3").mkdir()
    path = tmp_path / "llama3/config_registry.py"
    path.write_text(f"raise SystemExit\n{REGISTRY}", encoding="utf-8")
    result = programs.recognised(path)
    assert result is not None and result.name == "torchtitan"
    with pytest.raises(InputError, match="--set config=base"):
        result.read(path, ReadContext(devices=8))
    job = result.read(path, ReadContext(devices=8, settings={"config": "large"}))
    assert (job.plan.mesh.tp, job.plan.mesh.dp_shard, job.plan.saved.preset) == (4, 2, "full")
    assert (job.plan.schedule.micro_batch_size, job.workload.seq_len) == (2, 8192)
    assert round(job.graph().num_parameters() / 1e9, 1) == 70.6
    assert result.read(path, ReadContext(devices=8, settings={"config": "base"})).plan.mesh.dp_shard == 8


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("module: {}", "modules"),
        ("modules: [1]", "modules"),
        ("modules: {pre_trainer: megatron}", "pre_trainer"),
        ("modules: {pre_trainer: {framework: megatron, overrides: [1]}}", "overrides"),
    ],
)
def test_a_section_of_primus_that_is_none_is_named(text: str, name: str, tmp_path: Path) -> None:
    """A mutated file ended in a KeyError."""
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=f"'{name}' is no section with keys"):
        programs.find("primus").read(path, ReadContext(devices=8))


def test_what_is_given_beside_a_file_is_in_place_of_it(tmp_path: Path) -> None:
    job = read(tmp_path, "axolotl", settings={"micro_batch_size": "1", "sequence_len": "512"}, model="llama-tiny")
    assert (job.plan.schedule.micro_batch_size, job.workload.seq_len) == (1, 512)
    assert job.graph().name.startswith("llama-tiny")


def test_a_stage_may_stand_for_a_deepspeed_file(tmp_path: Path) -> None:
    job = read(tmp_path, "llama-factory")
    assert any("ds_z3_config.json is not here: taken as LLaMA-Factory" in line for line in job.assumed)
    (tmp_path / "examples/deepspeed").mkdir(parents=True)
    stage = '{"zero_optimization": {"stage": 2, "overlap_comm": false}, "bf16": {"enabled": "auto"}}'
    (tmp_path / "examples/deepspeed/ds_z3_config.json").write_text(stage, encoding="utf-8")
    assert read(tmp_path, "llama-factory").plan.optimizer.zero == 2


def test_names_of_the_hub_stand_for_networks() -> None:
    assert network_called("unsloth/Llama-3.2-1B-Instruct-bnb-4bit")[0] == "llama-3.2-1b"
    assert network_called("meta-llama/Meta-Llama-3-8B-Instruct")[0] == "llama-3.1-8b"
    assert network_called("meta-llama/Llama-3.1-8B") == ("llama-3.1-8b", "")
    assert plain_name("/data/Qwen2.5-7B-Instruct-GPTQ-Int4/") == "qwen2.5-7b"
    with pytest.raises(InputError, match="--model"):
        network_called("somebody/something")


def test_torchtunes_names_are_versions_and_sizes() -> None:
    assert "llama-3.1-8b" in spellings("torchtune.models.llama3_1.lora_llama3_1_8b")
    assert {"qwen2.5-7b", "qwen2-5.7b"} <= set(spellings("m.qwen2_5.qlora_qwen2_5_7b_instruct"))
    assert "gemma-2-9b" in spellings("m.gemma2_9b")


def test_references_are_followed_and_circles_stay() -> None:
    values = {
        "a": "${b.c}",
        "b": {"c": 3, "d": "${.c}"},
        "e": "${X:7}-${a}",
        "f": "${g}",
        "g": "${f}",
        "h": "${multiply:4, ${a}}",
    }
    result = resolved(values, {"X": "9"})
    assert (result["a"], result["b"], result["e"], result["h"]) == (3, {"c": 3, "d": 3}, "9-3", 12)
    assert resolved(values)["e"] == "7-3" and "${" in str(result["f"])
