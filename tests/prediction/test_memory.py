"""Memory against what can be worked out by hand: ZeRO's bytes a parameter, Korthikanti's bytes a layer, the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prediction.jobs import MEGATRON_2022, gpt_model, plan, small

from gnomon.hardware import parse_cluster
from gnomon.hardware.scaled import scaled
from gnomon.models.presets import model
from gnomon.plans import Layout, Mesh, Offload, Optimizer, Plan, Precision, Saved, SavedRule, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prediction.loading import loading
from gnomon.prediction.temporary_memory import temporaries
from gnomon.report.prediction import prediction_text
from gnomon.search.fit.advice import advice
from gnomon.software import Fact, stack

SEQ, HIDDEN, HEADS = 2048, 4096, 32
MEGATRON = stack("megatron-lm")
MIXED = Precision(param="fp16", compute="fp16", grad="fp16")
"""ZeRO's 16 bytes a parameter: 2 parameter, 2 gradient, 4 master, 4 + 4 moments."""


def static(result: Prediction) -> dict[str, int]:
    """Bytes that stay between steps on the first stage's ranks."""
    return result.stages[0].static_bytes()


@pytest.mark.parametrize(
    ("zero", "per_parameter"),
    [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)],
)
def test_zero_divides_what_the_paper_says(zero: Literal[0, 1, 2, 3], per_parameter: float) -> None:
    """Rajbhandari et al. 2020: 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N for N ranks."""
    job = replace(plan(dp_shard=8), precision=MIXED, optimizer=Optimizer(zero=zero))
    result = small(job, "1x8xh100-sxm")
    parameters = result.stages[0].elements[0]
    # 8 layers of 12h² + 13h, tied embedding of 51200 x 1024, 2048 positions, final norm
    assert parameters == 8 * (12 * 1024**2 + 13 * 1024) + (51200 + 2048) * 1024 + 2 * 1024
    assert sum(static(result).values()) == pytest.approx(per_parameter * parameters, rel=1e-6)


def test_bytes_of_a_parameter_follow_precision_and_optimizer() -> None:
    """Parameter, gradient, master and moments: 2 + 4 + 4 + 8 as plans have it unless told; 4 + 4 in fp32 under SGD."""
    usual = small(Plan(schedule=Schedule(micro_batch_size=1)), "1x1xh100-sxm")
    parameters = usual.stages[0].elements[0]
    assert sum(static(usual).values()) == 18 * parameters
    single = Precision(param="fp32", compute="fp32", master="none")
    plain = Plan(schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(kind="sgd"), precision=single)
    assert sum(static(small(plain, "1x1xh100-sxm")).values()) == 8 * parameters


def test_offload_takes_the_optimizer_off_the_device() -> None:
    job = replace(plan(dp_shard=8), optimizer=Optimizer(zero=1, clip=False))
    away = replace(job, optimizer=Optimizer(zero=1, clip=False, offload=Offload()))
    here, there = small(job, "1x8xh100-sxm"), small(away, "1x8xh100-sxm")
    assert static(there)["master"] == static(there)["states"] == 0
    assert static(there)["parameters"] == static(here)["parameters"]
    assert there.step_s > here.step_s  # the host's update is slower than the device's


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "preset", "per_element"),
    [
        (1, False, "none", 34 + 5 * HEADS * SEQ / HIDDEN),
        (8, False, "none", 10 + (24 + 5 * HEADS * SEQ / HIDDEN) / 8),
        (8, True, "none", (34 + 5 * HEADS * SEQ / HIDDEN) / 8),
        (8, False, "selective", 10 + 24 / 8),
        (8, True, "selective", 34 / 8),
        (1, False, "full", 2),
        (8, True, "full", 2 / 8),
    ],
)
@pytest.mark.parametrize("micro", [1, 2])
def test_activations_of_a_layer(micro: int, tp: int, sequence_parallel: bool, preset: str, per_element: float) -> None:
    """Korthikanti et al. 2022, table 2, in bytes over s·b·h, and what it leaves out: mean and 1/deviation of two norms
    in fp32, 16 bytes a token, divided under sequence parallelism."""
    job = plan(preset, micro=micro, tp=tp, sequence_parallel=sequence_parallel)
    workload = Workload(global_batch_size=micro, seq_len=SEQ)
    prediction = predict(gpt_model(2, HIDDEN, HEADS), f"1x{tp}xa100-sxm-80gb", job, workload, MEGATRON_2022)
    statistics = 0 if preset == "full" else 16 * SEQ * micro / (tp if sequence_parallel else 1)

    assert prediction.stages[0].kept_bytes[1] == SEQ * micro * HIDDEN * per_element + statistics


def test_a_loss_in_place_holds_one_fp32_copy_of_the_logits() -> None:
    """Megatron-LM's loss: softmax over the fp32 copy, its gradient over the softmax, then a bf16 gradient beside it:
    6 bytes a logit at the most. As separate tensors: log-softmax, its gradient, and that of the copy, 12 bytes."""
    facts = tuple(fact for fact in MEGATRON_2022.facts if fact.field != "cross_entropy")
    fact = Fact(field="cross_entropy", source="this test", date="2026-11-21")
    job, work = plan(), Workload(global_batch_size=1, seq_len=SEQ)
    model = gpt_model(2, HIDDEN, HEADS)
    actual = {
        how: predict(
            model, "1x1xa100-sxm-80gb", job, work, MEGATRON_2022.with_values((*facts, fact), cross_entropy=how)
        )
        .memory[0]
        .by_class
        for how in ("in_place", "unfused")
    }
    vocab = actual["in_place"]["logits"] // (4 * SEQ)
    assert vocab >= 50_257
    assert actual["in_place"]["temporary"] - 2 * vocab * SEQ < 16 * HIDDEN * SEQ
    assert actual["unfused"]["temporary"] - 8 * vocab * SEQ < 16 * HIDDEN * SEQ
    assert actual["unfused"]["logits"] == actual["in_place"]["logits"]


def test_one_f_one_b_holds_fewer_microbatches_on_later_ranks() -> None:
    """With 4 pipeline ranks, rank r holds 4 - r microbatches of its stage."""
    result = small(plan(pp=4), "1x4xh100-sxm", batch=8)
    held = [rank.by_class["activations"] + rank.by_class["logits"] for rank in result.memory]
    own = [sum(stage.kept_bytes) for stage in result.stages]
    for rank, (total, entry) in enumerate(zip(held, own, strict=True)):
        assert total == pytest.approx((4 - rank) * entry, rel=0.02)


def test_peak_is_in_the_backward_and_the_verdict_says_so() -> None:
    result = small(plan(), "1x1xh100-sxm", batch=2)
    rank = result.tightest
    assert rank.peak_at == "backward of unit 0"
    assert sum(rank.by_class.values()) == rank.peak_bytes
    assert result.fits and rank.peak_bytes <= rank.limit_bytes
    gib = f"{rank.peak_bytes / 2**30:.1f} of {rank.limit_bytes / 2**30:.4g} GiB"
    assert result.verdict.startswith(f"fits: {gib} (rank 0, backward of unit 0, ")


def test_a_plan_that_does_not_fit_says_so() -> None:
    result = small(plan(micro=64), "1x1xv100-sxm-16gb", batch=64)
    assert not result.fits
    assert result.verdict.startswith("does not fit: ")


def test_a_plan_that_needs_what_the_allocator_could_give_back_may_not_fit() -> None:
    rank = small(plan(), "1x1xh100-sxm", batch=2).tightest
    assert rank.verdict == "fits" and rank.peak_bytes == rank.usual_bytes
    between = rank.usual_bytes - 60 * 2**20  # of 79 MiB of free segments that could be given back
    result = small(plan(), scaled(parse_cluster("1x1xh100-sxm"), memory_bytes=between), batch=2)
    full = result.tightest
    assert full.allocated_bytes == rank.allocated_bytes and full.usual_bytes == rank.usual_bytes
    assert result.fits and full.verdict == "may not fit" and full.peak_bytes <= between
    assert (
        result.verdict.startswith("may not fit: ") and f", usually {rank.usual_bytes / 2**30:.1f} (" in result.verdict
    )
    assert result.to_mapping()["memory"][0]["verdict"] == "may not fit" and not result.has_room
    assert advice(result).ways and all(e.peak_bytes < full.usual_bytes for e in advice(result).ways)
    assert any("what would fit with room" in line for line in prediction_text(result, advice=advice(result)))


@given(micro=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]), sequence_parallel=st.booleans())
def test_more_recompute_never_keeps_more(micro: int, tp: int, sequence_parallel: bool) -> None:
    sequence_parallel = sequence_parallel and tp > 1
    kept = {}
    for preset in ("none", "selective", "full"):
        job = plan(preset, micro=micro, tp=tp, sequence_parallel=sequence_parallel)
        workload = Workload(global_batch_size=4, seq_len=1024)
        prediction = predict(gpt_model(8, 1024, 16), f"1x{tp}xa100-sxm-80gb", job, workload, MEGATRON_2022)
        kept[preset] = sum(prediction.stages[0].kept_bytes)
    assert kept["full"] < kept["selective"] < kept["none"]


@given(axes=st.sampled_from([{}, {"tp": 2}, {"pp": 2}, {"dp_shard": 2}]), zero=st.sampled_from([0, 1, 2, 3]))
def test_memory_grows_with_the_micro_batch(axes: dict[str, int], zero: Literal[0, 1, 2, 3]) -> None:
    cluster = f"1x{max(axes.values(), default=1)}xh100-sxm"
    peaks = []
    for micro in (1, 2, 4, 8):
        job = replace(plan(micro=micro, **axes), optimizer=Optimizer(zero=zero))
        peaks.append(small(job, cluster).tightest.allocated_bytes)
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


def test_runs_of_recomputed_layers_keep_one_input_for_each_run() -> None:
    """8 layers in runs of 4: two inputs of s·b·h in fp16."""
    job = plan("full")
    for every in (1, 2, 4):
        result = small(replace(job, saved=Saved(preset="full", every=every)), "1x1xh100-sxm", batch=1)
        inputs = [kept for kept in result.stages[0].kept_bytes[1:-1] if kept]
        assert inputs == [1024 * 1024 * 2] * (8 // every)


@pytest.mark.parametrize(("name", "layers", "width"), [("gpt-oss-20b", 24, 2880), ("gemma-2-2b", 26, 2304)])
def test_runs_of_layers_that_alternate_keep_one_input_too(name: str, layers: int, width: int) -> None:
    """Windowed and full layers are calls of their own: 4096 tokens in bf16 for each run, on each of two stages."""
    for every in (1, 2, 4):
        job = Plan(
            mesh=Mesh(pp=2, dp_shard=4),
            schedule=Schedule(micro_batch_size=1),
            saved=Saved(preset="full", every=every),
        )
        stages = predict(name, "1x8xh100-sxm", job, Workload(global_batch_size=8, seq_len=4096)).stages
        for stage, kept in ((stages[0], stages[0].kept_bytes[1:]), (stages[1], stages[1].kept_bytes[:-1])):
            run = [4096 * width * 2, *[0] * (every - 1)]
            assert list(kept) == (run * layers)[: layers // 2], stage.stage


def test_layers_that_alternate_move_their_inputs_to_the_host() -> None:
    """Where what layers read is offloaded, none of it stays: as with layers of one call."""
    rules = (SavedRule(action="recompute"), SavedRule(tensors=("input",), action="offload"))
    job = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), saved=Saved(rules=rules))
    kept = [
        predict(name, "1x8xh100-sxm", job, Workload(global_batch_size=8, seq_len=4096)).stages[0].kept_bytes[1:-1]
        for name in ("gpt-oss-20b", "qwen3-30b-a3b")
    ]
    assert kept == [(0,) * 24, (0,) * 48]


def test_offloaded_activations_leave_the_device_and_take_time() -> None:
    job = plan(micro=4)
    rules: Any = (SavedRule(calls="layers[0:8]", tensors=("*",), action="offload"),)
    here = small(job, "1x1xh100-sxm")
    away = small(replace(job, saved=Saved(rules=rules)), "1x1xh100-sxm")
    assert away.tightest.by_class["activations"] < here.tightest.by_class["activations"]
    assert away.step_s >= here.step_s


def test_an_encoder_output_is_kept_once() -> None:
    """Every decoder layer of T5 reads the encoder's output; it is one tensor."""
    workload = Workload(global_batch_size=1, seq_len=128, sizes=(("enc_seq", 4096),))
    prediction = predict("t5-small", "1x1xh100-sxm", Plan(schedule=Schedule(micro_batch_size=1)), workload)
    stage = prediction.stages[0]
    once = 4096 * 512 * 2
    shared = sum(kept.bytes for price in stage.order for kept in price.saved if kept.is_input and kept.bytes == once)
    apart = sum(kept.bytes for price in stage.order for kept in price.saved)
    assert shared > 6 * once
    assert sum(stage.kept_bytes) <= apart - 5 * once


def test_tensor_parallel_ranks_divide_all_but_norms_positions_and_biases_after_sums() -> None:
    """Whole on both ranks: 2048 positions, 4 vectors of norms and 2 biases a layer, the last norm; all of 1024."""
    one, two = small(plan(), "1x1xh100-sxm"), small(plan(tp=2), "1x2xh100-sxm")
    whole = (2048 + 8 * 6 + 2) * 1024 * 2
    assert static(two)["parameters"] == (static(one)["parameters"] + whole) // 2


def with_facts(**values: Any) -> Any:
    """The stack of the other tests with some fields set."""
    kept = tuple(fact for fact in MEGATRON_2022.facts if fact.field not in values)
    facts = tuple(Fact(field=name, source="this test", date="2026-11-21") for name in values)
    return MEGATRON_2022.with_values((*kept, *facts), **values)


def peak(stack: Any, precision: Precision, zero: Literal[0, 1] = 1) -> Prediction:
    """Two data-parallel ranks that recompute all, so that what is held between steps is most of it."""
    job = replace(plan("full", dp_shard=2), precision=precision, optimizer=Optimizer(zero=zero))
    workload = Workload(global_batch_size=2, seq_len=64)
    return predict(gpt_model(8, 1024, 16), "1x2xa100-sxm-80gb", job, workload, stack)


def test_gradients_that_stay_beside_wider_ones() -> None:
    """Two bytes a parameter more where fp32 gradients are accumulated, nothing where they are of one width."""
    kept = with_facts(kept_gradients=True)
    for precision, more in ((Precision(), 2), (MIXED, 0)):
        without, beside = peak(MEGATRON_2022, precision), peak(kept, precision)
        parameters = without.stages[0].elements[0]
        change = beside.tightest.by_class["gradients"] - without.tightest.by_class["gradients"]
        assert change == more * parameters


def test_gradients_that_stay_whole_between_microbatches() -> None:
    """Two bytes of every parameter in FSDP's no_sync, and none where there is one microbatch."""
    job = replace(plan(dp_shard=2), optimizer=Optimizer(zero=3))
    for batch, entry in ((2, 0), (4, 2)):
        actual = [
            predict(gpt_model(2, 512, 8), "1x2xh100-sxm", job, Workload(global_batch_size=batch, seq_len=64), stack)
            for stack in (MEGATRON_2022, with_facts(unsharded_accumulation=True))
        ]
        without, whole = (entry.tightest.by_class["gradients"] for entry in actual)
        assert whole - without == entry * sum(actual[0].stages[0].elements)


@pytest.mark.parametrize(
    ("step", "bytes_per_parameter"),
    [("fused", 4 / 2), ("foreach", 4 / 2 + 4 / 2), ("single", 4 / 2 + 2 * 4 / 2)],
)
def test_the_update_makes_an_fp32_gradient_and_roots(step: str, bytes_per_parameter: float) -> None:
    """ZeRO 1 on two ranks, fp16 gradients: each updates half of the parameters, DeepSpeed as one flat tensor."""
    result = peak(with_facts(optimizer_step=step, grad_buffers="contiguous"), MIXED)
    assert result.tightest.peak_at == "optimizer step"
    parameters = result.stages[0].elements[0]
    assert result.tightest.by_class["temporary"] == pytest.approx(bytes_per_parameter * parameters, rel=1e-6)


@pytest.mark.parametrize(("step", "bytes_per_parameter"), [("fused", (4 + 2) / 2), ("single", (4 + 2 * 4) / 2 - 2)])
def test_an_update_may_let_gradients_go(step: str, bytes_per_parameter: float) -> None:
    """DeepSpeed's: fp16 gradients are joined and copied to fp32, and gone (here all of them) before roots are made."""
    facts = with_facts(optimizer_step=step, grad_buffers="contiguous", update_frees_gradients=True)
    result = peak(facts, MIXED)
    parameters = result.stages[0].elements[0]
    assert result.tightest.by_class["temporary"] == pytest.approx(bytes_per_parameter * parameters, rel=1e-6)


@pytest.mark.parametrize(("step", "bytes_each"), [("fused", 4 + 2), ("foreach", 4 + 4), ("single", 4 + 2 * 4)])
def test_zero_3_updates_its_part_in_parts(step: str, bytes_each: float) -> None:
    """DeepSpeed's sub-groups: fp16 gradients of one are joined and copied to fp32, then roots are made, if at all."""
    job = replace(plan("full", dp_shard=2), precision=MIXED, optimizer=Optimizer(zero=3))
    workload = Workload(global_batch_size=2, seq_len=64)
    for most in (10**7, 10**12):
        facts = with_facts(optimizer_step=step, grad_buffers="contiguous", update_elements=most)
        prediction = predict(gpt_model(8, 1024, 16), "1x2xa100-sxm-80gb", job, workload, facts)
        part = min(most, prediction.stages[0].elements[0] / 2)
        updates = np.isin(
            prediction.structure.program.kind, [k.name == "OPT" for k in prediction.structure.program.kinds].index(True)
        )
        inside = temporaries(prediction.structure.program, prediction.pricing)[updates].max()
        assert inside == pytest.approx(bytes_each * part, rel=1e-6)


def test_fp32_gradients_need_no_copy() -> None:
    result = peak(with_facts(optimizer_step="fused"), Precision())
    assert result.tightest.peak_at != "optimizer step"


def test_flat_buffers_of_a_reduction_are_reserved_apart() -> None:
    """DeepSpeed's bucket, and the flat fp32 gradients of half of the parameters, beside what is allocated."""
    plain, flat = peak(MEGATRON_2022, MIXED), peak(with_facts(reduce_bucket_elements=10**8), MIXED)
    parameters = plain.stages[0].elements[0]
    assert flat.tightest.allocated_bytes == plain.tightest.allocated_bytes
    more = flat.tightest.reserved_bytes - plain.tightest.reserved_bytes
    assert more == pytest.approx(2 * 10**8 + 4 * parameters / 2, rel=1e-6)


def test_selective_recompute_runs_fused_attention_again() -> None:
    """As Megatron Core's `core_attn` and the runtime's checkpoint around attention: queries, keys and values stay for
    it and the output for the next product, so all that is saved are 4 bytes a head and token; the kernel runs twice.
    NVIDIA-NeMo/Megatron-Bridge#3880: 1.7 % more time on Qwen3 30B and no less memory."""
    kept, again = (
        predict(model("llama-3.1-8b"), "1x8xh100-sxm", job, Workload(global_batch_size=8, seq_len=SEQ), MEGATRON)
        for job in (plan("none", tp=8, sequence_parallel=True), plan("selective", tp=8, sequence_parallel=True))
    )
    saved = kept.tightest.by_class["activations"] - again.tightest.by_class["activations"]
    assert saved == 32 * (32 // 8) * SEQ * 4
    remade = again.stages[0].phase("recompute")
    assert remade.attention_s == pytest.approx(again.stages[0].phase("forward").attention_s)
    assert remade.compute_s == pytest.approx(remade.attention_s) and not kept.stages[0].phase("recompute").kernels


def test_xla_writes_a_gradient_of_logits_over_them_where_room_is_short() -> None:
    """GPT-2 on four TPUs: at the loss its logits and their gradient are most of the memory, and one of them must do
    where there is no room for both; less than the logits alone is too little."""
    job = Plan(mesh=Mesh(dp_shard=4), schedule=Schedule(micro_batch_size=8), optimizer=Optimizer(zero=3))
    workload = Workload(global_batch_size=32, seq_len=1024)
    cluster = parse_cluster("1x4xtpu-v5p")
    roomy = predict("gpt2", cluster, job, workload).tightest
    logits = roomy.by_class["logits"]
    assert roomy.verdict == "fits" and logits >= 8 * 1024 * 50257 * 2
    for part, verdict in ((0.4, "may not fit"), (2.5, "does not fit")):
        memory = int(roomy.usual_bytes - part * logits)
        prediction = predict("gpt2", scaled(cluster, memory_bytes=memory), job, workload).tightest
        assert prediction.verdict == verdict and prediction.usual_bytes == roomy.usual_bytes
        assert sum(prediction.by_class.values()) == prediction.peak_bytes


def test_a_loop_that_holds_what_the_model_returned_has_the_logits_once_more() -> None:
    """huggingface/transformers#3360, GPT-2: 13.33 GiB allocated and 786 MiB, the size of its logits, asked for."""
    eager = with_facts(cross_entropy="unfused", logits_dtype="fp32")
    held = with_facts(cross_entropy="unfused", logits_dtype="fp32", outputs_held=True)
    less, more = (
        predict("gpt2", "1x1xv100-sxm-32gb", plan(), Workload(global_batch_size=1, seq_len=1024), stack).tightest
        for stack in (eager, held)
    )
    assert more.allocated_bytes - less.allocated_bytes == 1024 * 50257 * 4
    assert more.by_class["temporary"] > less.by_class["temporary"]


def test_logits_that_are_held_have_the_width_in_which_they_are_returned() -> None:
    """nanoGPT's loop under autocast: fp16 beside the fp32 that the loss keeps."""
    eager = with_facts(cross_entropy="unfused", logits_dtype="compute")
    held = with_facts(cross_entropy="unfused", logits_dtype="compute", outputs_held=True)
    less, more = (
        predict("gpt2", "1x1xv100-sxm-32gb", plan(), Workload(global_batch_size=1, seq_len=1024), stack).tightest
        for stack in (eager, held)
    )
    assert more.allocated_bytes - less.allocated_bytes == 1024 * 50257 * 2


def test_a_loss_in_parts_never_has_whole_logits() -> None:
    """Llama 3.1 8B, 8,192 tokens: a fused loss keeps logits of 8192 x 128256 in 16 bits, 1.96 GiB, and has their
    gradient beside them; in parts both are as large as the 8192 x 4096 that the head reads. The time is the same."""
    work = Workload(global_batch_size=8, seq_len=8192)
    job = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3))
    base = stack("pytorch-fsdp")
    facts = (*base.facts, Fact(field="cross_entropy", source="a test", date="2026-11-23"))
    whole, parts = (
        predict("llama-3.1-8b", "1x8xh100-sxm", job, work, base.with_values(facts, cross_entropy=how))
        for how in ("fused", "chunked")
    )
    assert [part.stages[0].logits_bytes for part in (whole, parts)] == [8192 * 128256 * 2, 8192 * 4096 * 2]
    inside = [part.stages[0].order[-1].transient_bytes for part in (whole, parts)]
    assert inside[0] - inside[1] == 8192 * (128256 - 4096) * 2
    assert parts.memory[0].peak_bytes < whole.memory[0].peak_bytes
    assert parts.step_s == whole.step_s
    assert any("chunked cross-entropy" in line for line in parts.assumptions)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(dp_shard=8), Mesh(dp_shard=8, ep=8), Mesh(dp_shard=4, pp=2, ep=4), Mesh(tp=4, dp_shard=2, ep=4, etp=2)],
)
def test_loading_counts_the_whole_model_under_every_mesh(mesh: Mesh) -> None:
    """Each rank reads all experts, however few of them it holds afterwards."""
    graph = model("mixtral-8x7b")
    plan = Plan(
        mesh=mesh,
        layout=Layout(sequence_parallel=mesh.tp > 1),
        schedule=Schedule(micro_batch_size=1),
        optimizer=Optimizer(zero=1),
    )
    loads = with_facts(loads="each_rank")
    prediction = predict(graph, parse_cluster("1x8xh100-sxm"), plan, Workload(global_batch_size=8, seq_len=256), loads)
    assert loading(prediction).host_bytes == 8 * 2 * graph.num_parameters()
