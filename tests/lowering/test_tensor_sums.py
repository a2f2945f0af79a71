"""Sums over tensor-parallel ranks: which stages have them, and where they stand under each ZeRO stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from gnomon.errors import PlanError
from gnomon.lowering import lower, one_f_one_b
from gnomon.lowering.tensor_sums import COPIES, TERMS, tensor_sums, with_tensor_sums
from gnomon.models.deepseek import deepseek_v3, deepseek_v3_671b
from gnomon.models.llama import llama, llama_mini
from gnomon.plans import Layout, Mesh, Offload, Optimizer, Plan, Schedule, stage_layers
from gnomon.program import Program, validate

TINY = llama(llama_mini())
SEQUENCE = Layout(sequence_parallel=True)


def sums(mesh: Mesh, layout: Layout) -> tuple[tuple[int, str], ...]:
    plan = Plan(mesh=mesh, layout=layout)
    parts = [(plan.stage_mesh(stage), part) for stage, part in enumerate(stage_layers(plan, TINY))]
    return tensor_sums(TINY, layout, parts)


def test_only_what_the_layout_leaves_partial_or_copies() -> None:
    assert sums(Mesh(pp=2), SEQUENCE) == ()
    assert sums(Mesh(tp=2), Layout()) == ()
    assert sums(Mesh(tp=2), SEQUENCE) == ((0, TERMS),)
    assert sums(Mesh(pp=2, tp=4), Layout()) == ((0, COPIES), (1, COPIES))
    assert sums(Mesh(tp=4), SEQUENCE) == ((0, TERMS), (0, COPIES))


def test_a_router_sees_a_part_of_the_tokens() -> None:
    graph, mesh = deepseek_v3(deepseek_v3_671b()), Mesh(dp_shard=32, tp=2, ep=64)
    assert tensor_sums(graph, SEQUENCE, [(mesh, graph.layers()[4:5])]) == ((0, TERMS),)


def tokens(program: Program) -> list[str]:
    names = [(program.token(row), program.comm_of(row)) for row in range(int(program.class_ptr[1]))]
    return [token + (f":{comm}" if comm else "") for token, comm in names if token[1] not in "FB"]


def lowered(zero: int, *, clip: bool) -> Program:
    plan = Plan(
        mesh=Mesh(dp_shard=2, tp=4),
        schedule=Schedule(num_microbatches=2),
        layout=SEQUENCE,
        optimizer=Optimizer(zero=zero, clip=clip),  # type: ignore[arg-type]
    )
    return lower(TINY, plan)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_they_come_after_the_reduction_and_before_norm_and_update(zero: int) -> None:
    program = lowered(zero, clip=True)
    validate(program)
    rows = tokens(program)
    mine = [i for i, row in enumerate(rows) if row.endswith((":tp", ":kv_copies"))]
    over_data = [i for i, row in enumerate(rows) if row.endswith((":dp", ":dp_shard")) and "UNSHARD" not in row]
    # Under ZeRO 3 a block is a stage: both layers have both sums, the head the sum of its norm.
    assert len(mine) == (2 + 2 + 1 if zero == 3 else 2)
    assert max(i for i in over_data if "AR" in rows[i] or "REDUCE" in rows[i]) < min(mine)
    assert max(mine) < rows.index("0NORM:norm")


@pytest.mark.parametrize("accumulate", ["host", "device"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_nothing_changes_a_gradient_after_the_norm_has_read_it(
    accumulate: Literal["host", "device"], zero: Literal[0, 1, 2, 3], tied: bool, clip: bool, delay: int
) -> None:
    """Updates on the host too, whose gradients go down after the norm, or before it."""
    plan = Plan(
        mesh=Mesh(dp_shard=2, tp=4),
        schedule=Schedule(num_microbatches=2),
        layout=SEQUENCE,
        optimizer=Optimizer(zero=zero, clip=clip, delay=delay, offload=Offload(accumulate=accumulate)),
    )
    program = lower(llama(replace(llama_mini(), tied=tied)), plan)
    validate(program)
    names = [program.kinds[kind].name for kind in program.kind.tolist()]
    sums = [row for row, name in enumerate(names) if name == "AR" and program.comm_of(row) in (TERMS, COPIES)]
    assert sums
    made = [row for row, name in enumerate(names) if name in ("B", "W", "REDUCE_GRAD")]
    norms = [row for row, name in enumerate(names) if name == "NORM" and row > made[0]]
    assert bool(norms) == (clip and not delay)
    assert not norms or max(*sums, *made) < norms[0]


def test_a_stage_without_an_update_is_refused() -> None:
    with pytest.raises(PlanError, match="before the update"):
        with_tensor_sums(one_f_one_b(1, 1), ((0, TERMS),))
