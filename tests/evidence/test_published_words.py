"""Sources write one thing in many ways: devices, precisions, recompute, sharding, schedules; recompute left open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from published_rows import NOBODY

from evidence.published import to_run
from evidence.published.fitted_reading import fitted_reading
from gnomon.errors import InputError
from gnomon.plans import Optimizer, stage_layers


def test_a_program_that_nobody_knows_is_read() -> None:
    run = to_run(NOBODY)
    assert run.step_s == pytest.approx(64 * 8192 / 8 / 10_000)
    assert run.stack.name == "SomeTrainer" and "no record of what SomeTrainer does" in run.notes
    assert fitted_reading(run)[1].step_s > 0


@pytest.mark.parametrize(
    ("device", "named"),
    [
        ("H100 SXM5 80GB", "h100-sxm-80gb"),
        ("H100 96GB HBM2e", "h100-sxm-96gb"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("GB300", "gb300-nvl72"),
        ("MI300X", "mi300x-192gb"),
        ("AMD Instinct MI355X OAM", "mi355x-288gb"),
        ("TPU v5p", "tpu-v5p"),
        ("Trillium", "tpu-v6e"),
        ("unstated (V100-class by magnitude)", "v100-sxm-32gb"),
    ],
)
def test_devices(device: str, named: str) -> None:
    run = to_run(replace(NOBODY, device=device, precision="fp16"))
    assert {device.name for device in run.cluster.devices} == {named}


def test_torchtitans_h100_is_the_96_gb_part() -> None:
    run = to_run(replace(NOBODY, framework="torchtitan FSDP2", device="h100-sxm-80gb"))
    assert run.cluster.devices[0].name == "h100-sxm-96gb" and any("96 GB part" in note for note in run.notes)


@pytest.mark.parametrize(
    ("precision", "recipe"),
    [
        ("float8 rowwise", "rowwise"),
        ("bf16 + float8 tensorwise", "tensorwise"),
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("fp8-cs", "tensorwise"),
        ("fp8", "delayed"),
    ],
)
def test_narrow_precisions(precision: str, recipe: str) -> None:
    fp8 = to_run(replace(NOBODY, device="b200", precision=precision)).plan.precision.fp8
    assert fp8 is not None and fp8.recipe == recipe


def test_four_bits_are_faster_than_eight_where_the_device_has_them() -> None:
    big = replace(NOBODY, device="b200", hidden=16384, heads=128, ffn="53248", layers=2, micro_batch=2)
    eight, four = (fitted_reading(to_run(replace(big, precision=name)))[1].step_s for name in ("mxfp8", "nvfp4"))
    assert four < eight


@pytest.mark.parametrize(
    ("words", "zero"), [("ZeRO-2", 2), ("FSDP2", 3), ("fsdp128", 3), ("distributed optimizer", 1), ("ddp", 0)]
)
def test_sharding(words: str, zero: int) -> None:
    assert to_run(replace(NOBODY, zero_or_fsdp=words)).plan.optimizer.zero == zero


def test_hsdp_shards_in_a_node() -> None:
    mesh = to_run(replace(NOBODY, num_devices=32, dp=32, zero_or_fsdp="hsdp")).plan.mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (4, 8)


@pytest.mark.parametrize(
    ("notes", "name"),
    [
        ("schedule zbv", "zero_bubble_v"),
        ("schedule: ZB-H1", "zero_bubble_h1"),
        ("schedule v-half", "v_half"),
        ("Interleaved 1F1B", "interleaved_one_f_one_b"),
        ("", "one_f_one_b"),
    ],
)
def test_schedules(notes: str, name: str) -> None:
    assert to_run(replace(NOBODY, pp=4, dp=2, notes=notes)).plan.schedule.name == name


@pytest.mark.parametrize(
    ("method", "vocabulary"),
    [
        ("Baseline", "ends"),
        ("Redis", "ends"),
        ("Vocab-1", "vocab_1"),
        ("Vocab-2", "vocab_2"),
        ("Interlaced", "interlaced"),
    ],
)
def test_methods_of_the_vocabulary(method: str, vocabulary: str) -> None:
    notes = f"schedule 1F1B method {method}; 128 microbatches"
    plan = to_run(replace(NOBODY, pp=4, dp=2, notes=notes)).plan
    assert plan.schedule.vocabulary == vocabulary and not plan.overlap.pipeline_sends


def test_recompute_in_words() -> None:
    saved = {
        words: to_run(replace(NOBODY, recompute=words)).plan.saved
        for words in ("full", "full block num_layers=4", "uniform 2", "selective", 'selective ["layernorm", "moe_act"]')
    }
    assert saved["full"].preset == "full" and saved["uniform 2"].every == 2
    assert saved["full block num_layers=4"].rules[0].first_per_stage == 4
    assert saved["selective"].preset == "selective"
    assert len(saved['selective ["layernorm", "moe_act"]'].rules) == 2


def test_core_attn_is_the_preset_selective_in_a_list_too() -> None:
    """It names no tensor where attention is one kernel, so a rule for it would match nothing."""
    alone, listed = (
        to_run(replace(NOBODY, recompute=words)).plan.saved for words in ("core_attn", "[core_attn, layernorm]")
    )
    assert alone.preset == listed.preset == "selective"
    assert not alone.rules and [rule.tensors for rule in listed.rules] == [("*norm*",)]


@pytest.mark.parametrize(
    ("program", "zero", "grad"),
    [
        ("DeepSpeed (Hugging Face transformers)", "zero3", "bf16"),
        ("Colossal-AI", "gemini", "bf16"),
        ("DeepSpeed", "none", "fp32"),
        ("Megatron-DeepSpeed", "zero1", "fp32"),
        ("PyTorch (Hugging Face transformers)", "fsdp", "fp32"),
    ],
)
def test_gradients_of_deepspeed_have_the_dtype_of_parameters(program: str, zero: str, grad: str) -> None:
    """deepspeed/runtime/engine.py get_data_types: under ZeRO; its fork for BLOOM accumulates in fp32."""
    precision = to_run(replace(NOBODY, framework=program, zero_or_fsdp=zero)).plan.precision
    assert precision.grad == precision.reduce == grad


def test_transformers_code_is_eager_beside_deepspeeds_optimizer() -> None:
    own, fused = (
        to_run(replace(NOBODY, framework=f"DeepSpeed (Hugging Face transformers{more})", zero_or_fsdp="zero2")).stack
        for more in ("", "; FusedAdam")
    )
    assert own.layers.norm == fused.layers.norm == own.loss.cross_entropy == fused.loss.cross_entropy == "unfused"
    assert (own.update.optimizer_step, fused.update.optimizer_step) == ("single", "fused")


def test_ligers_kernels_never_have_whole_logits() -> None:
    row = replace(NOBODY, framework="DeepSpeed (Hugging Face transformers; Liger)", zero_or_fsdp="zero3")
    stack = to_run(row).stack
    assert (stack.layers.norm, stack.layers.activation, stack.loss.cross_entropy) == ("fused", "fused", "chunked")


def test_gpt_oss_has_no_fused_attention_in_nemo() -> None:
    row = replace(NOBODY, model="gpt-oss-20b", experts="32", topk=4, ffn="2880 expert", flash_attention="yes")
    nemo, bridge = (to_run(replace(row, framework=name)).stack for name in ("NeMo", "Megatron-Bridge"))
    assert (nemo.layers.attention, bridge.layers.attention) == ("unfused", "flash")


def test_autocast_has_the_softmax_in_fp32_and_nanogpt_holds_logits() -> None:
    gpt = replace(NOBODY, model="gpt2", kv_heads="32", zero_or_fsdp="none", num_devices=1, dp=1, flash_attention="no")
    for framework, precision, attention, held in (
        ("PyTorch", "bf16", "unfused", None),
        ("PyTorch", "bf16-amp", "unfused_fp32_softmax", None),
        ("PyTorch (nanoGPT)", "fp16-amp", "unfused_fp32_softmax", True),
        ("Megatron-LM", "bf16-amp", "unfused", None),
    ):
        stack = to_run(replace(gpt, framework=framework, precision=precision)).stack
        assert (stack.layers.attention, stack.loss.outputs_held) == (attention, held)


def test_open_recompute_is_the_least_that_fits() -> None:
    """Four and a half billion parameters with 16384 tokens a device: all activations do not fit 80 GB, some do."""
    tight = replace(NOBODY, device="h100", recompute=None, layers=16, micro_batch=2)
    run, result = fitted_reading(to_run(tight))
    assert result.fits and run.plan.saved.rules
    assert any("recompute not stated: the least that fits" in note for note in run.notes)
    roomy, _ = fitted_reading(to_run(replace(tight, micro_batch=1, seq_len=1024)))
    assert not roomy.plan.saved.rules
    stated, without = fitted_reading(to_run(replace(tight, recompute="none")))
    assert not without.fits and stated.plan == to_run(replace(tight, recompute="none")).plan


def test_what_other_columns_imply() -> None:
    tpu = replace(
        NOBODY,
        framework="MaxText",
        device="tpu-v5p",
        zero_or_fsdp=None,
        global_batch=None,
        seq_len=None,
        tp=None,
        pp=None,
        dp=None,
        micro_batch=3,
        notes="tokens/step=196608",
    )
    run = to_run(tpu)
    assert (run.workload.global_batch_size, run.workload.seq_len) == (24, 8192)
    assert run.plan.optimizer == Optimizer(zero=3) and run.stack.launch.launch_mode == "compiled"
    assert to_run(replace(NOBODY, num_devices=None)).plan.world_size == 8


QWEN = replace(
    NOBODY,
    family="megatron-bridge",
    model="Qwen3_30B_a3B",
    device="gb200",
    framework="Megatron-Bridge",
    experts="128",
    topk=8,
    layers=48,
    hidden=2048,
    kv_heads="4",
    ffn="768 expert",
    seq_len=4096,
    precision="mxfp8",
    ep=8,
)


@pytest.mark.parametrize(
    ("release", "device", "precision", "dispatch", "experts", "launch", "beside"),
    [
        ("25.09", "gb200", "mxfp8", None, "looped", "cuda_graph", False),
        ("26.02.01", "gb200", "mxfp8", "hybrid_ep", "looped", "eager", False),
        ("26.06", "gb200", "mxfp8", "hybrid_ep", "fused", "cuda_graph", True),
        ("26.08", "gb300", "bf16", "hybrid_ep", "looped", "eager", False),
        ("26.02", "h100-sxm-80gb", "fp8", "fused", "looped", "eager", True),
        ("26.04", "h100-sxm-80gb", "fp8", "fused", "looped", "eager", False),
        ("26.02", "b200", "mxfp8", None, "looped", "eager", False),
        ("26.06", "b200", "mxfp8", "fused", "looped", "eager", False),
        ("26.08", "b200", "mxfp8", "fused", "fused", "cuda_graph", True),
        ("26.06", "b300", "mxfp8", "fused", "fused", "cuda_graph", True),
    ],
)
def test_megatron_bridge_runs_as_the_recipes_of_its_release(
    release: str, device: str, precision: str, dispatch: str, experts: str, launch: str, beside: bool
) -> None:
    run = to_run(replace(QWEN, device=device, precision=precision, notes=f"NeMo container {release}; dropless"))
    assert (run.stack.experts.moe_dispatch, run.stack.experts.moe_experts, run.stack.launch.launch_mode) == (
        dispatch,
        experts,
        launch,
    )
    assert run.plan.overlap.experts == beside
    fp8 = run.plan.precision.fp8
    assert (fp8 is not None and fp8.attention) == (experts == "fused")


DEEPSEEK = replace(
    QWEN,
    model="DeepSeekV3",
    experts="256+1 shared",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads="MLA",
    ffn="18432 dense / 2048 expert",
    vocab=129_280,
    num_devices=256,
    dp=None,
    recompute=None,
    pp=4,
    ep=32,
    vpp="4",
    micro_batch=1,
    global_batch=2048,
)


@pytest.mark.parametrize(("device", "narrow"), [("gb200", False), ("gb300", True)])
def test_fused_recipes_of_deepseek_leave_attention_wide_on_gb200(device: str, narrow: bool) -> None:
    run = to_run(replace(DEEPSEEK, device=device, notes="NeMo container 26.06; dropless"))
    assert run.stack.experts.moe_experts == "fused"
    assert run.plan.precision.fp8 is not None and run.plan.precision.fp8.attention == narrow


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (*[4] * 15, 1)),
        ({"pp": 8, "tp": 2, "num_devices": 1024, "device": "h100-sxm-80gb"}, (1, *[2] * 30, 0)),
        ({"framework": "NeMo", "vpp": None}, (15, 16, 16, 14)),
        ({"framework": "SomeTrainer"}, ()),
        ({"model": "DeepSeekV3 w/o MTP"}, ()),
    ],
)
def test_recipes_of_deepseek_train_its_second_prediction(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    run = to_run(replace(DEEPSEEK, notes="NeMo container 26.02", **changes))
    assert run.graph.outputs == (("head.loss", "mtp.loss") if layers else ("head.loss",))
    assert run.plan.schedule.layers_per_stage == layers
    if layers:
        parts = stage_layers(run.plan, run.graph)
        assert parts[-1][-1].call.name == "mtp" and sum(layers) == 61


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({"notes": "NeMo container 25.09", "device": "h100-sxm-80gb"}, ("*", "layers[0:3]")),
        ({"notes": "NeMo container 26.02"}, ("*",)),
        ({"notes": "NeMo container 26.02", "recompute": "none"}, ()),
        (
            {
                "notes": "NeMo container 26.04; release-time recipe may differ",
                "precision": "fp8-cs",
                "recompute": 'selective ["mla_up_proj"]',
            },
            ("layers[0:3]",),
        ),
        ({"notes": "release v25.05", "framework": "NeMo", "device": "h100-sxm-80gb", "vpp": None}, ("*",)),
    ],
)
def test_a_recipe_says_what_it_recomputes(changes: dict[str, Any], calls: tuple[str, ...]) -> None:
    """Where the row does not, or only has it from a later release: up-projections, and the three dense layers."""
    run = to_run(replace(DEEPSEEK, **changes))
    assert tuple(rule.calls for rule in run.plan.saved.rules) == calls
    assert not run.recompute_open


def test_what_recipes_of_tpus_move_to_the_host() -> None:
    """GPT-OSS: what layers read and what experts put out; everything else is made again."""
    oss = replace(
        QWEN,
        source="AI-Hypercomputer/tpu-recipes/training/ironwood/README.md",
        model="gpt-oss-120b",
        device="tpu7x-ironwood(chip)",
        framework="MaxText",
        precision="bf16",
        recompute=None,
        num_devices=64,
        dp=None,
        ep=None,
    )
    again, away = to_run(oss).plan.saved.rules
    assert again.action == "recompute" and away.action == "offload"
    assert away.tensors == ("input", "*.experts.w2")
    assert (to_run(oss).plan.mesh.dp_replicate, to_run(oss).plan.mesh.dp_shard) == (2, 32)
    stated = to_run(replace(oss, recompute="none"))
    assert stated.plan.saved.rules == ()


def test_recipes_of_tpu_7x_say_what_stays_and_who_shares_a_sequence() -> None:
    """70B keeps what attention reads and puts out; its long sequences lie on four chips. 405B moves two tensors in
    bf16 and one in eight bits, whose scales are constants; its loss in bf16 is computed part by part."""
    llama = replace(
        QWEN,
        source="AI-Hypercomputer/tpu-recipes/training/ironwood/README.md",
        model="llama3.1-70b",
        device="tpu7x-ironwood(chip)",
        framework="MaxText",
        precision="bf16",
        recompute=None,
        num_devices=256,
        experts=None,
        ffn="28672",
        topk=None,
        dp=None,
        ep=None,
        seq_len=8192,
        global_batch=1024,
    )
    again, kept = to_run(llama).plan.saved.rules
    assert again.action == "recompute" and kept.action == "keep"
    assert kept.tensors == ("*q_proj", "*q_rotary", "*k_proj", "*k_rotary", "*v_proj", "*attn.core*")
    long = to_run(replace(llama, seq_len=131072, global_batch=64)).plan
    assert (long.mesh.cp, long.mesh.dp_shard, long.layout.context) == (4, 64, "all_gather")
    assert long.saved.rules[-1].calls == "head"
    big = replace(llama, model="llama3.1-405b", global_batch=1536)
    assert [rule.action for rule in to_run(big).plan.saved.rules] == ["recompute", "keep", "offload", "recompute"]
    narrow = to_run(replace(big, precision="fp8_full")).plan
    assert [rule.tensors for rule in narrow.saved.rules[1:]] == [("input",)]
    assert narrow.precision.fp8 is not None and narrow.precision.fp8.fixed and narrow.precision.fp8.gather


def test_a_recipe_gives_the_length_of_its_tokens_a_step() -> None:
    """DeepSeek-V3 on 512 v5p: six sequences of 8192 a chip; GPT-3's recipe runs in int8, which no row says."""
    row = replace(
        DEEPSEEK,
        source="AI-Hypercomputer/tpu-recipes/training/v5p/DeepSeek3-671B-MaxText/README.md",
        device="tpu-v5p",
        framework="MaxText",
        precision="bf16",
        notes="tokens/step=25165824",
        num_devices=512,
        seq_len=None,
        global_batch=None,
        micro_batch=None,
        **dict.fromkeys(("tp", "pp", "vpp", "ep", "cp")),
    )
    run = to_run(row)
    assert (run.workload.global_batch_size, run.workload.seq_len) == (3072, 8192)
    assert run.plan.schedule.micro_batch_size == 6
    with pytest.raises(InputError, match="seq_len not given"):
        to_run(replace(row, source="AI-Hypercomputer/tpu-recipes/training/v5p/GPT3-175B-MaxText/README.md"))


def test_finetuning_recipes_set_microbatches_of_one() -> None:
    row = replace(NOBODY, source="NVIDIA/dgxc-benchmarking/llama3/finetuning/README_8b.md@v25.02.02", micro_batch=None)
    assert to_run(row).plan.schedule.micro_batch_size == 1


@pytest.mark.parametrize(("name", "layers", "hidden"), [("GPT3-5B", 24, 4096), ("GPT3-20B", 44, 6144)])
def test_sizes_of_nemos_gpt(name: str, layers: int, hidden: int) -> None:
    sizes = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))
    model = to_run(replace(NOBODY, model=name, framework="NeMo", **sizes)).model
    assert (model.num_layers, model.hidden_size) == (layers, hidden)  # type: ignore[union-attr]


def test_up_projections_made_again_are_not_kept() -> None:
    """Queries and keys of 128 heads of 192, and what values are a view of, 256 a head: 61 layers of 4,096 tokens."""
    whole = replace(DEEPSEEK, framework="SomeTrainer", pp=1, vpp=None, precision="bf16", num_devices=64)
    runs = [to_run(replace(whole, recompute=how)) for how in ("none", 'selective ["mla_up_proj"]')]
    kept, again = (fitted_reading(run)[1].memory[0].by_class["activations"] for run in runs)
    assert kept - again == 61 * 4096 * 128 * (192 + 192 + 256) * 2


def test_a_dense_model_of_megatron_bridge_has_nothing_of_it() -> None:
    dense = replace(NOBODY, framework="Megatron-Bridge", device="gb200", precision="mxfp8")
    run = to_run(replace(dense, notes="NeMo container 26.06"))
    assert run.stack.experts.moe_experts == "looped" and not run.plan.overlap.experts


def test_what_xla_runs_again_is_the_least() -> None:
    """Under full recompute a layer's last product is not run again: nothing reads what it made."""
    maxtext = replace(NOBODY, framework="MaxText", zero_or_fsdp="fsdp", recompute="full")
    actual, torch = (fitted_reading(to_run(r))[1].pricing for r in (maxtext, replace(maxtext, framework="SomeTrainer")))
    again, whole = (p.compute.phase("recompute", 1).flops for p in (actual, torch))
    down = 2 * 8192 * 4096 * 14336
    assert whole - again == pytest.approx(down, rel=1e-6)


@pytest.mark.parametrize(
    ("tag", "precision", "kept"),
    [
        (
            "v24.11.1",
            "fp8",
            ("*q_proj", "*q_rotary", "*k_proj", "*k_rotary", "*v_proj", "*o_proj", "*attention_residual"),
        ),
        (
            "v24.11.1",
            "bf16",
            ("*q_proj", "*q_rotary", "*k_proj", "*k_rotary", "*v_proj", "*o_proj", "*attention_residual", "*down_proj"),
        ),
        ("v25.02.02", "bf16", ("*q_proj", "*q_rotary", "*k_proj", "*k_rotary", "*v_proj")),
    ],
)
def test_maxtext_of_dgxc_keeps_what_its_recipe_does(tag: str, precision: str, kept: tuple[str, ...]) -> None:
    source = f"NVIDIA/dgxc-benchmarking/maxtext/README_70b.md@{tag}"
    row = replace(NOBODY, framework="MaxText", zero_or_fsdp="fsdp", recompute=None, source=source, precision=precision)
    run = to_run(row)
    assert [rule.action for rule in run.plan.saved.rules] == ["recompute", "keep"]
    assert run.plan.saved.rules[1].tensors == kept and not run.recompute_open


def test_gradients_are_narrowed_before_whole_layers_run_again() -> None:
    """70B on 16 H100 of NeMo: in fp32 gradients all layers would have to run again, in bf16 none."""
    row = replace(
        NOBODY,
        model="Llama 2 70B",
        framework="NeMo",
        layers=80,
        hidden=8192,
        heads=64,
        ffn="28672",
        vocab=32_000,
        device="h100-sxm-80gb",
        seq_len=4096,
        num_devices=16,
        tp=4,
        pp=4,
        dp=1,
        zero_or_fsdp="zero1(distributed optimizer)",
        vpp="20",
        sequence_parallel="yes",
        precision="fp8",
        kv_heads="8",
        global_batch=32,
        recompute=None,
    )
    run, made = fitted_reading(to_run(row))
    assert made.may_have_run and run.plan.precision.grad == "bf16" and run.plan.saved.preset == "none"
    assert "taken with bf16 gradients" in run.notes[-1]


def test_a_run_is_not_refused_for_another_reading_of_it_that_cannot_be() -> None:
    """Experts over all 16 ranks cannot be divided over tp too; the run is read as it is, with recompute."""
    row = replace(
        QWEN,
        device="h100-sxm-80gb",
        precision="bf16",
        num_devices=16,
        tp=2,
        sequence_parallel="yes",
        layers=96,
        dp=8,
        ep=16,
        micro_batch=4,
        global_batch=64,
        seq_len=8192,
        zero_or_fsdp="zero1(distributed optimizer)",
        recompute=None,
    )
    run, made = fitted_reading(to_run(row))
    assert run.recompute_open and run.plan.mesh.etp == 1 and made.step_s > 0
