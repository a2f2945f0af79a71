"""Foreseen experts: estimates and choices against brute forces written from the paper's words; a replayed record."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from gnomon.serving.foresight import (
    Costs,
    PathRecord,
    Paths,
    choose_copies,
    holders_of,
    rank_costs,
    replay,
    shares,
)

FREE = Costs(touch=0.0, fetch=0.0)


def drawn(layers: int, experts: int, tokens: int, topk: int, follows: float, seed: int) -> np.ndarray:
    """(layers, tokens, topk). follows: how often a token's first choice follows from its last."""
    rng = np.random.default_rng(seed)
    after = [rng.permutation(experts) for _ in range(layers)]
    chosen = np.zeros((layers, tokens, topk), np.int64)
    for token in range(tokens):
        for layer in range(layers):
            first = rng.zipf(1.6) % experts
            if layer and rng.random() < follows:
                first = after[layer][chosen[layer - 1, token, 0]]
            rest = rng.permutation([e for e in range(experts) if e != first])[: topk - 1]
            chosen[layer, token] = [first, *rest]
    return chosen


@pytest.mark.parametrize(("length", "topk", "seed"), [(3, 2, 0), (2, 1, 1), (1, 2, 2)])
def test_rows_are_foreseen_as_the_paper_says(length: int, topk: int, seed: int) -> None:
    """n_e = sum over tokens of P(expert of the next layer | path of the last l layers), by counting token by token; a
    path that was never seen counts as its longest end that was."""
    layers, experts = 5, 4
    seen, now = drawn(layers, experts, 60, topk, 0.6, seed), drawn(layers, experts, 25, topk, 0.6, seed + 10)
    paths = Paths(layers, experts, length)
    for part in (seen[:, :40], seen[:, 40:]):  # as two batches
        for layer in range(layers):
            paths.note(layer, part[max(0, layer - length) : layer, :, 0], part[layer])
    for layer in range(1, layers):
        wanted = np.zeros(experts)
        for token in range(now.shape[1]):
            for back in range(min(length, layer), -1, -1):
                path = [now[at, token, 0] for at in range(layer - back, layer)]
                same = [t for t in range(seen.shape[1])
                        if [seen[at, t, 0] for at in range(layer - back, layer)] == path]  # fmt: skip
                if same:
                    chose = Counter(int(e) for t in same for e in seen[layer, t])
                    for expert, count in chose.items():
                        wanted[expert] += count / len(same)
                    break
        found = paths.foresee(layer, now[max(0, layer - length) : layer, :, 0])
        assert found == pytest.approx(wanted) and found.sum() == pytest.approx(now.shape[1] * topk)


def test_copies_are_chosen_nearly_as_well_as_by_trying_all() -> None:
    """Never worse than none, within the room, and on average within 5 % of the best of all choices."""
    rng, over = random.Random(0), []
    for _ in range(40):
        ep, room = rng.choice([(2, 1), (2, 2), (3, 1)])
        experts = 2 * ep
        costs = Costs(touch=rng.choice((0, 5)), fetch=rng.choice((0, 3, 12)))
        rows = [int(rng.paretovariate(1.0) * 10) for _ in range(experts)]
        found = choose_copies(rows, ep, room, costs)
        own = [[e for e in range(experts) if e // 2 != rank] for rank in range(ep)]
        every = product(*[[c for n in range(room + 1) for c in combinations(others, n)] for others in own])
        best = min(max(rank_costs(rows, copies, costs)) for copies in every)
        mine = max(rank_costs(rows, found, costs))
        assert mine <= max(rank_costs(rows, ((),) * ep, costs)) and all(len(one) <= room for one in found)
        assert all(e // 2 != rank for rank, one in enumerate(found) for e in one)
        over.append(mine / max(best, 1))
    assert sum(over) / len(over) < 1.05 and max(over) < 1.5


def test_every_row_is_computed_once() -> None:
    copies = ((3,), (0, 1))
    made = shares([40, 3, 0, 9], copies, Costs(touch=4.0, fetch=0.0))
    assert [sum(one) for one in made] == [40, 3, 0, 9] and holders_of(copies, 4) == [[0, 1], [0, 1], [1], [1, 0]]
    assert made[1] == [3, 0]  # too few to read its weights twice
    assert min(made[0]) > 0


def test_a_record_whose_layers_follow_each_other_is_foreseen_and_one_by_chance_is_not() -> None:
    found = {}
    for follows in (0.9, 0.0):
        chosen = drawn(4, 8, 600, 2, follows, 5)
        record = PathRecord(model="m", layers=("a", "b", "c", "d"), experts=8, begins=(0, 200, 400, 600), chosen=chosen)
        found[follows] = replay(record, 2, 2, FREE, learnt=1)
    sure, chance = found[0.9], found[0.0]
    assert sure.first / sure.tokens > 0.8 and sure.second >= sure.first > chance.first
    assert sure.mean <= sure.known <= sure.foreseen * 1.0001 and sure.foreseen < sure.in_order
    assert sure.load < 1.1 and len(sure.by_iteration) == 2
    dear = replay(record, 2, 2, Costs(touch=0.0, fetch=1e9))
    assert dear.fetched == 0 and dear.foreseen == dear.in_order
