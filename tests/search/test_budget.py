"""A search ends with its budget: the best plan so far, every point accounted for, a bound that holds for the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

import gnomon
from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Goal, Workload
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import Result
from gnomon.search.equal.devices import EqualDevices
from gnomon.search.space.points import make_space

WORK = Workload(global_batch_size=64, seq_len=4096)


def questions(most: int) -> Callable[[], bool]:
    """A budget of so many questions, which no clock decides."""
    asked = iter(range(most))
    return lambda: next(asked, None) is not None


def planned(most: int) -> Result:
    return gnomon.plan("llama-3.1-8b", "1x8xh100-sxm", WORK, keep_going=questions(most))


@cache
def whole() -> Result:
    return gnomon.plan("llama-3.1-8b", "1x8xh100-sxm", WORK)


@pytest.mark.parametrize("most", [0, 400])
def test_the_rest_is_counted_and_bounded(most: int) -> None:
    actual, best = planned(most), whole().best[0].step_s
    assert actual.counts.covered == actual.counts.space == whole().counts.space
    assert actual.best and actual.best[0].step_s >= best
    if actual.counts.num_unseen:
        assert actual.open_s is not None and min(actual.open_s, actual.best[0].step_s) <= best
    else:
        assert actual.open_s is None and actual.best[0].step_s == best


def test_a_budget_that_is_not_spent_changes_nothing() -> None:
    result = planned(10**9)
    assert result.open_s is None and result.counts == whole().counts
    assert [candidate.plan for candidate in result.best] == [candidate.plan for candidate in whole().best]


def test_without_a_plan_in_time_the_error_says_what_was_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnomon.search.equal.devices.OVERTIME", 0)
    with pytest.raises(PlanError, match=r"fits in 22.0 GiB a device; the budget was spent with [\d,]+ of [\d,]+ plans"):
        gnomon.plan("llama-3.1-8b", "1x8xh100-sxm", WORK, goal=Goal(memory_bytes=22 * 2**30), keep_going=questions(1))


def test_a_large_request_without_time_to_price_its_families_has_a_plan() -> None:
    """DeepSeek-V3 on 2,048 H800: what keeps little is tried by the bounds on memory, and counts stay whole."""
    fixed = {"tp": 1, "cp": 1, "ep": 64, "overlap": True}
    work = Workload(global_batch_size=15360, seq_len=4096)
    result = gnomon.plan("deepseek-v3", "256xhgx-h800", work, fixed=fixed, extra_choices=(), keep_going=questions(40))
    assert result.best and all(rank.peak_bytes <= result.limit_bytes for rank in result.best[0].prediction.memory)
    assert result.counts.num_unseen and result.counts.covered == result.counts.space
    assert {candidate.point.recompute for candidate in result.best} == {"full"}


def test_families_are_priced_only_while_there_is_time() -> None:
    """Of DeepSeek-V3 on 2,048 H800 they took the whole budget and more; nothing was left to find a plan."""
    graph, machines = model("llama-3.1-8b"), parse_cluster("1x8xh100-sxm")
    space = make_space(graph, machines, WORK)
    search = EqualDevices(graph, machines, WORK, space, PLAIN_STACK, Goal())
    bounds = [bound for bound, _ in search.blocks.families(questions(3))]
    assert len(bounds) > 3 and all(bounds[:3]) and not any(bounds[3:])
