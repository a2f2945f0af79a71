"""Which rank computes which rows of experts that several hold, against the flow of least load, and wrong placements."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from gnomon.errors import PlanError
from gnomon.models.presets import model
from gnomon.plans import Experts, Mesh, Plan, RouterLoad, Schedule, check
from gnomon.plans.replicas import busiest, check_placement, holders, in_order, rank_rows, sent_rows


def least_busiest(totals: list[int], placement: tuple[int, ...], ep: int) -> float:
    """By the theorem of max-flow and min-cut: rows that only some ranks can compute, over those ranks."""
    held = holders(placement, len(totals), ep)
    return max(
        sum(rows for rows, ranks in zip(totals, held, strict=True) if set(ranks) <= set(some)) / size
        for size in range(1, ep + 1)
        for some in combinations(range(ep), size)
    )


def test_rows_are_shared_out_as_evenly_as_they_can_be() -> None:
    random = np.random.default_rng(3)
    for _ in range(60):
        ep, each = int(random.integers(2, 5)), int(random.integers(2, 4))
        experts, replicas = ep * each, ep * int(random.integers(0, each))
        placement = in_order(experts, replicas, ep)
        counts = random.zipf(1.6, (ep, experts)).clip(0, 400)
        sent = sent_rows(counts, placement)
        assert (sent >= 0).all() and (sent.sum(axis=2) == counts).all()
        for expert, ranks in enumerate(holders(placement, experts, ep)):
            assert set(np.flatnonzero(sent[:, expert].sum(axis=0))) <= set(ranks)
        load = sent.sum(axis=(0, 1))
        totals = counts.sum(axis=0).tolist()
        assert load.tolist() == rank_rows(totals, placement, ep)
        least = least_busiest(totals, placement, ep)
        assert least <= load.max() <= 1.002 * least + 2


def test_rows_stay_on_their_rank_where_it_has_room() -> None:
    even = np.full((2, 2), 8)
    sent = sent_rows(even, (0, 1, 0, 1))
    assert sent[0, :, 0].tolist() == sent[1, :, 1].tolist() == [8, 8]


def test_the_load_of_a_prediction_follows_the_placement() -> None:
    load = RouterLoad(kind="histogram", counts=(6, 1, 1, 0))
    assert busiest(load, (), 4, 2) == pytest.approx(7 / 4)
    assert busiest(load, ((0, 1, 2, 0, 3, 2),), 4, 2) == pytest.approx(1.0, abs=1e-5)
    recorded = RouterLoad(kind="recorded", layers=((6, 1, 1, 0), (0, 1, 1, 6)))
    assert busiest(recorded, ((0, 1, 2, 0, 3, 2),), 4, 2) == pytest.approx((1 + 6 / 4) / 2, abs=1e-5)


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (Experts(replicas=3), "replicas = 3 give ep = 4 ranks unlike numbers of experts; the nearest are 0 and 4"),
        (Experts(replicas=28), "each of ep = 4 ranks 9 experts, and there are 8, of which a rank holds one copy;"),
        (Experts(placement=((0, 1, 2, 3, 4, 5, 6, 8),)), "names expert 8, and a layer has 8, counted from 0 to 7"),
        (Experts(placement=((0, 1, 2, 3, 4, 5, 6, 6),)), "has expert 7 on no rank; give each at least one slot"),
        (Experts(placement=((0, 1, 2, 3),)), "lists 4 slots, but 8 experts and 0 replicas have 8: 2 on each of ep = 4"),
        (Experts(replicas=4, placement=((0, 1, 0, 2, 3, 4, 4, 5, 6, 7, 1, 2),)), "has expert 0 twice on rank 0 of ep"),
        (Experts(placement=((0, 1, 2, 3, 4, 5, 6, 7),) * 3), "has 3 rows, but 'mixtral-8x7b' has 32 layers"),
    ],
)  # fmt: skip
def test_wrong_placements_are_one_line(experts: Experts, said: str) -> None:
    plan = Plan(mesh=Mesh(dp_shard=4, ep=4), schedule=Schedule(micro_batch_size=1), experts=experts)
    with pytest.raises(PlanError) as error:
        check(plan, model("mixtral-8x7b"))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(PlanError, match="must be at least 0"):
        Experts(replicas=-1)
    with pytest.raises(PlanError, match="ep = 1; use ep of 2 or more"):
        check(Plan(schedule=Schedule(micro_batch_size=1), experts=Experts(replicas=2)), model("mixtral-8x7b"))
    with pytest.raises(PlanError, match="twice on rank"):
        check_placement((0, 0, 1, 1), 2, 2, 2)
