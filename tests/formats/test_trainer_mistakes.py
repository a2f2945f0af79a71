"""Typical mistakes in files and commands of trainers around transformers: one clear line each, with the file's own key;
a name that nobody knows is listed with the nearest, never taken for another in silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import GnomonError
from gnomon.formats import programs
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.prediction import predict

FACTORY = {
    "model_name_or_path": "meta-llama/Llama-2-7b-hf",
    "stage": "sft",
    "finetuning_type": "full",
    "template": "x",
    "cutoff_len": "2048",
    "per_device_train_batch_size": "1",
    "bf16": "true",
}
AXOLOTL = {
    "base_model": "meta-llama/Llama-2-7b-hf",
    "sequence_len": "2048",
    "micro_batch_size": "1",
    "gradient_accumulation_steps": "1",
    "optimizer": "adamw_torch",
    "bf16": "auto",
}
TUNE = {
    "model": "{_component_: torchtune.models.llama2.llama2_7b}",
    "tokenizer": "{max_seq_len: 2048}",
    "batch_size": "1",
    "optimizer": "{_component_: torch.optim.AdamW}",
    "dtype": "bf16",
}
RUN = (
    "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta-llama/Llama-2-7b-hf --block_size 2048 "
    "--per_device_train_batch_size 1 --output_dir o"
)
TRL = {
    "model_name_or_path": "meta-llama/Llama-2-7b-hf",
    "max_length": "2048",
    "per_device_train_batch_size": "1",
    "bf16": "true",
}
COLOSSAL = "colossalai run --nproc_per_node 8 benchmark.py -c 7b -p 3d -b 8 -g"
SWIFT = "NPROC_PER_NODE=8 swift sft --model meta-llama/Llama-2-7b-hf --max_length 2048 --dataset d"

FILES = (
    (FACTORY, {"cutoff_len": "2k"}, "cutoff_len"),
    (FACTORY, {"cutoff_len": "0"}, "cutoff_len"),
    (FACTORY, {"cutoff_len": "-1"}, "cutoff_len"),
    (FACTORY, {"per_device_train_batch_size": "0"}, "per_device_train_batch_size"),
    (FACTORY, {"per_device_train_batch_size": "two"}, "per_device_train_batch_size"),
    (FACTORY, {"gradient_accumulation_steps": "1.5"}, "gradient_accumulation_steps"),
    (FACTORY, {"finetuning_type": "ful"}, "did you mean 'full'"),
    (FACTORY, {"finetuning_type": "lora", "lora_rank": "0"}, "lora_rank"),
    (FACTORY, {"deepspeed": "nothing.json"}, "deepspeed"),
    (FACTORY, {"deepspeed": "ds_z5_config.json"}, "deepspeed"),
    (FACTORY, {"quantization_bit": "4"}, "quantization_bit"),
    (FACTORY, {"fp16": "true"}, "fp16"),
    (FACTORY, {"bf16": "maybe"}, "bf16"),
    (FACTORY, {"packing": "sometimes"}, "packing"),
    (AXOLOTL, {"sequence_len": "long"}, "sequence_len"),
    (AXOLOTL, {"micro_batch_size": "0"}, "micro_batch_size"),
    (AXOLOTL, {"adapter": "lora", "lora_r": "-8"}, "lora_r"),
    (AXOLOTL, {"adapter": "loraa"}, "did you mean 'lora'"),
    (AXOLOTL, {"tensor_parallel_size": "3"}, "8 devices are not a multiple"),
    (AXOLOTL, {"context_parallel_size": "16"}, "8 devices are not a multiple"),
    (AXOLOTL, {"fsdp": "[full_shrd]"}, "did you mean 'full_shard'"),
    (AXOLOTL, {"fsdp_config": "{sharding_strategy: FULL_SHRD}"}, "did you mean 'full_shard'"),
    (AXOLOTL, {"deepspeed": "{zero_optimization: {stage: 4}}"}, "ZeRO has stages 0 to 3"),
    (AXOLOTL, {"experts_implementation": "groupd_mm"}, "experts_implementation"),
    (AXOLOTL, {"gradient_checkpointing": "ture"}, "gradient_checkpointing"),
    (TUNE, {"model": "{_component_: torchtune.models.llama2.lama2_7b}"}, "model._component_"),
    (TUNE, {"dtype": "bf61"}, "dtype"),
    (TUNE, {"batch_size": "${x}"}, "batch_size"),
    (TUNE, {"tensor_parallel_dim": "3"}, "8 devices are not a multiple"),
    (FACTORY, {"stage": "sfft"}, "did you mean 'sft'"),
    (FACTORY, {"finetuning_type": "lora", "lora_target": "q_prj"}, "did you mean 'q_proj'"),
    (FACTORY, {"flash_attn": "fa9"}, "flash_attn"),
    (FACTORY, {"bf16": "1.5"}, "bf16"),
    (FACTORY, {"fsdp": "full_shard", "deepspeed": "ds_z3_config.json"}, "leave one out"),
    (AXOLOTL, {"adapter": "lora", "load_in_4bit": "true", "load_in_8bit": "true"}, "load_in_8bit"),
    (AXOLOTL, {"adapter": "qlora", "load_in_4bit": "false"}, "load_in_4bit"),
    (AXOLOTL, {"load_in_4bit": "true"}, "trained by adapters only"),
    (AXOLOTL, {"sample_packing": "on-ish"}, "sample_packing"),
    (TRL, {"loss_type": "chunk_nll"}, "did you mean 'chunked_nll'"),
    (TRL, {"fsdp": "[full_shard]", "fsdp_config": "{fsdp_version: 3}"}, "FSDP has versions 1 and 2"),
    (TRL, {"torch_dtype": "float8"}, "torch_dtype"),
    (FACTORY, {"gradient_acumulation_steps": "4"}, "did you mean 'gradient_accumulation_steps'"),
    (FACTORY, {"per_device_train_batch_size": "{a: 1}"}, "got a mapping with 'a'"),
    (FACTORY, {"finetuning_type": "lora", "quantization_bit": "3"}, "bitsandbytes stores 4 or 8 bits"),
    (FACTORY, {"model_name_or_path": "null"}, "model_name_or_path"),
    (FACTORY, {"use_unsloth": "true", "deepspeed": "ds_z3_config.json"}, "use_unsloth"),
    (AXOLOTL, {"fsdp": "[full_shard]", "deepspeed": "deepspeed_configs/zero3.json"}, "leave one out"),
    (
        AXOLOTL,
        {"fsdp": "[full_shard]", "fsdp_config": "{fsdp_auto_wrap_policy: TRANSFORMERS}"},
        "TRANSFORMER_BASED_WRAP",
    ),
    (
        AXOLOTL,
        {"fsdp": "[full_shard]", "fsdp_config": "{fsdp_transformer_layer_cls_to_wrap: MistralDecoderLayer}"},
        "it has LlamaDecoderLayer",
    ),
    (AXOLOTL, {"rl": "dppo"}, "did you mean 'dpo'"),
    (AXOLOTL, {"rl": "dpo", "sample_packing": "true"}, "sample_packing"),
    (AXOLOTL, {"batch_size": "8"}, "leave one of both out"),
    (
        AXOLOTL,
        {"batch_size": "9", "micro_batch_size": "2", "gradient_accumulation_steps": "null"},
        "micro_batch_size = 2",
    ),
    (AXOLOTL, {"plugins": "[axolotl.integrations.liger.LigerPlugn]"}, "did you mean 'axolotl.integrations.liger."),
    (AXOLOTL, {"activation_offloading": "true"}, "gradient_checkpointing"),
    (AXOLOTL, {"tensor_parallel_size": "2", "optimizer": "adamw_8bit"}, "tensor_parallel_size"),
    (TRL, {"max_seq_length": "4096"}, "keep one of both"),
    (TRL, {"num_generations": "7"}, "num_generations"),
    (TUNE, {"enable_activation_offloading": "True"}, "enable_activation_checkpointing"),
    (TUNE, {"tokenizer": "{max_seq_len: -5}"}, "tokenizer.max_seq_len"),
    (TUNE, {"optimizer": "{_component_: torch.optim.AdamWW}"}, "did you mean 'AdamW'"),
    (TUNE, {"loss": "{_component_: torchtune.modules.loss.CEWithChunkedOutputLos}"}, "CEWithChunkedOutputLoss"),
)
COMMANDS = (
    (RUN + " --fsdp full_shart", "did you mean 'full_shard'"),
    (RUN + " --per_device_train_batch_size", "per_device_train_batch_size"),
    (RUN + " --bf16 maybe", "bf16"),
    (RUN + " --bf16 --fp16", "fp16"),
    (RUN + " --gradient_accumulation_steps=x", "gradient_accumulation_steps"),
    (RUN + " --deepspeed missing.json", "deepspeed"),
    (RUN.replace("2048", "$LEN"), "block_size takes 'LEN'"),
    (RUN + " --optim", "a name of an optimizer"),
    (COLOSSAL + " --tp 3", "devices = 8 is not divisible"),
    (COLOSSAL.replace("3d", "3dd"), "did you mean '3d'"),
    (COLOSSAL + " --zero 3", "--plugin gemini divides parameters"),
    (COLOSSAL + " --mbs 3 --pp 2", "batch_size = 8 is not divisible by mbs = 3"),
    (SWIFT + " --deepspeed zero7", "deepspeed"),
    (SWIFT + " --torch_dtype bfloat", "torch_dtype"),
    (SWIFT + " --train_type fulll", "did you mean 'full'"),
    (SWIFT + " --train_type lora --lora_rank abc", "lora_rank"),
    (SWIFT + " --train_type full --gradient_accumulation_steps $(cat steps)", "gradient_accumulation_steps"),
)


@pytest.mark.parametrize(("file", "changes", "said"), FILES)
def test_a_mistake_in_a_file_is_one_line(
    file: dict[str, str], changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    refused(tmp_path / "job.yaml", "".join(f"{key}: {value}\n" for key, value in (file | changes).items()), said)


@pytest.mark.parametrize(("command", "said"), COMMANDS)
def test_a_mistake_in_a_command_is_one_line(command: str, said: str, tmp_path: Path) -> None:
    refused(tmp_path / "job.sh", command + "\n", said)


def refused(path: Path, text: str, said: str) -> None:
    path.write_text(text)
    kind = programs.recognised(path)
    assert kind is not None
    with pytest.raises(GnomonError) as error:
        kind.read(path, ReadContext(devices=8))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_no_yaml_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (
        ("a: 1\na: 2\n", "'a' is given twice"),
        ("a: 1\n  b: 2\n", "job.yaml:"),
        ("\tx: 1\n", "job.yaml:"),
    ):
        (tmp_path / "job.yaml").write_text(text)
        assert main(["predict", str(tmp_path / "job.yaml"), "--on", "1xh100-sxm"]) == 2
        assert said in capsys.readouterr().err


def test_an_optimizer_that_nobody_knows_is_listed_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(RUN + " --optim adamw_tourch\n")
    kind = programs.recognised(path)
    assert kind is not None
    listed = [str(one) for one in kind.read(path, ReadContext(devices=8)).unexpressed]
    assert any("adamw_tourch" in one and "did you mean 'adamw_torch'" in one for one in listed)


def read(path: Path, file: dict[str, str], **changes: str) -> Job:
    path.write_text("".join(f"{key}: {value}\n" for key, value in (file | changes).items()))
    kind = programs.recognised(path)
    assert kind is not None
    return kind.read(path, ReadContext(devices=8))


def test_what_a_switch_or_a_plugin_that_is_not_there_would_turn_on_is_said(tmp_path: Path) -> None:
    for file, key, why in (
        (TRL, "lora_r", "use_peft"),
        (FACTORY, "lora_rank", "trains no adapters"),
        (AXOLOTL, "liger_fused_linear_cross_entropy", "LigerPlugin"),
        (AXOLOTL, "cut_cross_entropy", "CutCrossEntropyPlugin"),
    ):
        job = read(tmp_path / "job.yaml", file, **{key: "16" if "lora" in key else "true"})
        assert any(one.field == key and why in one.why for one in job.unexpressed), key
        assert job.stack == read(tmp_path / "job.yaml", file).stack


def test_attention_that_is_asked_to_run_op_by_op_keeps_its_scores(tmp_path: Path) -> None:
    for file, key, word in (
        (TRL, "attn_implementation", "eager"),
        (FACTORY, "flash_attn", "disabled"),
        (AXOLOTL, "eager_attention", "true"),
    ):
        job = read(tmp_path / "job.yaml", file, **{key: word})
        assert job.stack.layers.attention == "unfused_fp32_softmax", key
        assert not any(key in str(said) for said in (*job.notes, *job.unexpressed)), "it is not without effect"
        lines = predict(job.graph(), "1x8xh100-sxm", job.plan, job.workload, job.stack).assumptions
        assert not any("attention runs as" in line or "flash attention" in line for line in lines)
    assert read(tmp_path / "job.yaml", TRL, attn_implementation="sdpa").stack == read(tmp_path / "job.yaml", TRL).stack


def test_modules_that_are_trained_whole_beside_adapters_have_gradients_and_states(tmp_path: Path) -> None:
    """PEFT's modules_to_save: of Llama 2 7B the table and the head are 262 million parameters, of its adapters 8."""
    both = "[embed_tokens, lm_head]"
    for file, key, word, more in (
        (TRL, "lora_modules_to_save", both, {"use_peft": "true", "lora_r": "16"}),
        (FACTORY, "additional_target", "embed_tokens,lm_head", {"finetuning_type": "lora", "lora_rank": "16"}),
        (AXOLOTL, "lora_modules_to_save", both, {"adapter": "lora", "lora_r": "16"}),
    ):
        without = read(tmp_path / "job.yaml", file, **more).graph().num_parameters()
        job = read(tmp_path / "job.yaml", file, **more, **{key: word})
        assert job.graph().num_parameters() - without == 2 * 32000 * 4096, key
        assert job.graph().name.endswith("+whole:embed_tokens,lm_head")
        assert not any(key in str(said) for said in (*job.notes, *job.unexpressed))
        wrong = read(tmp_path / "job.yaml", file, **more, **{key: "[lm_heat]"})
        assert wrong.graph().num_parameters() == without
        assert any(one.field == key and "no module" in one.why for one in wrong.unexpressed)
    job = read(tmp_path / "job.yaml", TRL, lora_modules_to_save=both)
    assert any(one.field == "lora_modules_to_save" and "use_peft" in one.why for one in job.unexpressed)
    layers = {"adapter": "lora", "lora_r": "16", "peft_layers_to_transform": "[0, 1]"}
    job = read(tmp_path / "job.yaml", AXOLOTL, **layers)
    assert any(one.field == "peft_layers_to_transform" for one in job.unexpressed)


def test_a_name_is_proposed_once(tmp_path: Path) -> None:
    """One that the reader asks for and that is a field of TrainingArguments too was proposed twice."""
    job = read(tmp_path / "job.yaml", AXOLOTL, torch_dtypes="bf16", flash_atention="true")
    proposed = [re.findall(r"'(\w+)'", one.why.partition("did you mean")[2]) for one in job.unexpressed]
    assert [len(names) == len(set(names)) for names in proposed if names] == [True, True]


def test_deepspeed_trains_in_the_trainer_s_half_dtype_and_stage(tmp_path: Path) -> None:
    job = read(tmp_path / "job.yaml", TRL, deepspeed="{zero_optimization: {stage: auto}}")
    assert (job.plan.precision.compute, job.plan.optimizer.zero) == ("bf16", 2)
    assert any("stage = auto" in one for one in job.assumed)


def test_axolotl_s_batch_is_a_rank_s(tmp_path: Path) -> None:
    changes = {"batch_size": "8", "micro_batch_size": "2", "gradient_accumulation_steps": "null"}
    job = read(tmp_path / "job.yaml", AXOLOTL, **changes)
    assert (job.plan.schedule.micro_batch_size, job.workload.batch_size) == (2, 64)
