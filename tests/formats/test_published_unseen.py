"""How other tables than those known here may write things: metrics, models by name, programs, sharding, recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gnomon.formats.published import Row, to_run
from gnomon.formats.published.model import build, model_config
from gnomon.formats.published.sizes import with_sizes
from gnomon.formats.published.units import USUAL, in_usual_units
from gnomon.models.deepseek import DeepseekConfig

LLAMA = Row(
    id="x-1",
    family="unseen",
    model="Llama 3 8B",
    device="H200",
    framework="SomeTrainer",
    metric="tokens_per_s_per_device",
    value=10_000.0,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads="8",
    ffn="14336",
    vocab=128_256,
    seq_len=8192,
    num_devices=8,
    precision="bf16",
    tp=1,
    pp=1,
    zero_or_fsdp="fsdp",
    micro_batch=1,
    global_batch=64,
    recompute="none",
)
SIZES = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))


@pytest.mark.parametrize(
    ("metric", "value", "usual", "becomes"),
    [
        ("ms_per_step", 250, "s_per_step", 0.25),
        ("iteration_time_ms", 300, "s_per_step", 0.3),
        ("it/s", 2, "s_per_step", 0.5),
        ("tokens_per_s", 80_000, "tokens_per_s_per_device", 10_000),
        ("ktokens_per_s_total", 80, "tokens_per_s_per_device", 10_000),
        ("tokens/s/GPU", 4000, "tokens_per_s_per_device", 4000),
        ("tokens/GPU/s", 4000, "tokens_per_s_per_device", 4000),
        ("TGS", 4000, "tokens_per_s_per_device", 4000),
        ("tokens_per_s_per_chip", 4000, "tokens_per_s_per_device", 4000),
        ("samples_per_s_per_gpu", 4, "samples_per_s", 32),
        ("images_per_s", 400, "samples_per_s", 400),
        ("TFLOP/s/GPU", 300, "tflops_per_device", 300),
        ("pflops_total", 2.4, "tflops_per_device", 300),
        ("mfu", 0.45, "mfu_pct", 45),
        ("MFU %", 45, "mfu_pct", 45),
    ],
)
def test_metrics_by_other_names(metric: str, value: float, usual: str, becomes: float) -> None:
    row, notes = in_usual_units(replace(LLAMA, metric=metric, value=value))
    assert (row.metric, row.value) == (usual, pytest.approx(becomes)) and len(notes) == 1


@pytest.mark.parametrize("metric", USUAL)
def test_usual_metrics_stay(metric: str) -> None:
    row = replace(LLAMA, metric=metric, second_metric="hfu_pct", second_value=40.0)
    assert in_usual_units(row) == (row, ())


def test_a_metric_that_is_none_stays_to_be_refused() -> None:
    assert in_usual_units(replace(LLAMA, metric="days"))[0].metric == "days"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("GPT-2 124M", 0.124),
        ("GPT-2 1.5B", 1.56),
        ("gpt3-1.3b", 1.3),
        ("GPT-3 6.7B", 6.7),
        ("bert-base-uncased", 0.11),
        ("Qwen1.5-14B", 14.2),
        ("Qwen2-7B", 7.6),
        ("Qwen2.5-1.5B", 1.8),
        ("Qwen3-0.6B", 0.75),
        ("Gemma-2-9B", 10.2),
        ("gemma 7b", 9.3),
        ("Phi-3-mini-4k", 3.8),
        ("microsoft/phi-4", 14.7),
        ("Falcon-7B", 7.2),
        ("falcon-40b", 41.6),
        ("facebook/opt-66b", 66),
        ("BLOOM-7B1", 7.1),
        ("Pythia-12B", 12),
        ("GPT-NeoX-20B", 20.4),
        ("DeepSeek-V2-Lite", 15.7),
        ("DeepSeek-V2", 236),
        ("deepseek-moe-16b", 16.4),
        ("DeepSeek-R1", 671),
        ("DeepSeek-R1-Distill-Qwen-7B", 7.6),
        ("Kimi K2", 1026),
        ("Grok-1", 314),
        ("DBRX", 132),
        ("OLMo-2-13B", 13.7),
        ("Llama 4 Scout", 107),
        ("TinyLlama-1.1B", 1.1),
        ("CodeLlama-34B", 34),
        ("Yi-34B", 34.4),
        ("InternLM2-20B", 19.9),
        ("ChatGLM3-6B", 6.2),
        ("Nemotron-4 340B", 341),
        ("Nemotron-H 8B", 8.1),
        ("Megatron-Turing NLG 530B", 530),
    ],
)
def test_models_known_by_name_have_as_many_parameters(name: str, billions: float) -> None:
    """Within 8 %: untied heads, norms and positions of the nearest builder are not counted alike everywhere."""
    row, _ = with_sizes(replace(LLAMA, model=name, **SIZES))  # type: ignore[arg-type]
    config, _ = model_config(row)
    assert build(config).num_parameters() / 1e9 == pytest.approx(billions, rel=0.08)


def test_latent_attention_has_the_width_of_the_row() -> None:
    row, _ = with_sizes(replace(LLAMA, model="DeepSeek-V2-Lite", **SIZES))  # type: ignore[arg-type]
    config, _ = model_config(row)
    assert isinstance(config, DeepseekConfig)
    assert (config.hidden_size, config.q_rank, config.num_dense_layers, config.router) == (2048, 0, 1, "softmax")


@pytest.mark.parametrize(("params_b", "parameters"), [(6.7, 6.7e9), (9.1, 9.0e9), (None, 6.7e9)])
def test_published_parameters_tell_whether_a_feed_forward_is_gated(params_b: float | None, parameters: float) -> None:
    """Of a name that says nothing; without a count, four times the width is a GPT's."""
    row = replace(LLAMA, model="Ours", params_b=params_b, kv_heads="32", ffn="16384", vocab=50_304)
    assert to_run(row).graph.num_parameters() == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize(
    ("words", "zero"),
    [
        ("ds_z3_config.json", 3),
        ("ZeRO stage 2", 2),
        ("stage 1", 1),
        ("zero-1", 1),
        ("FULL_SHARD auto_wrap", 3),
        ("use-distributed-optimizer", 1),
        ("zero1=8", 1),
        ("HYBRID_SHARD", 3),
    ],
)
def test_sharding_in_other_words(words: str, zero: int) -> None:
    assert to_run(replace(LLAMA, zero_or_fsdp=words)).plan.optimizer.zero == zero


@pytest.mark.parametrize(
    ("words", "shard"),
    [("fsdp=8", 8), ("FSDP 8 x dp 4", 8), ("fsdp16", 16), ("fsdp2", 32), ("hybrid_shard", 8), ("zero1 size 8", 8)],
)
def test_how_many_ranks_shard(words: str, shard: int) -> None:
    assert to_run(replace(LLAMA, zero_or_fsdp=words, num_devices=32)).plan.mesh.dp_shard == shard


@pytest.mark.parametrize(
    ("words", "divided"), [("yes", True), ("True", True), ("1", True), ("no", False), ("0", False)]
)
def test_sequence_parallel_in_other_words(words: str, divided: bool) -> None:
    run = to_run(replace(LLAMA, tp=8, sequence_parallel=words, zero_or_fsdp="zero1"))
    assert run.plan.layout.sequence_parallel is divided


@pytest.mark.parametrize(
    ("words", "attention", "kernel"),
    [
        ("flash_attention_2", "flash", "flash2"),
        ("FlashAttention-3", "flash", "flash3"),
        ("False", "unfused", None),
        ("eager", "unfused", None),
        ("xformers", "memory_efficient", None),
        ("triton", "flash", "triton"),
        ("cudnn_flash_te", "flash", "cudnn"),
    ],
)
def test_attention_in_other_words(words: str, attention: str, kernel: str | None) -> None:
    stack = to_run(replace(LLAMA, flash_attention=words)).stack
    assert (stack.attention, stack.attention_kernel) == (attention, kernel)


@pytest.mark.parametrize(
    ("program", "stack"),
    [
        ("GPT-NeoX", "megatron-deepspeed"),
        ("Megatron-Turing (DeepSpeed + Megatron)", "megatron-deepspeed"),
        ("MindSpeed-LLM", "megatron-lm"),
        ("axolotl", "deepspeed"),
        ("LLaMA-Factory", "deepspeed"),
        ("OLMo-core", "pytorch-fsdp"),
    ],
)
def test_programs_near_to_a_stack(program: str, stack: str) -> None:
    run = to_run(replace(LLAMA, framework=program, zero_or_fsdp="zero3", tp=1, pp=1))
    assert run.stack.name == stack and f"{program} taken as the stack {stack}" in run.notes


def test_trainers_of_transformers_divide_data_alone() -> None:
    run = to_run(replace(LLAMA, framework="TRL SFTTrainer", tp=None, pp=None))
    assert (run.plan.mesh.tp, run.plan.mesh.pp, run.stack.norm, run.stack.rotary) == (1, 1, "unfused", "unfused")


def test_one_device_needs_no_axes() -> None:
    run = to_run(replace(LLAMA, num_devices=1, global_batch=4, tp=None, pp=None, zero_or_fsdp="whatever"))
    assert run.plan.mesh.world_size == 1 and run.plan.optimizer.zero == 0


def test_activations_on_the_host_with_checkpoints() -> None:
    saved = to_run(replace(LLAMA, recompute="yes", offload="activation checkpoints to CPU")).plan.saved
    assert saved.preset == "full" and [rule.action for rule in saved.rules] == ["offload"]
    assert saved == to_run(replace(LLAMA, framework="Unsloth", recompute="unsloth")).plan.saved


@pytest.mark.parametrize("words", ["ZeRO-3 + CPU offload", "zero3_bf16_cpuoffload_all", "ZeRO-2 offload"])
def test_offloading_in_the_words_of_sharding(words: str) -> None:
    optimizer = to_run(replace(LLAMA, framework="DeepSpeed", zero_or_fsdp=words)).plan.optimizer
    assert optimizer.offload is not None and optimizer.zero == (2 if "2" in words else 3)


TITAN = replace(LLAMA, framework="torchtitan FSDP2", zero_or_fsdp="fsdp2", device="h100-sxm-80gb")


def kept(**changes: Any) -> tuple[str, ...]:
    (rule,) = to_run(replace(TITAN, **changes)).plan.saved.rules
    return rule.tensors


@pytest.mark.parametrize("words", ["selective", "selective op", "SAC", "selective (op)", "ac: selective op", "sac_op"])
def test_torchtitans_selective_checkpoints_keep_every_other_product(words: str) -> None:
    assert kept(recompute=words) == (
        "self_attn.core*", "self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj",
    )  # fmt: skip


def test_torchtitans_selective_checkpoints_keep_no_product_in_eight_bits() -> None:
    """`aten._scaled_mm` is on no list; sums over tensor-parallel ranks are."""
    assert kept(recompute="selective op", precision="float8") == ("self_attn.core*",)
    assert kept(recompute="selective op", precision="float8", tp=8)[1:] == ("*o_proj", "*down_proj")


def test_torchtitans_presets_say_what_a_row_does_not() -> None:
    assert kept(recompute=None)[0] == "self_attn.core*"
    assert to_run(replace(TITAN, recompute=None, model="Llama 3.1 405B")).plan.saved.preset == "full"
    assert to_run(replace(TITAN, recompute=None, model="Ours")).recompute_open


def test_torchtitan_at_the_date_of_its_source() -> None:
    early, late = (
        to_run(replace(TITAN, source=f"pytorch/torchtitan/benchmarks/llama3_h100_{date}_torchtitan.md")).stack
        for date in ("202412", "2025-11")
    )
    assert (early.attention_kernel, early.optimizer_step, early.recompute_stops) == ("flash2", "foreach", True)
    assert (late.attention_kernel, late.optimizer_step, late.recompute_stops) == ("cudnn", "fused", None)
    b200 = to_run(replace(TITAN, device="b200", source="torchtitan/benchmarks/llama3_b200_202506.md")).stack
    assert b200.attention_kernel == "cudnn"


def test_float8_of_torchao_scales_each_tensor_as_it_is() -> None:
    fp8 = to_run(replace(TITAN, precision="float8")).plan.precision.fp8
    assert fp8 is not None and (fp8.recipe, fp8.gather) == ("tensorwise", True)
