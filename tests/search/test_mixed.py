"""Plans over unlike devices: the search finds what predicting every plan finds, points add up, and what plans mean."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from search.mixed_spaces import mixed_case, predicted
from search.spaces import model

from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.hardware.kinds import is_mixed, kinds_of
from gnomon.models.presets import model as preset
from gnomon.plans import Goal, Plan, Workload, check
from gnomon.plans.stacks import stack
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.mixed import MixedSearch, fits, memory_limits, plan_mixed
from gnomon.search.mixed_bounds import LayerTables, least_step_s
from gnomon.search.mixed_space import MixedPoint, make_mixed_space, shares_of
from gnomon.search.space import parse_limit

SEEDS = range(52)
MIXED = "1x2xh100-sxm+1x2xa100-sxm-80gb"
WORKLOAD = Workload(global_batch_size=16, seq_len=512)


def check_exact(seed: int) -> int:
    """Asserts that the search of a random space finds what predicting all of it finds; the number of points."""
    case = mixed_case(seed)
    every = list(predicted(case))
    draw = random.Random(seed)
    limits = memory_limits(case.space.kinds, Goal(memory_fraction=1.0))
    if every and seed % 2:  # of some kinds only so much that half of the plans fit
        peaks = sorted(found.tightest.peak_bytes for _, found in every)
        limits = tuple(min(limit, draw.choice((limit, peaks[len(peaks) // 2]))) for limit in limits)
    allowed = sorted(found.step_s for _, found in every if fits(found, case.space.kinds, limits))
    tables = LayerTables(case.graph, case.cluster, case.workload, case.stack, case.space.base, case.space.kinds)
    search = MixedSearch(tables, case.workload, case.stack, case.space, limits, tries=10**9)
    search.run()
    assert [found.step_s for found in search.best] == allowed[:1], seed
    assert search.counts.covered == search.counts.space == case.space.size and not search.counts.left
    assert search.bound_s == float("inf")
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
        forms.add((point.form, len(point.layers) > 1))
        assert sorted(d for ranks in plan.stage_ranks for d in ranks) == list(range(6))
        assert sum(point.layers) == 4 and not plan.placement
        check(replace(plan, optimizer=replace(plan.optimizer, zero=0)), graph, cluster, WORKLOAD)
    assert forms == {("replicas", False), ("replicas", True), ("stages", True)}


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
    found = plan_mixed(model("llama", 4), MIXED, WORKLOAD, forbid=["pp>2", "tp>1"], tries=60)
    best = found.best[0]
    assert best.prediction.fits and found.bound_s <= best.step_s
    others = [found.equal, *(each for _, each in found.alone)]
    assert all(each.step_s >= best.step_s for each in others if each is not None)
    assert len({kind.name for kind, _ in found.alone}) == 2
    counts = found.counts
    assert counts.priced + counts.too_slow + counts.too_large + counts.illegal + counts.left == found.space.size


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
    assert mixed.step.stages[0].device.name == "a100-sxm-80gb"
    more = predict(graph, MIXED, space.plan(point._replace(shares=(6, 2))), work)
    assert {rank.ranks for rank in more.memory} == {(0, 1), (2, 3)}
    by_device = {rank.device: rank.peak_bytes for rank in more.memory}
    assert by_device["h100-sxm-80gb"] > by_device["a100-sxm-80gb"]


def test_bounds_of_a_pipeline_by_hand() -> None:
    """Two stages, forward 1 and 2, backward 2 and 4, three microbatches: the second computes 18 after a forward of the
    first, which then has a backward left."""
    assert least_step_s([1, 2], [2, 4], [1, 2], 3, split=False, clip=True) == 1 + 18 + 2
    assert least_step_s([1, 2], [2, 4], [1, 2], 3, split=False, clip=False) == 18
    assert least_step_s([1, 2], [2, 4], [1, 2], 3, split=True, clip=True) == 1 + 18


def test_what_plans_over_kinds_do_not_have_is_refused() -> None:
    graph = model("llama", 4)
    with pytest.raises(PlanError, match="ep is asked for"):
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
    found = [space.plan(point) for point in random.Random(1).sample(list(space.points()), 100)]
    assert all(len({stage.mesh for stage in plan.stages}) == 1 for plan in found)
    assert all(plan.optimizer.zero == 0 for plan in found if len(plan.stages) > 1)


@pytest.mark.parametrize("seq_len", [512, 2048])
def test_context_parallelism_side_by_side_where_it_is_fixed(seq_len: int) -> None:
    """Two ranks of one node share a sequence; the search finds what predicting every plan finds."""
    graph, cluster = model("llama", 4), parse_cluster("1x4xh100-sxm+1x2xa100-sxm-80gb")
    work, base = Workload(global_batch_size=6, seq_len=seq_len), Plan()
    space = make_mixed_space(graph, cluster, work, base=base, fixed={"cp": 2, "zero": 1, "sequence_parallel": False})
    steps = []
    for point in space.points():
        plan = space.plan(point)
        assert {stage.mesh.cp for stage in plan.stages} == {2} and point.form == "replicas"
        try:
            found = predict(graph, cluster, plan, work)
        except PlanError:
            continue
        if fits(found, space.kinds, memory_limits(space.kinds, Goal())):
            steps.append(found.step_s)
    limits = memory_limits(space.kinds, Goal())
    search = MixedSearch(LayerTables(graph, cluster, work, PLAIN_STACK, base, space.kinds), work, PLAIN_STACK, space,
                         limits, tries=10**9)  # fmt: skip
    search.run()
    assert steps and search.best[0].step_s == min(steps)
    assert search.counts.covered == search.counts.space == space.size and not search.counts.left
