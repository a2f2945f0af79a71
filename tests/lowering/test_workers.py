"""Workers that are not alike: who shares a class, that every sequence is computed once, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.lowering import dualpipe_v, lower
from gnomon.lowering.workers import Workers, alike, divided_units, split
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Stage, Workload
from gnomon.program import Program, validate

CONFIG = GptConfig(name="four", num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
GRAPH = gpt(CONFIG)
MIXED = parse_cluster("1x4xa100-sxm-40gb+1x4xv100-sxm-32gb")


def pipeline(*shares: int, name: str = "one_f_one_b") -> Plan:
    """Two stages of 4 ranks, of which workers 0 and 1 have A100s (ranks 0, 1, 2, 3), 2 and 3 V100s."""
    stages = (
        Stage(calls=("embed", "layers[0:2]"), mesh=Mesh(dp_replicate=4), devices="0:2,4:6", shares=shares),
        Stage(calls=("layers[2:4]", "head"), mesh=Mesh(dp_replicate=4), devices="2:4,6:8", shares=shares),
    )
    return Plan(stages=stages, schedule=Schedule(name=name, num_microbatches=3), optimizer=Optimizer(clip=False))


def test_workers_are_grouped_by_share_and_device() -> None:
    assert [group.members for group in alike(pipeline(), None)] == [(0, 1, 2, 3)]
    assert [group.members for group in alike(pipeline(), MIXED)] == [(0, 1), (2, 3)]
    assert [group.members for group in alike(pipeline(3, 2, 1, 1), MIXED)] == [(0,), (1,), (2, 3)]
    assert [group.share for group in alike(pipeline(3, 2, 1, 1), MIXED)] == [3, 2, 1]
    alternate = parse_cluster("1x2xa100-sxm-40gb+1x2xv100-sxm-32gb+1x2xa100-sxm-40gb+1x2xv100-sxm-32gb")
    # Stage 0 on A100s and stage 1 on V100s: the workers are alike, the stages are not.
    assert len(alike(pipeline(), alternate)) == 1


def reductions(program: Program) -> Counter[tuple[int, str]]:
    rows = [row for row in range(program.num_rows) if program.kinds[program.kind[row]].name == "AR"]
    return Counter((int(program.group[row]), program.comm_of(row)) for row in rows)


def test_each_group_runs_the_pipeline_and_meets_the_others_in_reductions() -> None:
    program = lower(GRAPH, pipeline(), MIXED, Workload(global_batch_size=12, seq_len=32))
    validate(program)
    assert program.counts == (2, 2, 2, 2)
    assert [unit.worker for unit in program.units] == [0, 2] * 3
    assert [[piece[0] for piece in unit.pieces] for unit in program.units[:2]] == [[0, 1], [2, 3]]
    assert reductions(program) == {(0, "dp.0"): 2, (1, "dp.1"): 2}


def test_without_a_workload_shares_still_weigh_units() -> None:
    program = lower(GRAPH, pipeline(3, 3, 1, 1))
    validate(program)
    assert [unit.weight for unit in program.units] == [6 / 24, 2 / 24] * 3
    assert program.counts == (2, 2, 2, 2)


@given(
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    count=st.integers(1, 4),
    name=st.sampled_from(["gpipe", "one_f_one_b", "zero_bubble_h1"]),
)
def test_every_sequence_is_computed_once(shares: list[int], count: int, name: str) -> None:
    mesh = Mesh(dp_replicate=len(shares))
    size = sum(shares)
    plan = Plan(
        stages=tuple(
            Stage(calls=(f"layers[{2 * i}:{2 * i + 2}]", end), mesh=mesh, shares=tuple(shares))
            for i, end in enumerate(("embed", "head"))
        ),
        schedule=Schedule(name=name, num_microbatches=count),
    )
    program = lower(GRAPH, plan, None, Workload(global_batch_size=count * size, seq_len=8))
    validate(program)
    for kind in ("F", "W" if name == "zero_bubble_h1" else "B"):
        for stage in (0, 1):
            rows = [r for r in range(program.num_rows) if program.token(r).startswith(f"{stage}{kind}")]
            result = Counter(piece[0] for r in rows for piece in program.units[program.unit[r]].pieces)
            assert result == dict.fromkeys(range(count * size), 1)
    assert sum(unit.weight for unit in program.units) == pytest.approx(1)


def test_composites_of_two_classes_are_two_groups() -> None:
    rows = dualpipe_v(2, 4)
    twice = split(rows, 2)
    groups: dict[int, set[int]] = {}
    for group, rank_class in zip(twice.group.tolist(), twice.rank_class.tolist(), strict=True):
        if group >= 0:
            groups.setdefault(group, set()).add(rank_class)
    assert groups and all(len(classes) == 1 for classes in groups.values())


def test_what_has_no_rows_is_refused() -> None:
    with pytest.raises(PlanError, match="leave that worker out"):
        alike(pipeline(2, 1, 1, 0), None)
    unequal = pipeline(2, 2, 1, 1)
    unequal = replace(unequal, stages=(unequal.stages[0], replace(unequal.stages[1], shares=(1, 1, 2, 2))))
    with pytest.raises(PlanError, match="make them alike in all stages"):
        alike(unequal, None)
    sharded = pipeline()
    stages = tuple(replace(stage, mesh=Mesh(dp_shard=4)) for stage in sharded.stages)
    with pytest.raises(PlanError, match="over unlike workers"):
        lower(GRAPH, replace(sharded, stages=stages, optimizer=Optimizer(zero=1, clip=False)), MIXED)
    with pytest.raises(PlanError, match="does not divide into 4 equal parts"):
        unit = lower(GRAPH, pipeline(), None, Workload(global_batch_size=12, seq_len=32)).units[0]
        cut = replace(unit, pieces=unit.pieces[:3])
        divided_units((cut,), 1, (Workers(members=(0, 1), share=1), Workers(members=(2, 3), share=1)))
