"""Reasons of a plan: neighbours, machines, and answers that a reader can check."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from gnomon.hardware import Cluster, parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Goal, Layout, Mesh, Offload, Optimizer, Plan, Saved, SavedRule, Schedule, Workload
from gnomon.prediction import Prediction, host_memory, predict, traffic
from gnomon.report.prediction import describe
from gnomon.report.reasons import bounded_by, network, reasons_text, sharding, where
from gnomon.search import plan
from gnomon.search.fit.advice import advice
from gnomon.search.questions.reasons import MORE_MEMORY, Reasons, explain, undone, within_share, without
from gnomon.search.refinement.changes import changes

PLAN = Plan(
    mesh=Mesh(pp=2, dp_shard=4, tp=2),
    schedule=Schedule(micro_batch_size=1),
    optimizer=Optimizer(zero=1),
    layout=Layout(sequence_parallel=True),
)


@cache
def predicted() -> Prediction:
    return predict("llama-3.2-1b", "2x8xh100-sxm", PLAN, Workload(global_batch_size=32, seq_len=2048))


@cache
def reasons() -> Reasons:
    return explain(predicted())


def test_every_change_is_one_and_keeps_the_devices() -> None:
    names = [what for what, _ in changes(PLAN)]
    assert len(set(names)) == len(names)
    assert all(plan != PLAN and plan.world_size == PLAN.world_size for _, plan in changes(PLAN))
    assert {"tp 2 -> 4", "tp 2 -> 1", "pp 2 -> 1", "ZeRO 1 -> 3", "recompute full", "microbatch 1 -> 2"} <= {*names}


def test_neighbours_are_predictions() -> None:
    actual = {reason.what: reason for reason in reasons().neighbours}
    full = actual["recompute full"].prediction
    assert full is not None and full.plan.saved.preset == "full"
    assert full.step_s > predicted().step_s and full.tightest.peak_bytes < predicted().tightest.peak_bytes


def test_progress_counts_every_plan_that_is_looked_at() -> None:
    seen: list[tuple[int, int]] = []
    small = predict(
        "llama-tiny",
        "1xh100-sxm",
        Plan(schedule=Schedule(micro_batch_size=1)),
        Workload(global_batch_size=2, seq_len=64),
    )
    result = explain(small, runners_up=[PLAN], on_progress=lambda done, of: seen.append((done, of)))
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))] and len(seen) == len(result.neighbours) + 1
    assert result.runners_up == ()  # sixteen ranks do not run on one device


def test_faster_links_never_lose_and_slower_ones_never_gain() -> None:
    steps = {reason.what: reason.step_s for reason in reasons().sensitivities}
    own = predicted().step_s
    assert steps["network 2x"] <= own <= steps["network half"] and steps["links inside a node 2x"] <= own


def by_hand(cluster: Cluster, *, network: float = 1.0, more_bytes: int = 0) -> Cluster:
    """The machines with other ports or larger devices, put together field by field."""
    groups = []
    for group in cluster.groups:
        node = group.node
        assert node.nic is not None
        port = replace(node.nic, bytes_per_s=node.nic.bytes_per_s * network)
        device = replace(node.device, memory_bytes=node.device.memory_bytes + more_bytes)
        groups.append(replace(group, node=replace(node, nic=port, device=device)))
    return replace(cluster, groups=tuple(groups))


def test_what_is_said_of_other_machines_is_true_there() -> None:
    """Both lines predicted again on machines made by hand: `network half`, and what 10 GiB more let in."""
    cluster, work = parse_cluster("2x8xh100-sxm"), Workload(global_batch_size=32, seq_len=16384)
    held = {"pp": 1, "tp": 2, "cp": 1, "micro_batch_size": 1, "zero": 1, "sequence_parallel": True}
    fixed = {**held, "schedule": "one_f_one_b", "dp_replicate": 1, "dp_shard": 8, "keep_gathered": False}
    goal = Goal(memory_bytes=int(0.92 * cluster.devices[0].memory_bytes))
    result = plan("llama-3.1-8b", cluster, work, goal=goal, fixed=fixed, top=1, extra_choices=())  # recomputes
    best, large = result.best[0], [candidate for candidate in result.near if candidate.step_s < result.best[0].step_s]
    told = explain(best.prediction, too_large=[entry.plan for entry in large])
    lines = {sensitivity.what: sensitivity for sensitivity in told.sensitivities}
    slow = predict("llama-3.1-8b", by_hand(cluster, network=0.5), best.plan, work)
    assert lines["network half"].step_s == slow.step_s > best.step_s
    more = lines["+10 GiB a device"]
    larger = by_hand(cluster, more_bytes=10 * 2**30)
    assert best.plan.saved.preset == "full" and more.change.endswith("drops recompute full")
    there = plan("llama-3.1-8b", larger, work, fixed=fixed, top=1).best[0]
    assert there.step_s <= more.step_s < best.step_s
    again = predict("llama-3.1-8b", larger, replace(best.plan, saved=Saved()), work)
    assert more.step_s == again.step_s and again.tightest.peak_bytes <= 0.92 * larger.devices[0].memory_bytes
    text = " ".join(" ".join(reasons_text(told)).split())
    assert f"network half: {(slow.step_s / best.step_s - 1) * 100:+.1f} %" in text
    assert f"+10 GiB a device: {(again.step_s / best.step_s - 1) * 100:+.1f} % ({more.change})" in text


def test_choices_beyond_the_search_are_undone_one_by_one() -> None:
    odd = replace(PLAN, overlap=replace(PLAN.overlap, bucket_bytes=100 * 2**20))
    graph = model("llama-3.2-1b")
    assert list(undone(PLAN, graph)) == []
    ((what, plain),) = undone(odd, graph)
    assert what == "bucket_bytes 100 MiB -> a block" and plain == PLAN
    assert "; bucket_bytes 100 MiB" in describe(odd, predicted().workload)


def test_what_each_axis_buys_is_the_plan_without_it() -> None:
    actual = {reason.what: reason.prediction for reason in reasons().bought}
    assert {"tp 2", "pp 2", "ZeRO 1"} == {*actual}
    for what, axis in (("tp 2", "tp"), ("pp 2", "pp")):
        assert actual[what] is not None and getattr(actual[what].plan.mesh, axis) == 1
        assert actual[what].plan.world_size == PLAN.world_size
    assert actual["ZeRO 1"] is not None and actual["ZeRO 1"].plan.optimizer.zero == 0


def test_runners_up_of_a_search_lose_what_their_predictions_say() -> None:
    slower = replace(PLAN, saved=Saved(preset="full"))
    larger = replace(PLAN, schedule=Schedule(micro_batch_size=4))
    result = explain(predicted(), runners_up=(slower,), too_large=(larger,))
    (other,) = result.runners_up
    again = predict("llama-3.2-1b", "2x8xh100-sxm", slower, Workload(global_batch_size=32, seq_len=2048))
    assert other.loss.seconds == again.step_s - predicted().step_s > 0
    assert other.loss.part in again.breakdown and len(result.too_large) == 1
    assert "runners-up" in "\n".join(reasons_text(result))


def test_why_a_plan_does_not_fit_names_rank_moment_and_class() -> None:
    work = Workload(global_batch_size=128, seq_len=8192)
    plan = replace(PLAN, schedule=Schedule(micro_batch_size=4))
    tight = predict("llama-3.1-8b", "2x8xa100-sxm-40gb", plan, work)
    result = explain(tight)
    assert not tight.fits
    message = where(tight)
    assert message.startswith(f"rank {tight.tightest.ranks[0]}, {tight.tightest.peak_at}: ") and " of 39" in message
    largest = max(
        ("parameters", "gradients", "states", "activations", "logits"), key=lambda n: tight.tightest.by_class[n]
    )
    assert message.split(" GiB, ")[1].startswith(largest)
    lines = reasons_text(result, advice=advice(tight))
    assert all(len(line) <= 80 for line in lines)
    assert "fastest change that fits" in "\n".join(lines)


def test_more_memory_lets_in_what_the_share_of_a_device_forbids() -> None:
    """Without recomputation the job is quicker, over the share of a device now, and within it with 10 GiB more."""
    job = replace(PLAN, mesh=Mesh(dp_shard=8, tp=2), schedule=Schedule(micro_batch_size=2), saved=Saved(preset="full"))
    given = predict("llama-3.1-8b", "2x8xh100-sxm", job, Workload(global_batch_size=64, seq_len=8192))
    result = explain(given)
    (more,) = (sensitivity for sensitivity in result.sensitivities if sensitivity.what.startswith("+10 GiB"))
    named = {neighbour.what: neighbour.prediction for neighbour in result.neighbours}[more.change.partition(",")[0]]
    assert named is not None and named.step_s == more.step_s < given.step_s
    assert not within_share(named) and within_share(named, MORE_MEMORY)
    assert "no plan looked at" in next(s.change for s in reasons().sensitivities if s.what.startswith("+10 GiB"))


def test_experts_and_contexts_have_neighbours() -> None:
    plan = Plan(mesh=Mesh(dp_shard=2, cp=4, ep=8), schedule=Schedule(micro_batch_size=1), layout=Layout(context="ring"))
    names = {what for what, _ in changes(plan)}
    assert {"ep 8 -> 4", "context by ulysses", "context by all_gather", "cp 4 -> 2"} <= names
    assert "pp 1 -> 2" not in names  # four ranks of a stage cannot refold to eight of experts
    assert "ep 8" in {what for what, _ in without(plan)}
    whole = replace(plan, mesh=Mesh(dp_shard=8))
    assert "ep 1 -> 2" in {what for what, _ in changes(whole, experts=True)} - {what for what, _ in changes(whole)}


def test_uneven_stages_have_neighbours_with_their_layers_or_equal_ones() -> None:
    rules = (SavedRule(preset="full", stages=(1,)),)
    uneven = replace(PLAN, schedule=replace(PLAN.schedule, layers_per_stage=(9, 7)), saved=Saved(rules=rules))
    actual = dict(changes(uneven))
    assert actual["equal stages"].schedule.layers_per_stage == () == actual["equal stages"].saved.rules
    assert actual["ZeRO 1 -> 3"].schedule.layers_per_stage == (9, 7) and actual["ZeRO 1 -> 3"].saved.rules == rules
    for what in ("pp 2 -> 4", "pp 2 -> 1", "schedule zero_bubble_v"):
        assert actual[what].schedule.layers_per_stage == () == actual[what].saved.rules
    assert actual["schedule zero_bubble_h1"].schedule.layers_per_stage == (9, 7)
    work = Workload(global_batch_size=32, seq_len=2048)
    reasons = explain(predict("llama-3.2-1b", "2x8xh100-sxm", uneven, work))
    assert all(neighbour.prediction is not None or neighbour.why_not for neighbour in reasons.neighbours)
    assert reasons_text(reasons) and not any(
        "layers_per_stage" in neighbour.why_not for neighbour in reasons.neighbours
    )
    tight = predict(
        "llama-3.1-8b",
        "2x8xa100-sxm-40gb",
        replace(uneven, schedule=replace(uneven.schedule, layers_per_stage=(17, 15), micro_batch_size=8)),
        replace(work, global_batch_size=64),
    )
    assert not tight.fits and advice(tight).ways


def test_bytes_sent_are_those_of_the_textbook() -> None:
    """ZeRO 3 over 8 ranks: parameters gathered twice and gradients scattered once a microbatch, 7/8 of each; a
    pipeline: activations of every microbatch."""
    graph, work = model("llama-3.2-1b"), Workload(global_batch_size=16, seq_len=512)
    sharded = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=2), optimizer=Optimizer(zero=3))
    (only,) = traffic(predict(graph, "1x8xh100-sxm", sharded, work))
    elements = graph.num_parameters()
    # bf16 gathers for forward and backward (the last block stays), fp32 gradients
    assert only.axes == "dp_shard+cp" and only.ranks == 8
    assert only.sent_bytes == pytest.approx(7 / 8 * elements * (2 + 2 + 4), rel=0.25)
    staged = Plan(mesh=Mesh(pp=2), schedule=Schedule(micro_batch_size=2))
    (messages,) = traffic(predict(graph, "1x2xh100-sxm", staged, work))
    assert messages.axes == "pp" and messages.sent_bytes == 16 * 512 * 2048 * 2


def test_host_memory_of_an_offloaded_optimizer() -> None:
    """Master, two moments and the gradient in fp32, and what goes back in bf16: 18 bytes of every parameter, on the two
    ranks of a node."""
    graph, work = model("llama-3.2-1b"), Workload(global_batch_size=16, seq_len=512)
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=2), optimizer=Optimizer(zero=1, clip=False))
    assert host_memory(predict(graph, "1x2xh100-sxm", plan, work)).bytes == 0
    away = replace(plan, optimizer=replace(plan.optimizer, offload=Offload()))
    held = host_memory(predict(graph, "1x2xh100-sxm", away, work))
    assert held.bytes == pytest.approx(18 * graph.num_parameters(), rel=1e-6) and held.fits
    half, untied = replace(away, optimizer=replace(away.optimizer, offload=Offload(fraction=0.5))), model("llama-2-7b")
    whole, part = (host_memory(predict(untied, "1x2xh100-sxm", one, work)).bytes for one in (away, half))
    assert part == pytest.approx(whole / 2, rel=1e-6)


def test_the_text_names_what_bounds_and_the_memory_of_each_stage() -> None:
    result = reasons()
    parts = predicted().breakdown
    named = bounded_by(result).partition(":")[0]
    assert "launch" in sorted(parts, key=lambda part: -parts[part])[:2] and "kernels waiting for the host" in named
    assert ("computing, then" in named) == (parts["F"] + parts["B"] > parts["launch"])
    assert network(result).split("? ")[1].startswith(("yes", "partly", "no"))
    assert [zero for zero, _ in result.zero] == [0, 1, 2, 3]
    assert "by ZeRO stage" in sharding(result)
    assert all(len(line) <= 80 for line in reasons_text(result))


def test_uneven_stages_are_explained() -> None:
    """What they buy, and what is said of each stage is left out where there are other stages."""
    rules = (SavedRule(stages=(0,), first_per_stage=1, preset="full"),)
    schedule = Schedule(micro_batch_size=1, layers_per_stage=(3, 5, 3, 1))
    plan = Plan(mesh=Mesh(pp=4, dp_shard=2), schedule=schedule, saved=Saved(rules=rules))
    named = dict(changes(plan))
    assert named["equal stages"].schedule.layers_per_stage == ()
    assert named["pp 4 -> 2"].saved.rules == () and named["pp 4 -> 2"].schedule.layers_per_stage == ()
    assert named["schedule zero_bubble_h1"].schedule.layers_per_stage == (3, 5, 3, 1)
    assert named["schedule zero_bubble_v"].schedule.layers_per_stage == ()
    assert named["recompute none"].saved == Saved() and named["recompute full"].saved == Saved(preset="full")
