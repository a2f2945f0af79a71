"""Experts on ranks by an integer programme, against all placements there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from gnomon.errors import PlanError
from gnomon.models.presets import model
from gnomon.plans import Mesh, Optimizer, Plan, RouterLoad, Schedule, Workload
from gnomon.plans.replicas import Placement, busiest, in_order
from gnomon.prediction import predict
from gnomon.search.expert_placement import RouterProfile, best_placement, cost, crossings, for_load

pytest.importorskip("scipy", reason="scipy has the solver")


def every(experts: int, ep: int, left: tuple[int, ...] | None = None) -> Iterator[Placement]:
    """All placements of as many experts on each rank."""
    left = tuple(range(experts)) if left is None else left
    if not left:
        yield ()
        return
    for own in combinations(left, experts // ep):
        for rest in every(experts, ep, tuple(e for e in left if e not in own)):
            yield (*own, *rest)


def profile(seed: int, layers: int, experts: int, tokens: int = 200) -> RouterProfile:
    """Of tokens whose experts in neighbouring layers go together."""
    random = np.random.default_rng(seed)
    mates = [random.permutation(experts) for _ in range(layers)]
    chosen = [random.choice(experts, tokens, p=random.dirichlet(np.ones(experts)))]
    for mate in mates[1:]:
        follows = random.random(tokens) < 0.7
        chosen.append(np.where(follows, mate[chosen[-1]], random.integers(0, experts, tokens)))
    rows = tuple(tuple(np.bincount(one, minlength=experts).tolist()) for one in chosen)
    pairs = []
    for one, other in zip(chosen[:-1], chosen[1:], strict=True):
        pair = np.zeros((experts, experts), np.int64)
        np.add.at(pair, (one, other), 1)
        pairs.append(pair)
    return RouterProfile(rows=rows, pairs=tuple(pairs))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("row", "crossing"), [(1.0, 0.0), (0.0, 1.0), (1.0, 0.5)])
def test_it_is_as_good_as_the_best_of_all(seed: int, row: float, crossing: float) -> None:
    layers, experts, ep = 2, 4, 2
    given = profile(seed, layers, experts)
    found = best_placement(given, ep, row=row, crossing=crossing)
    least = min(
        cost(given, placement, ep, row=row, crossing=crossing)
        for placement in product(every(experts, ep), repeat=layers)
    )
    assert cost(given, found, ep, row=row, crossing=crossing) == pytest.approx(least)


def test_experts_that_follow_each_other_come_together_and_uniform_ones_gain_nothing() -> None:
    given, usual = profile(1, 3, 8), (in_order(8, 0, 4),) * 3
    together = best_placement(given, 4, row=0.0, crossing=1.0)
    assert crossings(given, together, 4) < 0.75 * crossings(given, usual, 4)
    even = RouterProfile(rows=((10,) * 4,) * 2, pairs=(np.full((4, 4), 5),))
    for one in (best_placement(even, 2, crossing=1.0), (in_order(4, 0, 2),) * 2):
        assert crossings(even, one, 2) == 40
    with pytest.raises(PlanError, match="record them"):
        best_placement(RouterProfile(rows=even.rows), 2, crossing=1.0)
    with pytest.raises(PlanError, match="4 experts do not divide over ep = 3"):
        best_placement(even, 3)


def test_a_placement_by_profile_is_predicted_to_gain() -> None:
    counts = (900, 800, 100, 100, 100, 100, 100, 100)
    load, moe = RouterLoad(kind="histogram", counts=counts), model("mixtral-8x7b")
    rows = for_load(load, (8,) * 32, 4)
    assert busiest(load, (), 8, 4) == pytest.approx(4 * 1700 / 2300) and len(set(rows)) == 1
    assert busiest(load, rows, 8, 4) == pytest.approx(4 * 1000 / 2300, abs=1e-4)
    plan = Plan(mesh=Mesh(dp_shard=4, ep=4), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1))
    work = Workload(global_batch_size=16, seq_len=2048, router=load)
    times = [
        predict(moe, "1x4xh100-sxm", replace(plan, experts=replace(plan.experts, placement=own)), work).step_s
        for own in ((), rows)
    ]
    assert times[1] < 0.9 * times[0]
