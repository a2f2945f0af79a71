"""V-Half: half of 1F1B's activations for half of its bubble, two stages a rank in a V (Qi et al. 2024, "Pipeline
parallelism with controllable memory").

With F, I and W of a chunk of one length T and enough microbatches a step from rest takes 6mT and a bubble of about 3pT,
where 1F1B has 6(p - 1)T. Left out: messages, and blocks for unequal times, with which more cells are idle.
"""

from __future__ import annotations

from functools import lru_cache, partial

from gnomon.orders.order import Order
from gnomon.orders.patterns.building_block import held_units, repeated_block, v_passes
from gnomon.orders.patterns.vocabulary import v_half_with_heads
from gnomon.program.rows import Longs, Rows


def v_half(num_ranks: int, num_microbatches: int, num_virtual: int = 2) -> Rows:
    """Stages r and 2p - 1 - r on rank r; at most p + 3 chunk activations on a rank, where 1F1B's rank 0 has 2p."""
    return repeated_block(_passes(num_ranks), num_microbatches)


@lru_cache(maxsize=64)
def _passes(num_ranks: int) -> Longs:
    """Distances between ranks average 1.5 cells. The turns have the smallest bubble of all of 1..6 cells, tried for
    p = 2 to 12: 3p - 4 cells for even p, 3p - 3 for odd."""
    turns = (1, 2, 5) if num_ranks % 2 else (4, 2, 2)
    return v_passes(num_ranks, (1, 2, 1, 2), turns)


@lru_cache(maxsize=4096)
def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    return held_units(_passes(ranks), rank, microbatches, weights=False)


def _activations(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    return held_units(_passes(ranks), rank, microbatches, weights=True)


ORDER = Order(
    name="v_half",
    title="V-Half",
    paper="Qi et al. 2024",
    build=v_half,
    stages=(2, 2),
    placement="v",
    backward="split",
    in_flight=_in_flight,
    activations=_activations,
    vocabulary={"vocab_1": partial(v_half_with_heads, "vocab_1"), "vocab_2": partial(v_half_with_heads, "vocab_2")},
    preference=60,
    bubble="(3p - 4)T/2, p odd (3p - 3)T/2",
    held="(p + 3)/2",
)
