"""What validate finds: every kind of problem by hand, and the same verdicts as a brute-force interpreter.

The cases by hand assert the whole message that a user sees. The properties mutate small valid Programs of every family
(see `strategies`) and compare `problems` with `interpreter.interpret`, which shares no code with it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import event, given, settings
from program.interpreter import CannotRead, Result, interpret
from program.strategies import mutated, tangled, valid_programs

from gnomon.errors import ProgramError
from gnomon.program import Deadlock, Program, dependencies, order, problems

# Against the interpreter


@given(valid_programs())
@settings(max_examples=150)
def test_programs_of_every_family_can_run(program: Program) -> None:
    assert problems(program) == ()
    assert not interpret(program).findings


@given(mutated())
@settings(max_examples=1000)
def test_mutated_programs_get_the_interpreters_verdict(program: Program) -> None:
    compare(program)


@given(tangled())
@settings(max_examples=500)
def test_tangled_streams_deadlock_where_the_interpreter_gets_stuck(program: Program) -> None:
    compare(program)


def compare(program: Program) -> None:
    """Same kinds of problem at the same actions; for a deadlock, a real and shortest cycle."""
    try:
        wanted = interpret(program)
    except CannotRead:
        event("names what is not there")
        with pytest.raises(ProgramError):
            problems(program)
        return
    found = problems(program)
    for what in {problem.what for problem in found} or {"can run"}:
        event(what)
    if any(what == "deadlock" for what, _, _ in wanted.findings):
        assert [problem.what for problem in found] == ["deadlock"]
        check_cycle(program, wanted)
    else:
        assert Counter((p.what, p.rank_class, p.action) for p in found) == wanted.findings


def check_cycle(program: Program, wanted: Result) -> None:
    """Every row of the cycle waits for the next, and there is no shorter cycle."""
    stuck = order(program, dependencies(program))
    assert isinstance(stuck, Deadlock)
    assert stuck.finished == wanted.finished
    following = stuck.rows[1:] + stuck.rows[:1]
    for row, partners, after in zip(stuck.rows, stuck.partners, following, strict=True):
        assert {row, *partners} == wanted.partners[row]
        waits = set().union(*(wanted.waits[one] for one in (row, *partners)))
        assert waits & wanted.partners[after], "an edge of the cycle is no wait"
    assert set(stuck.heads) == set(wanted.heads.values())
    assert len(stuck.rows) == shortest(wanted)


def shortest(wanted: Result) -> int:
    """Length of the shortest cycle of waits, by breadth-first search from every row."""
    graph = {
        together: {wanted.partners[other] for row in together for other in wanted.waits[row]}
        for together in {wanted.partners[row] for row in wanted.waits}
    }
    best = len(graph) + 1
    for start in graph:
        reached, frontier, length = {start}, {start}, 0
        while frontier and length < best:
            frontier = {after for node in frontier for after in graph[node]}
            length += 1
            if start in frontier:
                best = length
                break
            frontier -= reached
            reached |= frontier
    return best
