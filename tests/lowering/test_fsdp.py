"""Full sharding of any schedule: what it inserts can run, holds no more than it says, and costs what it must."""

from __future__ import annotations

import pytest
from block_programs import block_programs, count
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering import dualpipe_v, gpipe, with_messages, with_optimizer
from gnomon.lowering.blocks import with_blocks
from gnomon.lowering.fsdp import fully_shard
from gnomon.lowering.zero import shard_optimizer
from gnomon.program import Program, issue_order_peak, parse_program, print_program, validate
from gnomon.simulate import durations, period, simulate
from gnomon.timeline import peaks

NOTHING = {"PS": 0.0, "GS": 0.0, "G": 0.0, "S": 0.0, "X": 0.0, "Y": 0.0, "DX": 0.0, "DY": 0.0, "P": 0.0}
SECONDS = st.integers(0, 8).map(float)


OPTIONS = st.fixed_dictionaries(
    {
        "prefetch": st.integers(0, 4),
        "limit_gathered": st.booleans(),
        "reshard_after_forward": st.booleans(),
        "keep_last_block": st.booleans(),
        "reduce_each_unit": st.booleans(),
        "replicas": st.booleans(),
    }
)


@given(program=block_programs(), options=OPTIONS)
def test_every_option_gives_a_program_that_runs_and_comes_back_from_its_text(
    program: Program, options: dict[str, int]
) -> None:
    sharded = fully_shard(program, **options)  # type: ignore[arg-type]
    validate(sharded)
    assert parse_program(print_program(sharded)) == sharded
    assert count(sharded, "UNSHARD") == count(sharded, "RESHARD") >= program.num_stages
    per_block = 1 if not options["reduce_each_unit"] else len(program.units)
    assert count(sharded, "REDUCE_GRAD") == per_block * program.num_stages
    assert count(sharded, "AR") == (program.num_stages if options["replicas"] else 0)


@given(program=block_programs(), prefetch=st.integers(0, 3), gather=SECONDS, forward=SECONDS)
def test_gathered_blocks_never_exceed_the_limit_in_time_order(
    program: Program, prefetch: int, gather: float, forward: float
) -> None:
    sharded = fully_shard(program, prefetch=prefetch)
    seconds = durations(sharded, {"UNSHARD": gather, "F": forward, "*": 1})
    timeline = simulate(validate(sharded), seconds, {**NOTHING, "P": 1.0}, steps=2)
    assert max(peak.bytes for peak in peaks(timeline)) <= prefetch + 1


@given(program=block_programs(), prefetch=st.integers(0, 3), gather=SECONDS, forward=SECONDS)
def test_the_limit_and_the_gathers_never_make_a_step_faster(
    program: Program, prefetch: int, gather: float, forward: float
) -> None:
    table = {"F": forward, "RESHARD": 0, "UNSHARD": gather, "*": 1}
    plain = period_of(program, {"F": forward, "*": 1})
    limited = period_of(fully_shard(program, prefetch=prefetch), table)
    unlimited = period_of(fully_shard(program, prefetch=prefetch, limit_gathered=False), table)
    assert plain <= unlimited <= limited


def period_of(program: Program, table: dict[str, float]) -> float:
    return period(validate(program), durations(program, table)).seconds


def test_memory_is_that_of_zero_stage_3() -> None:
    # Rajbhandari et al. 2020: 16 Psi / N between steps, here Psi = 4, N = 4: parameters and gradients 2, states 12.
    blocks = parse_program("gnomon.program/1\nstages 4\nunits 1\nclass 0 count 4\n  0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 "
                           "0OPT 1OPT 2OPT 3OPT\n")  # fmt: skip
    sharded = fully_shard(blocks, prefetch=0)
    sizes = {**NOTHING, "PS": 14 / 4, "GS": 2 / 4, "P": 2.0, "G": 2.0}
    peak = issue_order_peak(sharded, validate(sharded).deps, sizes)[0]
    # The peak is the last backward: shards but the last gradient's, 16 - .5; a gathered block, 2, and its gradient, 2.
    assert peak.bytes == 16 * 4 / 4 - 0.5 + 2 + 2
    assert sharded.token(peak.row) == "0B0"


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_composite_actions_stay_whole(prefetch: int, reshard: bool) -> None:
    program = with_messages(with_optimizer(dualpipe_v(2, 6))).program()
    assert (program.group >= 0).any()
    sharded = fully_shard(program, prefetch=prefetch, reshard_after_forward=reshard)
    validate(sharded)
    assert parse_program(print_program(sharded)) == sharded
    for zero in (1, 2):
        validate(shard_optimizer(program, zero=zero))
    if reshard:
        with pytest.raises(PlanError, match="a composite action needs two blocks at once"):
            fully_shard(program, prefetch=0)


def test_what_is_refused() -> None:
    program = with_optimizer(gpipe(1, 1)).program()
    with pytest.raises(PlanError, match="prefetch = -1 must be at least 0"):
        fully_shard(program, prefetch=-1)
    with pytest.raises(PlanError, match="sharded already"):
        fully_shard(fully_shard(program))
    with pytest.raises(PlanError, match="needs an update .OPT. of stage 0"):
        fully_shard(gpipe(1, 1).program())
    tied = "gnomon.program/1\nstages 2\nunits 1\nalias P 0 = P 1\nclass 0\n  0F0 1F0 1B0 0B0 0OPT 1OPT\n"
    with pytest.raises(PlanError, match="tied over stages of one rank"):
        fully_shard(parse_program(tied))
    with pytest.raises(PlanError, match="one block or more"):
        with_blocks(program, (0,))
