"""Rounds: microbatches that go through the pipeline in parts, each from its first forward to its last backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.errors import PlanError
from gnomon.lowering import lower
from gnomon.models.presets import model
from gnomon.plans import Mesh, Plan, Schedule, Workload, check
from gnomon.program import Program, print_program, validate
from gnomon.simulate import durations, makespan

TINY = model("llama-tiny")


def program(rounds: int, count: int, ranks: int, virtual: int = 1) -> Program:
    name = "one_f_one_b" if virtual == 1 else "interleaved_one_f_one_b"
    schedule = Schedule(name=name, num_microbatches=count, virtual_stages=virtual, rounds=rounds)  # type: ignore[arg-type]
    return lower(TINY, Plan(mesh=Mesh(pp=ranks), schedule=schedule))


def seconds(result: Program) -> float:
    return makespan(validate(result), durations(result, {"F": 1.0, "B": 2.0, "*": 0.0}))


@pytest.mark.parametrize(("rounds", "count", "ranks"), [(1, 8, 2), (2, 8, 2), (4, 8, 2), (3, 12, 4), (8, 8, 1)])
def test_each_round_fills_and_empties(rounds: int, count: int, ranks: int) -> None:
    """(m + p - 1)(F + B) for each round of m."""
    assert seconds(program(rounds, count, ranks)) == rounds * (count // rounds + ranks - 1) * 3.0


def test_interleaved_rounds() -> None:
    """m (F + B) + (p - 1)(F + B) / v, with F and B of all v stages of a rank: 2 x 3 s each here."""
    assert seconds(program(2, 8, 2, virtual=2)) == 2 * (4 * 6.0 + 6.0 / 2)


def test_units_go_on_and_the_step_ends_once() -> None:
    text = print_program(program(2, 4, 2))
    first = text[text.index("class 0") : text.index("class 1")]
    order = [word for word in first.split() if word.startswith(("0F", "0B", "0OPT"))]
    assert order == ["0F0", "0F1", "0B0", "0B1", "0F2", "0F3", "0B2", "0B3", "0OPT"]


def test_refused() -> None:
    plan = Plan(mesh=Mesh(pp=2), schedule=Schedule(num_microbatches=4, rounds=3))
    with pytest.raises(PlanError, match="4 microbatches are not a multiple of rounds = 3"):
        lower(TINY, plan)
    batch = Workload(global_batch_size=8, seq_len=128)
    looped = Schedule(name="interleaved_one_f_one_b", micro_batch_size=1, virtual_stages=2, rounds=8)
    with pytest.raises(PlanError, match="needs a multiple of 2 microbatches"):
        check(replace(plan, schedule=looped), TINY, None, batch)
    with pytest.raises(PlanError, match="must be at least 1"):
        Schedule(rounds=0)
