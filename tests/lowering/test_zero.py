"""ZeRO 1 and 2, the host's optimizer and their combinations: they run on any schedule, and move what they should."""

from __future__ import annotations

import pytest
from block_programs import block_programs, count
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering.data_parallel import shard_state
from gnomon.lowering.offload import offload_optimizer
from gnomon.lowering.zero import shard_optimizer
from gnomon.plans import Offload, Optimizer, Overlap
from gnomon.program import Program, effect_table, parse_program, print_program, row_effects, validate

BLOCKS = """\
gnomon.program/1
stages 4
units 1
class 0 count 4
  0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0AR 1AR 2AR 3AR 0OPT 1OPT 2OPT 3OPT
"""


def reached(program: Program, kind: str, op: str) -> list[tuple[str, int]]:
    """(buffer, stage) on which rows of a kind have an effect, sorted."""
    table = effect_table(program)
    rows = [row for row in range(program.num_rows) if program.kinds[program.kind[row]].name == kind]
    return sorted(
        (ref.buffer, ref.stage) for row in rows for done, ref in row_effects(program, table, row) if done == op
    )


@given(
    program=block_programs(),
    zero=st.sampled_from([1, 2]),
    size=st.integers(1, 4),
    reduce=st.booleans(),
    gather=st.booleans(),
    replicas=st.booleans(),
)
def test_zero_1_and_2_run_on_any_schedule(
    program: Program, zero: int, size: int, reduce: bool, gather: bool, replicas: bool
) -> None:
    sharded = shard_optimizer(
        program,
        zero=zero,
        blocks_per_bucket=size,
        overlap_reduce=reduce,
        overlap_gather=gather,
        replicas=replicas,
    )
    validate(sharded)
    assert parse_program(print_program(sharded)) == sharded
    assert count(sharded, "UNSHARD") == program.num_stages
    assert count(sharded, "AR") == (program.num_stages if replicas else 0)


@given(
    program=block_programs(),
    zero=st.sampled_from([0, 1, 2, 3]),
    replicas=st.integers(1, 2),
    offload=st.booleans(),
    delay=st.booleans(),
    gather=st.booleans(),
)
def test_what_a_plan_says_runs_on_any_schedule(
    program: Program, zero: int, replicas: int, offload: bool, delay: bool, gather: bool
) -> None:
    optimizer = Optimizer(
        zero=zero,  # type: ignore[arg-type]
        offload=Offload() if offload else None,
        delay=1 if delay and offload else 0,
    )
    state = shard_state(program, optimizer, Overlap(param_gather=gather), shards=4, replicas=replicas)
    validate(state)
    assert parse_program(print_program(state)) == state
    assert count(state, "OPT") == (0 if offload else program.num_stages)
    assert count(state, "AR") == (program.num_stages if zero and replicas > 1 else 0)
    stages = range(program.num_stages) if offload else ()
    assert reached(state, "D2H", "consume") == [("GS" if zero >= 2 else "G", stage) for stage in stages]
    assert reached(state, "H2D", "write") == [("PS" if zero else "P", stage) for stage in stages]


@given(program=block_programs(), tiles=st.integers(1, 3))
def test_every_gradient_goes_down_once_and_every_parameter_comes_up_once(program: Program, tiles: int) -> None:
    ptr = program.class_ptr.tolist()
    fewest = min(len(set(program.stage[low:high].tolist())) for low, high in zip(ptr, ptr[1:], strict=False))
    offloaded = offload_optimizer(program, tiles=min(tiles, fewest))
    assert reached(offloaded, "D2H", "consume") == [("G", stage) for stage in range(program.num_stages)]
    assert reached(offloaded, "H2D", "write") == [("P", stage) for stage in range(program.num_stages)]
    assert count(offloaded, "D2H") == count(offloaded, "HOST_OPT") == min(tiles, fewest) * program.num_classes


def test_one_shard_changes_nothing() -> None:
    program = parse_program(BLOCKS)
    assert shard_state(program, Optimizer(zero=3), Overlap(), shards=1, replicas=4) == program


def test_what_no_pass_does_is_refused() -> None:
    program = parse_program(BLOCKS)
    for optimizer, overlap, why in (
        (Optimizer(zero=3), Overlap(grad_reduce=False), "leave grad_reduce on"),
        (Optimizer(zero=3), Overlap(bucket_bytes=1 << 20), "bucket_bytes out"),
        (Optimizer(offload=Offload(fraction=0.5)), Overlap(), "use fraction = 1, all updates on the host"),
        (Optimizer(delay=1), Overlap(), "offload the optimizer, all of it where gradients are clipped"),
        (Optimizer(offload=Offload(tiles=5)), Overlap(), "4 blocks cannot travel in 5 tiles"),
    ):
        with pytest.raises(PlanError, match=why):
            shard_state(program, optimizer, overlap, shards=4, replicas=1)
    with pytest.raises(PlanError, match="buckets of 0 blocks"):
        shard_optimizer(program, zero=1, blocks_per_bucket=0)
    with pytest.raises(PlanError, match="stages 1 and 2, not 3; stage 3 is fully_shard"):
        shard_optimizer(program, zero=3)
