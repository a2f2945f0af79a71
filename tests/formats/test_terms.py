"""Ways to fit are given in the terms of the job's own file: the lines, written into it and read again, make the plan
that the way was predicted with. What a file cannot say is not proposed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.formats import programs
from gnomon.formats.edit import edited
from gnomon.formats.given import ReadContext, parse_settings
from gnomon.formats.job import Job
from gnomon.hardware import Cluster, parse_cluster, with_host_memory
from gnomon.plans.parts import Offload
from gnomon.prediction import Prediction, host_memory, predict
from gnomon.prediction.loading import host_short, loading
from gnomon.report.prediction import prediction_text
from gnomon.search.fit.advice import FitAdvice, advice
from gnomon.search.fit.ladder import Fitting
from gnomon.search.fit.options import OPTIONS
from gnomon.search.fit.terms import Change, Terms
from gnomon.software import able

FACTORY = """
model_name_or_path: meta-llama/Llama-2-7b-hf
stage: sft
finetuning_type: full
template: llama2
deepspeed: examples/deepspeed/ds_z2_config.json
cutoff_len: 4096
packing: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
bf16: true
pure_bf16: true
"""
AXOLOTL = """
base_model: meta-llama/Llama-2-7b-hf
deepspeed: deepspeed_configs/zero1.json
sequence_len: 4096
sample_packing: true
micro_batch_size: 4
gradient_accumulation_steps: 2
optimizer: adamw_torch
bf16: auto
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama2.llama2_13b
tokenizer: {max_seq_len: 4096}
dataset: {packed: true}
batch_size: 4
gradient_accumulation_steps: 2
optimizer: {_component_: torch.optim.AdamW}
dtype: bf16
enable_activation_checkpointing: false
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 8192
[activation_checkpoint]
mode = "none"
"""
DEEPSPEED = json.dumps(
    {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
)
MEGATRON = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008
  --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4
  --global-batch-size 64 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
  --bf16 --use-flash-attn --vocab-size 32000 --untie-embeddings-and-output-weights --attention-dropout 0
  --hidden-dropout 0
""".replace("\n", " ")
TRAINER = (
    "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta-llama/Llama-2-7b-hf --block_size 4096 --bf16 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --fsdp 'full_shard auto_wrap' --output_dir o"
)
SWIFT = (
    "NPROC_PER_NODE=8 swift sft --model meta-llama/Llama-2-7b-hf --train_type full --torch_dtype bfloat16 "
    "--max_length 8192 --packing true --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --dataset d "
    "--gradient_checkpointing false --deepspeed zero2"
)

CASES = {
    "llama-factory": ("job.yaml", FACTORY),
    "axolotl": ("job.yaml", AXOLOTL),
    "torchtune": ("job.yaml", TORCHTUNE),
    "torchtitan": ("job.toml", TITAN),
    "deepspeed": ("ds.json", DEEPSPEED),
    "megatron": ("job.sh", MEGATRON),
    "transformers": ("job.sh", TRAINER),
    "swift": ("job.sh", SWIFT),
}
ON = "1x8xa100-sxm-40gb"
BY_OPTION = {option.name: option for option in OPTIONS}


def read(path: Path, name: str, settings: dict[str, str] | None = None) -> Job:
    text = (settings or {}).items()
    given = ReadContext(devices=8, settings=parse_settings([f"{key}={value}" for key, value in text]))
    if name == "deepspeed":
        given = replace(given, model="llama-2-7b", seq_len=2048, settings=given.settings)
    return programs.find(name).read(path, given)


def predicted(job: Job, on: str = ON) -> Prediction:
    stack = able(job.stack, job.plan, "the job's own file")
    return predict(job.graph(), parse_cluster(on), job.plan, job.workload, stack)


def ways(base: Prediction, job: Job) -> FitAdvice:
    return advice(base, most=8, terms=job.terms)


@pytest.mark.parametrize("name", CASES)
def test_lines_of_a_way_make_its_plan(name: str, tmp_path: Path) -> None:
    file, text = CASES[name]
    path = tmp_path / file
    path.write_text(text)
    job = read(path, name)
    base = predicted(job)
    found = ways(base, job)
    assert not base.has_room and found.ways
    checked = 0
    for way in found.ways:
        assert way.lines
        settings = settings_of(way.lines, job.terms)
        if settings is None:
            continue
        again = predicted(read(path, name, settings))
        assert abs(again.tightest.peak_bytes - way.peak_bytes) < 0.1 * 2**30, way.lines
        assert again.step_s == pytest.approx(way.step_s, rel=0.03), way.lines
        checked += 1
    assert checked


REPLICAS = FACTORY.replace("deepspeed: examples/deepspeed/ds_z2_config.json\n", "").replace("pure_bf16: true\n", "")
SCRIPT = (
    "accelerate launch --num_processes 8 --mixed_precision bf16 sft.py --model_name_or_path meta-llama/Llama-2-7b-hf "
    "--dataset_name d --max_length 4096 --bf16 true --per_device_train_batch_size 2 --output_dir o"
)
STAGES = TITAN + '[parallelism]\nfsdp_reshard_after_forward = "default"\n'
BLOCK = TORCHTUNE.replace("optimizer: {_component_: ", "optimizer:\n  _component_: ").replace("AdamW}", "AdamW")
ALONE = {
    "Liger has norms and activations besides": ("transformers", TRAINER, "chunked_loss"),
    "what is not gathered again stays so": (
        "transformers",
        TRAINER.replace("full_shard", "shard_grad_op"),
        "cpu_offload",
    ),
    "a regular expression is one word": ("transformers", SCRIPT.replace("sft.py", "run_clm.py"), "low_rank"),
    "the rest of a project's file is kept": ("axolotl", AXOLOTL, "optimizer_offload"),
    "a project's file does not gather ahead": ("llama-factory", FACTORY, "zero"),
    "DeepSpeed copies replicas in fp32": ("llama-factory", REPLICAS, "zero"),
    "FSDP widens what is trained": (
        "axolotl",
        AXOLOTL.replace("deepspeed: deepspeed_configs/zero1.json\n", ""),
        "zero",
    ),
    "FSDP reduces in the compute dtype": ("trl", SCRIPT, "zero"),
    "bitsandbytes' class has all states narrow": ("torchtune", BLOCK, "eight_bit_states"),
    "microbatches of stages are not of one sequence": ("torchtitan", STAGES, "pp"),
}
"""What was promised wrongly once -> (program, file, option)."""


@pytest.mark.parametrize("kind", ALONE)
def test_the_file_with_a_change_has_the_peak_that_was_promised(kind: str, tmp_path: Path) -> None:
    """To 0.1 GiB, of every level that the file can say."""
    name, text, option = ALONE[kind]
    path = tmp_path / {"transformers": "job.sh", "trl": "job.sh", "torchtitan": "job.toml"}.get(name, "job.yaml")
    path.write_text(text)
    job = read(path, name)
    base = predicted(job)
    assert job.terms is not None
    fitting = Fitting(base=base, terms=job.terms, options=[BY_OPTION[option]])
    checked = 0
    for rung in fitting.single_changes():
        change = Change(before=base.plan, after=rung.plan, workload=base.workload)
        settings = job.terms.settings(rung.options, change)
        if rung.prediction is None or settings is None:
            continue
        path.write_text(edited(text, path.suffix, job.terms.in_file(settings), near=("output_dir",)))
        again = predicted(read(path, name))
        assert abs(again.tightest.peak_bytes - rung.peak_bytes) < 0.1 * 2**30, (settings, rung.what)
        checked += 1
    assert checked


def test_torchtune_recomputes_all_of_a_layer_or_nothing(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(TORCHTUNE)
    job = read(path, "torchtune")
    fitting = Fitting(base=predicted(job), terms=job.terms, options=[BY_OPTION["recompute"]])
    assert [rung.what for rung in fitting.single_changes() if rung.prediction is not None] == ["recompute full"]


def settings_of(lines: tuple[str, ...], terms: Terms | None) -> dict[str, str] | None:
    """Lines as key -> value; None for what is said in a sentence, or done in another file."""
    assert terms is not None
    out: dict[str, str] = {}
    for line in lines:
        if line.startswith("in the") or "…" in line:
            return None
        match terms.style:
            case "yaml":
                key, _, value = line.partition(": ")
            case "toml":
                table, _, rest = line.partition("] ")
                key, _, value = rest.partition(" = ")
                key, value = f"{table[1:]}.{key}", value.strip('"')
            case "json":
                key, _, value = line.partition(": ")
                key = key.strip('"')
                if value.startswith("{"):
                    for inner, said in json.loads(value).items():
                        out[f"{key}.{inner}"] = str(said["device"] if isinstance(said, dict) else said)
                        if isinstance(said, dict):
                            out[f"{key}.{inner}.device"] = out.pop(f"{key}.{inner}")
                    continue
            case _:
                key, _, value = line.removeprefix("--").partition(" ")
                key, value = key.replace("-", "_"), " ".join(shlex.split(value)) or "true"
        out[key] = value
    return out


def test_what_a_file_cannot_say_is_not_proposed(tmp_path: Path) -> None:
    """LLaMA-Factory has no tensor, pipeline or context parallelism, and checkpoints all layers or none."""
    path = tmp_path / "job.yaml"
    path.write_text(FACTORY.replace("cutoff_len: 4096", "cutoff_len: 65536"))
    job = read(path, "llama-factory")
    for way in ways(predicted(job), job).ways:
        assert not any(word in way.what for word in ("tp ", "pp ", "cp ", "selective", " of 32"))


def test_a_fused_loss_is_proposed_where_logits_are_the_peak_and_the_program_has_one(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(FACTORY.replace("ds_z2", "ds_z3_offload").replace("cutoff_len: 4096", "cutoff_len: 65536"))
    text = path.read_text().replace("Llama-2-7b-hf", "Llama-3.1-8B").replace("_batch_size: 4", "_batch_size: 1")
    path.write_text(text)
    job = read(path, "llama-factory")
    found = ways(predicted(job, "1x8xa100-sxm-80gb"), job)
    assert any("enable_liger_kernel: true" in way.lines for way in found.ways)
    liger = read(path, "llama-factory", {"enable_liger_kernel": "true"})
    assert liger.stack.loss.cross_entropy == "chunked"


def test_host_memory_is_in_the_verdict_and_loading_is_said(tmp_path: Path) -> None:
    """torchtune's 70B with parameters, gradients and states on the host of an RTX 4090 server: 526 GiB while it trains
    of the usual 512, and a copy of the model on each rank before (pytorch/torchtune#1871 ran out of 500 GB)."""
    path = tmp_path / "job.yaml"
    text = TORCHTUNE.replace("llama2_13b", "llama2_70b").replace("_size: 4", "_size: 1").replace("false", "true")
    path.write_text(text + "fsdp_cpu_offload: true\n")
    job = read(path, "torchtune")
    made = predicted(job, "1x8xrtx-4090")
    before = loading(made)
    assert made.fits and host_short(made).startswith("host ")
    assert host_memory(made).bytes == pytest.approx(8 * 70e9, rel=0.05)  # parameters, gradients and two states in bf16
    assert before.host_bytes == pytest.approx(8 * 2 * 69e9, rel=0.02) and before.how.startswith("a copy of the model")
    assert not host_short(predict(job.graph(), more("1x8xrtx-4090"), job.plan, job.workload, job.stack))


def more(on: str) -> Cluster:
    return with_host_memory(parse_cluster(on), 2 * 2**40)


def test_a_quantised_base_peaks_while_it_is_loaded(tmp_path: Path) -> None:
    """A base in four bits under FSDP with parameters on the host: a rank's shard is on its device before it moves."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "base_model: meta-llama/Llama-2-70b-hf\nload_in_4bit: true\nadapter: qlora\nlora_r: 32\n"
        "lora_target_linear: true\nsequence_len: 512\nmicro_batch_size: 1\nbf16: auto\ngradient_checkpointing: true\n"
        "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true, fsdp_cpu_ram_efficient_loading: true}"
    )
    job = programs.find("axolotl").read(path, ReadContext(devices=2))
    made = predicted(job, "1x2xrtx-3090")
    before = loading(made)
    assert made.tightest.peak_bytes < 4 * 2**30 < 14e9 < before.device_bytes < 24e9
    assert before.host_bytes < 40e9 and "one rank" in before.how
    assert any(line.startswith("while it loads") for line in prediction_text(made))


yaml = pytest.importorskip("yaml", reason="PyYAML, the oracle, comes with the test extra")

SHARDED = """model_name_or_path: meta-llama/Llama-3.2-1B
stage: sft
finetuning_type: full
per_device_train_batch_size: 1
cutoff_len: 1024
bf16: true
output_dir: out
"""
OWN = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_param": None}}


@pytest.mark.parametrize(
    "said",
    [
        "examples/deepspeed/ds_z2_config.json",
        "own.json",
        json.dumps(OWN),
        "\n  gradient_clipping: 0.5\n  zero_optimization:\n    stage: 2  # mine\n    overlap_comm: true\n",
    ],
    ids=["shipped", "file", "inline", "table"],
)
def test_a_deepspeed_configuration_is_changed_and_keeps_what_is_the_users(tmp_path: Path, said: str) -> None:
    (tmp_path / "own.json").write_text(json.dumps({**OWN, "zero_optimization": {"stage": 2, "overlap_comm": True}}))
    path = tmp_path / "job.yaml"
    path.write_text(f"{SHARDED}deepspeed: {said}\n")
    job = read(path, "llama-factory")
    assert job.plan is not None and job.terms is not None
    optimizer = replace(job.plan.optimizer, zero=3, offload=Offload(accumulate="host"))
    after = replace(job.plan, optimizer=optimizer, overlap=replace(job.plan.overlap, bucket_bytes=None))
    assert job.workload is not None
    settings = job.terms.settings(("zero",), Change(before=job.plan, after=after, workload=job.workload))
    assert settings is not None
    text = edited(path.read_text(), ".yaml", job.terms.in_file(settings))
    wanted = yaml.safe_load(text)["deepspeed"]
    assert wanted["zero_optimization"]["stage"] == 3
    assert wanted["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    if "ds_z2" not in said:
        assert wanted["gradient_clipping"] == 0.5 and wanted["zero_optimization"]["overlap_comm"] is True
    assert "offload_param" not in wanted["zero_optimization"]
    path.write_text(text)
    again = read(path, "llama-factory").plan
    assert again is not None and again.optimizer.zero == 3 and again.optimizer.offload is not None


def test_a_trainers_words_are_read_before_deepspeeds() -> None:
    program = "import gnomon.formats.axolotl, gnomon.formats.deepspeed"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
