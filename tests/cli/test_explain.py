"""`gnomon explain` of a job of another program: what bounds it, and what the file would have to say instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main

JOB = (
    "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 "
    "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 2 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 1 "
    "--use-distributed-optimizer --use-flash-attn --vocab-size 32000\n"
)


def test_a_job_is_explained_with_its_forgotten_precision_and_its_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp32 on tensor cores and one sequence for two stages, as of NVIDIA/Megatron-LM#1000."""
    path = tmp_path / "job.sh"
    path.write_text(JOB)
    assert main(["explain", str(path), "--on", "1x8xa100-sxm-80gb", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    others = {job["change"].partition(",")[0]: job for job in found["other_jobs"]}
    assert others["in bf16"]["lines"] == ["--bf16"] and others["in bf16"]["step_s"] < found["step_s"] / 3
    assert others["global batch 1 -> 16"]["lines"] == ["--global-batch-size 16"]
    assert main(["explain", str(path), "--on", "1x8xa100-sxm-80gb"]) == 0
    said = capsys.readouterr().out
    assert "waiting for other stages" in said and "in bf16" in said and "--global-batch-size 16" in said


def test_a_model_with_options_is_explained_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "llama-mini", "--on", "1x2xa100-sxm-80gb", "--global-batch", "4"]) == 0
    assert "bounded by" in capsys.readouterr().out
