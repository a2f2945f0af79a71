"""The controller of experts' placement: a drifting load, what moves cost, and the same answer everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from gnomon.control.placing import ROWS_ALONE, Look, PlacingCosts, imbalance, move, place, with_placement
from gnomon.models.presets import model
from gnomon.plans import Experts, Mesh, Optimizer, Plan, RouterLoad, Saved, Schedule, Workload
from gnomon.plans.replicas import check_placement, in_order
from gnomon.prediction import predict
from gnomon.search.questions.reasons import without

EXPERTS, EP, REPLICAS = 16, 4, 8


def drifting(steps: int, *, s: float = 1.2, tokens: int = 65536, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """Rows of each expert, step by step: a Zipf load whose logits walk at random, with two experts that change places
    in every tenth."""
    random = np.random.default_rng(seed)
    logits = -s * np.log(random.permutation(EXPERTS) + 1.0)
    for step in range(steps):
        if step % 10 == 9:
            one, other = logits.argmax(), logits.argmin()
            logits[[one, other]] = logits[[other, one]]
        share = np.exp(logits) / np.exp(logits).sum()
        yield tuple(random.multinomial(tokens, share).tolist())
        logits = logits + 0.05 * random.standard_normal(EXPERTS)


@pytest.mark.parametrize("seed", range(4))
def test_a_drifting_load_is_even_within_twenty_steps(seed: int) -> None:
    placement, after, still = in_order(EXPERTS, REPLICAS, EP), list[float](), list[float]()
    for rows in drifting(60, seed=seed):
        after.append(imbalance(rows, placement, EP))
        still.append(imbalance(rows, in_order(EXPERTS, 0, EP), EP))
        placement = move(Look(placement=placement, rows=rows, steps=1), EP, ROWS_ALONE, horizon=10).placement
        check_placement(placement, EXPERTS, REPLICAS, EP)
    assert max(load for step, load in enumerate(after) if step >= 20 and step % 10 != 9) < 1.2
    assert np.mean(still) > 1.4


def test_moves_are_made_only_where_they_pay() -> None:
    rows = next(drifting(1))
    look = Look(placement=in_order(EXPERTS, REPLICAS, EP), rows=rows, steps=1)
    usual = PlacingCosts(row_s=1e-6, sum_s=0.0, move_s=1e-3)
    free, dear = (
        move(look, EP, costs, horizon=10) for costs in (usual, PlacingCosts(row_s=1e-6, sum_s=0.0, move_s=10.0))
    )
    assert free.slots and free.gain_s * 10 > 1e-3 * len(free.slots)
    assert dear.placement == look.placement and not dear.slots
    even = Look(placement=look.placement, rows=(100,) * EXPERTS, steps=1)
    assert not move(even, EP, ROWS_ALONE, horizon=10).slots


def test_a_known_load_is_placed_at_once() -> None:
    for seed in range(6):
        rows = next(drifting(1, seed=seed))
        for replicas in (0, REPLICAS, 3 * EXPERTS):
            found = place(rows, replicas, EP)
            check_placement(found, EXPERTS, replicas, EP)
            assert imbalance(rows, found, EP) <= imbalance(rows, in_order(EXPERTS, replicas, EP), EP)
        assert imbalance(rows, place(rows, REPLICAS, EP), EP) < 1.05


def test_a_step_with_replicas_is_three_quarters_of_the_static_one() -> None:
    """Predicted, with the copies' memory, their gradients' sum and the update of all copies in it; a placement of one
    load is worth less under another."""
    load = RouterLoad(kind="zipf", s=0.6)
    work = Workload(global_batch_size=8, seq_len=4096, router=load)
    plan = Plan(
        mesh=Mesh(dp_shard=8, ep=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1),
        saved=Saved(preset="full"),
    )  # fmt: skip
    few = model("qwen3-30b-a3b")
    static = predict(few, "1x8xh200", plan, work)
    asked = replace(plan, experts=Experts(replicas=16))
    with_copies = predict(few, "1x8xh200", asked, work)
    assert with_copies.step_s < 0.75 * static.step_s
    assert with_copies.plan.experts.placement == with_placement(asked, few, work).experts.placement
    bought = dict(without(with_copies.plan))
    assert bought["flexmoe"].experts == Experts()
    again = predict(with_copies.pricing.graph, "1x8xh200", bought["flexmoe"], work)
    assert again.step_s == static.step_s and again.memory == static.memory
    held = [max(rank.by_class["parameters"] for rank in one.memory) for one in (static, with_copies)]
    experts = 48 * 3 * 2048 * 768 * 2  # bytes of one more expert in each layer
    assert held[1] - held[0] == 2 * experts
