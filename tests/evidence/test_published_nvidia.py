"""What NVIDIA's scripts set, by release."""

from __future__ import annotations

import pytest
from published_rows import GPT3, LLAMA, run

from gnomon.models.decoder import DecoderConfig
from gnomon.models.gpt import GptConfig

DGXC = {"family": "dgxc-benchmarking", "framework": "NeMo", "device": "h100-sxm-80gb", "num_devices": "64", "notes": ""}
DENSE = LLAMA | DGXC | {"tp": "4", "pp": "2", "dp": "8", "precision": "bf16", "zero_or_fsdp": "zero1"}
GROK = DENSE | {"model": "Grok 1 314b", "arch": "moe", "experts": "8", "topk": "2", "pp": "1", "dp": "16", "ep": "8"}


@pytest.mark.parametrize(
    ("path", "release", "kernel"),
    [
        ("nemo_megatron/README_175b.md", "v24.11.1", "flash2"),
        ("nemo_megatron/README_175b.md", "v25.02.02", "cudnn"),
        ("nemotron/README_340b.md", "v24.11.1", "flash2"),
        ("nemotron/README_15b.md", "v24.11.1", "cudnn"),
        ("nemotron/README.md", "v25.04.02", "cudnn"),
        ("grok1/README_314b.md", "v25.02.02", "flash2"),
        ("grok1/README.md", "v25.05", "cudnn"),
    ],
)
def test_attention_by_release(path: str, release: str, kernel: str) -> None:
    outcome = run(DENSE | {"source": f"NVIDIA/dgxc-benchmarking/{path}@{release}"})
    assert outcome.stack.layers.attention_kernel == kernel


def test_gradients_in_sixteen_bits() -> None:
    outcome = run(DENSE | {"source": "NVIDIA/dgxc-benchmarking/llama3.1/README_70b.md@v24.11.1"})
    assert (outcome.plan.precision.grad, outcome.plan.precision.reduce) == ("bf16", "bf16")
    outcome = run(DENSE | {"source": "NVIDIA/NeMo/docs/source/performance/performance_long_sequence.md"})
    assert outcome.plan.precision.grad == "fp32"


def test_experts_divided_over_tp_before_the_scripts_say_otherwise() -> None:
    for release, ranks in (("v24.11.1", 4), ("v25.05.02", 1)):
        outcome = run(GROK | {"source": f"NVIDIA/dgxc-benchmarking/grok1/README_314b.md@{release}"})
        assert outcome.plan.mesh.etp == ranks


def test_nemotrons_squared_relu_is_compiled_in_nemo_1_only() -> None:
    row = DENSE | {"model": "Nemotron4 15b", "hidden": "6144", "heads": "48", "kv_heads": "8", "ffn": "24576"}
    for release, how in (("v24.11.1", "fused"), ("v25.04.02", "unfused")):
        outcome = run(row | {"source": f"NVIDIA/dgxc-benchmarking/nemotron/README.md@{release}"})
        assert isinstance(outcome.model, DecoderConfig) and not outcome.model.gated and outcome.model.ffn_size == 24_576
        assert outcome.stack.layers.activation == how


@pytest.mark.parametrize(
    ("model", "path", "release", "rows"),
    [
        ("Llama 3.1 405b FP8", "llama3.1/README_405b.md", "v24.11.1", 50_688),
        ("Llama 3.1 405b FP8", "llama3.1/README_405b.md", "v25.02.02", 50_688),
        ("Llama 3.1 405b FP8", "llama3.1/README.md", "v25.04.02", 128_512),
        ("Llama 3.1 70b FP8", "llama3.1/README_70b.md", "v25.02.02", 128_512),
    ],
)
def test_the_scripts_tokenizer_makes_the_vocabulary(model: str, path: str, release: str, rows: int) -> None:
    """50,257 and 128,256, each padded to a multiple of 128 times four ranks."""
    outcome = run(DENSE | {"model": model, "source": f"NVIDIA/dgxc-benchmarking/{path}@{release}", "vocab": ""})
    assert outcome.model.vocab_size == rows


def test_grok_1_has_the_tokenizer_of_llama_3() -> None:
    outcome = run(GROK | {"source": "NVIDIA/dgxc-benchmarking/grok1/README_314b.md@v24.11.1", "vocab": ""})
    assert outcome.model.vocab_size == 128_512


def test_gpt_3_of_nemo_has_dropout() -> None:
    outcome = run(GPT3 | DGXC | {"model": "NeMo Megatron BF16", "tp": "4", "pp": "2", "dp": "8"})
    assert isinstance(outcome.model, GptConfig) and outcome.model.dropout == outcome.model.attention_dropout == 0.1


def test_packed_sequences_are_short() -> None:
    """16 sequences of 256 tokens in each of 32 packs of 4096; the time is that of the packs."""
    row = DENSE | {"seq_len": "4096", "micro_batch": "1", "global_batch": "32", "metric": "s_per_step", "value": "1.32"}
    outcome = run(row | {"source": "NVIDIA/dgxc-benchmarking/llama3/finetuning/README_8b.md@v25.02.02"})
    assert (outcome.workload.seq_len, outcome.workload.batch_size) == (256, 512)
    assert outcome.plan.schedule.micro_batch_size == 16
    assert outcome.step_s == 1.32


TUNED = DENSE | {"seq_len": "4096", "micro_batch": "1", "global_batch": "32", "sequence_parallel": "yes"}
OF_2024 = {"source": "NVIDIA/NeMo/docs/source/performance/performance_summary.md@8e3d65dcfe", "family": "nemo-24.07"}


TUNED_8B = {"source": "NVIDIA/dgxc-benchmarking/llama3/finetuning/README_8b.md@v25.02.02"}


def test_fine_tuning_of_2024_is_packed_too() -> None:
    for section, length in (("Finetuning 24.07 final (2024-09)", 256), ("Pretraining 24.07 final (2024-09)", 4096)):
        assert run(TUNED | OF_2024 | {"section": section}).workload.seq_len == length


def test_adapters_of_2024_have_an_optimizer_of_their_own_on_each_rank() -> None:
    of = TUNED | OF_2024 | {"section": "Finetuning 24.07 final (2024-09)"}
    for name, zero, divided in (("LLAMA2-70B LoRA", 0, False), ("LLAMA2-70B SFT", 1, True)):
        outcome = run(of | {"model": name})
        assert (outcome.plan.optimizer.zero, outcome.plan.layout.sequence_parallel) == (zero, divided)
    newer = {"source": "NVIDIA/dgxc-benchmarking/llama3/finetuning/README_70b.md@v25.02.02", "model": "Llama3 70b LORA"}
    outcome = run(TUNED | newer)
    assert (outcome.plan.optimizer.zero, outcome.plan.layout.sequence_parallel) == (0, True)


@pytest.mark.parametrize(
    ("row", "loss"),
    [
        (OF_2024 | {"section": "Pretraining 24.07 final (2024-09)", "model": "LLAMA2-7B"}, "in_place"),
        (OF_2024 | {"section": "Pretraining 24.07 final (2024-09)", "model": "LLAMA3-8B"}, "fused"),
        ({"source": "NVIDIA/dgxc-benchmarking/llama3/finetuning/README_8b.md@v25.02.02", "model": "8b SFT"}, "fused"),
        (
            {"source": "NVIDIA/dgxc-benchmarking/llama3/finetuning/README_8b.md@v25.02.02", "model": "8b LORA"},
            "in_place",
        ),
    ],
)
def test_the_loss_is_fused_where_the_config_says_so(row: dict[str, str], loss: str) -> None:
    assert run(TUNED | row).stack.loss.cross_entropy == loss


def test_parameters_are_divided_within_sixteen_nodes() -> None:
    row = LLAMA | DGXC | {"framework": "MaxText", "tp": "1", "pp": "1", "dp": "", "zero_or_fsdp": ""}
    source = {"source": "NVIDIA/dgxc-benchmarking/maxtext/README_70b.md@v25.02.02", "micro_batch": "2"}
    for devices, shards in (("256", 256), ("1024", 128)):
        outcome = run(row | source | {"num_devices": devices, "global_batch": str(2 * int(devices))})
        assert outcome.plan.mesh.dp_shard == shards


def test_megatron_lm_before_core_sends_in_parts() -> None:
    outcome = run(GPT3 | {"source": "arXiv 2205.05198 Table 5"})
    assert outcome.stack.messages.p2p_partitioned
    assert not run(GPT3 | {"source": "elsewhere"}).stack.messages.p2p_partitioned


@pytest.mark.parametrize(("framework", "gathers"), [("MaxText", True), ("Paxml", False)])
def test_xla_gathers_in_the_eight_bits_of_its_own_products(framework: str, gathers: bool) -> None:
    row = LLAMA | DGXC | {"framework": framework, "tp": "1", "pp": "1", "precision": "fp8", "zero_or_fsdp": "fsdp"}
    outcome = run(row | {"micro_batch": "2", "global_batch": "128", "dp": "64"})
    assert outcome.plan.precision.fp8 is not None and outcome.plan.precision.fp8.gather == gathers
    assert bool(outcome.stack.layers.transformer_engine) != gathers


@pytest.mark.parametrize(
    ("framework", "precision", "gathers"),
    [
        ("NeMo", "fp8", True),
        ("Megatron-Bridge", "fp8-cs", True),
        ("Megatron-Bridge", "mxfp8", False),
        ("Megatron-Bridge", "nvfp4", False),
        ("Megatron-LM", "fp8", False),
    ],
)
def test_parameters_in_eight_bits_are_gathered_so(framework: str, precision: str, gathers: bool) -> None:
    outcome = run(DENSE | {"framework": framework, "precision": precision}).plan.precision.fp8
    assert outcome is not None and outcome.gather is gathers


@pytest.mark.parametrize(("release", "layers"), [("25.09", 0), ("25.11", 20), ("26.02", 0)])
def test_dense_recipes_with_megatron_fsdp_move_activations(release: str, layers: int) -> None:
    """70B on GB300; from 26.02 on its rows say themselves what they move."""
    row = DENSE | {"model": "LLAMA3_70B", "framework": "Megatron-Bridge", "device": "gb300", "precision": "fp8-cs"}
    row |= {"tp": "1", "pp": "1", "dp": "64", "zero_or_fsdp": "fsdp(megatron)", "recompute": "", "offload": ""}
    outcome = run(row | {"notes": f"NeMo container {release}"})
    assert [rule.calls for rule in outcome.plan.saved.rules] == ([f"layers[0:{layers}]"] if layers else [])
    assert outcome.recompute_open is (layers == 0)


@pytest.mark.parametrize(
    ("framework", "source", "release", "cudnn"),
    [
        ("NeMo", "NVIDIA/NeMo/docs/source/performance/performance_long_sequence.md", "", "9.1"),
        ("NeMo", "NVIDIA/dgxc-benchmarking/llama3.1/README_70b.md@v25.02.02", "", None),
        ("Megatron-Bridge", "", "25.09", "9.11"),
        ("Megatron-Bridge", "", "26.02.01", "9.18"),
        ("Megatron-Bridge", "", "26.08", "9.21"),
    ],
)
def test_cudnn_of_the_container(framework: str, source: str, release: str, cudnn: str | None) -> None:
    message = {"framework": framework, "source": source, "notes": f"NeMo container {release}" if release else ""}
    outcome = run(DENSE | message | {"section": "LLAMA2-7B (FP8) - H100 with CP"})
    assert outcome.stack.layers.attention_kernel == "cudnn" and outcome.stack.layers.cudnn == cudnn
