"""Skrull's prices: short sequences whole on one context-parallel rank, long ones divided, exchange beside computing.

What its heuristics choose is held against the paper's oracles in tests/methods/test_skrull.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.errors import PlanError
from gnomon.plans import Layout, Mesh, Optimizer, Pass, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict

K = 1024
PLAN = Plan(
    mesh=Mesh(cp=4),
    layout=Layout(context="all_gather"),
    schedule=Schedule(micro_batch_size=1),
    optimizer=Optimizer(clip=False),
)


def packed(capacity: int, plan: Plan = PLAN) -> Plan:
    passes = (Pass(name="skrull", params=(("capacity", capacity),)),)
    return replace(plan, schedule=replace(plan.schedule, passes=passes))


def predicted(plan: Plan, *lengths: int) -> Prediction:
    return predict("qwen2.5-0.5b", "8xh100-sxm", replace(plan, placement=range_of(plan)), Workload(lengths=lengths))


def range_of(plan: Plan) -> tuple[int, ...]:
    return tuple(range(plan.world_size))


def parts(prediction: Prediction, kind: str = "F") -> dict[str, float]:
    return prediction.pricing.compute.parts(kind, 0)


def test_a_sequence_that_no_rank_can_hold_is_divided_as_without_skrull() -> None:
    plain, skrull = predicted(PLAN, 32 * K), predicted(packed(8 * K), 32 * K)
    assert skrull.step_s == plain.step_s
    assert skrull.memory[0].peak_bytes == plain.memory[0].peak_bytes


def test_whole_sequences_cost_what_they_cost_without_context_parallelism() -> None:
    """Four of 4K, one on each rank: the computing of one of them alone, and no exchange."""
    four = predicted(packed(4 * K), *[4 * K] * 4)
    one = predicted(replace(PLAN, mesh=Mesh(), layout=Layout()), 4 * K)
    assert len(four.structure.program.units) == 1
    assert parts(four) == parts(one)
    assert "cp communication" not in four.breakdown


def test_the_exchange_of_divided_sequences_hides_behind_whole_ones() -> None:
    """DACP's objective on every rank: the longer of exchange and whole sequences, then the divided one."""
    both = predicted(packed(12 * K), 32 * K, *[4 * K] * 4)
    assert [len(unit.local) for unit in both.structure.program.units] == [4]
    divided, whole = predicted(PLAN, 32 * K), predicted(packed(4 * K), *[4 * K] * 4)
    assert parts(divided)["cp"] > 0
    assert parts(both).get("cp", 0.0) == 0.0
    for name in ("forward", "input_grad", "weight_grad"):
        both_s, divided_s, whole_s = (one.pricing.compute.phase(name, 0).compute_s for one in (both, divided, whole))
        assert both_s == pytest.approx(divided_s + whole_s, rel=1e-9)
    held = [one.memory[0].by_class["activations"] for one in (both, divided, whole)]
    assert held[0] == pytest.approx(held[1] + held[2], rel=0.02)


def test_a_batch_of_short_and_long_sequences_is_faster_with_it() -> None:
    """Over two data-parallel workers, each with its microbatches; none holds more than the capacity."""
    plan = replace(PLAN, mesh=Mesh(dp_shard=2, cp=4))
    lengths = (48 * K, 32 * K, *[512, 1024, 1536, 2048] * 8)
    plain, skrull = predicted(plan, *lengths), predicted(packed(16 * K, plan), *lengths)
    assert skrull.step_s < 0.5 * plain.step_s
    assert all(max(unit.rank_tokens(4)) <= 16 * K for unit in skrull.structure.program.units)
    assert sum(skrull.breakdown.values()) == skrull.step_s


def test_plans_without_context_parallelism_are_refused() -> None:
    with pytest.raises(PlanError, match="skrull cannot be used in this plan: .* use cp > 1"):
        predicted(packed(8 * K, replace(PLAN, mesh=Mesh())), 2 * K, K)
    with pytest.raises(PlanError, match="does not fit 4 ranks of 4096 tokens"):
        predicted(packed(4 * K), 32 * K, K)
