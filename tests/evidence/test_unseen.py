"""Runs of programs and devices that no number was fitted to: predicted, sane, and with a wider band.

The rows are made up, in the columns of published tables; nothing here was measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evidence.published import Row, to_run
from evidence.published.fitted_reading import fitted_reading
from gnomon.hardware import catalogue, parse_cluster
from gnomon.plans import Saved, SavedRule
from gnomon.prediction import Prediction, predict

SMALL = Row(
    id="u-1",
    family="unseen",
    model="Llama 3 of 8 layers",
    device="h100-sxm-80gb",
    framework="SomeTrainer",
    metric="tokens_per_s_per_device",
    value=10_000.0,
    layers=8,
    hidden=4096,
    heads=32,
    kv_heads="8",
    ffn="14336",
    vocab=128_256,
    seq_len=4096,
    num_devices=8,
    precision="bf16",
    tp=1,
    pp=1,
    zero_or_fsdp="fsdp",
    micro_batch=2,
    global_batch=64,
)
GPT6 = dict(
    model="GPT-3 6.2B", heads=32, kv_heads="32", ffn="16384", vocab=50_304, seq_len=1024, layers=30, zero_or_fsdp=None
)
SEVEN = dict(model="llama2-7b", layers=32, kv_heads="32", ffn="11008", vocab=32_000)

PROGRAMS: dict[str, dict[str, Any]] = {
    "torchtitan": dict(framework="torchtitan FSDP2", zero_or_fsdp="fsdp2", recompute="selective op", notes="eager"),
    "torchtitan float8": dict(
        framework="torchtitan FSDP2", precision="float8 rowwise", notes="torch.compile + float8", tp=8, micro_batch=8
    ),
    "torchtitan pipeline": dict(
        framework="torchtitan FSDP2", pp=4, notes="Interleaved 1F1B; async TP", tp=2, layers=16, micro_batch=1
    ),
    "zero-bubble": dict(
        framework="Megatron-LM zero-bubble", device="a100-sxm-80gb", interconnect="RoCE 800 Gbps", pp=8,
        micro_batch=6, global_batch=144, notes="schedule zb-2p", **GPT6,
    ),
    "zero-bubble V": dict(
        framework="Megatron-LM zero-bubble", device="a100-sxm-80gb", pp=8, micro_batch=6, global_batch=144,
        notes="schedule ZB-V", **GPT6,
    ),
    "InternEvo": dict(
        framework="InternEvo", device="a800-sxm-80gb", zero_or_fsdp="hybrid zero 8", recompute="activation_ckpt=True",
        **SEVEN,
    ),
    "accelerate": dict(framework="HF accelerate FSDP", device="a100-sxm-80gb", zero_or_fsdp="FULL_SHARD",
                       recompute="gradient checkpointing", tp=None, pp=None, **SEVEN),
    "DeepSpeed": dict(framework="DeepSpeed", device="v100-sxm-32gb", devices_per_node=16, precision="fp16",
                      num_devices=64, zero_or_fsdp="ZeRO-2", recompute="yes", global_batch=512, **SEVEN),
    "ZeRO-Offload": dict(framework="DeepSpeed ZeRO-Offload", precision="fp16", zero_or_fsdp="zero2", num_devices=1,
                         offload="optimizer", recompute="yes", global_batch=256, **SEVEN),
    "Colossal-AI": dict(framework="Colossal-AI", device="h800", zero_or_fsdp="gemini", recompute="yes", **SEVEN),
    "MaxText": dict(framework="MaxText", device="tpu-v5p", num_devices=128, tp=None, pp=None, global_batch=None,
                    micro_batch=4, zero_or_fsdp="ici_fsdp=64", notes="2 slices of v5p-128", **SEVEN),
    "MaxText by scale": dict(
        model="maxtext-16B", framework="MaxText", device="tpu-v5e", num_devices=256, tp=None, pp=None, micro_batch=6,
        global_batch=None, layers=None, hidden=None, heads=None, kv_heads=None, ffn=None, vocab=None, seq_len=None,
        zero_or_fsdp="ici_fsdp=", recompute="full", notes='{"global_parameter_scale": "16"}',
    ),
    "MaxText, remat": dict(
        framework="MaxText", device="tpu-v6e", num_devices=64, tp=None, pp=None, micro_batch=4, global_batch=256,
        zero_or_fsdp="ici_fsdp=-1", recompute="custom", offload="act:decoder_layer_input,query_proj", **SEVEN,
    ),
    "Primus": dict(framework="Primus-Megatron", device="MI300X", zero_or_fsdp="zero1", global_batch=256),
    "Primus, Megatron-FSDP": dict(framework="Primus (Megatron-LM)", device="MI325X", zero_or_fsdp="Megatron FSDP"),
    "torchtitan dated": dict(framework="torchtitan FSDP2", zero_or_fsdp="fsdp", recompute="selective op",
                             notes="torch.compile", source="pytorch/torchtitan/benchmarks/x_202412.md"),
    "torchtune": dict(framework="torchtune", device="A100-SXM4-80GB", zero_or_fsdp=None, tp=None, pp=None,
                      recompute="full", metric="tokens_per_s", notes="FSDP; packed dataset", **SEVEN),
    "axolotl": dict(framework="axolotl", device="A100 80GB PCIe", num_devices=4, devices_per_node=4, tp=None, pp=None,
                    zero_or_fsdp="deepspeed zero3", recompute="gradient_checkpointing", **SEVEN),
    "LLaMA-Factory": dict(framework="LLaMA-Factory", device="A800-SXM4-80GB", zero_or_fsdp="ds_z3_config.json", tp=None,
                          pp=None, recompute="yes", flash_attention="fa2", **SEVEN),
    "TRL": dict(framework="TRL SFTTrainer (accelerate)", zero_or_fsdp="FULL_SHARD", tp=None, pp=None,
                recompute="gradient_checkpointing=True", flash_attention="flash_attention_2"),
    "GPT-NeoX": GPT6 | dict(framework="GPT-NeoX", device="A100-SXM4-40GB", zero_or_fsdp="stage 1", recompute="yes",
                            precision="fp16", tp=2, interconnect="4x HDR InfiniBand", num_devices=32),
    "OLMo": dict(framework="OLMo (PyTorch FSDP)", device="MI250X", num_devices=64, zero_or_fsdp="full_shard",
                 global_batch=256, **SEVEN),
    "EasyLM": dict(global_batch=256, framework="EasyLM (JAX)", device="TPU v4-128", num_devices=64, tp=None, pp=None,
                   recompute="nothing_saveable", zero_or_fsdp="fsdp", **SEVEN),
    "Levanter": dict(framework="Levanter", device="v3-32", num_devices=32, tp=None, pp=None, zero_or_fsdp="FSDP",
                     precision="p=f32,c=bf16", recompute="gradient_checkpointing: true", **SEVEN),
    "DeepSpeed-Ulysses": dict(framework="DeepSpeed-Ulysses", cp=8, seq_len=131_072, micro_batch=1, global_batch=8,
                              zero_or_fsdp="ZeRO-3", recompute="yes", offload="activation checkpoints to CPU"),
    "DeepSeek-V2-Lite": dict(model="DeepSeek-V2-Lite", framework="Megatron-Core", ep=8, zero_or_fsdp="dist_opt",
                             layers=None, hidden=None, heads=None, kv_heads=None, ffn=None, vocab=None, arch="moe"),
}  # fmt: skip


def predicted(**changes: Any) -> Prediction:
    """Of SMALL with these columns."""
    return fitted_reading(to_run(replace(SMALL, **changes)))[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_without_runs_are_predicted_soundly(name: str) -> None:
    result = predicted(**PROGRAMS[name])
    assert result.mfu is not None and 0.15 < result.mfu < (0.8 if "MaxText" in name else 0.75), result.mfu
    assert result.fits


DEVICES = sorted(d.name for d in map(catalogue.device, catalogue.device_names()) if d.kind != "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_of_the_catalogue_trains(device: str) -> None:
    """One device, so that slow buses of workstations do not count: between a sixth and four fifths of its peak."""
    peak = catalogue.device(device).dense_peak
    precision = "bf16" if peak.bf16 else "fp16" if peak.fp16 else "fp32"
    result = predicted(device=device, num_devices=1, global_batch=8, precision=precision, layers=2, vocab=32_000)
    assert result.mfu is not None and 0.15 < result.mfu < 0.8, result.mfu


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("NVIDIA RTX A6000", "rtx-a6000-48gb"),
        ("RTX 3090", "rtx-3090-24gb"),
        ("4090", "rtx-4090-24gb"),
        ("A800 80GB", "a800-sxm-80gb"),
        ("H800", "h800-sxm-80gb"),
        ("H20", "h20-sxm-96gb"),
        ("H200", "h200-sxm-141gb"),
        ("GH200", "gh200-96gb"),
        ("A100 40GB PCIe", "a100-pcie-40gb"),
        ("A10G", "a10g-24gb"),
        ("L4", "l4-24gb"),
        ("L40", "l40-48gb"),
        ("L40S", "l40s-48gb"),
        ("MI350X", "mi350x-288gb"),
        ("mi100", "mi100-32gb"),
        ("TPU v3", "tpu-v3"),
        ("8xH100", "h100-sxm-80gb"),
        ("8x A100 80GB", "a100-sxm-80gb"),
        ("DGX A100 640GB", "a100-sxm-80gb"),
        ("A100 (40GB)", "a100-sxm-40gb"),
        ("p4d.24xlarge", "a100-sxm-40gb"),
        ("p4de.24xlarge", "a100-sxm-80gb"),
        ("p5.48xlarge", "h100-sxm-80gb"),
        ("A800-PCIe-80GB", "a100-pcie-80gb"),
        ("A6000 Ada", "rtx-6000-ada-48gb"),
        ("rtx4090", "rtx-4090-24gb"),
        ("RTX TITAN 24GB", "titan-rtx-24gb"),
        ("Ironwood", "tpu-7x"),
        ("v5litepod-16", "tpu-v5e"),
        ("v5p-128", "tpu-v5p"),
    ],
)
def test_spellings_of_devices(written: str, named: str) -> None:
    assert to_run(replace(SMALL, device=written)).cluster.devices[0].name == named


def band_of(**changes: Any) -> float:
    result = predicted(**changes)
    return result.band.high_s / result.band.low_s


def test_what_is_not_known_has_a_wider_band() -> None:
    known = band_of(framework="llm-foundry/composer FSDP", device="a100-sxm-80gb")
    nobody = band_of(device="a100-sxm-80gb")
    nowhere = band_of(device="mi300x-192gb")
    assert known < nobody < nowhere


def test_sixteen_v100_in_a_node_are_a_dgx_2() -> None:
    run = to_run(replace(SMALL, device="v100-sxm-32gb", devices_per_node=16, num_devices=32, global_batch=128))
    assert (run.cluster.devices[0].name, run.cluster.groups[0].node.count) == ("v100-sxm3-32gb", 16)


def test_hosts_of_tpus_are_packed_into_slices() -> None:
    """A pod slice is one torus, whatever its hosts; more chips than a slice holds are several."""
    (one,) = parse_cluster("32x8xtpu-v6e").groups
    (two,) = parse_cluster("64x8xtpu-v6e").groups
    assert (one.count, one.node.count, two.count, two.node.count) == (1, 256, 2, 256)


def test_the_first_and_the_last_stage_have_a_layer_less() -> None:
    run = to_run(replace(SMALL, **PROGRAMS["zero-bubble"]))
    assert run.plan.schedule.name == "zero_bubble_h2"
    assert run.plan.schedule.layers_per_stage == (3, 4, 4, 4, 4, 4, 4, 3)


def test_maxtexts_scale() -> None:
    """4096 wide, 64 heads of 128, 28672 in the gated feed-forward, 32 layers: 16e9 parameters."""
    run = to_run(replace(SMALL, **PROGRAMS["MaxText by scale"]))
    assert run.graph.num_parameters() == pytest.approx(16e9, rel=0.02)
    assert run.workload.seq_len == 2048


def test_a_model_known_by_its_name() -> None:
    gone = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))
    run = to_run(replace(SMALL, model="Llama3 70B", **gone))  # type: ignore[arg-type]
    assert run.graph.num_parameters() == 70_553_706_496
    assert any("those of Llama3 70B's own config" in note for note in run.notes)


def test_an_optimizer_on_the_host() -> None:
    run = to_run(replace(SMALL, **PROGRAMS["ZeRO-Offload"]))
    assert run.plan.optimizer.zero == 2 and run.plan.optimizer.offload is not None


def test_compiling_fuses() -> None:
    told = dict(framework="torchtitan FSDP2", zero_or_fsdp="fsdp2", recompute="none", micro_batch=1)
    assert predicted(**told, notes="torch.compile").step_s < predicted(**told, notes="no compile").step_s


def test_inputs_of_layers_on_the_host() -> None:
    """What they held is gone but for one layer on its way, out and back; the rest of the memory stays."""
    run = to_run(replace(SMALL, recompute="full"))
    away = Saved(preset="full", rules=(SavedRule(tensors=("input",), action="offload"),))
    kept, moved = (
        predict(run.graph, run.cluster, replace(run.plan, saved=saved), run.workload, run.stack).memory[0].by_class
        for saved in (Saved(preset="full"), away)
    )
    share = 2 * 4096 * 4096 * 2
    assert kept["activations"] - moved["activations"] == 8 * share
    assert moved["temporary"] <= kept["temporary"] + 2 * share
    assert all(kept[name] == moved[name] for name in ("parameters", "gradients", "states"))
