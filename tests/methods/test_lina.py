"""Lina on random layers: no all-to-all waits for more than one operation, and everything is still sent once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.methods.lina import BUFFERS, KINDS, lina
from gnomon.program import Program, ProgramBuilder, Structure, validate, with_buffers, with_kinds
from gnomon.simulate import Clock, Durations, Times, play

TIMES = st.integers(1, 12).map(lambda twelfths: 12.0 * twelfths)


def backward(layers: int) -> Program:
    """One step of a model of expert layers on ranks that all do the same."""
    builder = ProgramBuilder(num_stages=layers, units=1, kinds=with_kinds(*KINDS))
    cls = builder.rank_class(8)
    for stage in range(layers):
        builder.add(cls, "F", stage, 0)
    for stage in reversed(range(layers)):
        builder.add_all(cls, [(kind, stage, 0) for kind in ("COMBINE", "A2A_C", "EXPERT", "A2A_D", "B")])
        builder.add(cls, "AR", stage)
    for stage in range(layers):
        builder.add(cls, "OPT", stage)
    return builder.build(buffers=with_buffers(*BUFFERS))


def seconds_of(program: Program, whole: dict[str, float]) -> Durations:
    """A part takes its share of the whole; what is not named takes 12."""
    busy = [whole.get(key.kind, 12.0) / int(key.name.rpartition(".")[2] or 1) for key in program.keys]
    return Durations(busy=np.array(busy))


def rows(program: Program, kind: str) -> list[int]:
    return [row for row in range(program.num_rows) if program.kinds[program.kind[row]].name == kind]


@settings(max_examples=40)
@given(
    layers=st.integers(1, 3), parts=st.integers(1, 3), reduce_parts=st.integers(1, 4), seconds=st.tuples(*[TIMES] * 5)
)
def test_an_all_to_all_waits_for_one_operation_at_most(
    layers: int, parts: int, reduce_parts: int, seconds: tuple[float, ...]
) -> None:
    whole = dict(zip(("COMBINE", "A2A_C", "EXPERT", "A2A_D", "AR"), seconds, strict=True))

    def timed(structure: Structure) -> Times:
        return play(Clock.of(structure, seconds_of(structure.program, whole)))

    program = lina(backward(layers), timed, all_to_all=parts, all_reduce=reduce_parts)
    structure = validate(program)
    assert len(rows(program, "AR")) == layers * reduce_parts
    assert len(rows(program, "A2A_C")) == len(rows(program, "A2A_D")) == layers * parts

    last = structure.order.position[rows(program, "B")[-1]]
    with_reductions = timed(structure).end[last]
    without = play(Clock.of(structure, seconds_of(program, {**whole, "AR": 0.0}))).end[last]
    # Only the second all-to-all of a layer can find the network taken, once for each of its operations.
    assert without <= with_reductions <= without + whole["AR"] / reduce_parts * layers * parts
