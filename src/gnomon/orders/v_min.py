"""V-Min: a third of 1F1B's activations for two thirds of its bubble, two stages a rank in a V (Qi et al. 2024,
"Pipeline parallelism with controllable memory").

With F, I and W of a chunk of one length T and enough microbatches a step from rest takes 6mT and a bubble of about 4pT,
where 1F1B has 6(p - 1)T. Left out: messages, and blocks for unequal times, with which more cells are idle.
"""

from __future__ import annotations

from functools import lru_cache

from gnomon.orders.order import Order
from gnomon.orders.patterns.building_block import held_units, repeated_block, v_passes
from gnomon.program.rows import Longs, Rows


def v_min(num_ranks: int, num_microbatches: int, num_virtual: int = 2) -> Rows:
    """Stages r and 2p - 1 - r on rank r; at most 2p/3 + 3 chunk activations on a rank, where 1F1B's rank 0 has 2p."""
    return repeated_block(_passes(num_ranks), num_microbatches)


@lru_cache(maxsize=64)
def _passes(num_ranks: int) -> Longs:
    """Neighbouring ranks are one cell apart. The turns have the smallest bubble of all of 1..6 cells, tried for p = 2
    to 12: 4p - 5 cells. With p a multiple of three the plain turns would put two actions into one cell."""
    turns = (1, 1, 1) if num_ranks % 3 else (5, 1, 3)
    return v_passes(num_ranks, (1, 1, 1, 1), turns)


@lru_cache(maxsize=4096)
def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    return held_units(_passes(ranks), rank, microbatches, weights=False)


def _activations(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    return held_units(_passes(ranks), rank, microbatches, weights=True)


ORDER = Order(
    name="v_min",
    title="V-Min",
    paper="Qi et al. 2024",
    build=v_min,
    stages=(2, 2),
    placement="v",
    backward="split",
    in_flight=_in_flight,
    activations=_activations,
    preference=70,
    bubble="(4p - 5)T/2",
    held="p/3 + 3/2 at most",
)
