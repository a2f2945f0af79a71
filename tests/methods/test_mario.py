"""Mario's passes against the oracle table and its closed forms, their memory, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError, ProgramError
from gnomon.lowering import (
    interleaved_one_f_one_b,
    lower,
    one_f_one_b,
    with_loads,
    with_messages,
    with_optimizer,
    zero_bubble_h1,
    zero_bubble_v,
)
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.methods.mario import (
    Simulate,
    apply_checkpoint,
    mario,
    overlap_recompute,
    prepose_forward,
    remove_redundancy,
)
from gnomon.models.presets import model
from gnomon.plans import Mesh, Overlap, Plan, Schedule
from gnomon.program import Program, Structure, issue_order_peak, problems, validate
from gnomon.program.rows import Rows
from gnomon.simulate import Clock, Times, durations, play

SIZES = {"X": 0.125, "S": 1, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0}
BUSY = {"F": 1.0, "C": 1.0, "R": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "*": 0.0}
ORACLE = {
    (4, 4): (21, 28, 25, 23, 22),
    (4, 8): (33, 44, 41, 39, 38),
    (4, 16): (57, 76, 73, 71, 70),
    (8, 8): (45, 60, 53, 51, 50),
    (8, 16): (69, 92, 85, 83, 82),
    (8, 32): (117, 156, 149, 147, 146),
}
"""(p, m) -> no checkpoint, naive, pass 2, passes 2 and 3, passes 2 to 4. F = 1, B = 2, R = 1, messages free."""


def program_of(rows: Rows) -> Program:
    """Receives of gradients block the compute stream, as the oracle has it."""
    return with_optimizer(with_loads(with_messages(rows, blocking=("RECV_B",)))).program(inputs="loaded")


def simulate(lag: float = 0.0, busy: Mapping[str, float] = BUSY) -> Simulate:
    def step(structure: Structure) -> Times:
        used = {kind for _, kind, *_ in structure.program.keys}
        seconds = {label: value for label, value in busy.items() if label in used or label == "*"}
        late = {kind: lag for kind in ("SEND_F", "SEND_B") if kind in used}
        return play(Clock.of(structure, durations(structure.program, seconds, late)))

    return step


def makespan(program: Program, step: Simulate | None = None) -> float:
    return float((step or simulate())(validate(program)).end.max())


def peaks(program: Program) -> list[float]:
    return [peak.bytes for peak in issue_order_peak(program, validate(program).deps, SIZES)]


def compute(program: Program, rank_class: int, count: int) -> str:
    """The first compute actions of a rank, receives of gradients as V."""
    kept = [row for row in rows_of(program)[rank_class] if row.kind in ("F", "C", "R", "RECV_B", "B")]
    return " ".join(f"{'V' if row.kind == 'RECV_B' else row.kind}{row.unit}" for row in kept[:count])


@pytest.mark.parametrize(("p", "m"), list(ORACLE))
def test_the_oracle_table(p: int, m: int) -> None:
    base = program_of(one_f_one_b(p, m))
    naive = apply_checkpoint(base)
    overlapped = overlap_recompute(naive)
    lean = remove_redundancy(overlapped)
    preposed = prepose_forward(lean, simulate(), sizes=SIZES)
    actual = tuple(makespan(program) for program in (base, naive, overlapped, lean, preposed))
    assert actual == ORACLE[p, m]
    assert actual == (
        (m + p - 1) * 3,
        (m + p - 1) * 4,
        4 * m + 3 * (p - 1),
        4 * m + 3 * (p - 2) + 1,
        4 * m + 3 * (p - 2),
    )
    assert mario(base, simulate(), sizes=SIZES) == preposed
    assert peaks(base) == [p - rank + 0.125 for rank in range(p)]
    assert peaks(naive) == peaks(overlapped) == [1 + (p - rank) / 8 for rank in range(p)]
    assert peaks(preposed) == [1 + (p - rank) / 8 for rank in range(p - 2)] + [1.375, 1.125]


@pytest.mark.parametrize(("p", "m"), list(ORACLE))
def test_the_oracle_table_on_a_plan(p: int, m: int) -> None:
    """Llama 3.2 1B as `lower` has it, with sends and receives that nothing overlaps."""
    schedule = Schedule(name="one_f_one_b", num_microbatches=m)
    plan = Plan(mesh=Mesh(pp=p), schedule=schedule, overlap=Overlap(pipeline_sends=False))
    base = lower(model("llama-3.2-1b"), plan)
    naive = apply_checkpoint(base)
    overlapped = overlap_recompute(naive)
    lean = remove_redundancy(overlapped)
    preposed = prepose_forward(lean, simulate(), sizes={one.name: SIZES.get(one.name, 0) for one in lean.buffers})
    assert tuple(makespan(program) for program in (base, naive, overlapped, lean, preposed)) == ORACLE[p, m]


def test_final_orders() -> None:
    final = mario(program_of(one_f_one_b(4, 8)), simulate(), sizes=SIZES)
    assert compute(final, 0, 12) == "C0 C1 C2 C3 R0 V0 B0 C4 R1 V1 B1 C5"
    assert compute(final, 2, 13) == "C0 C1 C2 R0 V0 B0 R1 V1 B1 C3 R2 V2 B2"
    assert compute(final, 3, 4) == "F0 B0 F1 B1"


def test_a_forward_cannot_be_preposed_on_one_stage_alone_when_its_input_comes_from_behind_the_gradient() -> None:
    """Moved over three backwards on rank 2, 2C5 is issued before 2B1; but 1C5 comes after 1B2, which needs 2B2."""
    lean = remove_redundancy(overlap_recompute(apply_checkpoint(program_of(one_f_one_b(4, 8)))))
    rows = rows_of(lean)
    mine = [row for row in rows[2] if row.unit == 5 and row.kind in ("RECV_F", "C", "SEND_F")]
    at = next(i for i, row in enumerate(rows[2]) if row.kind == "R" and row.unit == 1)
    rows[2] = [*rows[2][:at], *mine, *(row for row in rows[2][at:] if row not in mine)]
    result = problems(with_rows(lean, rows))
    assert {problem.what for problem in result} & {"deadlock", "wrong order on a communicator"}


def test_moves_over_several_stages_pay_when_messages_take_time() -> None:
    """With latency, each round trip leaves a gap on all ranks; one rank alone gains nothing from going ahead."""
    lean = remove_redundancy(overlap_recompute(apply_checkpoint(program_of(one_f_one_b(4, 8)))))
    step = simulate(lag=1.0)
    ahead = prepose_forward(lean, step, sizes=SIZES)
    assert makespan(ahead, step) < makespan(lean, step)
    assert max(peaks(ahead)) > max(peaks(lean))
    tight = prepose_forward(lean, step, sizes=SIZES, limit=max(peaks(lean)))
    assert makespan(ahead, step) < makespan(tight, step) <= makespan(lean, step)
    assert max(peaks(tight)) == max(peaks(lean))


def test_with_receives_on_their_own_stream_naive_checkpointing_is_already_overlapped() -> None:
    base = with_optimizer(with_messages(one_f_one_b(4, 8))).program()
    assert makespan(apply_checkpoint(base)) == makespan(overlap_recompute(apply_checkpoint(base))) == 41


def test_checkpoint_chosen_places_only() -> None:
    """Checkpointing rank 0 alone costs m·R there, and its peak falls from 4.125 to 1.5; the others keep theirs."""
    part = apply_checkpoint(program_of(one_f_one_b(4, 8)), lambda stage, unit: stage == 0)
    assert peaks(part) == [1.5, 3.125, 2.125, 1.125]
    kinds = [row.kind for rows in rows_of(part)[1:] for row in rows]
    assert "C" not in kinds and "R" not in kinds


def test_what_was_computed_again_is_there_until_the_weight_gradient() -> None:
    """Of a split backward the input gradient needs it first: R takes its place before I, and W lets it go."""
    base = with_optimizer(with_messages(zero_bubble_h1(4, 8))).program()
    naive = apply_checkpoint(base)
    for rows in rows_of(naive):
        again = [i for i, row in enumerate(rows) if row.kind == "R"]
        assert len(again) == 8 and all(rows[i + 1].kind == "I" for i in again)
    assert peaks(base) == [4.0, 4.125, 4.125, 4.125]  # what ranks put aside for W, on the last one most
    assert peaks(naive) == [1.0, 2.375, 3.25, 4.125]


def test_composites_are_refused() -> None:
    plain = with_optimizer(with_messages(one_f_one_b(1, 2))).program()
    first, *rest = rows_of(plain)[0]
    together = with_rows(plain, [[Row(kind="F", stage=0, unit=first.unit, group=0), *rest]])
    with pytest.raises(PlanError, match="0F0 is part of a composite one"):
        apply_checkpoint(together)


def test_the_limit_is_named_when_checkpointing_is_not_enough() -> None:
    with pytest.raises(ProgramError, match=r"needs 1\.5 of 1\.4 bytes"):
        mario(program_of(one_f_one_b(4, 8)), simulate(), sizes=SIZES, limit=1.4)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 4),
    rounds=st.integers(1, 2),
    chunks=st.integers(1, 2),
    lag=st.sampled_from([0.0, 0.5, 1.0]),
    recompute=st.sampled_from([0.5, 1.0]),
    split=st.booleans(),
)
def test_no_pass_is_slower_or_needs_more_than_its_limit(
    ranks: int, rounds: int, chunks: int, lag: float, recompute: float, split: bool
) -> None:
    """Any interleaving or V, whole backwards or split, latency and cost of recompute: each pass is at least as fast as
    the one before."""
    count = ranks * rounds
    looped = ranks > 1 and chunks > 1
    if split and ranks > 1:
        base = program_of(zero_bubble_v(ranks, 2 * ranks) if looped else zero_bubble_h1(ranks, count))
    else:
        base = program_of(interleaved_one_f_one_b(ranks, count, chunks) if looped else one_f_one_b(ranks, count))
    step = simulate(lag, {**BUSY, "R": recompute})
    naive = apply_checkpoint(base)
    lean = remove_redundancy(overlap_recompute(naive))
    limit = max(peaks(lean)) + 0.125
    ahead = prepose_forward(lean, step, sizes=SIZES, limit=limit, tries=200)
    assert makespan(ahead, step) <= makespan(lean, step) <= makespan(naive, step)
    assert max(peaks(ahead)) <= limit
    assert max(peaks(lean)) <= max(peaks(base))
