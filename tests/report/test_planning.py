"""Plans in a few words: those that differ read differently."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from gnomon.plans import Mesh, Optimizer, Overlap, Plan, Saved, SavedRule, Schedule
from gnomon.report.planning import short_plan, short_plans

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
