"""What NeMo AutoModel's recipes of LoRA set, by release."""

from __future__ import annotations

import pytest
from published_rows import LLAMA, run

from evidence.published.automodel import adapters
from evidence.published.run import Run

DOCS = "NVIDIA-NeMo/Automodel/docs/performance-summary"
TUNED = LLAMA | {
    "family": "nemo-automodel",
    "framework": "NeMo AutoModel (FSDP2)",
    "device": "h100-sxm-80gb",
    "num_devices": "8",
    "precision": "bf16",
    "zero_or_fsdp": "fsdp2 shard=4",
    "model": "Llama3 70B LoRA",
    "sequence_parallel": "",
    "tp": "2",
    "pp": "1",
    "dp": "4",
    "notes": "",
    "recompute": "",
}


def tuned(release: str, **row: str) -> Run:
    return run(TUNED | {"source": f"{DOCS}.md{release}"} | row)


@pytest.mark.parametrize(
    ("release", "norm", "activation", "launch"),
    [
        ("@507bfb751", "unfused", "unfused", "eager"),
        ("@c0e4fe1bc", "fused", "unfused", "eager"),
        ("x@HEAD", "fused", "fused", "compiled"),
    ],
)
def test_kernels_by_release(release: str, norm: str, activation: str, launch: str) -> None:
    result = tuned(release).stack
    assert (result.layers.norm, result.layers.activation, result.launch.launch_mode) == (norm, activation, launch)
    assert (result.layers.attention_kernel, result.loss.cross_entropy) == ("flash2", "unfused")


def test_one_device_has_liger_and_no_compiler() -> None:
    result = tuned("x@HEAD", tp="1", dp="1", num_devices="1", zero_or_fsdp="fsdp2 shard=1", model="Llama3 8B LoRA")
    assert (result.stack.layers.norm, result.stack.layers.activation, result.stack.launch.launch_mode) == (
        "fused",
        "fused",
        "eager",
    )
    assert result.plan.layout.loss_parallel and not result.plan.overlap.splits
    assert result.adapters is not None and result.adapters.dropout == 0.1


def test_norms_of_mixtures_are_fused() -> None:
    for experts, norm in (("8", "fused"), ("", "unfused")):
        row = {"model": "Mixtral 8x7B", "arch": "moe", "experts": experts, "topk": "2" if experts else "", "ep": "1"}
        assert (
            tuned("x@HEAD", **row | ({} if experts else {"model": "Llama3 8B", "arch": "dense"})).stack.layers.norm
            == norm
        )


def test_what_tensor_parallel_ranks_exchange() -> None:
    """70B of April 2026 divides sequences and overlaps; 32B, and all before, do not. Logits are gathered in all."""
    for release, model, divided in (
        ("x@HEAD", "Llama3 70B LoRA", True),
        ("x@HEAD", "Llama3 32B LoRA", False),
        ("@c0e4fe1bc", "Llama3 70B LoRA", False),
    ):
        plan = tuned(release, model=model).plan
        assert (plan.layout.sequence_parallel, bool(plan.overlap.splits)) == (divided, divided)
        assert not plan.layout.loss_parallel and plan.optimizer.zero == 3


def test_adapters_by_release() -> None:
    for release, joined in (("@507bfb751", True), ("@c0e4fe1bc", True), ("x@HEAD", False)):
        result = tuned(release).adapters
        assert result is not None and (result.scaled, result.joined, result.dropout) == ("inner", joined, 0.0)
    assert adapters(run(LLAMA).row) is None


def test_runs_that_train_all_weights_are_left_alone() -> None:
    result = tuned("x@HEAD", model="Llama3 70B")
    assert (
        result.adapters is None and result.stack.layers.attention_kernel == "cudnn" and result.plan.layout.loss_parallel
    )


@pytest.mark.parametrize(
    ("model", "notes", "devices", "rounds"),
    [
        ("Llama3 70B LoRA", "local batch size LBS=4 GA=4", 8, 8),  # the recipe: 4, of 32
        ("Llama3 70B 2-node LoRA", "local batch size LBS=4 GA=2", 16, 2),  # the recipe: 8, of 16
        ("Llama3 70B", "local batch size LBS=8 GA=4", 8, 4),
        ("Llama3 70B", "", 8, 1),
    ],
)
def test_local_batches_go_through_the_pipeline_one_by_one(model: str, notes: str, devices: int, rounds: int) -> None:
    row = {"model": model, "notes": notes, "num_devices": str(devices), "dp": str(devices // 8), "pp": "4", "vpp": "10"}
    fixed = {"global_batch": "32", "micro_batch": "1", "zero_or_fsdp": "fsdp2 shard=1"}
    assert tuned("@c0e4fe1bc", **row, **fixed).plan.schedule.rounds == rounds


def test_what_the_recipe_recomputes_and_divides() -> None:
    """Whole models of 70B are compiled with checkpoints inside; experts of GPT-OSS 20B are on eight ranks."""
    whole = tuned("x@HEAD", model="Llama3 70B", tp="1", dp="8", zero_or_fsdp="fsdp2 shard=8")
    assert (whole.plan.saved.preset, whole.stack.launch.launch_mode, whole.stack.layers.recompute_stops) == (
        "full",
        "compiled",
        True,
    )
    precision = whole.plan.precision
    assert (precision.param, precision.grad, precision.reduce, precision.states) == ("bf16", "bf16", "bf16", "bf16")
    experts = {"model": "GPT-OSS 20B", "arch": "moe", "experts": "8", "topk": "2", "tp": "1", "dp": "8"}
    mixture = tuned("x@HEAD", **experts, zero_or_fsdp="fsdp2 shard=8", ep="")
    assert mixture.plan.mesh.ep == 8 and "ep_size 8: the recipe's" in mixture.notes
    assert (mixture.plan.saved.preset, mixture.plan.precision.reduce) == ("none", "fp32")


def test_compiled_layers_run_again_what_the_backward_reads() -> None:
    """A frozen product whose output nothing reads is not among it; eager layers run it before what adapters keep."""
    assert tuned("x@HEAD").stack.layers.recompute_stops is True
    assert tuned("@507bfb751").stack.layers.recompute_stops is None
