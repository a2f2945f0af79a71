"""What collectives and messages cost where their ranks check each of them, or where the host sleeps between looks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evidence.published import read_runs
from evidence.published.fitted_reading import as_measured
from evidence.readings import readings
from gnomon.errors import PlanError
from gnomon.models.presets import model
from gnomon.plans import Mesh, Optimizer, Overlap, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prices.host import CHECK_S, LAUNCH_S
from gnomon.search.space.points import stack_limits
from gnomon.software import Fact, Stack

WORK = Workload(global_batch_size=16, seq_len=1024)


def stack_with(**values: object) -> Stack:
    facts = tuple(Fact(field=name, source="a test", date="2026-11-22") for name in values)
    return Stack(name="test", version="0").with_values(facts, **values)


def run(stack: Stack, **axes: int) -> Prediction:
    plan = Plan(mesh=Mesh(**axes), schedule=Schedule(name="one_f_one_b", micro_batch_size=1))
    return predict("gpt2", "1x8xh100-sxm-80gb", plan, WORK, stack)


CHECKED = stack_with(checked_collectives=True)
PLAIN = stack_with()
POLLED = stack_with(p2p_poll_s=0.1)


def seconds(result: Prediction, kind: str) -> float:
    key = next(key for key in result.structure.program.keys if key.kind == kind and not key.name)
    return result.pricing.seconds(key)


def test_each_rank_of_a_group_is_heard_before_a_collective() -> None:
    """gpt2's layers on four ranks are shorter than their launches, so that all of the checks show."""
    checked, plain = run(CHECKED, tp=4, dp_replicate=2), run(PLAIN, tp=4, dp_replicate=2)
    count = checked.pricing.compute.phase("forward", 0).collectives["tp"]
    assert count >= 24  # two a layer and more
    assert seconds(checked, "F") - seconds(plain, "F") == pytest.approx(count * 4 * CHECK_S, rel=0.02)
    assert seconds(checked, "NORM") - seconds(plain, "NORM") == pytest.approx(8 * CHECK_S)


def test_checks_of_buckets_are_no_longer_than_all_of_them() -> None:
    checked, plain = run(CHECKED, dp_replicate=8), run(PLAIN, dp_replicate=8)
    assert seconds(plain, "AR") < seconds(checked, "AR") < seconds(plain, "AR") + 20 * 8 * CHECK_S


def test_a_host_that_polls_looks_twice_at_each_tensor() -> None:
    polled, plain = run(POLLED, pp=2, dp_replicate=4), run(PLAIN, pp=2, dp_replicate=4)
    assert {kind: seconds(polled, kind) for kind in ("POLL", "RECV_F", "RECV_B")} == dict.fromkeys(
        ("POLL", "RECV_F", "RECV_B"), pytest.approx(0.2)
    )
    assert seconds(plain, "RECV_F") == 0.0
    # four microbatches of three tensors on each of the two stages
    assert polled.step_s - plain.step_s == pytest.approx(4 * 0.6, rel=0.1)


def test_one_stage_has_no_messages_to_look_at() -> None:
    assert run(POLLED, tp=4, dp_replicate=2).step_s == run(PLAIN, tp=4, dp_replicate=2).step_s


@pytest.mark.parametrize("stack", [CHECKED, POLLED])
def test_the_search_has_no_bounds_of_them(stack: Stack) -> None:
    with pytest.raises(PlanError, match="no bounds"):
        stack_limits(stack, model("gpt2"), Plan())


HEADER = (
    "id,family,source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,device,num_devices,devices_per_node,"
    "precision,framework,tp,pp,dp,zero_or_fsdp,micro_batch,global_batch,recompute,flash_attention,metric,value,notes"
)
NOTES = "from huggingface/nanotron scripts/scaling_benchmarks.py"


@pytest.mark.parametrize(
    ("nodes", "tp", "pp", "notes", "checked", "polled"),
    [
        (64, 8, 4, NOTES, True, True),
        (16, 8, 4, NOTES, True, False),
        (16, 32, 2, NOTES, True, True),
        (32, 4, 2, NOTES, True, True),
        (32, 8, 2, NOTES, True, False),
        (16, 2, 2, NOTES, True, False),
        (64, 8, 1, NOTES, True, False),
        (64, 32, 1, NOTES, False, False),
        (16, 8, 1, NOTES, False, False),
        (1, 2, 4, NOTES, False, False),
        (64, 8, 4, "a run of somebody else", False, False),
    ],
)
def test_runs_of_the_benchmark_are_read_by_their_times(
    nodes: int, tp: int, pp: int, notes: str, checked: bool, polled: bool
) -> None:
    row = (
        f"a,nanotron-ultrascale,s,llama-8B,32,4096,32,32,14336,131072,4096,h100-sxm-80gb,{8 * nodes},8,bf16,nanotron,"
        f"{tp},{pp},{8 * nodes // tp // pp},zero1,1,512,none,yes,tokens_per_s_per_device,1000,{notes}"
    )
    (result,), refused = read_runs(f"{HEADER}\n{row}\n")
    assert not refused
    read = as_measured(result, readings().nanotron).stack
    assert (bool(read.launch.checked_collectives), read.messages.p2p_poll_s is not None) == (checked, polled)


@pytest.mark.parametrize(("params_b", "micro", "polled"), [(8.9, 2, True), (8.9, 1, False), (3.6, 2, False)])
def test_larger_models_on_32_nodes_ran_again_with_one_sequence_alone(params_b: float, micro: int, polled: bool) -> None:
    row = (
        f"a,nanotron-ultrascale,s,llama,32,4096,32,32,14336,131072,4096,h100-sxm-80gb,256,8,bf16,nanotron,"
        f"8,2,16,zero1,{micro},512,none,yes,tokens_per_s_per_device,1000,{NOTES},{params_b}"
    )
    (result,), refused = read_runs(f"{HEADER},params_b\n{row}\n")
    assert not refused
    assert (as_measured(result, readings().nanotron).stack.messages.p2p_poll_s is not None) == polled


def test_checks_of_buckets_are_host_time_of_the_backward() -> None:
    """Nothing hides them where the host is behind: one for each bucket of eight ranks, beyond what reducing takes."""
    plan = Plan(mesh=Mesh(dp_replicate=8), schedule=Schedule(micro_batch_size=1))
    plan = replace(plan, overlap=replace(plan.overlap, bucket_bytes=2**20))
    small = Workload(global_batch_size=8, seq_len=64)
    actual = [predict("gpt2", "1x8xh100-sxm-80gb", plan, small, s) for s in (CHECKED, PLAIN)]
    checked, plain = (seconds(entry, "AR") for entry in actual)
    elements = 124_439_808  # gpt2, tied
    assert checked - plain >= 0.9 * elements * 4 / 2**20 * 8 * CHECK_S / 2  # buckets of bf16 or fp32


def test_a_bucket_holds_whole_tensors_and_the_first_layers_comes_last() -> None:
    """gpt2's embedding is 31% of its parameters: no less of the reduction has nothing beside it."""
    plan = Plan(mesh=Mesh(dp_replicate=8), schedule=Schedule(micro_batch_size=2))
    plan = replace(plan, overlap=replace(plan.overlap, bucket_bytes=50 * 2**20))
    actual = [predict("gpt2", "1x8xh100-sxm-80gb", plan, WORK, s) for s in (stack_with(reducer_buckets=True), PLAIN)]
    reducer, other = (seconds(entry, "AR") for entry in actual)
    assert reducer > other
    at_once = replace(plan, overlap=replace(plan.overlap, grad_reduce=False))
    first = predict("gpt2", "1x8xh100-sxm-80gb", at_once, WORK, PLAIN)
    assert 0.31 * seconds(first, "AR") < reducer < 0.5 * seconds(first, "AR")


def test_slices_of_a_gather_are_copied_one_by_one() -> None:
    """Under ZeRO 1: ranks times tensors launches. Under ZeRO 0 there is nothing to gather."""
    sliced = stack_with(sliced_gather=True)
    for zero in (0, 1):
        plan = Plan(
            mesh=Mesh(dp_shard=8),
            schedule=Schedule(micro_batch_size=1),
            optimizer=Optimizer(zero=zero),  # type: ignore[arg-type]
            overlap=Overlap(param_gather=False),
        )
        actual, usual = (predict("gpt2", "1x8xh100-sxm-80gb", plan, WORK, s) for s in (sliced, PLAIN))
        copies = 8 * actual.pricing.stages[0].num_tensors * LAUNCH_S
        assert actual.step_s - usual.step_s == pytest.approx(copies * zero, rel=1e-6, abs=1e-9)
