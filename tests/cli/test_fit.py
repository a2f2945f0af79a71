"""`gnomon fit` on the command line and from Python: a model, a plan file, a job file; the plan that it writes fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gnomon
from gnomon.cli import main
from gnomon.plans import Mesh, Plan, PlanFile, Schedule, Workload, load_plan_file

FIXTURES = Path(__file__).parents[1] / "formats" / "fixtures"
ASKED = ["llama-3.2-1b", "--on", "1x2xa100-sxm-40gb", "--global-batch", "16", "--seq-len", "2048"]
LIMITED = [*ASKED, "--micro-batch-size", "4", "--memory", "26GiB"]


def test_recompute_by_tensor_costs_less_than_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed: its solver chooses")
    asked = ["fit", "llama-3.2-1b", "--on", "1xa100-sxm-40gb", "--global-batch", "2", "--micro-batch-size", "2"]
    asked += ["--seq-len", "8192", "--json"]
    path, steps = tmp_path / "plan.toml", []
    for more in ([], ["--sac-ilp", "-o", str(path)]):
        assert main([*asked, *more]) == 0
        rungs = json.loads(capsys.readouterr().out)["combined"]
        steps.append(min(rung["step_s"] for rung in rungs))
    assert any("recompute by tensor" in rung["changes"] for rung in rungs)
    assert steps[1] < 0.97 * steps[0]
    assert main(["predict", str(path), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["step_s"] == pytest.approx(steps[1])
    assert predicted["memory"][0]["fits"]
    assert main(["fit", *LIMITED, "--stack", "torchtitan", "--sac-ilp"]) == 2
    assert "--sac-ilp chooses tensor by tensor" in capsys.readouterr().err


def test_the_chosen_plan_is_written_and_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    assert main(["fit", *LIMITED, "-o", str(path)]) == 0
    text = capsys.readouterr().out
    for part in (
        "too much",
        "one change",
        "what does not help",
        "what fits, fewest changes first",
        "* fastest",
        "another job",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
    file = load_plan_file(path)
    assert isinstance(file, PlanFile) and file.model == "llama-3.2-1b" and file.runners_up
    assert main(["predict", "--plan", str(path), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["memory"][0]["peak_bytes"] <= 26 * 2**30
    assert main(["fit", *LIMITED, "--json", "--choose", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    fastest = min(document["combined"], key=lambda rung: rung["step_s"])
    assert fastest["step_s"] == predicted["step_s"] and document["chosen"] == 0 and not document["fits"]
    assert main(["fit", "--plan", str(path), "--memory", "26GiB"]) == 0
    assert "to spare" in capsys.readouterr().out


def test_a_job_file_that_ran_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job, on = str(FIXTURES / "accelerate" / "fsdp1.yaml"), "4x1xa100-sxm-40gb"
    given = ["fit", "--from", "accelerate", job, "--on", on]
    assert main([*given, "--model", "llama-3.2-1b", "--micro-batch-size", "16", "--seq-len", "4096", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "gnomon.fit/1" and document["alone"] and not document["fits"] and document["combined"]
    assert main([*given, "-o", str(tmp_path / "plan.toml")]) == 2
    assert "--model NAME" in capsys.readouterr().err


def test_largest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *LIMITED[:-2], "--memory", "30GiB", "--largest", "batch", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "gnomon.fit.largest/1" and document["sizes"][0]["changes"] == []
    assert main(["fit", *ASKED, "--largest", "batch", "-o", "x.toml"]) == 2
    assert "leave out -o" in capsys.readouterr().err


def test_in_python() -> None:
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=4))
    work = Workload(global_batch_size=16, seq_len=2048)
    made = gnomon.fit("llama-3.2-1b", "1x2xa100-sxm-40gb", plan, work, memory_bytes=30 * 2**30)
    assert made.combined and made.fastest is not None and made.fastest.fits
    with pytest.raises(gnomon.errors.InputError, match="memory_bytes"):
        gnomon.fit("llama-3.2-1b", "1x2xa100-sxm-40gb", plan, work, memory_bytes=0)


LAUNCH = """MBS=8
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 \\
    --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm \\
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \\
    --tokenizer-type NullTokenizer --vocab-size 32000 --attention-dropout 0 --hidden-dropout 0 \\
    --tensor-model-parallel-size 2 --micro-batch-size $MBS --global-batch-size 64 --bf16
"""
AXOLOTL = """base_model: meta-llama/Llama-2-7b-hf
deepspeed: deepspeed_configs/zero1.json  # as shipped
sequence_len: 4096
sample_packing: true
micro_batch_size: 8
gradient_accumulation_steps: 1
bf16: true
optimizer: adamw_torch
"""


@pytest.mark.parametrize(("name", "text"), [("job.sh", LAUNCH), ("job.yaml", AXOLOTL)])
def test_a_job_file_is_written_with_what_makes_it_fit(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, fits = tmp_path / name, tmp_path / f"fits{Path(name).suffix}"
    job.write_text(text)
    on = ["--on", "8xa100-sxm-80gb"]
    assert main(["predict", str(job), *on]) == 1
    assert main(["fit", str(job), *on, "--to", str(fits)]) == 0
    assert f"written to {fits}" in capsys.readouterr().out
    assert job.read_text() == text
    assert main(["predict", str(fits), *on]) == 0
    changed = [line for line in fits.read_text().splitlines() if line not in text.splitlines()]
    assert 1 <= len(changed) <= 6
    assert main(["fit", str(fits), *on, "--to", str(tmp_path / "again")]) == 2
    assert "the job fits as it is" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_a_change_in_code_is_not_written_as_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, fits = tmp_path / "ds.json", tmp_path / "fits.json"
    job.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    )
    asked = ["fit", str(job), "--on", "8xa100-sxm-40gb", "--model", "llama-2-13b", "--to", str(fits)]
    assert main(asked) == 2
    assert "in the script: model.gradient_checkpointing_enable()" in capsys.readouterr().err and not fits.exists()
    assert main(["fit", "llama-tiny", "--on", "1xa100-sxm-80gb", "--to", str(fits)]) == 2
    assert "--to writes a job file" in capsys.readouterr().err


def test_a_job_file_s_model_is_named_where_the_catalogue_has_it(tmp_path: Path) -> None:
    """Of a launch script it is found by its sizes, of adapters by their base."""
    script = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 32 "
        "--ffn-hidden-size 8192 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm "
        "--disable-bias-linear --position-embedding-type rope --vocab-size 128256 --tokenizer-type NullTokenizer "
        "--make-vocab-size-divisible-by 128 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
        "--global-batch-size 8 --bf16 --use-distributed-optimizer"
    )
    tuned = "model_name_or_path: Qwen/Qwen2.5-1.5B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 1024\nbf16: true\n"
    for name, text, known in (("a.sh", script, "llama-3.2-1b"), ("b.yaml", tuned, "qwen2.5-1.5b+lora8")):
        (path := tmp_path / name).write_text(text)
        assert main(["fit", str(path), "--on", "1x8xh100-sxm", "-o", str(out := tmp_path / f"{name}.toml")]) == 0
        assert load_plan_file(out).model == known


def test_zero_3_takes_the_place_of_a_file_of_another_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "job.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\nfinetuning_type: full\ncutoff_len: 1024\n"
        "per_device_train_batch_size: 1\nbf16: true\ndeepspeed: examples/deepspeed/ds_z2_config.json\n"
    )
    assert main(["predict", str(path), "--on", "1x2xrtx-4090", "--zero", "3"]) in (0, 1)
    assert "; ZeRO 3;" in capsys.readouterr().out
