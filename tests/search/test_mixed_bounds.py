"""Bounds on what plans over heterogeneous devices hold, against the points and predictions they are of, and searches
that end early."""

from __future__ import annotations

import random

import numpy as np
import pytest
from search.mixed_spaces import mixed_case, predicted
from search.spaces import model

from gnomon.hardware import parse_cluster
from gnomon.plans import Goal, Plan, Workload
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.best_first import Search
from gnomon.search.mixed.bounds import LayerTables
from gnomon.search.mixed.devices import Large, MixedDevices
from gnomon.search.mixed.plan_mixed import memory_limits, plan_mixed, search_mixed
from gnomon.search.mixed.point_bounds import Bounds, PointRows
from gnomon.search.mixed.results import MixedFound
from gnomon.search.mixed.space import MixedBlock, MixedPoint, MixedSpace, make_mixed_space, stages_of_ranks

MIXED = parse_cluster("1x2xh100-sxm+1x2xa100-sxm-80gb")


def bounds_of(space: MixedSpace, work: Workload, limits: tuple[int, ...]) -> Bounds:
    tables = LayerTables(space.graph, MIXED, work, PLAIN_STACK, space.base, space.kinds)
    return Bounds(tables, space, limits)


def rows_of(space: MixedSpace, block: MixedBlock, variant: tuple[int, str]) -> PointRows:
    chosen = list(space.choices(block))
    shares = np.array([entry for _, entry in chosen], np.int64).reshape(len(chosen), -1)
    return PointRows(block, variant, np.array([n for n, _ in chosen]), shares, np.zeros(len(chosen)), False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "layers", "seq_len"), [("llama", 5, 512), ("tied", 4, 4096), ("mixtral", 4, 512)])
def test_coarse_bounds_on_memory_are_below_those_of_points(kind: str, layers: int, seq_len: int) -> None:
    """Of a shape and of a block below those of its points, and no point that may fit gives a
    rank more layers than it has room for: under limits at which some of the points fit."""
    work = Workload(global_batch_size=8, seq_len=seq_len)
    fixed = {"sequence_parallel": True} if kind == "mixtral" else {}
    space, draw = make_mixed_space(model(kind, layers), MIXED, work, fixed=fixed), random.Random(seq_len)
    loose = bounds_of(space, work, (10**12, 10**12))
    for shape, blocks in draw.sample(space.by_shape, 24):
        of_shape = loose.roomiest_ratio(shape, blocks)
        for block in draw.sample(blocks, min(3, len(blocks))):
            variant = draw.choice(space.variants(shape, block.microbatches))
            made = rows_of(space, block, variant)
            ratios = loose.ratio(made)
            assert max(of_shape, loose.least_ratio(block)) <= ratios.min() * (1 + 1e-9), block
            if shape.form == "replicas":
                continue
            limit = int(np.median(ratios) * 10**12)
            tight = Bounds(loose.tables, space, (limit, limit))
            most = [tight.most_layers(block, rank, variant[0], (variant[1],)) for rank in range(shape.pp)]
            for row in made.layers[tight.ratio(made) <= 1].tolist():
                held = [sum(row[stage] for stage in stages) for stages in stages_of_ranks(shape)]
                assert all(n <= m for n, m in zip(held, most, strict=True)), (block, row, most)
                assert tight.has_room(block, variant[0], (variant[1],))


@pytest.mark.parametrize("seed", range(100, 111))
def test_no_bound_on_memory_is_above_the_prediction(seed: int) -> None:
    """Whole points, with their schedule played and without."""
    case = mixed_case(seed)
    limits = memory_limits(case.space.kinds, Goal(memory_fraction=1.0))
    tables = LayerTables(case.graph, case.cluster, case.workload, case.stack, case.space.base, case.space.kinds)
    rows, limit_of = Bounds(tables, case.space, limits), {}
    for kind, limit in zip(case.space.kinds, limits, strict=True):
        limit_of |= dict.fromkeys(kind.devices, limit)
    every = list(predicted(case))
    assert every
    for point, entry in every:
        place = entry.plan.device_of
        fullest = max(rank.peak_bytes / limit_of[place[r]] for rank in entry.memory for r in rank.ranks)
        made = row_of(case.space, point)
        assert rows.least_ratio(made.block) <= fullest
        assert rows.ratio(made)[0] <= fullest and (point.pp == 1 or rows.ratio(made, played=True)[0] <= fullest)


def row_of(space: MixedSpace, point: MixedPoint) -> PointRows:
    """The one point."""
    (block,) = (
        block
        for block in space.blocks
        if (block.microbatches, block.sequence_parallel, block.recompute) == (point.microbatches, *point[6:8])
        and block.shape[:4] == (point.form, point.kinds, point.tp, point.pp)
        and (block.shape.cp, block.shape.ep, block.shape.virtual) == (point.cp, point.ep, point.virtual)
        and (block.shape.v_placement == (point.placement == "v"))
        and (point.cp == 1 or block.context == point.context)
    )
    layers, shares = np.array([point.layers]), np.array([point.shares], np.int64).reshape(1, -1)
    return PointRows(block, (point.zero, point.schedule), layers, shares, np.zeros(1), False)


@pytest.mark.parametrize("most_nodes", [1, 10, 100])
def test_a_search_that_looks_at_few_pipelines_claims_no_more_than_is_so(most_nodes: int) -> None:
    """What it says that nothing is faster than is not above the best of the whole search."""
    work = Workload(global_batch_size=8, seq_len=512)
    asked = {"fixed": {"tp": 1, "zero": 1, "recompute": "none", "cp": 1}, "forbid": ["virtual_stages>1"], "tries": 1000}
    whole = plan_mixed(model("llama", 6), MIXED, work, **asked)  # type: ignore[arg-type]
    some = plan_mixed(model("llama", 6), MIXED, work, most_nodes=most_nodes, **asked)  # type: ignore[arg-type]
    assert whole.proved and some.bound_s <= whole.best[0].step_s <= some.best[0].step_s
    assert some.counts.covered == some.space.size
    assert not some.proved or some.best[0].step_s == whole.best[0].step_s


def test_what_is_too_large_at_less_work_is_not_looked_at_again() -> None:
    """With limits that leave less and less, the search for a longer sequence finds what it finds without."""
    graph, ruled = model("llama", 4), 0
    works = [Workload(global_batch_size=8, seq_len=length) for length in (512, 1024)]
    fixed = {"pp": 2, "tp": 1, "zero": 1, "schedule": "one_f_one_b", "virtual_stages": 1}
    spaces = [make_mixed_space(graph, MIXED, work, base=Plan(), fixed=fixed) for work in works]
    tables = [LayerTables(graph, MIXED, work, PLAIN_STACK, Plan(), spaces[0].kinds) for work in works]

    def search(at: int, limit: int, large: Large) -> Search[MixedFound]:
        return search_mixed(
            MixedDevices(tables[at], works[at], PLAIN_STACK, spaces[at], (limit, limit), tries=10**6, large=large)
        )

    whole = search(1, 10**12, Large())
    peak = max(rank.peak_bytes for rank in whole.best[0].prediction.memory)
    for limit in (peak, 150_000_000, 120_000_000, 90_000_000):  # communicators take most of so small a model's peak
        found = Large()
        search(0, limit, found)
        known = Large(known_too_large=frozenset(found.added))
        ruled += len(known.known_too_large)
        plain, quick = (search(1, limit, large) for large in (Large(), known))
        assert [candidate.step_s for candidate in plain.best] == [candidate.step_s for candidate in quick.best]
        assert plain.counts.space == quick.counts.covered
    assert ruled
