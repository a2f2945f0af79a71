"""Causal work of context-parallel ranks: by hand for two ranks, and zig-zag's evenness for all.

Pairs include the diagonal: a sequence of n tokens has n(n+1)/2.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.plans import Unit
from gnomon.sharding import causal_shares, ring_step_pairs


def test_two_ranks_by_hand() -> None:
    # 4 tokens: rows of 1, 2, 3, 4 keys. Contiguous: {1, 2} and {3, 4}. Zig-zag: {1, 4} and {2, 3}.
    assert causal_shares(4, 2, "contiguous") == (Fraction(3, 10), Fraction(7, 10))
    assert causal_shares(4, 2, "zigzag") == (Fraction(1, 2), Fraction(1, 2))


def test_imbalance_of_long_sequences() -> None:
    # For long sequences rank r of n does (2r+1)/n²: with 4 ranks 1, 3, 5, 7 sixteenths.
    shares = causal_shares(4 * 2**16, 4, "contiguous")
    assert [float(share) for share in shares] == pytest.approx([1 / 16, 3 / 16, 5 / 16, 7 / 16], abs=1e-4)


def test_steps_of_the_ring_by_hand() -> None:
    # Chunks of 2 tokens on 2 ranks. Step 0: own triangles, 3 pairs each. Step 1: rank 1 a full square, rank 0 nothing.
    assert ring_step_pairs(4, 2, "contiguous") == ((3, 3), (0, 4))
    # Zig-zag, chunks of 1: rank 0 holds 0 and 3, rank 1 holds 1 and 2; both do 3 pairs, then 2.
    assert ring_step_pairs(4, 2, "zigzag") == ((3, 3), (2, 2))


@given(st.integers(1, 6), st.integers(1, 50))
def test_zigzag_is_even_overall_and_in_every_step(cp: int, length: int) -> None:
    seq_len = 2 * cp * length
    assert set(causal_shares(seq_len, cp, "zigzag")) == {Fraction(1, cp)}
    for step in ring_step_pairs(seq_len, cp, "zigzag"):
        assert len(set(step)) == 1


@given(st.integers(1, 6), st.integers(1, 50), st.sampled_from(("contiguous", "zigzag")))
def test_steps_add_up_to_the_units_pairs(cp: int, length: int, order: str) -> None:
    seq_len = 2 * cp * length
    steps = ring_step_pairs(seq_len, cp, order)
    total = Unit(pieces=((0, 0, seq_len),)).attention_pairs()
    assert sum(sum(step) for step in steps) == total
    shares = causal_shares(seq_len, cp, order)
    assert sum(shares) == 1
    assert [sum(step[rank] for step in steps) for rank in range(cp)] == [share * total for share in shares]


def test_refusals() -> None:
    with pytest.raises(PlanError, match="does not divide into 8 chunks for cp = 4"):
        causal_shares(12, 4, "zigzag")
    with pytest.raises(PlanError, match="does not divide into 4 chunks"):
        ring_step_pairs(10, 4, "contiguous")
    with pytest.raises(PlanError, match="unknown context_order 'striped'"):
        causal_shares(16, 4, "striped")
