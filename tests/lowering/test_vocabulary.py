"""The vocabulary divided over the pipeline: closed forms, one order of exchanges, what cannot be had."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.models.presets import model
from gnomon.orders.patterns.vocabulary import BUFFERS
from gnomon.plans import Mesh, Optimizer, Pass, Plan, Schedule, Vocabulary, divided_layers
from gnomon.program import Program, issue_order_peak, validate
from gnomon.simulate import Clock, durations, play

SIZES = {"S": 1.0, **dict.fromkeys(("X", "Y", "DX", "DY", "P", "G", *(b.name for b in BUFFERS)), 0.0)}
HOWS: tuple[Vocabulary, ...] = ("vocab_1", "vocab_2", "interlaced")


def program(p: int, m: int, how: Vocabulary, *, turned: bool = False, tied: bool = False) -> Program:
    layers = 2 * p if turned else p
    graph = gpt(
        GptConfig(
            name="small", num_layers=layers, hidden_size=8, num_heads=2, vocab_size=8 * p, max_positions=8, tied=tied
        )
    )
    schedule = Schedule(num_microbatches=m, vocabulary=how)
    if turned:
        schedule = Schedule(name="v_half", virtual_stages=2, placement="v", num_microbatches=m, vocabulary=how)
    return lower(graph, Plan(mesh=Mesh(pp=p), schedule=schedule, optimizer=Optimizer(clip=False)))


def timed(made: Program, **seconds: float) -> tuple[float, tuple[int, ...]]:
    """(makespan, most activations of each rank in issue order)."""
    structure = validate(made)
    used = {key.kind for key in made.keys}
    times = play(Clock.of(structure, durations(made, {"*": 0.0, **{k: v for k, v in seconds.items() if k in used}})))
    return float(times.end.max()), tuple(int(peak.bytes) for peak in issue_order_peak(made, structure.deps, SIZES))


@pytest.mark.parametrize("how, barriers", [("vocab_1", 2), ("vocab_2", 1)])
@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_a_barrier_costs_a_microbatch_of_memory_and_no_time(p: int, how: Vocabulary, barriers: int) -> None:
    m = 2 * p + 3
    makespan, held = timed(program(p, m, how), F=1, B=2, S=0.125, T=0.25)
    assert makespan == m * (1 + 2 + 0.125 + 0.25) + (p - 1) * (1 + 2)
    assert held == tuple(p - r + barriers for r in range(p))


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_interlaced_holds_half_as_much_again(p: int) -> None:
    m = 3 * p
    makespan, held = timed(program(p, m, "interlaced"), F=1, B=2, S=0.25)
    assert makespan >= m * (1 + 2 + 0.25) + (p - 1) * (1 + 2)
    assert held == tuple(3 * p // 2 - r for r in range(p))


@pytest.mark.parametrize("p", range(2, 10))
def test_v_half_holds_two_chunks_more_for_each_barrier(p: int) -> None:
    for how, barriers in (("vocab_1", 2), ("vocab_2", 1)):
        _, held = timed(program(p, 3 * p, how, turned=True), F=1, I=1, W=1, S=0.125, T=0.125)  # type: ignore[arg-type]
        assert max(held) == p + 1 + (p % 2 == 0) + 2 * barriers


@given(p=st.integers(2, 6), m=st.integers(1, 13), how=st.sampled_from(HOWS), turned=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_part_runs_once_on_every_rank(p: int, m: int, how: Vocabulary, turned: bool) -> None:
    if turned and how == "interlaced":
        return
    made = program(p, m, how, turned=turned)
    validate(made)
    parts = ("S", "EMBED", "EGRAD") if how == "interlaced" else ("S", "T", "EMBED", "EGRAD", "CAST_H", "SUM_V")
    for cls in range(p):
        rows = range(int(made.class_ptr[cls]), int(made.class_ptr[cls + 1]))
        names = [(made.kinds[made.kind[row]].name, int(made.unit[row])) for row in rows]
        for part in parts:
            assert [unit for name, unit in names if name == part] == list(range(m))


def test_tied_tables_lie_on_the_same_ranks() -> None:
    names = {program(2, 4, "vocab_1", tied=True).comm_of(row) for row in range(program(2, 4, "vocab_1").num_rows)}
    assert "embedding" not in names


def test_frozen_tables_are_divided_too() -> None:
    graph = model("llama-tiny+lora4")
    plan = Plan(mesh=Mesh(pp=2), schedule=Schedule(num_microbatches=4, vocabulary="vocab_1"))
    assert [layer.label for layer in divided_layers(plan, graph)] == ["embed", "head"]
    validate(lower(graph, plan))


def refused(plan: Plan, graph_rows: int = 64) -> str:
    config = GptConfig(name="small", num_layers=4, hidden_size=8, num_heads=2, vocab_size=graph_rows, max_positions=8)
    with pytest.raises(PlanError) as error:
        lower(gpt(config), plan)
    return str(error.value)


def test_what_cannot_be_had_says_what_to_change() -> None:
    schedule = Schedule(num_microbatches=4, vocabulary="vocab_1")
    assert "pp = 1; use 'ends'" in refused(Plan(schedule=schedule))
    assert "not for gpipe" in refused(
        Plan(mesh=Mesh(pp=2), schedule=Schedule(name="gpipe", num_microbatches=4, vocabulary="vocab_2"))
    )
    turned = Schedule(name="v_half", virtual_stages=2, placement="v", num_microbatches=4, vocabulary="interlaced")
    assert "known for one_f_one_b" in refused(Plan(mesh=Mesh(pp=2), schedule=turned))
    assert "tp = 2 has no rows yet" in refused(Plan(mesh=Mesh(pp=2, tp=2), schedule=schedule))
    assert "optimizer.zero = 3" in refused(
        Plan(mesh=Mesh(pp=2, dp_shard=2), schedule=schedule, optimizer=Optimizer(zero=3))
    )
    assert "pad the vocabulary to 66" in refused(Plan(mesh=Mesh(pp=3), schedule=schedule))
    passes = (Pass(name="dapple_warmup", params=(("policy", "2p"),)),)
    warm = Schedule(num_microbatches=4, vocabulary="vocab_1", passes=passes)
    assert "under pass dapple_warmup" in refused(Plan(mesh=Mesh(pp=2), schedule=warm))
