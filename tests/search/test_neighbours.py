"""No plan one change away from the one that a search gives is faster, also when the budget cut the search; and of the
ways for tokens to get to their experts the search takes the fastest that machines and program have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from search.spaces import model

import gnomon
from gnomon.errors import GnomonError
from gnomon.plans import Dispatch, Workload
from gnomon.prediction import predict
from gnomon.search import Result
from gnomon.search.passes import Passes, improve
from gnomon.search.refinement.changes import changes
from gnomon.search.refinement.neighbours import allowed, climb, point_of
from gnomon.software.own import lacking

WORK = Workload(global_batch_size=64, seq_len=1024)


def questions(most: int) -> Callable[[], bool]:
    """A budget of so many questions, which no clock decides."""
    asked = iter(range(most))
    return lambda: next(asked, None) is not None


def faster(result: Result) -> list[str]:
    """Changes of the best plan that fit, are free, and shorten its step: predicted one by one."""
    best, found = result.best[0], []
    for what, plan in changes(best.plan, experts=True):
        if what.startswith("vocabulary") or not allowed(point_of(plan, best.point), result.space):
            continue
        try:
            other = predict(result.graph, result.cluster, plan, result.workload, result.stack)
        except GnomonError:
            continue
        fits = all(rank.peak_bytes <= result.limit_bytes for rank in other.memory)
        found += [what] if fits and other.step_s < best.step_s else []
    return found


@pytest.mark.parametrize(("kind", "most"), [("llama", 3), ("llama", 60), ("mixtral", 3), ("mixtral", 60)])
def test_a_cut_search_gives_no_plan_with_a_faster_neighbour(kind: str, most: int) -> None:
    result = gnomon.plan(model(kind, 8), "2x8xmi300x", WORK, keep_going=questions(most))
    assert result.counts.num_unseen and result.neighbours and faster(result) == []


def test_a_change_is_only_made_where_it_is_free_and_fits() -> None:
    result = gnomon.plan(model("llama", 8), "1x8xh100-sxm", WORK, fixed={"tp": 2, "zero": 1}, keep_going=questions(3))
    point = result.best[0].point
    assert (point.tp, point.zero) == (2, 1) and result.neighbours
    whole = gnomon.plan(model("llama", 8), "1x8xh100-sxm", WORK)
    slow = max(whole.best, key=lambda candidate: candidate.step_s)
    climbed = climb(whole, slow)
    assert climbed.best.step_s <= slow.step_s and all(made.fits for _, made in climbed.steps)
    assert climb(whole, whole.best[0]).steps == ()  # the exact search had looked at all of them


def test_passes_that_leave_the_space_end_at_a_plan_without_a_faster_neighbour() -> None:
    result = gnomon.plan(model("tied", 8), "1x8xh100-sxm", replace(WORK, global_batch_size=8), fixed={"pp": 4})
    made = improve(result, Passes())
    assert made.best.step_s <= result.best[0].step_s
    assert faster(replace(result, best=(made.best,))) == []


@pytest.mark.parametrize(
    ("machines", "program", "taken"),
    [
        ("2x8xh100-sxm", None, "fused"),
        ("2x8xh100-sxm", "megatron-lm", "fused"),
        ("2x8xh100-sxm", "gnomon", "all_to_all"),
        ("2x8xa100-sxm-80gb", None, "all_to_all"),
        ("2x8xmi300x", "megatron-lm", "all_to_all"),
    ],
)
def test_tokens_get_to_experts_in_the_fastest_way_there_is(machines: str, program: str | None, taken: str) -> None:
    fixed = {"ep": 4, "tp": 1, "cp": 1, "pp": 1}
    result = gnomon.plan(model("mixtral", 4), machines, WORK, program, fixed=fixed, top=1)
    best = result.best[0]
    assert best.plan.layout.dispatch == taken
    if program == "gnomon":
        return
    for way in get_args(Dispatch):
        other = replace(best.plan, layout=replace(best.plan.layout, dispatch=way))
        predicted = predict(result.graph, result.cluster, other, WORK, result.stack)
        assert predicted.step_s >= best.step_s or (way in ("fused", "hybrid_ep") and taken == "all_to_all")
        assert predicted.tightest.peak_bytes == best.prediction.tightest.peak_bytes


def test_a_way_that_is_fixed_stays_and_means_nothing_without_experts_apart() -> None:
    base = gnomon.plans.Plan(layout=gnomon.plans.Layout(dispatch="all_to_all"))
    result = gnomon.plan(model("mixtral", 4), "2x8xh100-sxm", WORK, base=base, fixed={"ep": 4, "pp": 1}, top=1)
    assert result.best[0].plan.layout.dispatch == "all_to_all"
    alone = gnomon.plan(model("mixtral", 4), "2x8xh100-sxm", WORK, fixed={"ep": 1, "pp": 1}, top=1)
    assert alone.best[0].plan.layout.dispatch is None


def test_gnomons_runtime_refuses_kernels_that_it_has_not() -> None:
    assert lacking(gnomon.plans.Plan(layout=gnomon.plans.Layout(dispatch="fused")))
    assert not lacking(gnomon.plans.Plan(layout=gnomon.plans.Layout(dispatch="all_to_all")))
