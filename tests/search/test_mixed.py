"""Plans over unlike devices: the search finds what predicting every plan finds, points add up, and what plans mean."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from search.mixed_spaces import mixed_case, predicted
from search.spaces import model

from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.plans import Goal, Plan, Workload, check
from gnomon.plans.stacks import stack
from gnomon.prediction import predict
from gnomon.search.mixed import MixedPoint, MixedSearch, fits, memory_limits, plan_mixed
from gnomon.search.mixed_bounds import LayerTables, least_step_s
from gnomon.search.mixed_space import is_mixed, kinds_of, make_mixed_space, shares_of
from gnomon.search.space import parse_limit

SEEDS = range(60)
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
