"""Plans over heterogeneous devices: the search finds what predicting all finds; points add up; what plans mean."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from search.mixed_spaces import mixed_case, predicted
from search.spaces import model

from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.hardware.kinds import is_mixed, kinds_of
from gnomon.models.presets import model as preset
from gnomon.plans import Goal, Optimizer, Plan, Workload, check
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.report.mixed import mixed_text
from gnomon.search.bounds.families import Actions
from gnomon.search.mixed.bounds import LayerTables, least_of_ranks, least_step_s, played_s, tails_s
from gnomon.search.mixed.devices import MixedDevices
from gnomon.search.mixed.plan_mixed import memory_limits, plan_mixed, search_mixed
from gnomon.search.mixed.results import fits
from gnomon.search.mixed.space import MixedPoint, Shape, divisions, layers_of_stages, make_mixed_space, shares_of
from gnomon.search.space.points import parse_limit
from gnomon.software import stack

LARGE = (0, 8, 11, 16, 18, 28, 29, 33, 37, 42, 43, 44, 45)
SEEDS = [seed for seed in range(52) if seed not in LARGE]
"""Those left out are large, and take no line of the search after another that the rest do not. `check_exact(seed)` of
this file takes any."""
MIXED = "1x2xh100-sxm+1x2xa100-sxm-80gb"
WORKLOAD = Workload(global_batch_size=16, seq_len=512)


def check_exact(seed: int) -> int:
    """Asserts that the search of a random space finds what predicting all of it finds; the number of points."""
    case = mixed_case(seed)
    every = list(predicted(case))
    draw = random.Random(seed)
    limits = memory_limits(case.space.kinds, Goal(memory_fraction=1.0))
    if every and seed % 2:  # of some kinds only so much that half of the plans fit
        peaks = sorted(entry.tightest.peak_bytes for _, entry in every)
        limits = tuple(min(limit, draw.choice((limit, peaks[len(peaks) // 2]))) for limit in limits)
    allowed = sorted(entry.step_s for _, entry in every if fits(entry, case.space.kinds, limits))
    tables = LayerTables(case.graph, case.cluster, case.workload, case.stack, case.space.base, case.space.kinds)
    search = search_mixed(MixedDevices(tables, case.workload, case.stack, case.space, limits, tries=10**9))
    assert [candidate.step_s for candidate in search.best] == allowed[:1], seed
    assert search.counts.covered == search.counts.space == case.space.size and not search.counts.num_unseen
    assert search.open_s == float("inf")
    return case.space.size


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_finds_what_predicting_everything_finds(seed: int) -> None:
    check_exact(seed)


def test_the_kinds_of_a_cluster() -> None:
    kinds = kinds_of(parse_cluster("1x2xh100-sxm+1x4xa100-sxm-80gb+1x2xh100-sxm"))
    assert [(kind.name, kind.devices) for kind in kinds] == [
        ("h100-sxm-80gb", (0, 1, 6, 7)),
        ("a100-sxm-80gb", (2, 3, 4, 5)),
    ]
    assert not is_mixed(parse_cluster("4x8xh100-sxm")) and not is_mixed(parse_cluster("37x4xgb200"))
    cluster = parse_cluster("2x8xh100-sxm")
    (group,) = cluster.groups
    fewer = replace(group, node=replace(group.node, nics=1), count=1)
    slower = kinds_of(replace(cluster, groups=(replace(group, count=1), fewer)))
    assert [kind.name for kind in slower] == [
        "h100-sxm-80gb (8 a node, 8 x infiniband-ndr)",
        "h100-sxm-80gb (8 a node, 1 x infiniband-ndr)",
    ]


def test_shares_add_up_and_leave_nobody_out() -> None:
    assert shares_of(4, (1, 2), False) == ((1, 3), (2, 2))
    assert shares_of(6, (1, 2), True) == ((2, 4),)
    assert shares_of(5, (1, 2), True) == ()


def test_every_plan_of_a_space_uses_each_device_once_and_computes_the_batch() -> None:
    cluster = parse_cluster("1x4xh100-sxm+1x2xa100-sxm-80gb")
    graph = model("llama", 4)
    space = make_mixed_space(graph, cluster, WORKLOAD)
    points = list(space.points())
    assert len(points) == space.size
    forms = set()
    for point in random.Random(0).sample(points, 200):
        plan = space.plan(point)
        forms.add((point.form, point.pp > 1, point.virtual > 1))
        held = [d for ranks in plan.stage_ranks for d in ranks]
        assert sorted(held) == sorted(list(range(6)) * point.virtual)  # one stage, or several, on each rank
        assert sum(point.layers) == 4 and not plan.placement
        check(replace(plan, optimizer=replace(plan.optimizer, zero=0)), graph, cluster, WORKLOAD)
    several = {(form, True, virtual) for form in ("replicas", "stages") for virtual in (False, True)}
    assert forms == {("replicas", False, False), *several}


def test_kinds_left_out_are_no_ranks() -> None:
    cluster = parse_cluster("1x2xv100-sxm-32gb+1x2xh100-sxm+1x2xa100-sxm-80gb")
    graph = model("llama", 4)
    space = make_mixed_space(graph, cluster, WORKLOAD, fixed={"tp": 1, "recompute": "none", "zero": 0})
    point = next(p for p in space.points() if p.form == "stages" and set(p.kinds) == {1, 2} and p.kinds[0] == 2)
    plan = space.plan(point)
    assert plan.world_size == 4 and plan.placement == (2, 3, 4, 5)
    first = {plan.device_of[rank] for rank in plan.stage_ranks[0]}
    assert first <= {4, 5}
    predict(graph, cluster, plan, WORKLOAD)


def test_the_fast_devices_take_more_and_nothing_compared_with_is_faster() -> None:
    result = plan_mixed(model("llama", 4), MIXED, WORKLOAD, forbid=["pp>2", "tp>1"], tries=20)
    best = result.best[0]
    assert best.prediction.fits and result.bound_s <= best.step_s
    others = [result.equal, *(entry for _, entry in result.best_of_kinds)]
    assert all(other.step_s >= best.step_s for other in others if other is not None)
    assert len({kind.name for kind, _ in result.best_of_kinds}) == 2
    counts = result.counts
    assert (
        counts.num_predicted + counts.too_slow + counts.too_large + counts.illegal + counts.num_unseen
        == result.space.size
    )


def test_a_spent_budget_leaves_plans_over_several_kinds_and_says_what_ended_it() -> None:
    spent = plan_mixed(model("llama", 4), MIXED, WORKLOAD, keep_going=lambda: False)
    assert spent.counts.num_predicted and spent.counts.num_unseen and len(spent.best[0].kinds) == 2
    assert (spent.end_reason, len(spent.unfinished)) == ("budget", 3)
    text = " ".join(mixed_text(spent))
    assert "--budget" in text and "--tries" not in text and "none fits" not in text
    tried = plan_mixed(model("llama", 4), MIXED, WORKLOAD, tries=1)
    assert (tried.end_reason, tried.unfinished) == ("tries", ()) and "--tries" in " ".join(mixed_text(tried))


def test_shares_by_speed_beat_equal_ones_in_the_simulator() -> None:
    graph, work = preset("llama-3.2-1b"), Workload(global_batch_size=32, seq_len=2048)
    space = make_mixed_space(graph, parse_cluster(MIXED), work)
    one = MixedPoint("replicas", (0, 1), (1, 1), (16,), (8, 8), 2, False, "none", 1, "one_f_one_b")
    even, uneven, too_much = (
        predict(graph, MIXED, space.plan(one._replace(shares=shares)), work).step_s
        for shares in ((8, 8), (12, 4), (14, 2))
    )
    assert uneven < 0.75 * even and uneven < too_much < even


def test_a_step_is_as_long_as_that_of_the_slowest_replica() -> None:
    graph, work = model("llama", 4), Workload(global_batch_size=8, seq_len=512)
    space = make_mixed_space(graph, parse_cluster(MIXED), work)
    point = MixedPoint("replicas", (0, 1), (1, 1), (4,), (4, 4), 1, False, "none", 0, "one_f_one_b")
    mixed = predict(graph, MIXED, space.plan(point), work)
    assert {rank.device for rank in mixed.memory} == {"h100-sxm-80gb", "a100-sxm-80gb"}
    assert mixed.stages[0].device.name == "a100-sxm-80gb"
    more = predict(graph, MIXED, space.plan(point._replace(shares=(6, 2))), work)
    assert {rank.ranks for rank in more.memory} == {(0, 1), (2, 3)}
    by_device = {rank.device: rank.peak_bytes for rank in more.memory}
    assert by_device["h100-sxm-80gb"] > by_device["a100-sxm-80gb"]


def test_bounds_of_a_pipeline_by_hand() -> None:
    """Two stages, forward 1 and 2, backward 2 and 4, three microbatches: the second computes 18 after a forward of the
    first, which then has a backward left. Reductions of 5 after the last action of the second, of which its backward
    hides 4: one is left."""
    one, two = Shape("stages", (0, 1), (1, 1), 2, 1, (1, 1), 1, False), np.ones((2, 1))
    act = Actions(forward=two * [[1], [2]], whole=two * [[2], [4]], input=two * [[1], [2]], weight=two * [[1], [2]])
    ranks = least_of_ranks(act, one)
    assert least_step_s(ranks, 3, split=False, clip=True) == 1 + 18 + 2
    assert least_step_s(ranks, 3, split=False, clip=False) == 18
    assert least_step_s(ranks, 3, split=True, clip=True) == 1 + 18
    tails = tails_s(two * [[0], [5]], act, one, split=False)
    assert tails.tolist() == [[0], [1]]
    assert least_step_s(ranks, 3, split=False, clip=True, tails=3 + tails) == 1 + 18 + 4
    whole, ends = played_s(act, one, "one_f_one_b", 3)
    assert whole == pytest.approx(1 + 18 + 2, rel=1e-9) and ends[1] == pytest.approx(1 + 18, rel=1e-9)


def test_layers_of_a_rank_go_to_its_stages_equally() -> None:
    ranks = [np.array([3, 2]), np.array([2, 5])]
    assert layers_of_stages(ranks, 2, False).tolist() == [[2, 1, 1, 1], [1, 3, 1, 2]]
    assert layers_of_stages(ranks, 2, True).tolist() == [[2, 1, 1, 1], [1, 3, 2, 1]]
    assert divisions(5, 2, 2) == 2 and divisions(3, 2, 2) == 0 and divisions(5, 3, 1) == 6


def test_what_plans_over_kinds_do_not_have_is_refused() -> None:
    graph = model("llama", 4)
    with pytest.raises(PlanError, match="micro_batch_size is asked for"):
        plan_mixed(graph, MIXED, WORKLOAD, fixed={"micro_batch_size": 2})
    with pytest.raises(PlanError, match="ep = 2 is asked for, and l has no experts"):
        plan_mixed(graph, MIXED, WORKLOAD, fixed={"ep": 2})
    with pytest.raises(PlanError, match="no choice of tp is left"):
        make_mixed_space(graph, parse_cluster(MIXED), WORKLOAD, limits=[parse_limit("tp>=1")])
    with pytest.raises(PlanError, match="one kind"):
        plan_mixed(graph, "1x2xh100-sxm", WORKLOAD)
    tiny = Goal(memory_bytes=2**20)
    with pytest.raises(PlanError, match="no plan of l fits"):
        plan_mixed(graph, MIXED, WORKLOAD, goal=tiny, fixed={"pp": 1, "tp": 1})


def test_tied_weights_stay_on_equal_meshes_where_the_runtime_wants_it() -> None:
    cluster = parse_cluster("1x4xh100-sxm+1x2xa100-sxm-80gb")
    space = make_mixed_space(model("tied", 4), cluster, WORKLOAD, base=Plan(), stack=stack("gnomon"))
    actual = [space.plan(point) for point in random.Random(1).sample(list(space.points()), 100)]
    assert all(len({stage.mesh for stage in plan.stages}) == 1 for plan in actual)
    assert all(plan.optimizer.zero == 0 for plan in actual if len(plan.stages) > 1)


NEW_AXES = {
    "context side by side and in stages": ("llama", 4, 4096, {"zero": 1, "schedule": "one_f_one_b", "pp": 2, "tp": 1}),
    "context, one exchange": (
        "llama",
        4,
        512,
        {"zero": 0, "cp": 2, "context": "ulysses", "schedule": "gpipe", "pp": 2},
    ),
    "experts": ("mixtral", 4, 512, {"zero": 1, "schedule": "one_f_one_b", "sequence_parallel": True, "tp": 1}),
    "experts and tp": ("mixtral", 4, 512, {"zero": 2, "tp": 2, "sequence_parallel": True, "recompute": "none"}),
    "two stages on a rank": ("llama", 6, 512, {"zero": 1, "virtual_stages": 2, "pp": 2, "tp": 1}),
    "two stages on a rank of three kinds": ("gpt", 7, 512, {"zero": 0, "virtual_stages": 2, "pp": 3, "tp": 1}),
    "experts, two stages on a rank": ("mixtral", 4, 512, {"zero": 1, "virtual_stages": 2, "ep": 2, "pp": 2, "tp": 1}),
}
"""Model, its layers, sequence length, and what is fixed: the axes that `mixed_case` leaves out or draws seldom."""


@pytest.mark.parametrize(("name", "clip"), [(name, n % 2 == 0) for n, name in enumerate(NEW_AXES)])
def test_the_search_is_exact_with_context_experts_and_several_stages(name: str, clip: bool) -> None:
    kind, layers, seq_len, fixed = NEW_AXES[name]
    graph, machines = model(kind, layers), "1x4xh100-sxm+1x4xa100-sxm-80gb"
    cluster = parse_cluster(machines + ("+1x2xl40s" if "three" in name else ""))
    work, base = Workload(global_batch_size=16, seq_len=seq_len), Plan(optimizer=Optimizer(clip=clip))
    whole = make_mixed_space(graph, cluster, work, base=base, fixed=fixed)
    narrow = {"microbatches": (4,), "recompute": ("none",), "cp": whole.cp[:2], "ep": whole.ep[:3]}
    space = replace(whole, **narrow, schedule=whole.schedule[:: 1 if len(whole.schedule) < 4 else 3])
    limits, steps, used = memory_limits(space.kinds, Goal()), [], set()
    points = list(space.points())
    assert 8 <= len(points) == space.size < 200
    for point in points:
        try:
            prediction = predict(graph, cluster, space.plan(point), work)
        except PlanError:
            continue
        used.add((point.form, point.cp > 1, max(point.ep) > 1, point.virtual > 1))
        steps += [prediction.step_s] if fits(prediction, space.kinds, limits) else []
    tables = LayerTables(graph, cluster, work, PLAIN_STACK, base, space.kinds)
    search = search_mixed(MixedDevices(tables, work, PLAIN_STACK, space, limits, tries=10**9))
    assert steps and [candidate.step_s for candidate in search.best] == [min(steps)]
    assert search.counts.covered == search.counts.space == space.size and not search.counts.num_unseen
    wanted = "context" in name, "experts" in name, "two stages" in name
    assert any(entry[1:] == wanted for entry in used), used


def test_experts_are_divided_within_a_kind() -> None:
    """Groups of experts never hold devices of two kinds, and kinds with fewer ranks divide less."""
    cluster = parse_cluster("1x8xh100-sxm+1x2xa100-sxm-80gb")
    space = make_mixed_space(
        model("mixtral", 4), cluster, WORKLOAD, fixed={"tp": 1, "zero": 1, "sequence_parallel": True}
    )
    kind_of = {device: k for k, kind in enumerate(space.kinds) for device in kind.devices}
    actual = set()
    for point in random.Random(0).sample(list(space.points()), 300):
        plan = space.plan(point)
        for stage, ranks in enumerate(plan.stage_ranks):
            for group in plan.stage_mesh(stage).experts.groups("ep").tolist():
                assert len({kind_of[plan.device_of[ranks[i]]] for i in group}) == 1
        actual.add((point.form, point.ep))
    assert {("replicas", (2, 2)), ("stages", (4, 2))} <= actual


def test_stacks_keep_their_zero_stages_and_axes_over_kinds() -> None:
    mixed, graph = parse_cluster(MIXED), model("llama", 4)
    space = make_mixed_space(graph, mixed, WORKLOAD, stack=stack("gnomon"))
    assert space.cp == space.ep == (1,) and max(space.virtual_stages) == 4
    megatron = stack("megatron-lm")
    within = make_mixed_space(graph, mixed, WORKLOAD, stack=megatron)
    allowed = set(megatron.runs.zero_in_pipeline or (0, 1, 2, 3))
    assert {point.zero for point in within.points() if point.pp > 1} <= allowed
