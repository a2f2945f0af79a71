"""Borders of tensor-parallel regions and actions cut into parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering import gpipe, one_f_one_b, with_messages, with_optimizer
from gnomon.lowering.async_tensor_parallel import async_tensor_parallel
from gnomon.lowering.blocks import with_blocks
from gnomon.lowering.sequence_parallel import tensor_parallel_regions
from gnomon.lowering.splits import split
from gnomon.program import Program, issue_order_peak, parse_program, print_program, validate
from gnomon.simulate import Durations, period


def transformer(ranks: int, units: int) -> Program:
    """Each pipeline stage an attention or MLP region in two products, and the loss apart on the last rank."""
    program = with_messages(with_optimizer(one_f_one_b(ranks, units))).program()
    return with_blocks(program, [2] * (ranks - 1) + [3])


def seconds(program: Program, hop: int, product: int, parts: int) -> Durations:
    """Hops and whole products in quarters; parts take their share, the rank's own part nothing."""

    def of(kind: str, name: str) -> float:
        if name.endswith(".own"):
            return 0.0
        if kind[:2] in ("AG", "RS"):
            return hop / 4 if name else (parts - 1) * hop / 4
        if kind in ("F", "B"):
            return product / 4 if name else parts * product / 4
        return 0.0

    return Durations(busy=np.array([of(key.kind, key.name) for key in program.keys]))


@settings(max_examples=60)
@given(
    ranks=st.integers(1, 3),
    units=st.integers(1, 3),
    parts=st.integers(2, 5),
    hop=st.integers(0, 9),
    product=st.integers(0, 9),
)
def test_rings_are_never_slower_and_all_but_the_first_hop_hides_behind_long_products(
    ranks: int, units: int, parts: int, hop: int, product: int
) -> None:
    blocks = transformer(ranks, units)
    begin, end = range(0, 2 * ranks, 2), range(1, 2 * ranks, 2)
    whole = tensor_parallel_regions(blocks, begin=begin, end=end)
    rings = async_tensor_parallel(whole, parts=parts)
    assert parse_program(print_program(rings)) == rings
    in_one, hidden, free = (
        period(validate(program), seconds(program, travel, product, parts)).seconds
        for program, travel in ((whole, hop), (rings, hop), (rings, 0))
    )
    assert free <= hidden <= in_one
    if hop <= product:
        assert hidden == free


@given(units=st.integers(1, 4), parts=st.integers(2, 5))
def test_parts_allocate_what_the_whole_did(units: int, parts: int) -> None:
    whole = with_optimizer(gpipe(1, units)).program()
    sizes = {"P": 1.0, "G": 2.0, "S": 3.0}
    cut = split(whole, {"F": "", "B": ""}, parts)
    one, several = (issue_order_peak(p, validate(p).deps, sizes)[0].bytes for p in (whole, cut))
    assert one == several == 1 + 2 + 3 * units
    assert cut.num_rows == 2 * units * parts + 1


def test_all_reduces_and_gather_with_scatter_stand_at_the_same_borders() -> None:
    blocks = parse_program(
        "gnomon.program/1\nstages 4\nunits 1\nclass 0\n  0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0OPT 1OPT 2OPT 3OPT\n"
    )
    for sequence_parallel, expected in (
        (True, "0F0 1AG_F0 1F0 2F0 2RS_F0 3F0 3B0 2AG_B0 2B0 1B0 1RS_B0 0B0"),
        (False, "0F0 1F0 2F0 2AR_F0 3F0 3B0 2B0 1B0 1AR_B0 0B0"),
    ):
        program = tensor_parallel_regions(blocks, begin=(1,), end=(2,), sequence_parallel=sequence_parallel)
        tokens = [program.token(row) for row in range(program.num_rows)]
        assert " ".join(tokens[:-4]) == expected


def test_the_gradient_of_the_models_input_is_not_scattered() -> None:
    program = tensor_parallel_regions(transformer(1, 1), begin=(0,), end=(1,))
    assert "RS_B" not in [program.kinds[kind].name for kind in program.kind.tolist()]


def test_what_is_refused() -> None:
    blocks = transformer(1, 1)
    with pytest.raises(PlanError, match="ends in stage 2, the last of its chain; give the loss a stage of its own"):
        tensor_parallel_regions(blocks, begin=(0,), end=(2,))
    both = tensor_parallel_regions(blocks, begin=(1,), end=(1,))
    with pytest.raises(PlanError, match="stage 1 has a gather before and a reduce-scatter after"):
        async_tensor_parallel(both, parts=4)
    with pytest.raises(PlanError, match="put in the borders of regions first"):
        async_tensor_parallel(blocks, parts=4)
    with pytest.raises(PlanError, match="a split into 1 parts; use 2 or more"):
        split(blocks, {"F": ""}, 1)
    with pytest.raises(PlanError, match="is in a group"):
        split(parse_program("gnomon.program/1\nstages 1\nunits 1\nclass 0\n  0F0 0B0#0 0OPT\n"), {"B": ""}, 2)
    with pytest.raises(PlanError, match="forwards F and full backwards B, not for 0C0"):
        checkpointed = parse_program("gnomon.program/1\nstages 2\nunits 1\nclass 0\n  0C0 1F0 1B0 0R0 0B0 0OPT 1OPT\n")
        tensor_parallel_regions(checkpointed, begin=(0,), end=())
