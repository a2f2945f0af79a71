"""Every hand-worked case of `tests/cases/`: text, lowering, validity, times, exposure and memory, to the last bit.

A module there defines `CASE` or `CASES` (see `case_format`) and is found by being there. What a case leaves out is not
checked; durations are on the dyadic grid, so numbers are compared with `==`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from case_format import Case, Peak

from gnomon.program import Program, Structure, issue_order_peak, parse_program, print_program, problems, validate
from gnomon.simulate import Clock, Durations, durations, period, play, simulate
from gnomon.timeline import breakdown, exposed_communication, peaks

FOLDER = Path(__file__).parent / "cases"


def modules() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def cases() -> Iterator[object]:
    for name in modules():
        for case in _of(name):
            yield pytest.param(case, id=case.name if case.name.startswith(name) else f"{name}-{case.name}")


def test_case_names_are_unique_and_modules_say_where_numbers_come_from() -> None:
    names = [case.name for name in modules() for case in _of(name)]
    assert len(set(names)) == len(names)
    for name in modules():
        assert len((import_module(f"cases.{name}").__doc__ or "").strip().splitlines()) >= 3, name


def _of(name: str) -> tuple[Case, ...]:
    module = import_module(f"cases.{name}")
    return tuple(getattr(module, "CASES", ())) or (module.CASE,)


@pytest.mark.parametrize("case", list(cases()))
def test_case(case: Case) -> None:
    program = parse_program(case.program)
    assert parse_program(print_program(program)) == program
    if case.lowered is not None:
        lowered = case.lowered()
        assert print_program(lowered) == print_program(program)
        assert lowered == program
    if case.expected.problem:
        result = problems(program)
        assert result and result[0].what == case.expected.problem, [str(problem) for problem in result]
    else:
        check_times(case, program)
        check_memory(case, validate(program))
    for check in case.also:
        check()


def check_times(case: Case, program: Program) -> None:
    """Makespan, period, idle and exposed time, ends."""
    wanted = case.expected
    if not case.busy:
        assert wanted.makespan is None and wanted.period is None and not wanted.ends, "expected times need durations"
        return
    structure = validate(program)
    seconds = durations(program, case.busy, case.lag)
    times = play(Clock.of(structure, seconds))
    actual: dict[str, object] = {}
    expected: dict[str, object] = {}
    if wanted.makespan is not None:
        actual["makespan"], expected["makespan"] = float(times.end.max()), wanted.makespan
    if wanted.period is not None:
        actual["period"], expected["period"] = period(structure, seconds).seconds, wanted.period
    timeline = simulate(structure, seconds)
    shares, exposed = breakdown(timeline), exposed_communication(timeline)
    assert shares.step_s == float(times.end.max())
    for rank_class, idle in wanted.idle.items():
        actual[f"idle {rank_class}"], expected[f"idle {rank_class}"] = shares.idle_s(f"class {rank_class}"), idle
    for rank_class, shown in wanted.exposed.items():
        actual[f"exposed {rank_class}"], expected[f"exposed {rank_class}"] = exposed[f"class {rank_class}"], shown
    rows = rows_by_action(program)
    for action, end in wanted.ends.items():
        assert action in rows, f"no action {action!r}"
        actual[action], expected[action] = float(times.end[structure.order.position[rows[action]]]), end
    assert actual == expected


def check_memory(case: Case, structure: Structure) -> None:
    """Peaks in issue order and in time order."""
    wanted, program = case.expected, structure.program
    actual: dict[str, Peak] = {}
    expected: dict[str, Peak] = {}
    if wanted.issue_peaks:
        issued = issue_order_peak(program, structure.deps, case.sizes)
        for rank_class, peak in wanted.issue_peaks.items():
            name = program.token(issued[rank_class].row) if peak.action else ""
            actual[f"issue {rank_class}"] = Peak(size=issued[rank_class].bytes, action=name, moment=peak.moment)
            expected[f"issue {rank_class}"] = peak
    if wanted.time_peaks:
        seconds: Durations = durations(program, case.busy, case.lag)
        held = peaks(simulate(structure, seconds, case.sizes, steps=wanted.time_steps))
        for rank_class, peak in wanted.time_peaks.items():
            name = held[rank_class].action if peak.action else ""
            moment = held[rank_class].moment_s if peak.moment is not None else None
            actual[f"time {rank_class}"] = Peak(size=held[rank_class].bytes, action=name, moment=moment)
            expected[f"time {rank_class}"] = peak
    assert actual == expected


def rows_by_action(program: Program) -> dict[str, int]:
    """`0:2F3` -> row; of actions named alike the last."""
    return {f"{program.rank_class(row)}:{program.token(row)}": row for row in range(program.num_rows)}
