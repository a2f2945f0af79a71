"""Levers that trainers have keys for: checkpoints on the host, sequences divided over ranks, room of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.request import read_request
from gnomon.errors import InputError
from gnomon.plans import INPUTS_AWAY, RouterLoad
from gnomon.prediction import Prediction, predict
from gnomon.search.fit.advice import advice

TRL = """
model_name_or_path: Qwen/Qwen2.5-7B
max_length: 16384
packing: true
per_device_train_batch_size: 1
torch_dtype: bfloat16
use_peft: true
lora_target_modules: all-linear
use_liger_kernel: true
gradient_checkpointing: true
"""

AXOLOTL = """
base_model: Qwen/Qwen2.5-7B
sequence_len: 16384
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 1
bf16: true
adapter: lora
lora_target_linear: true
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
gradient_checkpointing: true
"""

FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
finetuning_type: lora
cutoff_len: 16384
packing: true
per_device_train_batch_size: 1
bf16: true
enable_liger_kernel: true
"""

TUNE = """
model: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_7b_base, lora_attn_modules: [q_proj, v_proj]}
tokenizer: {max_seq_len: 16384}
dataset: {packed: True}
batch_size: 1
optimizer: {_component_: torch.optim.AdamW}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
enable_activation_checkpointing: True
dtype: bf16
"""


def made(path: Path, text: str, *settings: str, on: str = "1x1xa100-sxm-80gb") -> Prediction:
    path.write_text(text)
    source = ("trl", str(path)) if text is TRL else None
    options = TrainingOptions(model=None if source else str(path), source=source, on=on, settings=settings)
    asked = read_request(options)
    return predict(asked.graph, asked.cluster, asked.plan, asked.workload, asked.stack)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (TRL, "activation_offloading=true"),
        (AXOLOTL, "activation_offloading=true"),
        (AXOLOTL, "gradient_checkpointing=offload"),
        (FACTORY, "use_unsloth_gc=true"),
        (TUNE, "enable_activation_offloading=true"),
    ],
)
def test_checkpoints_on_the_host(text: str, key: str, tmp_path: Path) -> None:
    """A layer keeps what it reads: 16,384 tokens x 3,584 x 2 bytes, in each of 28 layers but one or two that are on
    their way."""
    one = 16384 * 3584 * 2
    before, after = made(tmp_path / "job.yaml", text), made(tmp_path / "job.yaml", text, key)
    assert after.plan.saved.rules == (INPUTS_AWAY,) and before.plan.saved.rules == ()
    kept = before.tightest.by_class["activations"] - after.tightest.by_class["activations"]
    assert 26 * one <= kept <= 28 * one
    assert before.step_s <= after.step_s < 1.2 * before.step_s  # the copies run beside


def test_the_way_out_is_in_the_file_s_words(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(TRL)
    asked = read_request(TrainingOptions(source=("trl", str(path)), on="1x1xrtx-4090-server", seq_len=20480))
    before = predict(asked.graph, asked.cluster, asked.plan, asked.workload, asked.stack)
    ways = advice(before, terms=asked.terms).ways
    assert any("activation_offloading: true" in line for way in ways for line in way.lines)


@pytest.mark.parametrize(
    ("model", "names", "same"),
    [
        ("meta-llama/Llama-3.1-8B", "qkv_proj,dense", "q_proj,k_proj,v_proj,o_proj"),
        ("Qwen/Qwen2.5-7B", "c_attn,w1,w2", "q_proj,k_proj,v_proj,gate_proj,down_proj"),
        ("EleutherAI/pythia-1.4b", "query_key_value", "query_key_value"),
    ],
)
def test_names_of_linears_in_other_types(model: str, names: str, same: str, tmp_path: Path) -> None:
    text = FACTORY.replace("Qwen/Qwen2.5-7B", model)
    trained = [
        made(tmp_path / "job.yaml", f"{text}lora_target: {targets}\n").pricing.graph.num_parameters()
        for targets in (names, same)
    ]
    assert trained[0] == trained[1] > 0


WHOLE = """
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: full
cutoff_len: 2048
packing: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


def test_where_nothing_fits_adapters_are_another_job_in_the_file_s_words(tmp_path: Path) -> None:
    """8B trained whole takes 16 bytes a parameter on one device of 48 GB; LoRA's frozen weights take 2, QLoRA's half
    one; beside two trained layers the others have no gradients. What is proposed is what the file is read as once it
    says so."""
    (path := tmp_path / "job.yaml").write_text(WHOLE)
    asked = read_request(TrainingOptions(model=str(path), on="1xl40-48gb"))
    found = advice(predict(asked.graph, asked.cluster, asked.plan, asked.workload, asked.stack), terms=asked.terms)
    assert found.ways == () and [len(other.lines) for other in found.others] == [3, 4, 2]
    for other in found.others:
        again = made(path, WHOLE, *(line.replace(": ", "=") for line in other.lines), on="1xl40-48gb")
        assert again.tightest.peak_bytes == pytest.approx(other.peak_bytes, rel=0.01)
        assert again.step_s == pytest.approx(other.step_s, rel=0.01)


@pytest.mark.parametrize(
    ("text", "words", "context"),
    [
        (TRL, ("parallelism_config.sp_size=4",), "ulysses"),
        (TRL, ("parallelism_config.cp_size=4",), "all_gather"),
        (TRL, ("parallelism_config.sp_size=4", "deepspeed=zero3"), "ulysses"),
        (AXOLOTL, ("context_parallel_size=4",), "ring"),
    ],
)
def test_sequences_are_divided_over_ranks(text: str, words: tuple[str, ...], context: str, tmp_path: Path) -> None:
    path, on = tmp_path / "job.yaml", "1x8xa100-sxm-80gb"
    whole, divided = made(path, text, *words[1:], on=on), made(path, text, *words, on=on)
    mesh = divided.plan.mesh
    assert (mesh.cp, mesh.dp_shard, divided.plan.layout.context) == (4, 2, context)
    assert divided.plan.optimizer.zero == whole.plan.optimizer.zero
    assert divided.tightest.by_class["activations"] == pytest.approx(
        whole.tightest.by_class["activations"] / 4, rel=0.02
    )


def test_swift_divides_sequences(tmp_path: Path) -> None:
    command = (
        "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --max_length 32768 --packing true --torch_dtype bfloat16 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --tuner_type full "
        "--sequence_parallel_size 4 --deepspeed zero3"
    )
    asked = made(tmp_path / "job.sh", command, on="1x8xa100-sxm-80gb")
    assert (asked.plan.mesh.cp, asked.plan.mesh.dp_shard, asked.plan.layout.context) == (4, 2, "ulysses")
    assert asked.workload.batch_size == 2 * 2


def test_room_of_experts_in_megatron(tmp_path: Path) -> None:
    command = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --bf16 "
        "--vocab-size 32000 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --tokenizer-type NullTokenizer "
        "--make-vocab-size-divisible-by 128 "
    )
    limit = "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity "
    free = made(tmp_path / "a.sh", command, on="1x8xa100-sxm-80gb")
    full = made(tmp_path / "b.sh", command + limit, on="1x8xa100-sxm-80gb")
    assert (free.workload.router, full.workload.router) == (RouterLoad(), RouterLoad(capacity=1.5, padded=True))
    assert full.step_s > free.step_s


def test_trl_s_loss_with_the_head_has_no_logits(tmp_path: Path) -> None:
    """In fp32 whole logits are 16,384 x 152,064 x 4 bytes, and an unfused loss holds several of them."""
    plain = TRL.replace("use_liger_kernel: true\n", "")
    peaks = []
    for kind in ("nll", "chunked_nll"):
        (path := tmp_path / f"{kind}.yaml").write_text(f"{plain}loss_type: {kind}\n")
        asked = read_request(TrainingOptions(source=("trl", str(path)), on="1x1xa100-sxm-80gb"))
        made = predict(asked.graph, asked.cluster, asked.plan, asked.workload, asked.stack)
        peaks.append(made.tightest.peak_bytes)
        assert any("part by part" in note for note in asked.notes) == (kind == "nll")
    assert peaks[0] - peaks[1] > 2 * 16384 * 152064 * 4


def test_a_key_that_is_given_twice_counts_as_its_program_takes_it(tmp_path: Path) -> None:
    """axolotl and TRL read YAML by PyYAML, where the last one counts; LLaMA-Factory by OmegaConf, which refuses it."""
    for text in (AXOLOTL, TRL):
        (path := tmp_path / "job.yaml").write_text(
            f"{text}gradient_accumulation_steps: 2\ngradient_accumulation_steps: 4\n"
        )
        source = ("trl", str(path)) if text is TRL else None
        asked = read_request(TrainingOptions(model=None if source else str(path), source=source, on="1xa100-sxm-80gb"))
        assert asked.workload.batch_size == 4
        assert any("gradient_accumulation_steps is given more than once" in line for line in asked.assumed)
    with pytest.raises(InputError, match="'bf16' is given twice"):
        made(tmp_path / "job.yaml", f"{FACTORY}bf16: false\n")
