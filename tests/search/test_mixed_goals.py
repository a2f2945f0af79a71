"""Other questions than the fastest plan, on machines of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from search.spaces import model

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.hardware.kinds import is_mixed
from gnomon.plans import Goal, Plan, Workload
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.mixed.bounds import LayerTables
from gnomon.search.mixed.first_fit import RoomyFirst, first_fit
from gnomon.search.mixed.plan_mixed import fitting, plan_mixed
from gnomon.search.mixed.results import MixedFound
from gnomon.search.mixed.space import make_mixed_space
from gnomon.search.questions.goals import Question, among, best_case, fewest_devices, longest, of_nodes, pareto, up_to
from gnomon.search.questions.sweep import Variation, sweep
from gnomon.search.space.points import make_space

MIXED = parse_cluster("1x2xh100-sxm+1x2xa100-sxm-80gb")
WORK = Workload(global_batch_size=12, seq_len=256)
FIXED = {"tp": 1, "pp": 1, "recompute": "none", "zero": 1}
ASKED = Question(graph=model("llama", 4), stack=PLAIN_STACK, base=Plan(), fixed=FIXED)


def test_choices_are_every_number_of_each_kind() -> None:
    result = up_to(parse_cluster("1x8xh100-sxm+2x4xa100-sxm-80gb"))
    counts = [tuple((g.node.device.name[:4], g.count) for g in entry.groups) for entry in result]
    assert counts == [
        (("a100", 1),), (("h100", 1),), (("a100", 2),), (("h100", 1), ("a100", 1)), (("h100", 1), ("a100", 2)),
    ]  # fmt: skip
    assert [entry.num_devices for entry in up_to(parse_cluster("1x8xh100-sxm+2x4xa100-sxm-80gb"), 8)] == [4, 8, 8]
    with pytest.raises(PlanError, match="at most 3 devices, but a node of .* has 4"):
        up_to(parse_cluster("1x8xh100-sxm+2x4xa100-sxm-80gb"), 3)
    with pytest.raises(PlanError, match="80 choices of whole nodes, and up to 64"):
        up_to(parse_cluster("8x8xh100-sxm+8x8xa100-sxm-80gb"))
    with pytest.raises(PlanError, match="does not say which; write the choices, as in --vary on="):
        of_nodes(MIXED, 2)


def test_the_best_case_is_that_of_the_search_over_kinds() -> None:
    case = ASKED.best(MIXED, WORK)
    assert isinstance(case.best, MixedFound)
    result = plan_mixed(ASKED.graph, MIXED, WORK, base=Plan(), fixed=FIXED)
    assert case.best.step_s == result.best[0].step_s


def test_machines_by_time_and_by_cost() -> None:
    cases = among(ASKED, up_to(MIXED), WORK)
    steps = [case.best.step_s for case in cases if case.best is not None]
    assert len(steps) == 3 and [is_mixed(case.cluster) for case in cases] == [False, False, True]
    fastest = best_case(cases, "step")
    assert fastest is not None and fastest.best is not None and fastest.best.step_s == min(steps)
    cheapest = best_case(cases, "cost")
    assert cheapest is not None and cheapest.dollars_per_token == min(c.dollars_per_token or 1.0 for c in cases)
    limit = sorted(steps)[0]
    assert fewest_devices(ASKED, up_to(MIXED), WORK, limit)[-1].best is not None


def test_fronts_and_sweeps() -> None:
    front = pareto(ASKED, MIXED, WORK, resolution_bytes=2**28)
    points = [(c.best.step_s, max(r.peak_bytes for r in c.best.prediction.memory)) for c in front if c.best]
    assert (
        points and points == sorted(points) and [p for _, p in points] == sorted((p for _, p in points), reverse=True)
    )
    swept = sweep(ASKED, MIXED, WORK, (Variation(name="network", values=(0.5, 2.0)),))
    slow, fast = (case.best.step_s for case in swept if case.best is not None)
    assert fast <= slow
    assert longest(ASKED, MIXED, WORK, multiple=256, most=512)[-1].label == "seq_len=512"


def every_peak(work: Workload) -> Iterator[tuple[str, int]]:
    """(device, peak bytes) of the fullest rank of every plan that `ASKED` may be answered with."""
    assert isinstance(ASKED.graph, Graph)
    spaces = [(MIXED, make_mixed_space(ASKED.graph, MIXED, work, base=Plan(), fixed=FIXED))]
    spaces += [(part, make_space(ASKED.graph, part, work, base=Plan(), fixed=FIXED)) for part in up_to(MIXED)[:2]]
    for cluster, space in spaces:
        for point in space.points():
            try:
                prediction = predict(ASKED.graph, cluster, space.plan(point), work)
            except PlanError:
                continue
            yield cluster.name, max(rank.peak_bytes for rank in prediction.memory)


@pytest.mark.parametrize("limit", [3 * 2**30, 5 * 2**30])
def test_the_longest_that_fits_and_no_plan_that_fits_beyond_it(limit: int) -> None:
    """Predicted apart: the plan of the answer is within the limit, and of the next length no plan is, alone or over
    kinds."""
    cases = longest(replace(ASKED, goal=Goal(memory_bytes=limit)), MIXED, WORK, multiple=512)
    best = cases[-1]
    assert best.best is not None and len(cases) > 3
    again = predict(ASKED.graph, MIXED, best.best.plan, best.workload)
    assert max(rank.peak_bytes for rank in again.memory) <= limit
    beyond = replace(WORK, seq_len=best.workload.sequence_lengths()[0] + 512)
    peaks = [peak for _, peak in every_peak(beyond)]
    assert peaks and min(peaks) > limit


def test_a_search_over_kinds_that_is_stopped_says_so() -> None:
    """At once, and in the middle of the search over kinds, which counts what is left."""
    asked = replace(ASKED, goal=Goal(memory_bytes=3 * 2**30))
    with pytest.raises(PlanError, match="no plan was found with 512 tokens: not looked at: the time allowed is spent"):
        longest(replace(asked, keep_going=lambda: False), MIXED, WORK, multiple=512)
    whole = longest(asked, MIXED, WORK, multiple=512)[-1].workload.sequence_lengths()[0]
    left = iter(range(10))
    cases = longest(replace(asked, keep_going=lambda: next(left, None) is not None), MIXED, WORK, multiple=512)
    assert cases[-1].best is not None and cases[-1].workload.sequence_lengths()[0] <= whole
    assert any("the time allowed is spent" in case.why for case in cases)
    beyond = replace(WORK, seq_len=whole + 512)
    with pytest.raises(PlanError, match="nothing that fits in memory was found.*the time allowed is spent"):
        fitting(
            ASKED.graph,
            MIXED,
            beyond,
            PLAIN_STACK,
            Goal(memory_bytes=3 * 2**30),
            base=Plan(),
            fixed=FIXED,
            forbid=(),
            keep_going=lambda: False,
        )


def test_the_first_that_fits_is_found_wherever_one_is() -> None:
    """Over kinds, of random limits, just when predicting every point finds one."""
    work = Workload(global_batch_size=8, seq_len=512)
    space = make_mixed_space(model("llama", 4), MIXED, work, fixed={"pp": 2, "virtual_stages": 2, "zero": 1})
    space = replace(space, recompute=("none", "full"), microbatches=(2, 4), schedule=space.schedule[:3])
    tables = LayerTables(model("llama", 4), MIXED, work, PLAIN_STACK, Plan(), space.kinds)
    peaks = []
    for point in space.points():
        prediction = predict(model("llama", 4), MIXED, space.plan(point), work)
        peaks.append(max(rank.peak_bytes for rank in prediction.memory))
    for limit in (min(peaks) - 1, min(peaks), sorted(peaks)[len(peaks) // 2]):
        search = first_fit(RoomyFirst(tables, work, PLAIN_STACK, space, (limit, limit), tries=10**6))
        assert bool(search.best) == (limit >= min(peaks)) and not search.counts.num_unseen
