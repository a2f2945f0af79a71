"""Bamboo: whatever rank fails, the step still does all of its work, in the same order of sums, and can run."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering import (
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    with_all_reduce,
    with_loads,
    with_messages,
    with_optimizer,
    zero_bubble_h1,
)
from gnomon.lowering.edit import Row, rows_of
from gnomon.methods.bamboo import fail_over, redundant
from gnomon.methods.mario import apply_checkpoint
from gnomon.program import Program, validate
from gnomon.program.rows import Rows
from gnomon.simulate import Clock, durations, play

WORK = ("LOAD", "F", "C", "R", "B", "I", "W", "AR")
SCHEDULES = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "zero_bubble_h1": zero_bubble_h1,
    "interleaved": lambda ranks, count: interleaved_one_f_one_b(ranks, ranks * count, 2),
}


def program_of(rows: Rows) -> Program:
    complete = with_loads(with_messages(with_optimizer(with_all_reduce(rows, range(rows.num_stages)))))
    return complete.program(inputs="loaded")


def everything(program: Program) -> list[Row]:
    return [row for rows in rows_of(program) for row in rows]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(2, 5),
    count=st.integers(1, 5),
    checkpointed=st.booleans(),
    data=st.data(),
)
def test_all_work_is_done_once_and_sums_keep_their_order(
    name: str, ranks: int, count: int, checkpointed: bool, data: st.DataObject
) -> None:
    before = program_of(SCHEDULES[name](ranks, count))
    if checkpointed and name != "zero_bubble_h1":
        before = apply_checkpoint(before)
    dead = data.draw(st.integers(0, ranks - 1))
    after = fail_over(before, (dead,))
    assert after.num_classes == ranks - 1
    old, new = everything(before), everything(after)
    assert Counter(r for r in new if r.kind in WORK) == Counter(r for r in old if r.kind in WORK)
    for stage in range(before.num_stages):
        sums = [[r.unit for r in rows if r.stage == stage and r.kind in ("B", "W")] for rows in (old, new)]
        assert sums[0] == sums[1]
    assert {r for r in new if r.kind not in (*WORK, "OPT")} <= set(old)


def test_the_first_rank_is_taken_over_by_the_last_and_no_message_becomes_local() -> None:
    before = program_of(one_f_one_b(4, 4))
    after = fail_over(before, (0,))
    assert {row.stage for row in rows_of(after)[2]} == {0, 3}
    assert sum(row.kind.startswith(("SEND", "RECV")) for row in everything(after)) == 4 * 3 * 4


def test_two_ranks_that_are_not_neighbours() -> None:
    """Two ranks are left, each with two stages and twice the work; messages cross only between stages 1 and 2."""
    after = fail_over(program_of(one_f_one_b(4, 4)), (1, 3))
    assert [{row.stage for row in rows} for rows in rows_of(after)] == [{0, 1}, {2, 3}]
    assert {(r.stage, r.kind) for r in everything(after) if r.kind.startswith(("SEND", "RECV"))} == {
        (1, "SEND_F"),
        (2, "RECV_F"),
        (2, "SEND_B"),
        (1, "RECV_B"),
    }


def test_losing_neighbours_needs_a_checkpoint() -> None:
    program = program_of(one_f_one_b(4, 4))
    with pytest.raises(PlanError, match="ranks 1 and 2 failed, and only 1 has a copy of 2; restart from a checkpoint"):
        fail_over(program, (2, 1))
    with pytest.raises(PlanError, match="ranks 3 and 0 failed"):
        fail_over(program, (0, 3))
    with pytest.raises(PlanError, match="rank classes 0 to 3"):
        fail_over(program, (4,))


def test_one_of_several_replicas_needs_a_class_of_its_own() -> None:
    rows = with_messages(with_optimizer(one_f_one_b(2, 2)))
    with pytest.raises(PlanError, match="rank classes 0 and 1 must be single ranks"):
        fail_over(rows.program(counts=(4, 4)), (1,))


def test_a_step_with_a_failure_is_slower_but_not_more_than_twice() -> None:
    busy = {"F": 1, "B": 2, "*": 0}
    before = program_of(one_f_one_b(4, 8))
    healthy = play(Clock.of(validate(before), durations(before, busy))).end.max()
    for dead in range(4):
        after = fail_over(before, (dead,))
        failed = play(Clock.of(validate(after), durations(after, busy))).end.max()
        assert healthy < failed <= 2 * healthy


@given(ranks=st.integers(2, 6), count=st.integers(1, 8), forward=st.integers(1, 4), backward=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_copies_cost_a_forward_of_each_unit_at_most_and_their_gradients(
    ranks: int, count: int, forward: int, backward: int
) -> None:
    """Each rank runs every unit of the next one's stage once, and lets go of it; the plain rows keep their order."""
    before = program_of(one_f_one_b(ranks, count))
    after = redundant(before)
    for cls, (old, new) in enumerate(zip(rows_of(before), rows_of(after), strict=True)):
        copy, own = (cls + 1) % ranks, {row.kind for row in old}
        assert [row for row in new if row.kind in own] == old
        for kind in ("FRC", "FORGET"):
            assert sorted(row.unit for row in new if row.kind == kind and row.stage == copy) == list(range(count))

    def makespan(program: Program, **more: int) -> float:
        busy = {"F": forward, "B": backward, "OPT": 1, "*": 0, **more}
        return float(play(Clock.of(validate(program), durations(program, busy))).end.max())

    copied = makespan(after, FRC=forward, OPT_COPY=1)
    assert makespan(before) < copied <= makespan(before) + count * ranks * forward + 1
    assert makespan(after, FRC=0, OPT_COPY=0) == makespan(before), "what takes no time changes nothing"


def test_ranks_with_several_stages_have_no_copies() -> None:
    with pytest.raises(PlanError, match="ranks hold 2 stages each"):
        redundant(program_of(interleaved_one_f_one_b(2, 4, 2)))
