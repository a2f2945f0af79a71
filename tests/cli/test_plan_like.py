"""`gnomon plan --like`: what it offers is what the changed file says, and what the program cannot do is not offered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main

MEGATRON = """#!/bin/bash
TP=8
ARGS=(
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16
    --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 32000
    --tensor-model-parallel-size $TP  # one node
    --micro-batch-size 1
    --global-batch-size 64
    --bf16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --attention-dropout 0 --hidden-dropout 0
)
torchrun --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}"
"""
FACTORY = """# my adapter
model_name_or_path: meta-llama/Llama-2-7b-hf
stage: sft
finetuning_type: full
template: llama2
deepspeed: examples/deepspeed/ds_z3_config.json
cutoff_len: 2048
packing: true
per_device_train_batch_size: 1  # to be safe
gradient_accumulation_steps: 8
bf16: true
pure_bf16: true
learning_rate: 1.0e-5
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
global_batch_size = 16
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # one node
[activation_checkpoint]
mode = "full"
"""
JOBS = {"job.sh": MEGATRON, "job.yaml": FACTORY, "job.toml": TITAN}
DEEPSPEED = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("name", JOBS)
def test_the_changed_file_is_read_as_it_was_predicted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, faster = tmp_path / name, tmp_path / f"faster{Path(name).suffix}"
    job.write_text(JOBS[name])
    on = ["--on", "8xh100-sxm"]
    assert main(["plan", "--like", str(job), *on, "--budget", "4s", "--json", "--to", str(faster)]) == 0
    answer = json.loads(capsys.readouterr().out)
    before, after = answer["step_s"]
    assert after < 0.9 * before and answer["text"] == faster.read_text()
    for path, step in ((job, before), (faster, after)):
        assert main(["predict", str(path), *on, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_s"] == step
    changed = [line for line in answer["diff"] if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")]
    assert len(changed) <= 12 and faster.read_text().count("#") == JOBS[name].count("#")
    assert any(one["alone"] and one["alone"]["step_s"] < before for one in answer["changes"])


def test_what_is_fastest_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(FACTORY)
    assert main(["plan", "--like", str(job), "--on", "8xh100-sxm", "--to", str(job)]) == 0
    text = job.read_text()
    assert main(["plan", str(job), "--on", "8xh100-sxm"]) == 0
    assert "is faster than the file as it is" in " ".join(capsys.readouterr().out.split())
    assert text != FACTORY


def test_what_is_given_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.sh"
    job.write_text(MEGATRON)
    assert main(["plan", "--like", str(job), "--on", "8xh100-sxm", "--tp", "8", "--forbid", "pp>1", "--no-refine"]) == 0
    text = capsys.readouterr().out
    assert "-TP=8" not in text and "pipeline-model-parallel" not in text and "without --recompute-granularity" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--like", "JOB", "llama-3.1-8b"], "leave MODEL and --from out, and give the network by --model NAME"),
        (["--like", "JOB", "-o", "x.toml"], "-o writes a plan file, and what is planned is a job file: --to FILE"),
        (["--like", "JOB", "--seq-len", "8k"], "--seq-len does not go with a job file, which is planned as it says"),
        (["--like", "JOB", "--pareto"], "--pareto does not go with a job file"),
        (["--like", "JOB", "--price", "2.5"], "--price does not go with a job file"),
        (["--like", "JOB", "--best", "cost"], "--best does not go with a job file"),
        (["--like", "JOB", "--top", "3"], "--top does not go with a job file"),
        (["--like", "JOB", "--try-steps", "9"], "--try-steps does not go with a job file"),
        (["--like", "JOB", "--input-len", "9"], "--input-len does not go with a job file"),
        (["--like", "JOB", "--kv-dtype", "fp8"], "--kv-dtype does not go with a job file"),
        (["--like", "none.sh"], "'none.sh' is no job file here; give its path"),
        (["llama-3.1-8b", "--to", "x.sh"], "--to goes with a job file; give it with --like FILE"),
        (["llama-3.1-8b", "--set", "a=1"], "--set goes with a job file"),
        ([], "no model; give a name"),
    ],
)
def test_what_does_not_go_together(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text(MEGATRON)
    assert main(["plan", *["job.sh" if word == "JOB" else word for word in words], "--on", "8xh100-sxm"]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sh"]


def test_a_job_that_no_change_makes_fit_is_sent_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "ds.json"
    job.write_text(json.dumps(DEEPSPEED))
    assert main(["plan", "--like", str(job), "--on", "1x2xa100-sxm-40gb", "--model", "llama-3.1-70b"]) == 2
    assert "gnomon fit" in capsys.readouterr().err
