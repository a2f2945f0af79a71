"""Ring attention: every pair is computed once, by the rank that holds the query, in a Program that can run."""

from __future__ import annotations

import pytest
from cover import check_cover
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering.context_parallel import ring_attention, ring_units
from gnomon.lowering.edit import rows_of
from gnomon.plans import Unit
from gnomon.program import Program, validate
from gnomon.sharding import ring_step_pairs
from gnomon.simulate import Clock, durations, play, simulate
from gnomon.timeline import peaks

ORDERS = st.sampled_from(["contiguous", "zigzag"])


def tokens(unit: Unit) -> list[int]:
    return [token for _, start, stop in unit.pieces for token in range(start, stop)]


def counted(program: Program) -> list[int]:
    """Pairs that each rank's rows compute, counted one by one: query in the rank's unit, key in the row's."""
    units = program.units
    return [
        sum(
            key <= query
            for row in rows
            if row.kind in ("DIAG", "ATTN")
            for query in tokens(units[rank])
            for key in tokens(units[row.unit])
        )
        for rank, rows in enumerate(rows_of(program))
    ]


@settings(max_examples=30, deadline=None)
@given(cp=st.integers(1, 6), length=st.integers(1, 3), order=ORDERS)
def test_every_pair_under_the_mask_is_computed_once(cp: int, length: int, order: str) -> None:
    seq_len = 2 * cp * length
    program = ring_attention(seq_len, cp, order)
    validate(program)
    check_cover(program.units, [seq_len])
    pairs = counted(program)
    assert sum(pairs) == seq_len * (seq_len + 1) // 2
    assert pairs == [sum(step[rank] for step in ring_step_pairs(seq_len, cp, order)) for rank in range(cp)]
    if order == "zigzag":
        assert len(set(pairs)) == 1


@settings(max_examples=30, deadline=None)
@given(cp=st.integers(2, 5), order=ORDERS, message=st.integers(0, 12))
def test_double_buffering_holds_whatever_messages_cost(cp: int, order: str, message: int) -> None:
    """Two units of keys and values a rank; and no step faster than its messages or its busiest rank."""
    program = ring_attention(4 * cp, cp, order)
    structure = validate(program)
    steps = ring_step_pairs(4 * cp, cp, order)
    busy = {"DIAG": steps[0][0], "ATTN": steps[1][cp - 1], "SEND_KV": message, "RECV_KV": message, "*": 0}
    seconds = durations(program, busy)
    makespan = float(play(Clock.of(structure, seconds)).end.max())
    assert makespan == sum(max(max(step), message) for step in steps[:-1]) + max(steps[-1])
    timeline = simulate(structure, seconds, {"KV": 1, "P": 0}, steps=3)
    assert {peak.bytes for peak in peaks(timeline)} == {2}


def test_unequal_chunks_are_refused() -> None:
    with pytest.raises(PlanError, match="does not divide into 8 chunks"):
        ring_attention(12, 4, "zigzag")
    with pytest.raises(PlanError, match="unknown context_order"):
        ring_units(8, 4, "spiral")
