"""Arguments written beside a script, templates, lists of the autotuner of DeepSpeed, sizes of forks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.errors import GnomonError, InputError
from gnomon.formats import programs
from gnomon.formats.deepspeed.read import read_deepspeed
from gnomon.formats.given import ReadContext
from gnomon.formats.nanotron.read import read_nanotron
from gnomon.formats.torchtitan.read import read_torchtitan
from gnomon.formats.usage import written_arguments
from gnomon.models.llama import LlamaConfig

SCRIPT = """
if [ "$1" = "7B" ]; then L=32; H=4096; fi
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $L --hidden-size $H --num-attention-heads 32 --bf16 \\
  --seq-length $3 --max-position-embeddings $3 --micro-batch-size $2 --global-batch-size 64 --lr 1e-4
"""


@pytest.mark.parametrize(
    ("comment", "readme", "said"),
    [
        ("", "Run it:\n\n    bash train.sh 7B 2 2048\n", "README.md, line 3"),
        ("# e.g. bash ./train.sh 7B 2 2048", "    bash train.sh 13B 1 4096", "its comment on line 1"),
        ("# usage: bash train.sh <size> <batch> <len>", "`sh scripts/train.sh 7B 2 2048`", "README.md, line 1"),
    ],
)
def test_arguments_that_are_written_down_are_taken_and_said(
    comment: str, readme: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(readme)
    (script := tmp_path / "train.sh").write_text(comment + SCRIPT)
    job = programs.find("megatron").read(script, ReadContext(devices=8))
    assert (job.workload.seq_len, job.plan.schedule.micro_batch_size) == (2048, 2)
    assert any("7B 2 2048" in note and said in note for note in job.notes)
    own = programs.find("megatron").read(script, ReadContext(devices=8, settings={"args": "7B 4 512"}))
    assert (own.workload.seq_len, own.plan.schedule.micro_batch_size) == (512, 4)


@pytest.mark.parametrize(
    "readme",
    [
        "bash train.sh $SIZE 1 4096",
        "bash train.sh 7B ... 4096",
        "use train.sh for it",
        "bash train.sh",
        "train.sh [GPUS]",
    ],
)
def test_what_only_names_a_place_is_no_argument(readme: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(readme)
    assert written_arguments(SCRIPT, tmp_path / "train.sh") is None


def test_a_template_is_said_with_its_line(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text("base_model: a/b\nsequence_len: {{ length }}\n")
    assert "a template: {{ length }}" in programs.broken(path) and "job.yaml:2" in programs.broken(path)
    (path := tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": {{ stage }} }}')
    assert "a template: {{ stage }}" in programs.broken(path)
    (path := tmp_path / "chat.yaml").write_text("chat_template_jinja: '{{ messages }}'\nsequence_len: 8\n")
    assert programs.broken(path) == ""


@pytest.mark.parametrize(("key", "first"), [("train_micro_batch_size_per_gpu", 2), ("zero_optimization.stage", 1)])
def test_lists_of_the_autotuner_are_jobs_of_their_own(key: str, first: int) -> None:
    values = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "autotuning": {"enabled": True}}
    section, _, name = key.rpartition(".")
    table = values[section] if section else values
    assert isinstance(table, dict)
    table[name] = [first, 3]
    with pytest.raises(InputError, match=rf"autotuner tries each .*--set {key}={first}"):
        read_deepspeed(json.dumps(values), devices=8, model="llama-2-7b", seq_len=2048)
    read = read_deepspeed(
        json.dumps(values), context=ReadContext(devices=8, model="llama-2-7b", seq_len=2048, settings={key: str(first)})
    )
    assert read.plan.optimizer.zero == (first if section else 2)


FORK = """
[model]
name = "ours"
flavor = "3B"
dim = 3072
n_layers = 28
n_heads = 24
n_kv_heads = 8
multiple_of = 1024
ffn_dim_multiplier = 1.0
vocab_size = 128256
[training]
local_batch_size = 1
seq_len = 2048
[optimizer]
name = "AdamW"
early_step_in_backward = true
"""


def test_a_fork_of_torchtitan_by_its_dims() -> None:
    """llama3's rule by hand: 8/3 x 3072 = 8192, a multiple of 1024."""
    job = read_torchtitan(FORK, devices=8)
    assert isinstance(job.model, LlamaConfig)
    assert (job.model.ffn_size, job.model.num_kv_heads, job.model.head_dim) == (8192, 8, 128)
    assert any("early_step_in_backward" in str(listed) for listed in job.unexpressed)
    with pytest.raises(GnomonError, match="--set model.dim=4096"):
        read_torchtitan(FORK.replace("\ndim = 3072", ""), devices=8)


def test_nanotrons_feed_forward_is_gated_whatever_its_activation() -> None:
    text = """
model:
  model_config: {hidden_act: gelu, hidden_size: 512, intermediate_size: 1024, num_attention_heads: 8,
    num_hidden_layers: 4, num_key_value_heads: 8, vocab_size: 1000, is_llama_config: true}
parallelism: {dp: 2, pp: 1, tp: 1, pp_engine: 1f1b}
optimizer: {zero_stage: 0, optimizer_factory: {name: adamW}}
tokens: {micro_batch_size: 1, sequence_length: 128, batch_accumulation_per_replica: 1}
"""
    model = read_nanotron(text).model
    assert isinstance(model, LlamaConfig) and model.activation == "gelu"
