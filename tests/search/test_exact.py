"""The search against predicting every plan: same optimum, no bound above its plan, points that add up.

Here a few dozen random spaces; `benchmarks/search/exact.py` does hundreds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest
from search.spaces import Case, case

from gnomon.errors import GnomonError
from gnomon.hardware import parse_cluster
from gnomon.hardware.scaled import scaled
from gnomon.models.llama import llama, llama3_1_8b
from gnomon.models.mixtral import mixtral, mixtral_8x7b
from gnomon.plans import Plan, Workload
from gnomon.prediction import Prediction, predict
from gnomon.search import Point, solve
from gnomon.search.bounds.families import Family, partly_split
from gnomon.search.bounds.tighter_time import Loose
from gnomon.search.equal.blocks import SLACK
from gnomon.search.equal.devices import EqualDevices
from gnomon.search.space.points import make_space
from gnomon.software import Fact, stack

SEEDS = range(24)
WITHOUT = frozenset({1, 7, 14, 15, 18, 23})
"""Seeds of spaces none of whose plans can run: what is searched for must not be found there."""
CHECKED = 6
"""Points of a space whose bounds are looked at."""


def predicted(given: Case, points: Iterable[Point] | None = None) -> Iterator[tuple[Point, Prediction]]:
    """Every point that can run, with its prediction, or every one of these that can."""
    for point in given.space.points() if points is None else points:
        try:
            yield point, predict(given.graph, given.cluster, given.space.plan(point), given.workload, given.stack)
        except GnomonError:
            continue


def check(seed: int, *, extra_choices: bool = False, away: bool = False, disk: bool = False) -> int:
    """Asserts that the search of a random space finds what predicting all of it finds; the number of points."""
    given = case(seed, extra_choices=extra_choices, away=away, disk=disk)
    every = list(predicted(given))
    assert bool(every) == (seed not in WITHOUT) or seed not in SEEDS or away
    peaks = sorted({entry.tightest.peak_bytes for _, entry in every})
    limit = peaks[len(peaks) // 2] if peaks and seed % 3 else None
    goal = replace(given.goal, memory_bytes=limit)
    fits = sorted(entry.step_s for _, entry in every if limit is None or entry.tightest.peak_bytes <= limit)
    result = solve(given.graph, given.cluster, given.workload, given.space, given.stack, goal, top=1)
    assert result.counts.covered == given.space.size == result.counts.space
    assert [candidate.step_s for candidate in result.best] == fits[:1], seed
    check_bounds(given, random.Random(seed).sample(every, min(CHECKED, len(every))))
    return given.space.size


def check_bounds(given: Case, some: list[tuple[Point, Prediction]]) -> None:
    """No bound is above the plan it is of, no plan that fits is said not to, and twins are the same run."""
    search = EqualDevices(given.graph, given.cluster, given.workload, given.space, given.stack, given.goal)
    for point, entry in some:
        same = given.space.canonical(point)
        if same != point:
            twin = predict(given.graph, given.cluster, given.space.plan(same), given.workload, given.stack)
            assert twin.step_s == entry.step_s and twin.tightest.peak_bytes == entry.tightest.peak_bytes, point
            continue
        bounds, allowed = bounds_of(search, point)
        assert max(bounds, default=0.0) <= entry.step_s, (point, bounds, entry.step_s)
        assert allowed or not entry.fits, point


def bounds_of(search: EqualDevices, point: Point) -> tuple[list[float], bool]:
    """(every bound on a point's time, from its family's on; whether bounds on memory allow it)."""
    space, blocks = search.space, search.blocks
    layout = replace(
        space.base.layout,
        sequence_parallel=point.sequence_parallel,
        keep_gathered=point.keep_gathered,
        context=point.context,
    )
    dp = point.dp_replicate * point.dp_shard
    micro = space.micro_batch_size
    family = Family(search.job, point.tp, point.cp, point.ep, point.pp, dp, layout, point.recompute, micro)
    actual, column = [blocks.family_bound(family)], micro.index(point.micro_batch_size)
    for row in blocks.rows(family):
        if (row.schedule, row.virtual) == (point.schedule, point.virtual_stages) and column in row.columns:
            actual.append(row.bounds[row.columns.index(column)])
            block = search.opening.block(family, row.schedule, row.virtual, column)
            for least, group in search.opening.open(block):
                if group.rough:
                    least = max(least, search.opening.better(group)[0])
                for bound, item in search.opening.members(group):
                    if isinstance(item, Loose) and item.point == point:
                        stalls = item.reductions == "stages" and not partly_split(point.schedule)
                        better = [search.tighten.with_stalls(item)] if stalls else []
                        better += [search.tighten.bound(item), search.tighten.by_itself(item) if item.gathers else 0.0]
                        fits = search.opening.fits(item)
                        return [*actual, least, bound, *(entry * (1 - SLACK) for entry in better)], fits
                    if item == point:
                        return [*actual, least, bound], True
    return actual, False


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_finds_what_predicting_everything_finds(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("factor", (0.05, 0.12, 0.16, 0.25))
def test_bounds_hold_on_slow_networks(factor: float) -> None:
    """ZeRO 3 on two nodes, with and without replicas: from transfers that outlast all computing, whose gathers and
    reductions wait side by side, to those that hide and take less from kernels."""
    given = case(3)
    graph = llama(replace(llama3_1_8b(), num_layers=16, vocab_size=2048))
    machines = scaled(parse_cluster("2x8xa100-sxm-80gb"), network=factor)
    work = Workload(global_batch_size=32, seq_len=4096)
    space = make_space(graph, machines, work, base=Plan())
    space = replace(space, tp=(1,), cp=(1,), pp=(1,), zero=(3,), micro_batch_size=(1, 2), recompute=("none",))
    slow = replace(given, graph=graph, cluster=machines, workload=work, space=space, stack=stack("torchtitan"))
    every = list(predicted(slow))
    assert len(every) > 1
    check_bounds(slow, every)


@pytest.mark.parametrize("factor", (0.02, 0.12))
def test_bounds_hold_where_gradients_hold_backwards_up(factor: float) -> None:
    """ZeRO 2 in pipelines over slow networks: a stage's next backward waits for the reduction of the last."""
    given = case(3)
    graph = llama(replace(llama3_1_8b(), num_layers=8, vocab_size=2048))
    machines = scaled(parse_cluster("4x8xa100-sxm-80gb"), network=factor)
    work = Workload(global_batch_size=64, seq_len=4096)
    space = make_space(graph, machines, work, base=Plan())
    space = replace(space, tp=(1,), cp=(1,), pp=(1, 2), zero=(2,), micro_batch_size=(1,), recompute=("none",))
    slow = replace(given, graph=graph, cluster=machines, workload=work, space=space, stack=stack("torchtitan"))
    every = list(predicted(slow, (point for point in space.points() if point.overlap)))
    assert len(every) > 5
    check_bounds(slow, every)


def test_bounds_hold_where_tokens_go_once_to_a_node() -> None:
    """Experts over one node and two, with kernels that send a token once to each."""
    given = case(3)
    graph = mixtral(replace(mixtral_8x7b(), num_layers=4))
    machines, work = parse_cluster("2x8xh100-sxm"), Workload(global_batch_size=32, seq_len=2048)
    fact = Fact(field="moe_dispatch", source="test", date="2026-11-22")
    program = given.stack.with_values((*given.stack.facts, fact), moe_dispatch="fused")
    space = make_space(graph, machines, work, base=Plan())
    space = replace(space, tp=(1,), cp=(1,), ep=(1, 4, 8), zero=(1, 3), micro_batch_size=(1,), recompute=("none",))
    made = replace(given, graph=graph, cluster=machines, workload=work, space=space, stack=program)
    points = list(space.points())
    random.Random(0).shuffle(points)
    some = list(islice(predicted(made, points), 12))
    assert {point.ep for point, _ in some} == {1, 4, 8}
    check_bounds(made, some)


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_with_exactly_the_memory_it_needs_is_not_ruled_out(seed: int) -> None:
    given = case(seed)
    points = [point for point in given.space.points() if given.space.canonical(point) == point]
    random.Random(seed).shuffle(points)
    some = list(islice(predicted(given, points), CHECKED))
    assert bool(some) == (seed not in WITHOUT)
    for point, entry in some:
        goal = replace(given.goal, memory_bytes=entry.tightest.peak_bytes)
        search = EqualDevices(given.graph, given.cluster, given.workload, given.space, given.stack, goal)
        assert bounds_of(search, point)[1], point
