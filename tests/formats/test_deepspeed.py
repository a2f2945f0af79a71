"""DeepSpeed: batch arithmetic, stages, offload and precision as its runtime/config.py and engine.py have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import InputError
from gnomon.formats.deepspeed.read import read_deepspeed
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.plans import Offload, Saved, check

FILES = Path(__file__).parent / "fixtures/deepspeed"


def job(devices: int = 8, **values: Any) -> Job:
    base = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    return read_deepspeed(
        json.dumps({**base, **values}), devices=devices, seq_len=1024, model="gpt2", context=ReadContext(strict=True)
    )


def test_parameters_on_the_host() -> None:
    """ZeRO-Infinity: at stage 3 only; NVMe is the disk."""
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}, "offload_optimizer": {"device": "cpu"}}
    result = job(zero_optimization=zero, gradient_clipping=0.0)
    assert result.plan.optimizer.offload_parameters and result.plan.optimizer.offload == Offload()
    assert not result.unexpressed
    alone = job(zero_optimization={"stage": 3, "cpu_offload_param": True})
    assert alone.plan.optimizer.offload_parameters and alone.plan.optimizer.offload is None
    below = job(zero_optimization={**zero, "stage": 2}, gradient_clipping=0.0)
    assert not below.plan.optimizer.offload_parameters and any("stage 3 only" in note for note in below.notes)
    far = job(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}})
    assert far.plan.optimizer.offload_parameters and far.plan.optimizer.parameter_tier == "disk"


def test_zero_offload() -> None:
    result = read_deepspeed(FILES / "zero2_offload.json", devices=16, seq_len=2048)
    assert result.plan.optimizer.offload == Offload() and result.plan.optimizer.zero == 2
    # 256 = 4 sequences x 4 accumulation steps x 16 ranks.
    assert result.workload.global_batch_size == 256 and result.plan.schedule.micro_batch_size == 4
    assert result.plan.precision.param == "fp16" and result.plan.precision.grad == "fp16"
    assert result.plan.overlap.bucket_bytes == int(2e8) * 2 and result.plan.overlap.grad_reduce
    assert {u.field for u in result.unexpressed} == {"zero_optimization.allgather_bucket_size"}
    assert result.plan.optimizer.clip
    with pytest.raises(InputError, match="which model"):
        result.graph()


def test_auto_is_filled_by_arguments() -> None:
    result = read_deepspeed(
        FILES / "zero3_auto.json",
        devices=8,
        seq_len=512,
        micro_batch_size=2,
        gradient_accumulation_steps=4,
        mixed_precision="bf16",
        model="gpt2",
        saved=Saved(preset="full"),
    )
    assert result.workload.global_batch_size == 64 and result.plan.optimizer.zero == 3
    assert result.plan.saved == Saved(preset="full")
    assert result.graph().num_parameters() == 124_439_808
    check(result.plan, result.graph(), None, result.workload)


def test_what_a_file_leaves_open_is_taken_as_usual_and_listed() -> None:
    result = read_deepspeed(FILES / "zero3_auto.json", devices=8)
    assert result.plan.precision.param == "bf16" and result.plan.schedule.micro_batch_size == 1
    assert [line.rpartition("(")[2] for line in result.assumed] == ["--precision)", "--micro-batch-size)", "--seq-len)"]
    wider = read_deepspeed(
        FILES / "zero3_auto.json", devices=8, context=ReadContext(global_batch=64, micro_batch_size=2)
    )
    assert wider.workload.global_batch_size == 64 and wider.plan.schedule.micro_batch_size == 2


def test_auto_that_arguments_do_not_fill() -> None:
    file = FILES / "zero3_auto.json"
    result = read_deepspeed(file, devices=8, seq_len=512, micro_batch_size=2, mixed_precision="no")
    assert result.plan.precision.param == "fp32"
    assert {u.field.rpartition(".")[2] for u in result.unexpressed} == {
        "gradient_clipping",
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
    }


def test_auto_that_means_nothing_to_a_step_is_not_listed() -> None:
    text = '{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": {"params": {"warmup": "auto"}}}'
    assert read_deepspeed(text, devices=8, seq_len=512, micro_batch_size=1).unexpressed == ()


@given(micro=st.integers(1, 8), steps=st.integers(1, 8), devices=st.integers(1, 64))
def test_two_sizes_give_the_third(micro: int, steps: int, devices: int) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = dict(zip(names, (micro * steps * devices, micro, steps), strict=True))
    for left_out in names:
        rest = {key: value for key, value in sizes.items() if key != left_out}
        result = read_deepspeed(json.dumps(rest), devices=devices, seq_len=8)
        assert result.workload.global_batch_size == micro * steps * devices
        assert result.plan.schedule.micro_batch_size == micro


def test_precision() -> None:
    assert job().plan.precision.grad == "bf16"
    assert job(zero_optimization={"stage": 0}).plan.precision.grad == "fp32"
    assert job(data_types={"grad_accum_dtype": "fp32"}).plan.precision.grad == "fp32"
    assert job(communication_data_type="fp32").plan.precision.reduce == "fp32"
    plain = job(bf16={"enabled": False}).plan.precision
    assert (plain.param, plain.master) == ("fp32", "none")
    small = job(bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True})
    assert (small.plan.precision.master, small.plan.precision.states) == ("bf16", "bf16")


def test_overlap_is_on_by_default_at_stage_three_only() -> None:
    assert not job().plan.overlap.grad_reduce
    assert job(zero_optimization={"stage": 3}).plan.overlap.grad_reduce


def test_groups_of_mics() -> None:
    mesh = job(16, zero_optimization={"stage": 3, "mics_shard_size": 4}).plan.mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (4, 4)


def test_what_has_no_place_is_reported() -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme"},
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 8,
    }
    result = job(zero_optimization=zero, progressive_layer_drop={"enabled": True})
    assert {u.field for u in result.unexpressed} == {
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_hpz_partition_size",
        "progressive_layer_drop.enabled",
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 100}, "= 100 is not .* = 2 x 6 x 8 = 96; set it to 96"),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": None}, "= 8 x 1 = 8; the nearest legal one is 16"),
        ({"zero_optimization": {"stage": 4}}, "stages 0 to 3"),
        ({"fp16": {"enabled": True}}, "keep one"),
        ({"optimizer": {"type": "AdamX"}}, "understood are Adam"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "raise stage"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "mics_shard_size = 3; .* is 2"),
        ({"zero_optimisation": {"stage": 3}}, "unknown field 'zero_optimisation.stage'"),
        ({"train_micro_batch_size_per_gpu": 0}, "at least 1"),
    ],
)
def test_what_the_program_refuses_is_refused_with_the_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**values)


def test_twice_is_refused() -> None:
    with pytest.raises(InputError, match="twice"):
        read_deepspeed('{"train_batch_size": 8, "train_batch_size": 16}', devices=8, seq_len=8)
