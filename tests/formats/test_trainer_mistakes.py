"""Typical mistakes in files and commands of trainers around transformers: one clear line each, with the file's own key;
a name that nobody knows is listed with the nearest, never taken for another in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import GnomonError
from gnomon.formats import programs
from gnomon.formats.given import ReadContext

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
