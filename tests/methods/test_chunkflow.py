"""ChunkFlow: chunks cover the batch and fit, orders respect sequences, and `keep` bounds the activations."""

from __future__ import annotations

import pytest
from cover import check_cover
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering import with_messages, with_optimizer
from gnomon.lowering.edit import rows_of
from gnomon.methods.chunkflow import BUFFERS, backward_order, chunkflow, chunks
from gnomon.plans import Unit
from gnomon.program import Program, issue_order_peak, problems, validate

SIZES = {"S": 1, "KV": 0, "DKV": 0, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0}


def program_of(ranks: int, units: tuple[Unit, ...], *, keep: int | None = None, extra: int = 0) -> Program:
    rows = with_messages(chunkflow(ranks, units, keep=keep, extra=extra))
    return with_optimizer(rows).program(units=units, buffers=BUFFERS)


def compute(program: Program, rank_class: int) -> str:
    return " ".join(f"{r.kind}{r.unit}" for r in rows_of(program)[rank_class] if r.kind in ("F", "C", "R", "B"))


def test_chunks_of_the_papers_example() -> None:
    units = chunks((4, 2, 1, 1), 2)
    assert [unit.pieces for unit in units] == [((0, 0, 2),), ((0, 2, 4),), ((1, 0, 2),), ((2, 0, 1), (3, 0, 1))]
    assert [unit.weight for unit in units] == [0.25] * 4


def test_short_sequences_go_into_as_few_packs_as_fit() -> None:
    """5 + 3, 4 + 4 and 4 + 3 into packs of 8; the long one leaves a remainder of 2, which stays a chunk of its own."""
    units = chunks((5, 4, 18, 4, 3, 4, 3), 8)
    assert [unit.tokens for unit in units] == [8, 8, 2, 8, 8, 7]
    assert [unit.pieces for unit in units[:3]] == [((2, 0, 8),), ((2, 8, 16),), ((2, 16, 18),)]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), chunk_size=st.integers(1, 16))
def test_chunks_cover_every_token_once_and_fit(lengths: list[int], chunk_size: int) -> None:
    units = chunks(lengths, chunk_size)
    check_cover(units, lengths)
    assert all(unit.tokens <= chunk_size for unit in units)
    assert sum(unit.weight for unit in units) == pytest.approx(1)
    short = [length for length in lengths if length <= chunk_size]
    packs = [unit for unit in units if lengths[unit.pieces[0][0]] <= chunk_size]
    assert sum(short) <= len(packs) * chunk_size and len(packs) <= len(short)
    if short and sum(short) <= chunk_size:
        assert len(packs) == 1


def test_one_long_sequence_runs_all_but_the_last_chunks_twice() -> None:
    """The paper's Algorithm 2 on one rank, four chunks, K 2: forward all, the last two backward, then the first two
    again, last to first."""
    program = program_of(1, chunks((8,), 2), keep=2, extra=3)
    assert compute(program, 0) == "C0 C1 F2 F3 B3 B2 R1 B1 R0 B0"
    peak = issue_order_peak(program, validate(program).deps, SIZES)[0]
    assert peak.bytes == 2


@given(num_chunks=st.integers(1, 12), keep=st.integers(1, 4))
def test_activations_do_not_grow_with_the_length(num_chunks: int, keep: int) -> None:
    program = program_of(1, chunks((2 * num_chunks,), 2), keep=keep)
    assert issue_order_peak(program, validate(program).deps, SIZES)[0].bytes == min(keep, num_chunks)
    assert sum(row.kind == "R" for row in rows_of(program)[0]) == max(0, num_chunks - keep)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    chunk_size=st.integers(1, 6),
    keep=st.one_of(st.none(), st.integers(1, 3)),
    extra=st.integers(0, 3),
)
def test_every_schedule_can_run(ranks: int, lengths: list[int], chunk_size: int, keep: int | None, extra: int) -> None:
    units = chunks(lengths, chunk_size)
    program = program_of(ranks, units, keep=keep, extra=extra)
    assert problems(program) == ()
    for rows in rows_of(program):
        assert [row.unit for row in rows if row.kind in ("F", "C")] == list(range(len(units)))
        assert [row.unit for row in rows if row.kind == "B"] == list(backward_order(units))


def test_equal_sequences_are_one_f_one_b() -> None:
    program = program_of(2, chunks((3, 3, 3, 3), 3))
    assert compute(program, 0) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert compute(program, 1) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_what_cannot_be_chunked_is_refused() -> None:
    with pytest.raises(PlanError, match="chunks of 0 tokens"):
        chunks((1, 2), 0)
    with pytest.raises(PlanError, match="keep >= 1"):
        chunkflow(2, chunks((4,), 2), keep=0)
    mixed = (Unit(pieces=((0, 0, 2), (1, 0, 1))), Unit(pieces=((0, 2, 4),)))
    with pytest.raises(PlanError, match="sequence 0 is cut, but one of its chunks holds another piece"):
        chunkflow(2, mixed)
    with pytest.raises(PlanError, match="in the order of their tokens"):
        chunkflow(2, tuple(reversed(chunks((4,), 2))))
