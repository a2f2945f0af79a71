"""Choices that the exact search has where it is allowed to: products that are cut, activations on the host."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from search.spaces import Case, case, with_disks
from search.test_exact import bounds_of, check, check_bounds, predicted

from gnomon.errors import PlanError
from gnomon.hardware import Cluster, parse_cluster
from gnomon.models.gpt import GptConfig, gpt
from gnomon.models.presets import model
from gnomon.plans import Goal, Offload, Optimizer, Plan, Precision, Workload
from gnomon.prediction import Prediction, host_memory
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import Point, make_space, plan, solve
from gnomon.search.equal.devices import EqualDevices
from gnomon.search.refinement.choices import CHOICES, allowed, choice
from gnomon.search.refinement.refine import THOROUGH, refine
from gnomon.search.space.points import EXTRA_CHOICES, saving_of
from gnomon.software import stack

SEEDS = range(1001, 1010)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_finds_what_predicting_everything_finds(seed: int) -> None:
    check(seed, extra_choices=True)


@pytest.mark.parametrize("seed", range(2001, 2010))
def test_with_parameters_on_the_host_it_finds_what_predicting_everything_finds(seed: int) -> None:
    check(seed, away=True)


@pytest.mark.parametrize("seed", [3003, 3005, 3008, 3012, 3016, 3025])  # which have plans that run
def test_with_parameters_on_a_disk_it_finds_what_predicting_everything_finds(seed: int) -> None:
    check(seed, away=True, disk=True)


def test_bounds_know_of_updates_and_parameters_on_the_host() -> None:
    """None is above its plan, and where the host's update takes most of the step the last one is close."""
    given = case(2)
    graph = gpt(
        GptConfig(
            name="g", num_layers=4, hidden_size=4096, num_heads=32, vocab_size=8192, max_positions=2048, tied=False
        )
    )
    machines, work = parse_cluster("1x4xh100-sxm"), Workload(global_batch_size=4, seq_len=1024)
    for moved in (False, True):
        optimizer = Optimizer(clip=False, offload=Offload(), offload_parameters=moved)
        space = make_space(graph, machines, work, base=Plan(optimizer=optimizer))
        few = replace(space, cp=(1,), micro_batch_size=(1,), recompute=("none",), pp=(1, 2), virtual_stages=(1,))
        few = replace(few, schedule=("one_f_one_b",), keep_gathered=(False,), sequence_parallel=(True,))
        here = replace(given, graph=graph, cluster=machines, workload=work, space=few, stack=PLAIN_STACK)
        some = [(point, entry) for point, entry in predicted(here) if few.canonical(point) == point]
        assert some and all(entry.breakdown["offload"] > 0.5 * entry.step_s for _, entry in some)
        check_bounds(here, some)
        search = EqualDevices(graph, machines, work, few, PLAIN_STACK, given.goal)
        assert all(max(bounds_of(search, point)[0]) > 0.7 * entry.step_s for point, entry in some)


def test_parameters_are_put_on_the_host_where_memory_decides() -> None:
    """One device that has no room for the parameters: gradients go to the host as they are made."""
    work, base = Workload(global_batch_size=2, seq_len=4096), Plan(optimizer=Optimizer(clip=False))
    goal, machines = Goal(memory_bytes=16 * 2**30), parse_cluster("1x1xh100-sxm")
    result = plan("llama-3.1-8b", machines, work, goal=goal, base=base, top=1).best[0]
    assert result.plan.optimizer.offload_parameters and result.plan.optimizer.offload is not None
    assert result.prediction.tightest.peak_bytes <= 16 * 2**30 and host_memory(result.prediction).fits
    with pytest.raises(PlanError, match="--fix optimizer_offload=yes --fix parameter_offload=yes"):
        plan("llama-3.1-8b", machines, work, goal=goal, top=1)


def test_parameters_are_put_on_a_disk_where_nothing_else_fits() -> None:
    """One device without room for the parameters, in a node whose memory has none either. Where it has, they go there;
    where nobody knows the disk, it is not offered."""
    work, goal = Workload(global_batch_size=1, seq_len=2048), Goal(memory_bytes=16 * 2**30)
    base = Plan(optimizer=Optimizer(clip=False), precision=Precision(states="bf16", grad="bf16", master="none"))
    unknown = parse_cluster("1x1xh100-sxm")
    few = {"pp": 1, "tp": 1}

    def planned(machines: Cluster, memory_gib: int) -> Plan:
        (group,) = machines.groups
        node = replace(group.node, host_memory_bytes=memory_gib * 2**30)
        held = replace(machines, groups=(replace(group, node=node),))
        result = plan("llama-3.1-8b", held, work, goal=goal, base=base, fixed=few, top=1)
        assert result.counts.space == result.counts.covered
        assert result.best[0].prediction.tightest.peak_bytes <= goal.memory_bytes  # type: ignore[operator]
        assert host_memory(result.best[0].prediction).fits
        return result.best[0].plan

    disks = with_disks(unknown, 4e9)
    assert choice("parameter_disk").of(planned(disks, 50))
    roomy = planned(disks, 120)
    assert choice("parameter_offload").of(roomy) and not choice("parameter_disk").of(roomy)
    assert choice("parameter_offload").of(planned(unknown, 120))
    with pytest.raises(PlanError, match="fits"):
        planned(unknown, 50)
    asked = choice("parameter_disk").make(base, model("llama-3.1-8b"), True)
    with pytest.raises(PlanError, match="parameter_disk is asked for, but a node of .* does not say how fast"):
        plan("llama-3.1-8b", unknown, work, base=asked)


@cache
def large() -> Case:
    """Layers of which kernels, collectives and copies take longer than launches, on two nodes."""
    graph = gpt(
        GptConfig(
            name="g", num_layers=8, hidden_size=4096, num_heads=32, vocab_size=8192, max_positions=2048, tied=False
        )
    )
    machines, work = parse_cluster("2x4xh100-sxm"), Workload(global_batch_size=16, seq_len=2048)
    space = make_space(graph, machines, work, base=Plan(), extra_choices=EXTRA_CHOICES)
    few = replace(
        space,
        tp=(2, 4),
        cp=(1,),
        pp=(1, 2),
        schedule=("one_f_one_b", "zero_bubble_h1"),
        micro_batch_size=(1, 2),
        recompute=("none", "offload"),
        sequence_parallel=(True,),
        keep_gathered=(False,),
        overlap=(True,),
        dp_replicate=(1,),
    )
    return Case(graph, machines, work, few, PLAIN_STACK, Goal(memory_fraction=1.0))


@cache
def every(*, cut: bool) -> dict[Point, Prediction]:
    """Predictions of all its points, with products cut or left whole."""
    given = large()
    return dict(predicted(given if cut else replace(given, space=replace(given.space, cut=0))))


def test_cut_products_are_not_slower() -> None:
    """What `Space.splits` proves of ZeRO 0 to 2 and says of ZeRO 3; and they take as much memory."""
    cut, whole = every(cut=True), every(cut=False)
    assert cut.keys() == whole.keys()
    for point, entry in cut.items():
        assert entry.step_s <= whole[point].step_s, point
        assert entry.tightest.peak_bytes == whole[point].tightest.peak_bytes, point
    assert sum(entry.step_s < whole[point].step_s for point, entry in cut.items()) > len(cut) / 2


def test_activations_on_the_host_never_gain_time() -> None:
    """So a plan that fits without is not slower, and only where memory decides may it pay to send them there."""
    result = every(cut=False)
    away = {point: entry for point, entry in result.items() if point.recompute == "offload"}
    others = {point: result[point._replace(recompute="none")] for point in away}
    for point, entry in away.items():
        assert saving_of(entry.plan.saved) == point.recompute
        assert entry.step_s >= others[point].step_s, point
    assert any(entry.step_s > 1.05 * others[point].step_s for point, entry in away.items())
    assert sum(entry.tightest.peak_bytes < others[point].tightest.peak_bytes for point, entry in away.items())


def test_bounds_know_of_copies_to_the_host() -> None:
    """None is above its plan, and where copies take longest the last one is close."""
    given, actual = large(), every(cut=True)
    some = [(point, entry) for point, entry in actual.items() if given.space.canonical(point) == point]
    check_bounds(given, some)
    search = EqualDevices(given.graph, given.cluster, given.workload, given.space, given.stack, given.goal)
    away = [(p, f) for p, f in some if p.recompute == "offload" and f.breakdown.get("offload", 0) > 0.1 * f.step_s]
    assert away
    assert all(max(bounds_of(search, point)[0]) > 0.85 * entry.step_s for point, entry in away)


def test_a_plan_that_sends_activations_to_the_host_is_found_where_memory_decides() -> None:
    """Faster than any without, and once both are refined not slower."""
    machines, work = parse_cluster("1x8xh100-sxm"), Workload(global_batch_size=16, seq_len=65536)
    fixed = {"pp": 1, "tp": 8, "sequence_parallel": True}
    result = plan("llama-3.1-8b", machines, work, fixed=fixed, top=1)
    plain = plan("llama-3.1-8b", machines, work, fixed=fixed, top=1, extra_choices=())
    assert result.best[0].point.recompute == "offload" and host_memory(result.best[0].prediction).fits
    assert result.best[0].step_s < 0.99 * plain.best[0].step_s
    both = [refine(entry, effort=THOROUGH).best.step_s for entry in (result, plain)]
    assert both[0] <= both[1] * (1 + 1e-9)


def test_what_the_stack_does_not_run_is_not_searched() -> None:
    work, machines = Workload(global_batch_size=8, seq_len=512), parse_cluster("1x2xh100-sxm")
    fixed = {"tp": 2, "sequence_parallel": True, "schedule": "one_f_one_b"}
    none = plan("llama-tiny", machines, work, stack("gnomon"), fixed=fixed)
    assert not none.space.cut and "offload" not in none.space.recompute
    bridge = plan("llama-tiny", machines, work, stack("megatron-bridge"), fixed=fixed)
    assert bridge.space.cut == 2 and "offload" not in bridge.space.recompute
    assert all(choice("async_tp").of(candidate.plan) for candidate in bridge.best)
    assert not plan("llama-tiny", machines, work, stack("megatron-lm"), fixed=fixed).space.cut
    open_ = plan("llama-tiny", machines, work, fixed=fixed)
    assert "offload" in open_.space.recompute


def test_products_are_not_cut_between_nodes() -> None:
    machines = parse_cluster("2x2xh100-sxm")
    space = make_space(
        model("llama-tiny"), machines, Workload(global_batch_size=8, seq_len=512), extra_choices=EXTRA_CHOICES
    )
    cut = {tp: bool(space.splits(tp, sequence_parallel=True)) for tp in (1, 2, 4)}
    assert cut == {1: False, 2: True, 4: False}
    assert not space.splits(2, sequence_parallel=False)


def test_a_base_plan_that_offloads_by_itself_is_left_as_it_is() -> None:
    graph, machines = model("llama-tiny"), parse_cluster("1x2xh100-sxm")
    work = Workload(global_batch_size=8, seq_len=512)
    base = choice("activation_offload").make(Plan(), graph, 2)
    assert "offload" not in make_space(graph, machines, work, base=base, extra_choices=EXTRA_CHOICES).recompute


def test_choices_that_are_searched_are_choices() -> None:
    names = {entry.name for entry in allowed(stack("gnomon"), allow=(), forbid=(), fixed=())}
    assert set(EXTRA_CHOICES) <= {choice.name for choice in CHOICES}
    # a CPU's host and device are one memory, which a disk frees; the runtime has two dispatchers
    assert names & {*EXTRA_CHOICES} == {"parameter_disk", "dispatch"}


def test_an_optimizer_on_the_host_is_searched_where_gradients_are_not_clipped() -> None:
    """Where it alone makes a plan fit, and where it does not help."""
    work = Workload(global_batch_size=4, seq_len=2048)
    free = Plan(optimizer=Optimizer(clip=False))
    away = choice("optimizer_offload")
    with pytest.raises(PlanError, match="optimizer on the host"):
        plan("llama-3.1-8b", "1x1xh100-sxm", work)
    result = plan("llama-3.1-8b", "1x1xh100-sxm", work, base=free)
    assert all(away.of(candidate.plan) and host_memory(candidate.prediction).fits for candidate in result.best)
    assert result.counts.space == result.counts.covered  # those of ZeRO 3 again, with parameters on the host
    assert result.counts.space == 2 * result.space.size + result.space.size // 4
    with pytest.raises(PlanError, match="fits"):
        plan("llama-3.1-8b", "1x1xh100-sxm", work, base=free, extra_choices=("async_tp", "activation_offload"))
    roomy = plan("llama-3.1-8b", "1x8xh100-sxm", replace(work, global_batch_size=16), base=free)
    plain = plan(
        "llama-3.1-8b", "1x8xh100-sxm", replace(work, global_batch_size=16), base=free, extra_choices=EXTRA_CHOICES[:2]
    )
    assert [candidate.step_s for candidate in roomy.best] == [candidate.step_s for candidate in plain.best]


@pytest.mark.parametrize("seed", range(1001, 1006))
def test_two_searches_together_find_what_predicting_both_spaces_finds(seed: int) -> None:
    given = case(seed, extra_choices=True)
    base = replace(given.space.base, optimizer=replace(given.space.base.optimizer, clip=False))
    one = replace(given.space, base=base)
    other = replace(one, base=choice("optimizer_offload").make(base, given.graph, True))
    every = [*predicted(replace(given, space=one)), *predicted(replace(given, space=other))]
    peaks = sorted({entry.tightest.peak_bytes for _, entry in every})
    goal = Goal(memory_fraction=1.0, memory_bytes=peaks[len(peaks) // 3])
    fits = sorted(entry.step_s for _, entry in every if entry.tightest.peak_bytes <= peaks[len(peaks) // 3])
    first = solve(given.graph, given.cluster, given.workload, one, given.stack, goal, top=3)
    both = solve(given.graph, given.cluster, given.workload, other, given.stack, goal, top=3, known=first.best)
    assert {candidate.step_s for candidate in both.best} <= set(fits) and both.best[0].step_s == fits[0]
