"""Programs of the user's own: what would train another model, or wait for ever, is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import grid, parity  # noqa: E402

from gnomon.errors import PlanError, ProgramError  # noqa: E402
from gnomon.lowering import lower  # noqa: E402
from gnomon.lowering.edit import Row, rows_of, with_rows  # noqa: E402
from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.plans import Plan, Workload  # noqa: E402
from gnomon.plans.plan import effective_zero  # noqa: E402
from gnomon.program import Program  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.module.apply import check_plan, holders  # noqa: E402
from gnomon.runtime.step.check_program import check_program  # noqa: E402
from gnomon.runtime.step.rows import program_of  # noqa: E402

pytestmark = pytest.mark.torch
Edit = Callable[[list[list[str]]], None]


def edited(program: Program, edit: Edit) -> Program:
    """The Program after a change to its actions by name (`0F1`, an AR with its communicator) class by class."""
    rows = rows_of(program)
    named: dict[str, Row] = {}
    names = []
    for cls, (low, listed) in enumerate(zip(program.class_ptr.tolist(), rows, strict=False)):
        names.append([])
        for at, row in enumerate(listed):
            name = str(row) + (f" {program.comm_of(low + at)}" if row.kind == "AR" else "")
            named[f"{cls} {name}"] = row
            names[-1].append(name)
    edit(names)
    return with_rows(program, [[named[f"{cls} {name}"] for name in listed] for cls, listed in enumerate(names)])


def without(*gone: str) -> Edit:
    def edit(names: list[list[str]]) -> None:
        assert any(name in gone for listed in names for name in listed)
        names[:] = [[name for name in listed if name not in gone] for listed in names]

    return edit


def moved(cls: int, name: str, after: str) -> Edit:
    def edit(names: list[list[str]]) -> None:
        names[cls].remove(name)
        names[cls].insert(names[cls].index(after) + 1, name)

    return edit


def twice(name: str) -> Edit:
    def edit(names: list[list[str]]) -> None:
        names[0].insert(names[0].index(name), name)

    return edit


@pytest.mark.parametrize(
    ("plan", "edit", "message"),
    [
        ("dp", without("0AR dp"), "stage 0 has 0 AR over dp, .* has 1: ranks that should hold the same would drift"),
        ("dp", twice("0AR dp"), "stage 0 has 2 AR over dp"),
        ("dp", moved(0, "0AR dp", "0B1"), "reduced over dp .AR. before its last backward"),
        ("dp", without("0OPT"), "stage 0 has 0 OPT|leak"),
        ("dp", without("0NORM"), "stage 0 has 0 NORM over norm, .* gradients would not be clipped"),
        ("dp", without("0F1", "0B1"), "stage 0 runs microbatch 1 forward 0 times"),
        ("zero 1", without("0REDUCE_GRAD"), "stage 0 has 0 REDUCE_GRAD over dp_shard"),
        ("zero 1", without("0UNSHARD"), "stage 0 has no UNSHARD between its OPT and the next forward"),
        ("tp and sp", without("0AR tp"), "stage 0 has 0 AR over tp"),
        ("1f1b", moved(0, "0SEND_F3", "0F3"), ""),
        ("1f1b", moved(0, "0SEND_F3", "0B3"), "rank class 0 waits at 0B3 for 0RECV_B3; rank class 1 waits at 1F3"),
        ("1f1b", without("0SEND_F1"), "receive without send|leak"),
        ("1f1b, tied", without("0AR embedding", "1AR embedding"), "0 AR over embedding, .* copies of the tied weights"),
        ("zero bubble h1", without("0W3"), "leak"),
    ],
)
def test_what_is_no_step_of_the_plan(plan: str, edit: Edit, message: str) -> None:
    config, given = parity.config_of(plan), parity.PLANS[plan.removesuffix(", tied")]
    program = edited(lower(llama(config), given, None, parity.WORKLOAD), edit)
    # no process group is there: what is refused is refused before any is asked for
    with pytest.raises(ProgramError if message else ValueError, match=message or "process group"):
        Executor(llama(config), given, parity.WORKLOAD, program=program)


def test_a_program_of_another_plan() -> None:
    plan = parity.PLANS["dp"]
    for other, message in (
        (parity.PLANS["1f1b"], "2 rank classes"),
        (parity.PLANS["tp"], "2 microbatches and the plan 4"),
    ):
        program = lower(llama(parity.CONFIG), other, None, parity.WORKLOAD)
        with pytest.raises(ProgramError, match=message):
            Executor(llama(parity.CONFIG), plan, parity.WORKLOAD, program=program)


def plans() -> list[tuple[LlamaConfig, Plan, Workload]]:
    """Those of the tests, tied and not, and some that are drawn."""
    drawn = [grid.draw(number) for number in range(len(grid.FIELDS))]
    return [(case.config, case.plan, case.workload) for case in drawn] + [
        (replace(parity.CONFIG, tied=tied), plan, parity.WORKLOAD)
        for plan in parity.PLANS.values()
        for tied in (False, True)
    ]


def test_every_program_of_a_plan_is_a_step_of_it() -> None:
    checked = 0
    for config, plan, workload in plans():
        graph = llama(config)
        try:
            check_plan(plan)
            program = program_of(graph, plan, workload)
        except PlanError:
            continue
        zero = effective_zero(plan)
        tied = {stage for stages in holders(plan, graph, zero).values() for stage in stages}
        check_program(program, program, zero=zero, tied=tied)
        checked += 1
    assert checked > 120
