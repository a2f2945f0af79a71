"""Can this Program run? Finds and explains what is wrong before anything is played or executed.

`validate(program)` returns the `Structure` (dependencies and order of play) that simulator and runtime work on, or
raises ProgramError with every problem found, first cause first. `problems(program)` returns them instead. A deadlock
is looked for only when buffers, messages and collectives are in order, because each of those would show as one.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import ProgramError
from gnomon.program.dependencies import Dependencies, dependencies
from gnomon.program.messages import collective_orders
from gnomon.program.order import Deadlock, Order, order
from gnomon.program.problems import Problem
from gnomon.program.program import Program


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Structure:
    """A valid Program with everything that does not depend on durations and sizes, derived once."""

    program: Program
    """The Program."""
    deps: Dependencies
    """Which of its rows wait for which."""
    order: Order
    """An order in which its rows can be played."""


def validate(program: Program) -> Structure:
    """Checks the Program and returns its Structure. ProgramError, with all problems found, if it cannot run."""
    examined = _examine(program)
    if isinstance(examined, Structure):
        return examined
    shown = "\n".join(f"  {problem}" for problem in examined[:5])
    and_more = f"\n  … and {len(examined) - 5} more" if len(examined) > 5 else ""
    raise ProgramError(f"this Program cannot run:\n{shown}{and_more}", examined)


def structure_of(program: Program) -> Structure | None:
    """The Program's Structure, or None if it cannot run: sooner than `validate`, which says why."""
    deps = dependencies(program)
    if deps.problems or collective_orders(program):
        return None
    # Without the reason for a deadlock, whose cycle takes long to find: a pass that tries many orders only asks whether
    # one runs.
    play = order(program, deps, why=False)
    return Structure(program=program, deps=deps, order=play) if isinstance(play, Order) else None


def problems(program: Program) -> tuple[Problem, ...]:
    """Everything that keeps the Program from running, first cause first; empty when it can run."""
    examined = _examine(program)
    return () if isinstance(examined, Structure) else examined


def _examine(program: Program) -> Structure | tuple[Problem, ...]:
    deps = dependencies(program)
    errors = (*deps.problems, *collective_orders(program))
    # Not played: unmatched messages would show again as deadlocks, which are their effect.
    if errors:
        return errors
    play = order(program, deps)
    if isinstance(play, Deadlock):
        return (_explain(program, play),)
    assert play is not None
    return Structure(program=program, deps=deps, order=play)


_SHOWN = 8  # streams named in the message of a deadlock


def _explain(program: Program, deadlock: Deadlock) -> Problem:
    def name(row: int) -> str:
        return f"{program.rank_class(row)}:{program.token(row)}"

    shown = [
        name(row) + (f" (with {', '.join(map(name, others))})" if others else "")
        for row, others in zip(deadlock.rows, deadlock.partners, strict=True)
    ]
    steps = " -> ".join((*shown, name(deadlock.rows[0])))
    stand = ", ".join(map(name, deadlock.heads[:_SHOWN])) + (", …" if len(deadlock.heads) > _SHOWN else "")
    ran = f"{deadlock.finished} of {program.num_rows} actions ran; streams stand at {stand}"
    return Problem.of(program, "deadlock", deadlock.rows[0], f"each waits for the next: {steps}; {ran}")
