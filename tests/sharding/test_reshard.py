"""Messages between stages of different replication: DAPPLE's 3 : 1 by hand, and conservation of every row.

Rows are sequences of a microbatch; a fraction is part of one.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.sharding import deal, reshard

SHARES = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


def test_three_replicas_each_send_their_third() -> None:
    messages = reshard(deal(6, 3), deal(6, 1))
    assert [(m.source, m.target, m.start, m.rows) for m in messages] == [(0, 0, 0, 2), (1, 0, 2, 2), (2, 0, 4, 2)]
    thirds = reshard(deal(1, 3), deal(1, 1))
    assert [m.rows for m in thirds] == [Fraction(1, 3)] * 3


def test_two_to_three_splits_the_middle() -> None:
    messages = reshard(deal(6, 2), deal(6, 3))
    assert [(m.source, m.target, m.rows) for m in messages] == [(0, 0, 2), (0, 1, 1), (1, 1, 1), (1, 2, 2)]


def test_uneven_shares() -> None:
    # Whale: a fast and a slow device take 38 and 26 of 64 samples; the next stage shares equally.
    messages = reshard(deal(64, 2, (38, 26)), deal(64, 2))
    assert [(m.source, m.target, m.rows) for m in messages] == [
        (0, 0, 32),
        (0, 1, 6),
        (1, 1, 26),
    ]


def test_equal_stages_send_one_message_each() -> None:
    assert [(m.source, m.target) for m in reshard(deal(4, 4), deal(4, 4))] == [(r, r) for r in range(4)]


@given(st.integers(1, 64), SHARES, SHARES)
def test_every_row_is_sent_once_and_received_once(total: int, left: list[int], right: list[int]) -> None:
    source, target = deal(total, len(left), left), deal(total, len(right), right)
    messages = reshard(source, target)
    for rank, rows in enumerate(source):
        assert sum(m.rows for m in messages if m.source == rank) == rows
    for rank, rows in enumerate(target):
        assert sum(m.rows for m in messages if m.target == rank) == rows
    ends = [(m.start, m.start + m.rows) for m in messages]
    assert [start for start, _ in ends] == [Fraction(0), *(stop for _, stop in ends[:-1])]
    assert ends[-1][1] == total


@given(st.integers(1, 64), SHARES, SHARES)
def test_gradients_return_the_same_way(total: int, left: list[int], right: list[int]) -> None:
    source, target = deal(total, len(left), left), deal(total, len(right), right)
    there = {(m.source, m.target, m.start, m.rows) for m in reshard(source, target)}
    back = {(m.target, m.source, m.start, m.rows) for m in reshard(target, source)}
    assert there == back


def test_refusals() -> None:
    with pytest.raises(PlanError, match="sending stage has 4 rows of a microbatch, the receiving one 6"):
        reshard(deal(4, 2), deal(6, 3))
    with pytest.raises(PlanError, match="each of 2 ranks"):
        deal(4, 2, (1, 2, 3))
