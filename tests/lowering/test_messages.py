"""Insertion of rows, and messages: where sends and receives stand, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.lowering import (
    KIND,
    Inserted,
    Rows,
    dualpipe_v,
    gpipe,
    insert,
    interleaved_one_f_one_b,
    of_lists,
    one_f_one_b,
    v_half,
    with_loads,
    with_messages,
    with_optimizer,
    zero_bubble_v,
)
from gnomon.lowering.messages import with_polled
from gnomon.program import STANDARD_KINDS, Communicator, Program, parse_program, print_program, problems, validate
from gnomon.simulate import Script, durations, makespans


def tokens(program: Program) -> list[str]:
    """Rows of each class in issue order."""
    ends = program.class_ptr.tolist()
    return [" ".join(program.token(r) for r in range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]


def test_sends_follow_their_producer_and_receives_precede_their_consumer() -> None:
    program = with_messages(with_optimizer(one_f_one_b(2, 2))).program()
    assert tokens(program) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0OPT",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1OPT",
    ]


def test_neighbouring_stages_on_one_rank_need_no_message() -> None:
    """The V turns on rank 1: stage 1's output is stage 2's input."""
    rows = of_lists(
        [[("F", 0, 0), ("F", 3, 0), ("B", 3, 0), ("B", 0, 0)], [("F", 1, 0), ("F", 2, 0), ("B", 2, 0), ("B", 1, 0)]],
        num_stages=4,
        num_units=1,
    )
    assert tokens(with_messages(with_optimizer(rows)).program()) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0 0OPT 3OPT",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0 1OPT 2OPT",
    ]


def test_a_second_chain_takes_no_input_from_the_stage_before() -> None:
    program = with_messages(with_optimizer(gpipe(2, 1)), chains=(0, 1)).program(chains=(0, 1))
    assert tokens(program) == ["0F0 0B0 0OPT", "1F0 1B0 1OPT"]
    validate(program)


def test_receives_come_in_the_order_sent() -> None:
    """Rank 1 needs microbatch 1 first, but rank 0 sends 0 first: the receive of 0 moves up before it."""
    order = [("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("B", 0, 0)]
    rows = of_lists([order, [("F", 1, 1), ("B", 1, 1), ("F", 1, 0), ("B", 1, 0)]], num_stages=2, num_units=2)
    program = with_messages(with_optimizer(rows)).program()
    assert tokens(program) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0 0OPT",
        "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0 1OPT",
    ]
    validate(program)


def test_messages_stay_outside_composites() -> None:
    """`(1F3&2B1)`: both receives before its first member, both sends after its last."""
    program = with_messages(with_optimizer(dualpipe_v(2, 4))).program()
    assert "(2F2&1B0) 2SEND_F2\n  1SEND_B0 1RECV_F3 2RECV_B1 (1F3&2B1)" in print_program(program)
    validate(program)


def test_blocking_receives_are_on_the_compute_stream() -> None:
    program = with_messages(with_optimizer(one_f_one_b(2, 2)), blocking=("RECV_B",)).program()
    streams = {program.kinds[k].name: program.streams[s] for k, s in zip(program.kind, program.stream, strict=True)}
    assert streams["RECV_B"] == "compute"
    assert streams["RECV_F"] == "recv_f"


def test_loads_precede_the_forwards_of_the_first_stage() -> None:
    rows = with_loads(with_messages(with_optimizer(one_f_one_b(4, 8))))
    program = rows.program(inputs="loaded")
    validate(program)
    assert tokens(program)[0].startswith("0LOAD0 0F0 0SEND_F0 0LOAD1 0F1")
    assert program.num_rows == 172  # 64 F and B, 48 + 48 messages, 8 LOAD, 4 OPT


SCHEDULES = st.one_of(
    st.builds(one_f_one_b, st.integers(1, 5), st.integers(1, 9)),
    st.builds(gpipe, st.integers(1, 4), st.integers(1, 5)),
    st.builds(
        lambda p, r, v: interleaved_one_f_one_b(p, p * r, v), st.integers(2, 4), st.integers(1, 3), st.integers(2, 3)
    ),
    st.builds(lambda p, more: zero_bubble_v(p, 2 * p - 1 + more), st.integers(1, 5), st.integers(0, 4)),
    st.builds(lambda p, more: dualpipe_v(p, 2 * p + more), st.integers(1, 5), st.integers(0, 4)),
    st.builds(v_half, st.integers(1, 5), st.integers(1, 9)),
)


@given(rows=SCHEDULES)
@settings(max_examples=80)
def test_every_schedule_validates_with_each_message_once(rows: Rows) -> None:
    """A hop between ranks is one send and one receive each way for every microbatch; what is inserted moves nothing."""
    full = with_messages(rows)
    program = with_optimizer(full).program()
    validate(program)
    rank_of = np.zeros(rows.num_stages, int)
    rank_of[rows.stage] = rows.rank_class
    hops = int((np.diff(rank_of) != 0).sum())
    for name in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        assert int(full.is_kind(name).sum()) == hops * rows.num_units
    kept = ~full.is_kind("SEND_F", "RECV_F", "SEND_B", "RECV_B")
    for before, after in ((rows.kind, full.kind), (rows.stage, full.stage), (rows.unit, full.unit)):
        assert np.array_equal(before, after[kept])


@given(rows=SCHEDULES)
@settings(max_examples=60)
def test_every_schedule_runs_with_any_kind_of_message(rows: Rows) -> None:
    """Rendezvous on streams of their own, one message in flight between two ranks, and sends on the compute stream."""
    own = with_messages(with_optimizer(rows))
    blocking = with_messages(with_optimizer(rows), blocking=("SEND_F", "RECV_F", "SEND_B", "RECV_B"))
    for program in (
        own.program(comms=both("rendezvous")),
        own.program(comms=both("buffered", capacity=1)),
        blocking.program(),
    ):
        assert problems(program) == ()


def both(semantics: Literal["buffered", "rendezvous"], capacity: int = 0) -> tuple[Communicator, ...]:
    return tuple(Communicator(name=name, semantics=semantics, capacity=capacity) for name in ("fwd", "bwd"))


def part(anchors: list[int], kind: str, *, before: bool = False) -> Inserted:
    size = len(anchors)
    return Inserted(
        anchor=np.array(anchors, np.int64),
        kind=np.full(size, KIND[kind], np.int8),
        stage=np.zeros(size, np.int16),
        unit=np.arange(size, dtype=np.int32),
        before=before,
    )


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=80)
def test_insert_agrees_with_lists(sizes: list[int], data: st.DataObject) -> None:
    """Against a Python list in which every row is followed and preceded by what was asked for."""
    rows = of_lists([[("F", 0, u) for u in range(size)] for size in sizes], num_stages=1, num_units=max(sizes))
    anchors = st.lists(st.integers(0, rows.num_rows - 1), max_size=5)
    parts = [
        part(data.draw(anchors), name, before=side)
        for name, side in (("B", True), ("W", False), ("I", True), ("R", False))
    ]
    new = insert(rows, parts)
    wanted: list[tuple[str, int]] = []
    ends = [0]
    for row in range(rows.num_rows):
        for given_before in (True, False):
            for one in parts:
                if one.before == given_before:
                    name = STANDARD_KINDS[one.kind[0]].name if len(one.kind) else ""
                    wanted += [(name, int(u)) for a, u in zip(one.anchor, one.unit, strict=True) if a == row]
            if given_before:
                wanted.append(("F", int(rows.unit[row])))
        if row + 1 in rows.class_ptr:
            ends.append(len(wanted))
    assert [(STANDARD_KINDS[k].name, int(u)) for k, u in zip(new.kind, new.unit, strict=True)] == wanted
    assert new.class_ptr.tolist() == ends


def test_a_million_and_a_half_rows_in_a_moment() -> None:
    """64 ranks, 512 microbatches, 8 stages each: 524,288 F and B and 1,046,528 messages. 0.25 s on a quiet core."""
    best = 10.0
    for _ in range(3):
        start = process_time()
        rows = with_messages(interleaved_one_f_one_b(64, 512, 8))
        program = rows.program()
        best = min(best, process_time() - start)
    assert program.num_rows == 1_570_816
    assert best < 0.6, f"{best:.2f} s"


def test_the_text_of_a_schedule_is_its_own_golden() -> None:
    text = """\
gnomon.program/1
stages 2
units 1
class 0
  F0 SEND_F0 RECV_B0 B0 OPT
class 1
  RECV_F0 F0 B0 SEND_B0 OPT
"""
    assert with_messages(with_optimizer(one_f_one_b(2, 1))).program() == parse_program(text)


def test_units_must_be_as_many_as_the_schedule_has() -> None:
    units = with_messages(one_f_one_b(2, 3)).program().units
    with pytest.raises(ValueError, match="the schedule has 2 microbatches, but 3 units are given"):
        one_f_one_b(2, 2).program(units=units)


def test_a_host_that_polls_sleeps_for_each_tensor() -> None:
    """Activations are two tensors, gradients one. Beside a backward, the second tensor leaves after it."""
    program = with_polled(with_optimizer(one_f_one_b(2, 2)), paired=True).program()
    assert tokens(program) == [
        "0F0 0POLL0 0SEND_F0 0POLL0 0F1 0POLL1 0RECV_B0 0B0 0SEND_F1 0POLL1 0RECV_B1 0B1 0OPT",
        "1POLL0 1RECV_F0 1F0 1B0 1SEND_B0 1POLL0 1POLL1 1RECV_F1 1F1 1B1 1SEND_B1 1POLL1 1OPT",
    ]


@given(ranks=st.integers(2, 6), units=st.integers(1, 12), schedule=st.sampled_from([gpipe, one_f_one_b]))
def test_polled_messages_deadlock_nowhere(ranks: int, units: int, schedule: Callable[[int, int], Rows]) -> None:
    rows = with_optimizer(schedule(ranks, units))
    program = with_polled(rows, paired=schedule is one_f_one_b).program()
    assert not problems(program)


@pytest.mark.parametrize(("ranks", "slope"), [(2, 0.6), (4, 1.2), (8, 1.2)])
def test_by_hand_a_microbatch_is_polled_for(ranks: int, slope: float) -> None:
    """0.1 s a look, two looks a tensor: a stage in the middle sends three tensors of a microbatch and receives three,
    the first one sends two and receives one, the last the other way round. Computing takes nothing."""
    ends = []
    for units in (20, 40):
        program = with_polled(with_optimizer(one_f_one_b(ranks, units)), paired=True).program()
        busy = {"*": 0.0} | {kind: 0.2 for kind in ("POLL", "RECV_F", "RECV_B")}
        ends.append(float(makespans(Script.of(validate(program)), durations(program, busy))[0]))
    assert (ends[1] - ends[0]) / 20 == pytest.approx(slope)
