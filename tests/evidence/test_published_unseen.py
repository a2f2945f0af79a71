"""How other tables than those known here may write things: metrics, models by name, programs, sharding, recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from published_rows import NOBODY

from evidence.published import read_runs, to_run
from evidence.published.fitted_reading import fitted_reading
from evidence.published.model import build, model_config
from evidence.published.network import ports_of
from evidence.published.sizes import with_sizes
from evidence.published.units import USUAL, in_usual_units
from evidence.published.words import with_words
from gnomon.models.deepseek import DeepseekConfig

LLAMA = replace(NOBODY, family="unseen", dp=None, zero_or_fsdp="fsdp")
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
    assert (stack.layers.attention, stack.layers.attention_kernel) == (attention, kernel)


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
    assert (run.plan.mesh.tp, run.plan.mesh.pp, run.stack.layers.norm) == (1, 1, "unfused")


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
    assert (early.layers.attention_kernel, early.update.optimizer_step, early.layers.recompute_stops) == (
        "flash2",
        "foreach",
        True,
    )
    assert (late.layers.attention_kernel, late.update.optimizer_step, late.layers.recompute_stops) == (
        "cudnn",
        "fused",
        None,
    )
    b200 = to_run(replace(TITAN, device="b200", source="torchtitan/benchmarks/llama3_b200_202506.md")).stack
    assert b200.layers.attention_kernel == "cudnn"


def test_float8_of_torchao_scales_each_tensor_as_it_is() -> None:
    fp8 = to_run(replace(TITAN, precision="float8")).plan.precision.fp8
    assert fp8 is not None and (fp8.recipe, fp8.gather) == ("tensorwise", True)


@pytest.mark.parametrize(
    ("words", "link", "gbps", "ports"),
    [
        ("InfiniBand 8x400Gb", "infiniband-ndr", 400, 8),
        ("100 Gb/s InfiniBand", "infiniband-edr", 100, 1),
        ("25Gbps Ethernet", "ethernet-25", 25, 1),
        ("4x HDR InfiniBand", "infiniband-hdr", 200, 4),
        ("NVLink intra, 8x200Gb/s HDR IB per node", "infiniband-hdr", 200, 8),
        ("3.2 Tbps RoCE per node", "roce-400", 400, 8),
        ("400 Gbps per GPU RoCE", "roce-400", 400, 8),
        ("8x NVIDIA ConnectX-7 400G NDR", "infiniband-ndr", 400, 8),
        ("50 GB/s InfiniBand", "infiniband-ndr", 400, 1),
        ("800 Gbps total", "roce-100", 100, 8),
    ],
)
def test_networks_in_words(words: str, link: str, gbps: int, ports: int) -> None:
    assert ports_of(words, 8, (200, 8)) == (link, gbps, ports)


@pytest.mark.parametrize(
    "words", ["InfiniBand", "200 Gb/s HDR InfiniBand", "NVLink 600 GB/s", "PCIe 4.0", "Cray Aries"]
)
def test_words_that_name_no_other_network(words: str) -> None:
    assert ports_of(words, 8, (200, 8)) is None


def test_a_slow_network_is_slow() -> None:
    """Ten gigabits are a tenth of a hundred; amazon's network is that of its node with such devices."""
    nodes = {
        words: to_run(replace(LLAMA, num_devices=16, device="a100-sxm-80gb", interconnect=words)).cluster.groups[0].node
        for words in ("10 GbE", "100 GbE", "AWS EFA 400 Gbps")
    }
    slow, fast = (nodes[words].nic for words in ("10 GbE", "100 GbE"))
    assert slow is not None and fast is not None
    assert fast.bytes_per_s == 10 * slow.bytes_per_s == 100e9 / 8
    assert nodes["AWS EFA 400 Gbps"].nics == 4


def test_notes_fill_columns_that_are_empty() -> None:
    notes = (
        "selective activation recomputation; FlashAttention-2; distributed optimizer; sequence parallelism; TP=4, PP 2"
    )
    blank = dict.fromkeys(("recompute", "flash_attention", "zero_or_fsdp", "sequence_parallel", "tp", "pp"))
    row, _ = with_words(replace(LLAMA, notes=notes, **blank))  # type: ignore[arg-type]
    assert (row.recompute, row.flash_attention, row.zero_or_fsdp) == ("selective", "fa2", "distributed optimizer")
    assert (row.sequence_parallel, row.tp, row.pp) == ("yes", 4, 2)


def test_what_a_row_gives_is_not_changed_by_its_notes() -> None:
    row = replace(LLAMA, notes="full recomputation; ZeRO-1; TP=4; micro batch size 8; no flash attention", vpp="2")
    assert with_words(replace(row, flash_attention="yes", seq_len=4096))[0].recompute == "none"
    assert with_words(replace(row, flash_attention="yes"))[1] == ()
    assert (
        with_words(replace(LLAMA, recompute=None, notes="activation checkpointing not in table"))[0].recompute is None
    )


def test_accumulation_gives_the_microbatch() -> None:
    row = replace(LLAMA, micro_batch=None, notes="gradient accumulation 4")
    assert to_run(row).plan.schedule.micro_batch_size == 2


def test_axes_follow_from_the_others() -> None:
    blank = replace(LLAMA, num_devices=32, framework="Megatron-LM", zero_or_fsdp="zero1", dp=4, pp=2, tp=None)
    assert to_run(blank).plan.mesh.tp == 4
    shared = replace(blank, tp=2)
    assert to_run(shared).plan.mesh.cp == 2


def test_sharding_by_the_program_alone() -> None:
    stages = {
        program: to_run(replace(LLAMA, framework=program, zero_or_fsdp=None)).plan.optimizer.zero
        for program in ("PyTorch FSDP", "DeepSpeed ZeRO-2", "NeMo", "SomeTrainer")
    }
    assert list(stages.values()) == [3, 2, 1, 0]


def test_heads_and_feed_forward_follow_from_the_width() -> None:
    row = replace(LLAMA, model="Llama of ours", heads=None, kv_heads=None, ffn=None)
    model = to_run(row).model
    assert (model.num_heads, model.ffn_size) == (32, 11008)  # type: ignore[union-attr]


@pytest.mark.parametrize(("kv_heads", "heads"), [("8", 16), ("16", 16), ("32", 32), ("25", 25)])
def test_heads_are_as_many_as_keys_where_a_usual_width_does_not_fit(kv_heads: str, heads: int) -> None:
    hidden = 1600 if kv_heads == "25" else 2048
    model = to_run(replace(LLAMA, heads=None, kv_heads=kv_heads, hidden=hidden, ffn="6400")).model
    assert model.num_heads == heads  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["NVIDIA NeMo", "NeMo 25.04", "NeMo v2.1 (main)", "NeMo Framework 24.12", "nemo"])
def test_nemo_by_its_other_names(name: str) -> None:
    run = to_run(replace(LLAMA, framework=name, zero_or_fsdp="zero1"))
    assert run.row.framework == "NeMo" and run.stack.name == "megatron-bridge"
    assert run.facts.release == ("v25.04" if "25.04" in name else "v24.12" if "24.12" in name else "")


def test_devices_counted_in_their_name() -> None:
    assert to_run(replace(LLAMA, device="2x8xH100", num_devices=None)).cluster.num_devices == 16


def test_internevo_makes_norms_again_and_shards_over_a_node() -> None:
    run = to_run(replace(LLAMA, framework="InternEvo", device="a800", num_devices=64, zero_or_fsdp="zero1=8"))
    assert run.stack.name == "internevo" and (run.plan.mesh.dp_replicate, run.plan.mesh.dp_shard) == (8, 8)
    assert run.plan.saved.rules[0].tensors == ("*norm*",) and run.plan.precision.grad == "bf16"
    half = to_run(replace(LLAMA, framework="InternEvo", recompute="0.5")).plan.saved
    assert half.rules[0].first_per_stage == 16


def test_a_program_that_is_only_near_to_a_stack_has_a_wider_band() -> None:
    near, same = (
        fitted_reading(to_run(replace(LLAMA, framework=name, zero_or_fsdp="zero1", tp=2, device="a100-sxm-80gb")))[
            1
        ].band
        for name in ("GPT-NeoX", "Megatron-DeepSpeed")
    )
    assert near.high_s / near.low_s > same.high_s / same.low_s


def test_capitals_and_hubs_do_not_matter() -> None:
    columns = (
        "id,family,model,device,framework,metric,value,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,num_devices,"
    )
    columns += "precision,tp,pp,zero_or_fsdp,micro_batch,global_batch,recompute\n"
    plain = "a,f,Qwen3-8B,h200,X,s_per_step,3,36,4096,32,8,12288,151936,4096,8,fp8,1,1,fsdp,1,64,full\n"
    loud = (
        plain.replace("Qwen3-8B", "Qwen/Qwen3-8B").replace("fp8", "FP8").replace("fsdp", "FSDP").replace("full", "FULL")
    )
    (one,), (two,) = (read_runs(columns + text)[0] for text in (plain, loud))
    assert one.plan == two.plan and one.model == two.model and one.row.model == two.row.model
