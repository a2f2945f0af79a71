"""accelerate: FSDP 1 and 2 as its dataclasses read them. The YAML reader's limits are tested in test_yaml_file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gnomon.errors import InputError
from gnomon.formats.accelerate.read import read_accelerate
from gnomon.formats.deepspeed.read import read_deepspeed
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.plans import Saved, check

FILES = Path(__file__).parent / "fixtures/accelerate"


STRICT = ReadContext(strict=True)


def job(text: str, **arguments: Any) -> Job:
    return read_accelerate(
        text, **{"seq_len": 1024, "micro_batch_size": 2, "model": "gpt2", "context": STRICT, **arguments}
    )


def test_hybrid_sharding_replicates_over_machines() -> None:
    result = job(
        (FILES / "fsdp1.yaml").read_text(), gradient_accumulation_steps=4, micro_batch_size=1, model="llama-3.1-8b"
    )
    assert (result.plan.mesh.dp_replicate, result.plan.mesh.dp_shard) == (4, 8)
    assert result.plan.optimizer.zero == 3 and result.plan.optimizer.reshard_after_forward
    assert result.plan.saved == Saved(preset="full") and result.workload.global_batch_size == 32 * 4
    precision = result.plan.precision
    assert (precision.param, precision.compute, precision.reduce, precision.master) == ("fp32", "bf16", "bf16", "none")
    assert result.unexpressed == () and result.devices == 32
    check(result.plan, result.graph(), None, result.workload)


def test_context_parallelism() -> None:
    result = read_accelerate(FILES / "cp8.yaml", seq_len=8192, micro_batch_size=1)
    assert result.plan.mesh.cp == 8 and result.plan.mesh.dp_shard == 1 and result.plan.layout.context == "all_gather"
    assert result.workload.global_batch_size == 1


@pytest.mark.parametrize(
    ("strategy", "zero", "reshard", "replicas"),
    [
        ("FULL_SHARD", 3, True, 1),
        ("SHARD_GRAD_OP", 3, False, 1),
        ("NO_SHARD", 0, True, 1),
        ("HYBRID_SHARD_ZERO2", 3, False, 2),
        ("1", 3, True, 1),
        ("2", 3, False, 1),
    ],
)
def test_strategies(strategy: str, zero: int, reshard: bool, replicas: int) -> None:
    text = "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\nfsdp_config:\n  fsdp_sharding_strategy: "
    plan = job(text + strategy).plan
    assert (plan.optimizer.zero, plan.optimizer.reshard_after_forward) == (zero, reshard)
    assert plan.mesh.dp_replicate == replicas


def test_sections_that_are_not_used_may_be_empty() -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 2\nfsdp_config: {}\ndeepspeed_config: {}\nmegatron_lm_config:\n"
    assert job(text).unexpressed == ()
    with pytest.raises(InputError, match="unknown field 'deepspeed_config.zero_stage'"):
        job(text.replace("deepspeed_config: {}", "deepspeed_config: {zero_stage: 3}"))


def test_ddp_and_one_process() -> None:
    ddp = job("distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16").plan
    assert ddp.optimizer.zero == 0 and ddp.mesh.dp_shard == 4 and ddp.precision.reduce == "fp32"
    assert job("distributed_type: 'NO'").devices == 1


DEEPSPEED = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config:\n  "


def test_a_deepspeed_config_is_read_as_deepspeed_reads_its_own() -> None:
    """The file that TRL's examples start by."""
    text = DEEPSPEED + (
        "gradient_accumulation_steps: 4\n  gradient_clipping: 1.0\n  offload_optimizer_device: none\n"
        "  offload_param_device: none\n  zero3_init_flag: true\n  zero3_save_16bit_model: true\n  zero_stage: 3"
    )
    result = job(text)
    own = read_deepspeed(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "gradient_clipping": 1.0, '
        '"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}',
        devices=8,
        seq_len=1024,
        model="gpt2",
    )
    assert (result.plan, result.workload, result.stack) == (own.plan, own.workload, own.stack)
    assert result.workload.global_batch_size == 2 * 4 * 8 and result.plan.precision.compute == "bf16"
    assert job(text, gradient_accumulation_steps=1).workload.global_batch_size == 16
    offloaded = job(text.replace("offload_optimizer_device: none", "offload_optimizer_device: cpu"))
    assert offloaded.plan.optimizer.offload is not None


FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_processes: 8", "missing key 'distributed_type'"),
        ("distributed_type: MEGATRON_LM\nnum_processes: 8", "--from megatron"),
        (DEEPSPEED + "deepspeed_config_file: ds.json", "--from deepspeed ds.json"),
        (DEEPSPEED + "zero_stag: 3", "did you mean 'deepspeed_config.zero_stage'"),
        (DEEPSPEED + "zero_stage: 4", "ZeRO has stages 0 to 3"),
        ("distributed_type: FSDP", "missing key 'num_processes'"),
        (FSDP + "fsdp_sharding_strategy: FULL_SHARDS", "is not one of FULL_SHARD"),
        (FSDP + "fsdp_reshard_after_forward: true", "names a strategy"),
        (FSDP + "fsdp_version: 2\n  fsdp_reshard_after_forward: FULL_SHARD", "it is true or false"),
        (FSDP + "fsdp_offload_parms: true", "did you mean 'fsdp_config.fsdp_offload_params'"),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\nparallelism_config:\n  parallelism_config_tp_size: 3", "is 9"),
        (
            "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_dp_shard_size: 4",
            "set its dp_shard_size to 8",
        ),
    ],
)
def test_what_the_program_refuses_is_refused_with_the_fix(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(text)


def test_what_has_no_place_is_reported() -> None:
    result = job(FSDP + "fsdp_offload_params: true\n  fsdp_forward_prefetch: true\n  fsdp_auto_wrap_policy: NO_WRAP")
    names = {u.field.removeprefix("fsdp_config.fsdp_") for u in result.unexpressed}
    assert names == {"forward_prefetch", "auto_wrap_policy"}
    assert result.plan.optimizer.offload is not None and result.plan.optimizer.offload_parameters
