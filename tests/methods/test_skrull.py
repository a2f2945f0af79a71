"""Skrull's heuristics: the oracles, and what must hold for any batch."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from cover import check_cover
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering.edit import rows_of
from gnomon.methods.skrull import DIVIDED, dacp, gds, microbatch_step
from gnomon.plans import Unit
from gnomon.program import Program, unit_shapes, validate
from gnomon.simulate import durations, simulate

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=24)


def square(length: int) -> int:
    return length * length


def mixed(length: int) -> int:
    """Attention and the rest, as a transformer of width 4000 has them, up to a factor."""
    return length * length + 4000 * length


def test_oracles() -> None:
    """In the first, the 4000 goes whole to rank 5 and is divided when the 30000 needs room there."""
    lengths = (500, 800, 1000, 1200, 2000, 4000, 9000, 30000)
    assert dacp(lengths, capacity=8000, cp=8, work=mixed) == (0, 1, 2, 3, 4, DIVIDED, DIVIDED, DIVIDED)
    assert dacp((4, 4, 4, 4, 8), capacity=12, cp=2, work=square) == (0, 1, 0, 1, DIVIDED)
    assert dacp((1000,) * 8, capacity=8000, cp=4, work=mixed) == (0, 1, 2, 3, 0, 1, 2, 3)


def test_placement_is_in_the_order_of_the_batch() -> None:
    assert dacp((8, 4, 4, 4, 4), capacity=12, cp=2, work=square) == (DIVIDED, 0, 1, 0, 1)


@settings(max_examples=300)
@given(lengths=LENGTHS, capacity=st.integers(1, 64), cp=st.integers(1, 8))
def test_no_rank_holds_more_than_its_capacity(lengths: list[int], capacity: int, cp: int) -> None:
    """And a batch is refused only if it would not fit with everything divided."""
    if sum(lengths) > capacity * cp:
        with pytest.raises(PlanError, match="do not fit"):
            dacp(lengths, capacity=capacity, cp=cp, work=mixed)
        return
    placed = dacp(lengths, capacity=capacity, cp=cp, work=mixed)
    assert all(DIVIDED <= rank < cp for rank in placed)
    shared = sum(Fraction(length, cp) for length, rank in zip(lengths, placed, strict=True) if rank == DIVIDED)
    for rank in range(cp):
        whole = sum(length for length, where in zip(lengths, placed, strict=True) if where == rank)
        assert whole + shared <= capacity


@settings(max_examples=100)
@given(lengths=LENGTHS, data_ranks=st.integers(1, 3), capacity=st.integers(4, 64), cp=st.integers(1, 4))
def test_units_of_a_global_batch(lengths: list[int], data_ranks: int, capacity: int, cp: int) -> None:
    """Every sequence is in one unit, no rank over its capacity, every worker has work."""
    fits = max(lengths) <= capacity * cp and len(lengths) >= data_ranks
    if not fits:
        with pytest.raises(PlanError):
            gds(lengths, data_ranks=data_ranks, capacity=capacity, cp=cp, work=square)
        return
    units = gds(lengths, data_ranks=data_ranks, capacity=capacity, cp=cp, work=square)
    check_cover(units, lengths)
    assert {unit.worker for unit in units} == set(range(data_ranks))
    assert all(tokens <= capacity for unit in units for tokens in unit.rank_tokens(cp))
    assert sum(unit.weight for unit in units) == pytest.approx(1)


@given(count=st.integers(1, 16), length=st.integers(1, 16), cp=st.integers(1, 4))
def test_equal_lengths_that_fit_are_never_divided(count: int, length: int, cp: int) -> None:
    placed = dacp((length,) * count, capacity=length * count, cp=cp, work=mixed)
    counts = Counter(placed)
    assert DIVIDED not in counts
    assert max(counts.values()) - min(counts.get(rank, 0) for rank in range(cp)) <= 1


def test_microbatches_mix_long_and_short_sequences() -> None:
    """40 tokens on 2 x 12 need two microbatches; dealt by length, each gets a 16 and two of the short ones."""
    units = gds((16, 16, 2, 2, 2, 2), data_ranks=1, capacity=12, cp=2, work=square)
    assert [sorted(stop for _, _, stop in unit.pieces) for unit in units] == [[2, 2, 16], [2, 2, 16]]
    assert [dict(unit.local) for unit in units] == [{2: 0, 4: 1}, {3: 0, 5: 1}]


def forward_s(unit: Unit, cp: int, exchange: int) -> float:
    """DACP's objective, with squares of lengths for seconds of work and `exchange` seconds to exchange a token's keys
    and values: on the slowest rank the exchange beside the whole sequences, then the divided ones."""
    where, tokens = dict(unit.local), {sequence: stop for sequence, _, stop in unit.pieces}
    divided = [count for sequence, count in tokens.items() if sequence not in where]
    whole = [sum(square(tokens[entry]) for entry, rank in unit.local if rank == mine) for mine in range(cp)]
    return max(exchange * sum(divided), *whole) + sum(map(square, divided)) / cp


def played_forward_s(unit: Unit, cp: int, exchange: int) -> float:
    """The same from the Program, with a backward that takes no time."""
    where, tokens = dict(unit.local), {sequence: stop for sequence, _, stop in unit.pieces}
    divided = [count for sequence, count in tokens.items() if sequence not in where]
    busy = {"*": 0.0, "AG_KV": float(exchange * sum(divided)), "DIST": sum(map(square, divided)) / cp}
    for rank in set(where.values()):
        busy[f"{rank}:LOCAL"] = float(sum(square(tokens[entry]) for entry, mine in unit.local if mine == rank))
    program = microbatch_step(unit, cp)
    busy = {name: seconds for name, seconds in busy.items() if name == "*" or name.split(":")[-1] in kinds_of(program)}
    return simulate(validate(program), durations(program, busy)).makespan_s


def kinds_of(program: Program) -> set[str]:
    return {row.kind for rows in rows_of(program) for row in rows}


def test_the_objective_is_the_slower_of_exchange_and_whole_sequences_then_the_divided_ones() -> None:
    unit = gds((4, 4, 4, 4, 8), data_ranks=1, capacity=12, cp=2, work=square)[0]
    assert forward_s(unit, 2, 1) == played_forward_s(unit, 2, 1) == 32 + 32
    assert forward_s(unit, 2, 5) == played_forward_s(unit, 2, 5) == 40 + 32
    alone = Unit(pieces=unit.pieces, weight=1.0)
    assert forward_s(alone, 2, 1) == played_forward_s(alone, 2, 1) == 24 + 64


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, cp=st.sampled_from([1, 2, 4]), exchange=st.integers(0, 64))
def test_a_played_forward_takes_what_the_heuristics_lower(lengths: list[int], cp: int, exchange: int) -> None:
    for unit in gds(lengths, data_ranks=1, capacity=64, cp=cp, work=square):
        assert played_forward_s(unit, cp, exchange) == forward_s(unit, cp, exchange)


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, cp=st.integers(1, 4))
def test_the_step_of_any_unit_can_run(lengths: list[int], cp: int) -> None:
    for unit in gds(lengths, data_ranks=1, capacity=64, cp=cp, work=square):
        program = microbatch_step(unit, cp)
        validate(program)
        divided = len(unit.local) < len(unit.pieces)
        for rank, rows in enumerate(rows_of(program)):
            kinds = {row.kind for row in rows}
            assert ("AG_KV" in kinds) == ("RS_DKV" in kinds) == divided
            assert ("LOCAL" in kinds) == (rank in dict(unit.local).values())


def test_units_that_differ_only_in_placement_have_different_prices() -> None:
    pieces = ((0, 0, 4), (1, 0, 8))
    units = (Unit(pieces=pieces, local=((0, 1),)), Unit(pieces=pieces))
    assert unit_shapes(units)[0] == ("4@1,8", "4,8")


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(PlanError, match="a sequence of 30 tokens does not fit 2 ranks of 12"):
        gds((4, 30), data_ranks=1, capacity=12, cp=2, work=square)
    with pytest.raises(PlanError, match="5 sequences of 25 tokens do not fit 2 ranks of 12 tokens"):
        dacp((5,) * 5, capacity=12, cp=2, work=square)
    with pytest.raises(PlanError, match="1 sequences do not give each of 2"):
        gds((4,), data_ranks=2, capacity=12, cp=2, work=square)
    with pytest.raises(PlanError, match="must be at least 1"):
        dacp((0,), capacity=12, cp=2, work=square)
