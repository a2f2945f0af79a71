"""Plans in a few words: those that differ read differently."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import gnomon
from gnomon.plans import Mesh, Optimizer, Overlap, Plan, Saved, SavedRule, Schedule, Workload
from gnomon.prediction.band import Band
from gnomon.report.planning import short_plan, short_plans
from gnomon.search import FoundPlan
from gnomon.search.results import safest

ONE = Plan(mesh=Mesh(pp=2, dp_shard=4), schedule=Schedule(micro_batch_size=1))


def cut(*layers: int) -> Plan:
    return replace(ONE, schedule=replace(ONE.schedule, layers_per_stage=layers))


def test_plans_that_read_alike_are_told_apart() -> None:
    assert short_plan(cut(10, 6)) == short_plan(cut(9, 7)) == "pp2 dp4 mb1 uneven; one_f_one_b"
    assert short_plans([cut(10, 6), cut(9, 7), ONE]) == (
        "pp2 dp4 mb1 uneven; one_f_one_b; layers 10 6",
        "pp2 dp4 mb1 uneven; one_f_one_b; layers 9 7",
        "pp2 dp4 mb1; one_f_one_b",
    )


def test_the_same_plan_twice_is_the_same() -> None:
    assert short_plans([ONE, ONE]) == (short_plan(ONE),) * 2


def test_whatever_differs_is_said() -> None:
    rules = [Saved(rules=(SavedRule(stages=(stage,), preset="full"),)) for stage in (0, 1)]
    plans = [
        ONE,
        replace(ONE, overlap=replace(ONE.overlap, bucket_bytes=1 << 20)),
        replace(ONE, optimizer=Optimizer(clip=False)),
        replace(ONE, overlap=Overlap(prefetch=3)),
        *(replace(ONE, saved=saved) for saved in rules),
    ]
    names = short_plans(plans)
    assert all(a != b for a, b in combinations(names, 2)), names


def test_a_plan_that_is_as_fast_and_surer_is_named() -> None:
    """Of two that tie, the one whose band reaches less far up; not one that is slower by more than a tie, nor one that
    is as sure as the best."""
    point = gnomon.plan("llama-tiny", "1x1xa100-sxm-80gb", Workload(global_batch_size=1, seq_len=64), top=1).best[0]

    def result(step_s: float, high_s: float) -> FoundPlan:
        band = Band(low_s=step_s / 2, high_s=high_s, low_bytes=1, high_bytes=2)
        made = replace(point.prediction, step_s=step_s)
        vars(made)["band"] = band  # as if the plan were better or less well known
        return replace(point, prediction=made)

    best, sure, slow, close = result(1.0, 1.5), result(1.01, 1.3), result(1.03, 1.1), result(1.001, 1.495)
    assert safest(best, [best, slow, sure, close]) is sure
    assert safest(best, [best, slow, close]) is None
