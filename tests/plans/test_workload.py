"""Units and workloads: tokens, prefixes and weights by hand, coverage and normalisation as invariants.

The examples are a decode batch, chunks of a long sequence, uneven shares and a skewed router.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.plans import (
    Lengths,
    RouterLoad,
    Unit,
    Workload,
)
from gnomon.schema import dump, load

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def test_a_decode_batch() -> None:
    # Two requests with 4 and 2 tokens behind them, one new token each.
    unit = Unit(pieces=((0, 4, 5), (1, 2, 3)))
    assert unit.tokens == 2
    assert unit.attention_pairs() == 5 + 3


def test_pairs_of_chunks_add_up_to_the_whole_sequence() -> None:
    whole = Unit(pieces=((0, 0, 10),))
    parts = [Unit(pieces=((0, 0, 3),)), Unit(pieces=((0, 3, 7),)), Unit(pieces=((0, 7, 10),))]
    assert whole.attention_pairs() == 55
    assert sum(part.attention_pairs() for part in parts) == 55
    assert Unit(pieces=((0, 3, 7),)).attention_pairs(causal=False) == 4 * 7


def test_some_sequences_divided_and_some_local() -> None:
    # Skrull's own choice for these lengths on cp 8 with room for 8000 tokens a rank: the three longest are divided.
    lengths = (500, 800, 1000, 1200, 2000, 4000, 9000, 30000)
    pieces = tuple((i, 0, length) for i, length in enumerate(lengths))
    unit = Unit(pieces=pieces, local=tuple((i, i) for i in range(5)))
    divided = (4000 + 9000 + 30000) // 8
    assert unit.rank_tokens(8) == tuple(divided + n for n in (500, 800, 1000, 1200, 2000, 0, 0, 0))
    assert max(unit.rank_tokens(8)) <= 8000
    assert sum(unit.rank_tokens(8)) == unit.tokens
    with pytest.raises(PlanError, match="beyond cp = 4"):
        unit.rank_tokens(4)
    with pytest.raises(PlanError, match="must name sequences of the unit"):
        Unit(pieces=pieces, local=((9, 0),))


def test_router_load() -> None:
    assert RouterLoad().fractions(4).tolist() == [0.25] * 4
    assert RouterLoad(kind="zipf", s=1.0).fractions(2).tolist() == pytest.approx([2 / 3, 1 / 3])
    load_ = RouterLoad(kind="histogram", counts=(6.0, 2.0, 1.0, 1.0))
    # Experts 0 and 1 on rank 0: it works 1.6 times the mean.
    assert (load_.rank_fractions(4, 2) * 2).tolist() == pytest.approx([1.6, 0.4])
    with pytest.raises(PlanError, match="4 counts, but the block has 8 experts"):
        load_.fractions(8)


def test_router_capacity() -> None:
    """By hand: four experts get 60, 20, 10, 10 % of the rows; the mean is 25 %, a capacity of 1.2 is 30 %."""
    load_ = RouterLoad(kind="histogram", counts=(6.0, 2.0, 1.0, 1.0), capacity=1.2)
    assert load_.computed_shares(4).tolist() == pytest.approx([0.3, 0.2, 0.1, 0.1])
    assert load_.dropped(4) == pytest.approx(0.3)
    assert load_.busiest(4, 2) == pytest.approx(1.0) and load_.busiest(4, 4) == pytest.approx(1.2)
    padded = replace(load_, padded=True)
    assert padded.busiest(4, 2) == pytest.approx(1.2) and padded.dropped(4) == pytest.approx(0.3)
    assert RouterLoad(capacity=1.25).busiest(8, 4) == 1.0 and RouterLoad(capacity=1.25).dropped(8) == 0.0
    assert RouterLoad(capacity=1.25, padded=True).busiest(8, 4) == pytest.approx(1.25)


@given(st.integers(1, 6), st.floats(0, 4), st.floats(1, 4), st.booleans())
def test_rows_are_computed_or_dropped(power: int, s: float, capacity: float, padded: bool) -> None:
    experts = 2**power
    load_ = RouterLoad(kind="zipf", s=s, capacity=capacity)
    assert load_.computed_shares(experts).sum() + load_.dropped(experts) == pytest.approx(1.0)
    ways = [replace(load_, padded=padded).busiest(experts, 2**p) for p in range(power + 1)]
    assert ways == pytest.approx(sorted(ways)) and ways[-1] <= capacity + 1e-9


@given(st.integers(1, 64), st.floats(0, 4))
def test_router_fractions_add_up_and_fall(num_experts: int, s: float) -> None:
    fractions = RouterLoad(kind="zipf", s=s).fractions(num_experts)
    assert fractions.sum() == pytest.approx(1.0)
    assert (np.diff(fractions) <= 0).all()


def test_workloads_as_text() -> None:
    workload = Workload(lengths=(5, 7), router=RouterLoad(kind="zipf", s=1.2), sizes=(("enc_seq", 512),))
    assert load(Workload, dump(workload)) == workload
    assert workload.batch_size == 2
    drawn = Workload(global_batch_size=3, distribution=Lengths(values=(10, 20), weights=(1.0, 1.0)))
    assert load(Workload, dump(drawn)) == drawn
    assert drawn.sequence_lengths(seed=1) == drawn.sequence_lengths(seed=1)
    assert set(drawn.sequence_lengths()) <= {10, 20}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Workload(global_batch_size=4), "exactly one of"),
        (lambda: Workload(global_batch_size=4, seq_len=8, lengths=(1,)), "exactly one of"),
        (lambda: Workload(seq_len=8), "global_batch_size >= 1"),
        (lambda: Workload(global_batch_size=3, lengths=(1, 2)), "lists 2"),
        (lambda: Unit(pieces=()), "no pieces"),
        (lambda: Unit(pieces=((0, 3, 3),)), "start < stop"),
        (lambda: Unit(pieces=((0, 0, 3), (0, 2, 4))), "token 2 of sequence 0 twice"),
        (lambda: Unit(pieces=((0, 0, 1),), weight=1.5), "share of the global batch"),
        (lambda: RouterLoad(kind="histogram"), "needs counts"),
        (lambda: RouterLoad(s=2.0), "does not use s"),
        (lambda: RouterLoad(capacity=0.5), "at least 1"),
        (lambda: RouterLoad(padded=True), "give one"),
        (lambda: Lengths(values=(1, 2), weights=(1.0,)), "one weight for each"),
    ],
)
def test_contradictions_are_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(PlanError, match=message):
        build()
