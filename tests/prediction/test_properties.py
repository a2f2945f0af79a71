"""What must hold for any plan: faster machines are not slower, parts add up, work is conserved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prediction.jobs import gpt_model, plan, scaled, small

from gnomon.hardware import catalogue
from gnomon.plans import Fp8, Layout, Mesh, Optimizer, Plan, Precision, Saved, Schedule, Workload
from gnomon.prediction import predict
from gnomon.program import Key
from gnomon.software import Fact, stack

SPEC = "2x4xh100-sxm"


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans for 8 devices of 8-layer models with 16 heads."""
    axes = draw(
        st.sampled_from(
            [
                {"dp_shard": 8},
                {"dp_shard": 4, "tp": 2},
                {"dp_shard": 2, "tp": 4},
                {"dp_replicate": 2, "dp_shard": 4},
                {"pp": 2, "dp_shard": 4},
                {"pp": 2, "tp": 2, "dp_shard": 2},
                {"pp": 4, "tp": 2},
                {"dp_shard": 4, "cp": 2},
            ]
        )
    )
    pp = axes.get("pp", 1)
    name = draw(st.sampled_from(["gpipe", "one_f_one_b", "interleaved_one_f_one_b", "zero_bubble_h1"]))
    if name == "interleaved_one_f_one_b" and pp == 1:
        name = "one_f_one_b"
    # tied embeddings on several ranks cannot be divided by ZeRO
    zero = draw(st.sampled_from([0, 1, 2, 3])) if pp == 1 else 0
    preset: Any = draw(st.sampled_from(["none", "selective", "full"]))
    return Plan(
        mesh=Mesh(**axes),
        schedule=Schedule(
            name=name,  # type: ignore[arg-type]
            num_microbatches=4,
            virtual_stages=2 if name == "interleaved_one_f_one_b" else 1,
        ),
        saved=Saved(preset=preset),
        layout=Layout(sequence_parallel=axes.get("tp", 1) > 1 and draw(st.booleans())),
        optimizer=Optimizer(zero=zero),  # type: ignore[arg-type]
    )


@given(job=plans(), faster=st.sampled_from(["flops", "memory", "link", "network"]), by=st.sampled_from([1.5, 4.0]))
def test_a_faster_machine_is_never_slower(job: Plan, faster: str, by: float) -> None:
    before = small(job, scaled(SPEC), batch=32, seq_len=512)
    after = small(job, scaled(SPEC, **{faster: by}), batch=32, seq_len=512)
    assert after.step_s <= before.step_s * (1 + 1e-9)


@given(job=plans())
def test_the_breakdown_adds_up_to_the_bit(job: Plan) -> None:
    result = small(job, SPEC, batch=32, seq_len=512)
    assert sum(result.breakdown.values()) == result.step_s
    assert min(result.breakdown.values()) > 0


@given(job=plans(), batch=st.sampled_from([32, 64]))
def test_tokens_are_conserved(job: Plan, batch: int) -> None:
    result = small(job, SPEC, batch=batch, seq_len=512)
    assert result.tokens_per_s_per_device * result.step_s * 8 == pytest.approx(batch * 512, rel=1e-12)
    assert 0 < result.mfu <= result.hfu < 1
    assert result.step_s <= result.makespan_s


@given(
    axes=st.sampled_from([{"dp_shard": 8}, {"pp": 4, "tp": 2}, {"dp_shard": 4, "tp": 2}]), micro=st.sampled_from([1, 2])
)
def test_more_microbatches_of_one_size_take_longer(axes: dict[str, int], micro: int) -> None:
    job = plan(micro=micro, **axes)
    step = micro * axes.get("dp_shard", 1)
    times = [small(job, SPEC, batch=step * count).step_s for count in (4, 8, 16)]
    assert times == sorted(times) and times[0] < times[-1]


@given(preset=st.sampled_from(["selective", "full"]), tp=st.sampled_from([1, 2, 4]))
def test_recompute_takes_time(preset: str, tp: int) -> None:
    cluster = f"1x{tp}xh100-sxm"
    assert small(plan(preset, tp=tp), cluster).step_s >= small(plan(tp=tp), cluster).step_s


def test_the_bubble_of_one_f_one_b() -> None:
    """p - 1 of m + p - 1 slots are idle (Narayanan et al. 2021), if stages are alike: embedding and head are not, so
    a model without much of either."""
    job = replace(plan(micro=4, pp=4), optimizer=Optimizer(clip=False))
    workload = Workload(global_batch_size=64, seq_len=2048)
    prediction = predict(gpt_model(16, 4096, 32, vocab=64, dropout=0.0), "1x4xh100-sxm", job, workload)
    busiest = prediction.breakdown
    share = busiest["bubble"] / (prediction.step_s - busiest["OPT"])
    assert share == pytest.approx(3 / 19, rel=0.1)


def test_without_overlap_reductions_take_their_whole_time() -> None:
    job = replace(plan(dp_shard=8, micro=2), optimizer=Optimizer(zero=1))
    overlap = replace(job.overlap, grad_reduce=False, param_gather=False)
    beside, apart = small(job, SPEC), small(replace(job, overlap=overlap), SPEC)
    assert apart.breakdown["REDUCE_GRAD"] > beside.breakdown["dp communication"]
    assert apart.step_s > beside.step_s


def test_partitioned_messages_between_stages_are_parts_and_a_gather() -> None:
    """Without sequence parallelism each of 4 tp ranks holds the whole activation; DeepSpeed sends a quarter each over
    the network and gathers it inside the node, which is quicker."""
    job = plan(pp=2, tp=4, micro=4)
    record = stack("megatron-deepspeed")
    work, model = Workload(global_batch_size=16, seq_len=1024), gpt_model(8, 1024, 16, dropout=0.0)
    facts = tuple(fact for fact in record.facts if fact.field != "p2p_partitioned")
    whole = predict(model, "2x4xa100-sxm-80gb", job, work, record.with_values(facts, p2p_partitioned=None)).pricing
    parts = predict(model, "2x4xa100-sxm-80gb", job, work, record).pricing
    assert parts.messages.bytes_of((0, 1)) == whole.messages.bytes_of((0, 1)) == 4 * 1024 * 1024 * 2
    send = Key(rank_class=0, kind="SEND_F", stage=0, shape="", name="")
    assert whole.seconds(send) / 4 < parts.seconds(send) < whole.seconds(send)


def test_a_slow_host_shows() -> None:
    """A kernel each 8 us: a tiny model waits for launches most of its step."""
    prediction = predict("llama-tiny", "1x1xh100-sxm", plan(), Workload(global_batch_size=1, seq_len=64))
    assert prediction.breakdown["launch"] > prediction.step_s / 2


@given(job=plans())
def test_work_is_conserved(job: Plan) -> None:
    """FLOPs of all ranks and microbatches are those of the mathematics."""
    result = small(job, SPEC, batch=32, seq_len=512)
    phases = ("forward", "input_grad", "weight_grad")
    done = sum(stage.phase(name).flops * len(stage.ranks) for stage in result.stages for name in phases)
    assert done * result.pricing.count == pytest.approx(result.model_flops, rel=1e-12)


def test_full_recompute_runs_the_layers_forward_again() -> None:
    """3 parts of work become 4, but for the head, which is not run again."""
    result = small(plan("full"), "1x1xh100-sxm")
    stage = result.stages[0]
    assert stage.phase("recompute").flops == stage.phase("forward").flops - stage.order[-1].forward.flops
    again = stage.phase("recompute").flops * result.pricing.count
    assert result.hfu / result.mfu == pytest.approx(1 + again / result.model_flops, rel=1e-12)


def test_a_long_head_does_not_hide_layers_that_are_launched_too_slowly() -> None:
    """Tiny layers wait for their launches; the head after them computes for long all the same."""
    few, many = (
        predict(
            gpt_model(24, 256, 4, vocab=vocab),
            SPEC,
            Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=4)),
            Workload(global_batch_size=32, seq_len=512),
            stack("megatron-lm"),
        )
        for vocab in (51200, 409600)
    )
    shorter, longer = (made.pricing.compute.parts("F", 0) for made in (few, many))
    assert shorter["launch"] > shorter["compute"]
    head = longer["compute"] - shorter["compute"]
    assert sum(longer.values()) - sum(shorter.values()) == pytest.approx(head, rel=0.1)


def test_a_checkpoint_that_stops_early_leaves_out_the_last_product() -> None:
    """torch's checkpoints without reentry do not run a layer's last product again (8 sequences of 1024, from 4096 to
    1024 wide, 8 layers)."""
    record = stack("llm-foundry")
    job = replace(plan(micro=8), saved=Saved(preset="full"))
    work, model = Workload(global_batch_size=8, seq_len=1024), gpt_model(8, 1024, 16, dropout=0.0)
    facts = tuple(fact for fact in record.facts if fact.field != "recompute_stops")
    again = [
        predict(model, "1x1xa100-sxm-80gb", job, work, fact).pricing.compute.phase("recompute", 0).flops
        for fact in (record.with_values(facts, recompute_stops=None), record)
    ]
    assert again[0] - again[1] == 8 * 2 * 8 * 1024 * 4096 * 1024


def test_metrics_of_the_loss_read_and_write_the_logits_again() -> None:
    """Composer computes cross-entropy twice more, in fp32 op by op: 14 bytes a logit each time, of 8 x 1024 x 50257."""
    record = stack("llm-foundry")
    work, model = Workload(global_batch_size=8, seq_len=1024), gpt_model(4, 1024, 16, vocab=50257, dropout=0.0)
    facts = tuple(fact for fact in record.facts if fact.field != "loss_metrics")
    without, with_metrics = (
        predict(model, "1x1xa100-sxm-80gb", plan(micro=8), work, fact)
        for fact in (record.with_values(facts, loss_metrics=None), record)
    )
    least = 2 * 14 * 8 * 1024 * 50257 / catalogue.device("a100-sxm-80gb").memory_bytes_per_s
    assert least < with_metrics.step_s - without.step_s < 2 * least


@given(lengths=st.permutations([512, 1024, 2048]))
def test_one_plan_at_several_lengths_is_priced_at_each(lengths: list[int]) -> None:
    """Prices are shared between predictions of one plan, but not between lengths, whichever comes first."""
    job = plan(dp_shard=2, tp=4)
    actual = {length: small(job, SPEC, batch=8, seq_len=length) for length in lengths}
    memory = [actual[length].tightest.by_class["activations"] for length in sorted(actual)]
    assert memory == sorted(set(memory))


def test_partial_sums_in_eight_bits_are_half_as_long() -> None:
    """Of the forward's collectives in a layer with fp8 products, two gather in eight bits and two reduce: in 16 bits
    these are two thirds of the bytes, in eight the half."""
    record = stack("megatron-bridge")
    facts = (
        *(f for f in record.facts if f.field != "tp_reduce_dtype"),
        Fact(field="tp_reduce_dtype", source="a test", date="2026-11-22"),
    )
    narrow = record.with_values(facts, tp_reduce_dtype="fp8")
    job = replace(
        plan(tp=8, micro=4), layout=Layout(sequence_parallel=True), precision=Precision(fp8=Fp8(recipe="delayed"))
    )
    work, model = Workload(global_batch_size=4, seq_len=2048), gpt_model(8, 8192, 64, dropout=0.0)
    wide_s, narrow_s = (
        predict(model, "1x8xh100-sxm", job, work, entry).pricing.stages[0].layers[1][0].forward.comm_s["tp"]
        for entry in (record, narrow)
    )
    assert 0.6 < narrow_s / wide_s < 0.75
