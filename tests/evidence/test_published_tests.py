"""Rows of Megatron-LM's functional tests: what a test's name and its fixed options say, and the peak that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from evidence.published import Row, Run, to_run
from evidence.published.megatron_ci import with_test_facts
from gnomon.errors import InputError
from gnomon.models.decoder import DecoderConfig
from gnomon.models.mixtral import MixtralConfig
from gnomon.prediction import predict

TEST = Row(
    id="t-1",
    family="megatron-ci-tiny",
    model="gpt",
    section="gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
    device="a100-sxm-80gb",
    framework="Megatron-LM CI",
    metric="s_per_step",
    value=1.0,
    layers=12,
    hidden=512,
    heads=8,
    kv_heads="8",
    ffn="2048",
    seq_len=1024,
    num_devices=8,
    devices_per_node=8,
    precision="bf16",
    tp=1,
    pp=1,
    dp=8,
    cp=1,
    ep=1,
    micro_batch=4,
    global_batch=32,
    recompute="full",
)
"""NVIDIA/Megatron-LM tests/functional_tests: its log reads 2.358 GiB at most allocated (dev_dgx_a100)."""


def allocated_gib(run: Run) -> float:
    """Predicted peak of the rank that the row is of."""
    prediction = predict(run.graph, run.cluster, run.plan, run.workload, run.stack)
    (rank,) = [memory for memory in prediction.memory if run.memory_rank in memory.ranks]
    return rank.allocated_bytes / 2**30


@pytest.mark.parametrize(
    ("section", "changes", "measured"),
    [
        ("gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute", {}, 2.3581),
        ("gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute", {"device": "h100-sxm-80gb"}, 2.3854),
        ("gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu", {"pp": 4, "dp": 2, "recompute": "none"}, 2.0441),
        ("gpt3_mcore_te_tp1_pp4_vp1", {"pp": 4, "dp": 2, "recompute": "none", "vpp": "3"}, 2.4663),
    ],
)
def test_peak_of_a_test(section: str, changes: Mapping[str, object], measured: float) -> None:
    row = replace(TEST, section=section, **changes)  # type: ignore[arg-type]
    assert allocated_gib(to_run(row)) == pytest.approx(measured, rel=0.025)


@pytest.mark.parametrize(("tp", "pp", "micro_batch", "measured"), [(1, 4, 1, 56.5507), (4, 1, 2, 53.2193)])
def test_gpt_with_groups_of_heads_has_biases_and_dropout(tp: int, pp: int, micro_batch: int, measured: float) -> None:
    """The tests of memory and speed; the greater of all ranks is within 1%."""
    changes = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": "16384", "seq_len": 8192, "recompute": "none"}
    axes = {"tp": tp, "pp": pp, "dp": 2, "vpp": "layers/vstage=1" if pp > 1 else None, "micro_batch": micro_batch}
    test = replace(TEST, section=f"gpt3_7b_tp{tp}_pp{pp}_memory_speed", device="h100-sxm-80gb", global_batch=8)
    result = to_run(replace(test, **changes, **axes, zero_or_fsdp="zero1"))  # type: ignore[arg-type]
    assert isinstance(result.model, DecoderConfig) and result.model.ffn_bias and not result.model.gated
    assert result.stack.gradients.grad_accumulation_fused is False
    made = predict(result.graph, result.cluster, result.plan, result.workload, result.stack)
    assert max(memory.allocated_bytes for memory in made.memory) / 2**30 == pytest.approx(measured, rel=0.01)


def test_the_log_is_the_last_ranks() -> None:
    # Rank 0 of four stages holds four microbatches, the last rank one and the logits.
    run = to_run(replace(TEST, pp=4, dp=2, recompute="none"))
    assert (run.memory_metric, run.memory_rank) == ("unstated", 7)
    assert to_run(replace(TEST, notes="mem = max mem-max-allocated-bytes (rank 0)")).memory_metric == "allocated"


@pytest.mark.parametrize(
    ("section", "column", "cp", "kernel"),
    [
        ("gpt3_mcore_te_tp1_pp1", None, 1, "flash"),
        ("gpt3_mcore_tp1_pp1", None, 1, "unfused"),
        ("gpt3_mcore_te_tp1_pp1", "yes", 1, "unfused"),
        ("gpt3_mcore_te_tp2_pp1_cp2", "yes", 2, "flash"),
    ],
)
def test_attention_of_a_test(section: str, column: str | None, cp: int, kernel: str) -> None:
    row = replace(TEST, section=section, flash_attention=column, cp=cp, dp=8 // cp)
    assert to_run(row).stack.layers.attention == kernel


@pytest.mark.parametrize(
    ("section", "file", "kernel"),
    [
        ("gpt3_mcore_te_tp2_pp2_resume_torch_dist", "golden_values_lts_dgxa100_dracooci.json", "unfused"),
        ("gpt3_mcore_te_tp2_pp2_resume_torch_dist", "golden_values_lts_dgx_a100.json", "flash"),  # recorded again
        ("gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu", "golden_values_lts_dgx_a100.json", "unfused"),
        ("gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu", "golden_values_dev_dgx_a100.json", "flash"),
        ("gpt3_mcore_te_tp2_pp2_reshard_1x4xNone", "golden_values_lts_dgxa100_dracooci.json", "flash"),
    ],
)
def test_attention_of_the_older_container(section: str, file: str, kernel: str) -> None:
    assert to_run(replace(TEST, section=section, source=file)).stack.layers.attention == kernel


def test_names_of_tests_say_plans() -> None:
    plain = replace(TEST, pp=4, dp=2, recompute="none")
    uneven = to_run(replace(plain, section="gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline", flash_attention="yes"))
    assert uneven.plan.schedule.layers_per_stage == (2, 4, 4, 2)
    assert allocated_gib(uneven) == pytest.approx(2.2223, rel=0.025)
    name = "gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split"
    ends = to_run(replace(plain, section=name, flash_attention="yes", layers=6))
    assert ends.plan.schedule.layers_per_stage == (0, 1, 1, 1, 1, 1, 1, 0)
    assert allocated_gib(ends) == pytest.approx(2.6212, rel=0.03)
    assert to_run(replace(TEST, section="gpt3_moe_mcore_te_ep8_muon")).plan.optimizer.kind == "momentum"
    assert (
        to_run(replace(TEST, section="gpt3_mcore_tp2_pp2_uninstall_te")).stack.layers.attention
        == "unfused_fp32_softmax"
    )


@pytest.mark.parametrize("section", ["multimodal_llava_mcore_te_tp1_pp1", "gpt_grpo_tp4_pp1_dp2_8b_throughput"])
def test_tests_of_another_model_are_refused(section: str) -> None:
    with pytest.raises(InputError, match=r"which the row's columns do not describe"):
        to_run(replace(TEST, section=section))
    assert to_run(replace(TEST, section=section, framework="Megatron-LM")).model  # only tests are known by their names


def test_names_of_tests_say_options() -> None:
    mixture = replace(TEST, experts="8", topk=2, tp=2, dp=4, ep=2, model="moe", recompute="none")
    run = to_run(mixture)
    assert isinstance(run.model, MixtralConfig) and not run.model.gated and run.model.attention_dropout == 0.1
    assert run.plan.mesh.etp == 2  # an expert is divided as the rest, unless the name says otherwise
    assert to_run(replace(mixture, section="gpt3_te_8experts_etp1_ep4")).plan.mesh.etp == 1
    halves = replace(TEST, section="gpt3_te_multi_dist_optimizer_instances", zero_or_fsdp="zero1")
    assert (to_run(halves).plan.mesh.dp_replicate, to_run(halves).plan.mesh.dp_shard) == (2, 4)
    assert to_run(TEST).stack.workspace.cublas_workspace_bytes == 32 * 2**20
    assert to_run(replace(TEST, section="gpt3_te_nondeterministic")).stack.workspace.cublas_workspace_bytes is None


def test_tests_add_in_one_order() -> None:
    """On Blackwell cuDNN cannot, with dropout: FlashAttention-2 does."""
    free = to_run(replace(TEST, section="gpt3_te_nondeterministic", device="gb200")).stack
    assert (free.layers.deterministic, free.layers.attention_kernel) == (False, "cudnn")
    for device, kernel in (("gb200", "flash2"), ("h100-sxm-80gb", "cudnn")):
        ordered = to_run(replace(TEST, device=device)).stack
        assert (ordered.layers.deterministic, ordered.layers.attention_kernel) == (True, kernel)


def test_other_rows_stay_as_they_are() -> None:
    row = replace(TEST, framework="Megatron-LM", vocab=None)
    assert with_test_facts(row) == (row, ())
