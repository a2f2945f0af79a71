"""Blocks called twice: which stage stands for which, when its gradient is reduced, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from cases.shared_block import FOUR, ONE_RANK

from gnomon.errors import PlanError
from gnomon.graph import Graph, Layer
from gnomon.lowering import lower
from gnomon.lowering.shared import shared_stages
from gnomon.plans import Mesh, Plan
from gnomon.program import issue_order_peak, parse_program, validate

LAYERS = {layer.label: layer for layer in FOUR.layers()}


def pairs(graph: Graph, stages: Sequence[Sequence[str]], ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    parts: list[list[Layer]] = [[LAYERS[label] for label in labels] for labels in stages]
    return shared_stages(graph, parts, ranks)


def test_the_largest_stage_stands_for_the_others_the_earliest_of_equals() -> None:
    assert pairs(FOUR, [["once_0"], ["again_0"]], [0, 0]) == ((0, 1),)
    assert pairs(FOUR, [["once_0"], ["again_0"]], [0, 1]) == ()
    assert pairs(FOUR, [["once_0"], ["once_1"], ["again_0", "again_1"]], [0, 0, 0]) == ((2, 0), (2, 1))
    assert pairs(FOUR, [["embed", "once_0"], ["again_0", "head"]], [0, 0]) == ()  # each has parameters of its own


def with_mesh(plan: Plan, mesh: Mesh) -> Plan:
    size = mesh.world_size
    ranks = (f"0:{size}", f"{size}:{2 * size}") * 2
    stages = tuple(replace(stage, mesh=mesh, devices=r) for stage, r in zip(plan.stages, ranks, strict=True))
    return replace(plan, stages=stages)


def test_gradients_are_reduced_once_and_after_both_backwards() -> None:
    program = lower(FOUR, with_mesh(ONE_RANK, Mesh(dp_replicate=2)))
    validate(program)
    rows = [program.token(row) for row in range(program.num_rows)]
    assert [row for row in rows if "AR" in row] == ["0AR", "3AR"]
    assert rows[-3:] == ["1SEND_B1", "3AR", "3OPT"]
    assert max(i for i, row in enumerate(rows) if row in ("0B1", "2B1")) < rows.index("0AR")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_passes_that_divide_parameters_refuse_shared_ones(zero: int) -> None:
    plan = with_mesh(ONE_RANK, Mesh(dp_shard=2))
    plan = replace(plan, optimizer=replace(plan.optimizer, zero=zero))  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        lower(FOUR, plan)


def test_an_alias_has_the_size_of_the_buffer_that_stands_for_it() -> None:
    text = """\
gnomon.program/1
stages 2
units 1
alias P 1 = P 0
alias G 1 = G 0
class 0
  0F0 1F0 1B0 0B0 1OPT
"""
    program = parse_program(text)
    sizes = {"S": 0, "X": 0, "Y": 0, "DX": 0, "DY": 0, "0P": 100, "0G": 100, "1P": 3, "1G": 2}
    assert issue_order_peak(program, validate(program).deps, sizes)[0].bytes == 5
