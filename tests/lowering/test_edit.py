"""Rows as lists and back: nothing is lost on the way."""

from __future__ import annotations

import pytest

from gnomon.lowering import dualpipe_v, one_f_one_b, with_loads, with_messages, with_optimizer, zero_bubble_v
from gnomon.lowering.context_parallel import ring_attention
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.methods.easyscale import easyscale
from gnomon.program import NO_UNIT, BufferRef, Override, Program, RowEffect, validate

PROGRAMS = {
    "loads and blocking receives": with_loads(with_messages(one_f_one_b(3, 4), blocking=("RECV_B",))).program(
        inputs="loaded", counts=(2, 4, 2)
    ),
    "split backward, two stages a rank": with_optimizer(with_messages(zero_bubble_v(2, 4))).program(),
    "composites": with_optimizer(with_messages(dualpipe_v(2, 4))).program(),
    "peers and chains": easyscale((0, 1, 0)),
    "pools and rendezvous": ring_attention(8, 4, "zigzag"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_there_and_back(name: str) -> None:
    program = PROGRAMS[name]
    rows = rows_of(program)
    assert [len(listed) for listed in rows] == (program.class_ptr[1:] - program.class_ptr[:-1]).tolist()
    assert [str(row) for listed in rows for row in listed] == [program.token(i) for i in range(program.num_rows)]
    assert with_rows(program, rows) == program


def test_overrides_move_with_their_rows() -> None:
    """The update of one stage reads and writes more than its kind says, wherever it stands."""
    program = with_optimizer(with_messages(one_f_one_b(1, 2))).program()
    rows = rows_of(program)
    effects = (RowEffect("consume", BufferRef("G", 0)), RowEffect("write", BufferRef("P", 0)))
    special = Override(stream="host", name="STEP", effects=effects)
    changed = with_rows(program, [[*rows[0][:-1], Row(kind="OPT", stage=0, override=special)]])
    assert changed.overrides == {program.num_rows - 1: special}
    moved = with_rows(changed, [[rows[0][0], *rows[0][1:-1], rows_of(changed)[0][-1]]])
    assert moved == changed
    validate(changed)
    assert rows_of(changed)[0][-1].unit == NO_UNIT


def test_classes_may_go() -> None:
    """Without its second rank the pipeline's messages have no partner, but the rows are a Program."""
    program = PROGRAMS["loads and blocking receives"]
    first: Program = with_rows(program, rows_of(program)[:1], counts=program.counts[:1])
    assert first.num_classes == 1 and first.counts == (2,)
