"""Longest, largest and fronts with choices beyond the exact search, against predicting every combination of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from gnomon.errors import GnomonError, PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import CONFIGS, model
from gnomon.plans import Goal, Optimizer, Plan, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import make_space
from gnomon.search.questions.goals import Case, Question, further, longest, pareto
from gnomon.search.questions.largest import grown, largest, largest_of
from gnomon.search.refinement.choices import CHOICES, allowed, choice, parse_choice_limit
from gnomon.search.refinement.make_fit import LEAN, Spare

CLUSTER = parse_cluster("1x2xa100-sxm-80gb")
WORK = Workload(global_batch_size=2, seq_len=512)
OPEN = allowed(PLAIN_STACK, allow=(), forbid=(), fixed=())
ASKED = Question(
    graph=model("llama-tiny"),
    stack=PLAIN_STACK,
    base=Plan(optimizer=Optimizer(clip=False)),
    fixed={"schedule": "one_f_one_b", "sequence_parallel": True, "keep_gathered": False, "overlap": True, "pp": 1,
           "dp_replicate": 1, "micro_batch_size": 1, "context": "ring"},
)  # fmt: skip


def squeezing(asked: Question, forbid: str = "") -> Question:
    limit = parse_choice_limit(forbid) if forbid else None
    return replace(asked, spare=Spare(choices=OPEN, forbid=() if limit is None else (limit,)))


def combinations(asked: Question, work: Workload) -> Iterator[Prediction]:
    """Every point with every combination of the choices that spare memory, independent of the search."""
    space = make_space(asked.graph, CLUSTER, work, base=asked.base, fixed=asked.fixed, limits=asked.limits)
    for point, kept in product(space.points(), product((False, True), repeat=len(LEAN))):
        plan = space.plan(point)
        for (name, value), take in zip(LEAN.items(), kept, strict=True):
            tried = name != "optimizer_offload" or not plan.optimizer.clip  # searches try it without clipping
            plan = choice(name).make(plan, asked.graph, value) if take and tried else plan
        host = choice("activation_offload")
        for layers in host.values(plan, asked.graph, CLUSTER) or (0,):
            try:
                yield predict(asked.graph, CLUSTER, host.make(plan, asked.graph, layers), work)
            except GnomonError:
                continue


def fits(asked: Question, work: Workload) -> bool:
    limit = asked.goal.memory_bytes
    assert limit is not None
    return any(combination.tightest.peak_bytes <= limit for combination in combinations(asked, work))


def needs_all(asked: Question, case: Case) -> None:
    """The plan fits, is a prediction of its plan, and does not fit without any one of the choices."""
    limit, actual, fitted = asked.goal.memory_bytes, case.best, case.fit
    assert limit is not None and actual is not None and fitted is not None and fitted.choices
    again = predict(asked.graph, CLUSTER, actual.prediction.plan, case.workload)
    assert again.step_s == actual.step_s and again.tightest.peak_bytes <= limit
    assert fitted.without.tightest.peak_bytes > limit
    assert fitted.cost == pytest.approx(actual.step_s / fitted.without.step_s - 1)
    for entry, value in fitted.choices:
        assert entry.of(actual.prediction.plan) == value
        less = entry.make(actual.prediction.plan, asked.graph, entry.of(asked.base))
        assert predict(asked.graph, CLUSTER, less, case.workload).tightest.peak_bytes > limit


@pytest.mark.parametrize("fixed", [{"recompute": "none"}, {"zero": 0, "recompute": "none", "tp": 1, "cp": 1}])
def test_the_longest_fits_by_choices_and_the_next_does_not(fixed: dict[str, object]) -> None:
    asked = replace(ASKED, fixed={**ASKED.fixed, **fixed}, base=Plan())
    limit = min(combination.tightest.peak_bytes for combination in combinations(asked, replace(WORK, seq_len=2048)))
    asked = replace(asked, goal=Goal(memory_bytes=limit))
    plain = longest(asked, CLUSTER, WORK, multiple=256)[-1]
    cases = longest(squeezing(asked), CLUSTER, WORK, multiple=256)
    result = cases[-1]
    assert result.workload.seq_len > plain.workload.seq_len and plain.fit is None
    assert any(case.fit is None and case.label == plain.label for case in cases)
    needs_all(asked, result)
    assert "activation_offload" in {entry.name for entry, _ in result.fit.choices}  # type: ignore[union-attr]
    assert not fits(asked, replace(WORK, seq_len=result.workload.seq_len + 256))
    shut = longest(squeezing(asked, "activation_offload>0"), CLUSTER, WORK, multiple=256)[-1]
    assert shut.workload.seq_len < result.workload.seq_len


def test_the_largest_fits_by_choices_and_the_next_does_not() -> None:
    config = CONFIGS["llama-tiny"]()
    asked = replace(ASKED, fixed={**ASKED.fixed, "recompute": "full", "cp": 1})
    twelve = replace(asked, graph=grown(config, "layers", 12).graph)
    limit = min(combination.tightest.peak_bytes for combination in combinations(twelve, WORK))
    asked = replace(asked, goal=Goal(memory_bytes=limit))
    plain = largest(asked, CLUSTER, WORK, config, "layers")[-1]
    sizes = largest(squeezing(asked), CLUSTER, WORK, config, "layers")[-1]
    layers, before = (int(entry.label.split("=")[1].split()[0]) for entry in (sizes, plain))
    assert layers > before
    needs_all(replace(asked, graph=grown(config, "layers", layers).graph), sizes)
    assert "optimizer_offload" in {entry.name for entry, _ in sizes.fit.choices}  # type: ignore[union-attr]
    assert not fits(replace(asked, graph=grown(config, "layers", layers + 1).graph), WORK)
    graphs = [grown(config, "layers", n).graph for n in (before, layers, layers + 1)]
    assert largest_of(squeezing(asked), CLUSTER, WORK, graphs)[-1].fit is not None
    shut = largest(squeezing(asked, "optimizer_offload=yes"), CLUSTER, WORK, config, "layers")[-1]
    assert shut.best is not None and shut.best.prediction.plan.optimizer.offload is None


def test_nothing_fits_even_so() -> None:
    asked = squeezing(replace(ASKED, goal=Goal(memory_bytes=2**20)))
    with pytest.raises(PlanError, match="no plan fits with 256 tokens"):
        longest(asked, CLUSTER, WORK, multiple=256)
    with pytest.raises(PlanError, match="not even layers=1"):
        largest(asked, CLUSTER, WORK, CONFIGS["llama-tiny"](), "layers")


@pytest.mark.parametrize("most", range(1, 18))
def test_further_finds_the_greatest(most: int) -> None:
    for low in range(most + 1):
        assert further(lambda count: count <= most, low) == most


def test_a_front_with_choices_beats_the_one_without() -> None:
    work = replace(WORK, seq_len=2048)
    plain, front = (pareto(entry, CLUSTER, work) for entry in (ASKED, squeezing(ASKED)))
    shown = [(c.best.step_s, c.best.prediction.tightest.peak_bytes) for c in front if c.best is not None]
    before = [(c.best.step_s, c.best.prediction.tightest.peak_bytes) for c in plain if c.best is not None]
    assert shown == sorted(shown) and [p for _, p in shown] == sorted({p for _, p in shown}, reverse=True)
    assert all(any(t <= s and b <= p for t, b in shown) for s, p in before)
    assert set(shown) - set(before)
    for case in front:
        assert case.best is not None
        again = predict(ASKED.graph, CLUSTER, case.best.prediction.plan, work)
        assert (again.step_s, again.tightest.peak_bytes) in shown
    names = {
        choice.name
        for case in front
        for choice in CHOICES
        if choice.of(case.best.prediction.plan) != choice.of(ASKED.base)
    }  # type: ignore[union-attr]
    assert names <= {*LEAN, "activation_offload"} and names
