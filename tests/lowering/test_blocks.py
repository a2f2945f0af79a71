"""Stages taken apart into blocks, against rows written out by hand."""

from __future__ import annotations

import pytest

from gnomon.errors import PlanError
from gnomon.lowering.blocks import with_blocks
from gnomon.program import parse_program, print_program, validate


def rows(text: str, stages: int = 2, head: str = "") -> str:
    return f"gnomon.program/1\nstages {stages}\nunits 1\n{head}{text}"


def test_forward_in_order_backward_in_reverse_messages_at_the_ends() -> None:
    stages = rows(
        "class 0\n  0LOAD0 0F0 0SEND_F0 0RECV_B0 0B0 0AR 0OPT\nclass 1\n  1RECV_F0 1F0 1B0 1SEND_B0 1AR 1OPT\n",
        head="inputs loaded\n",
    )
    blocks = rows(
        "class 0\n  0LOAD0 0F0 1F0 1SEND_F0 1RECV_B0 1B0 1AR 0B0 0AR 0OPT 1OPT\n"
        "class 1\n  2RECV_F0 2F0 3F0 4F0 4B0 3B0 2B0 2SEND_B0 4AR 3AR 2AR 2OPT 3OPT 4OPT\n",
        stages=5,
        head="inputs loaded\n",
    )
    made = with_blocks(parse_program(stages), (2, 3))
    assert print_program(made) == print_program(parse_program(blocks))
    validate(made)


def test_a_recompute_goes_block_by_block_with_its_backward() -> None:
    made = with_blocks(parse_program(rows("class 0\n  0C0 1F0 1B0 0R0 0B0 0OPT 1OPT\n")), (2, 1))
    assert made == parse_program(rows("class 0\n  0C0 1C0 2F0 2B0 1R0 1B0 0R0 0B0 0OPT 1OPT 2OPT\n", stages=3))
    validate(made)


def test_chains_keep_their_first_blocks() -> None:
    made = with_blocks(parse_program(rows("class 0\n  0F0 0B0 1F0 1B0 0OPT 1OPT\n", head="chains 0 1\n")), (2, 2))
    assert made.chains == (0, 2)
    validate(made)


def test_what_is_refused() -> None:
    plain = parse_program(rows("class 0\n  0F0 1F0 1B0 0B0 0OPT 1OPT\n"))
    for blocks in ((0, 1), (1,), (1, 1, 1)):
        with pytest.raises(PlanError, match="must give each of the 2 stages one block or more"):
            with_blocks(plain, blocks)
    with pytest.raises(PlanError, match="is grouped or has effects"):
        with_blocks(parse_program(rows("class 0\n  0F0 1F0 1B0 0B0#3 0OPT 1OPT\n")), (1, 2))
    with pytest.raises(PlanError, match="tied parameters cannot be taken apart"):
        with_blocks(parse_program(rows("class 0\n  0F0 1F0 1B0 0B0 0OPT 1OPT\n", head="alias P 0 = P 1\n")), (1, 2))
