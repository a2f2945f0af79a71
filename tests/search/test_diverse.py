"""Alternatives: which plans `gnomon plan` shows and tries; a search for them finds what predicting all plans does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search.spaces import case
from search.test_exact import predicted

from gnomon.plans import Mesh, Optimizer, Plan, Saved, Schedule
from gnomon.search import pick_diverse, solve
from gnomon.search.results import SAME_MESH, UP_TO, most_alike, sort_of, sort_of_point

PLANS = st.lists(
    st.builds(
        lambda mesh, micro, zero, preset: Plan(
            mesh=mesh,
            schedule=Schedule(micro_batch_size=micro),
            optimizer=Optimizer(zero=zero),
            saved=Saved(preset=preset),
        ),
        st.sampled_from([Mesh(dp_shard=8), Mesh(dp_shard=4, tp=2), Mesh(dp_shard=4, pp=2), Mesh(dp_replicate=8)]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 2]),
        st.sampled_from(["none", "full"]),
    ),
    min_size=1,
    max_size=12,
)


@given(plans=PLANS, few=st.integers(1, 6))
def test_no_two_are_alike_and_few_of_one_mesh(plans: list[Plan], few: int) -> None:
    chosen = pick_diverse(plans, few)
    sorts = [sort_of(plans[i]) for i in chosen]
    assert chosen[0] == 0 and chosen == sorted(chosen) and len(chosen) <= few
    assert len(set(sorts)) == len(sorts)
    meshes = len({sort_of(plan)[0] for plan in plans})
    assert max(Counter(ranks for ranks, *_ in sorts).values()) <= most_alike(meshes, few)
    for i in chosen:  # the first of its sort
        assert sort_of(plans[i]) not in [sort_of(plan) for plan in plans[:i]]


@given(plans=PLANS, few=st.integers(1, 6))
def test_filled_up_there_are_as_many_as_are_asked_for(plans: list[Plan], few: int) -> None:
    chosen = pick_diverse(plans, few, fill=True)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(few, len(plans))
    assert set(pick_diverse(plans, few)) <= set(chosen)


def test_what_schedules_and_replicas_differ_in_is_no_alternative() -> None:
    data, tensor = Plan(mesh=Mesh(dp_shard=8)), Plan(mesh=Mesh(dp_shard=4, tp=2))
    gpipe = replace(data, schedule=Schedule(name="gpipe"))
    hybrid = replace(data, mesh=Mesh(dp_replicate=2, dp_shard=4))
    large = replace(data, schedule=Schedule(micro_batch_size=2))
    assert pick_diverse([data, gpipe, hybrid, tensor], 3) == [0, 3]
    assert pick_diverse([data, gpipe, hybrid, tensor], 3, fill=True) == [0, 1, 3]
    assert pick_diverse([data, large, tensor], 3) == [0, 1, 2]
    assert most_alike(40, 5) == SAME_MESH and most_alike(1, 5) == 5


@pytest.mark.parametrize("seed", range(16))
def test_a_search_for_alternatives_finds_those_of_predicting_everything(seed: int) -> None:
    """The best, then each the fastest of its sort, sorts and meshes counted over all points that fit."""
    asked, few = case(seed), 4
    every = list(predicted(asked))
    limit = sorted(entry.tightest.peak_bytes for _, entry in every)[len(every) * 3 // 4] if every else None
    fits = [(p, f.step_s) for p, f in every if limit is None or f.tightest.peak_bytes <= limit]
    able = sorted((step_s, sort_of_point(asked.space.canonical(point))) for point, step_s in fits)
    same, seen, meshes, wanted = most_alike(len(set(asked.space.axes())), few), set(), Counter[object](), []
    for step_s, sort in able:
        if sort not in seen and step_s < UP_TO * able[0][0]:
            seen.add(sort)
            meshes[sort[0]] += 1
            wanted += [step_s] if meshes[sort[0]] <= same else []
    goal = replace(asked.goal, memory_bytes=limit)
    given = asked.graph, asked.cluster, asked.workload, asked.space, asked.stack, goal
    result = solve(*given, top=few, diverse=True)
    assert [candidate.step_s for candidate in result.best] == wanted[:few] and result.diverse
    assert result.counts.covered == asked.space.size
