"""ZB-H2: ZB-H1 with nearly twice the activations, and no bubble in the steady state (Qi et al. 2023, "Zero bubble
pipeline parallelism").

A rank holds up to 2p - 1 microbatches and, with F = I = W, waits only before its first action and after its last: the
period is m(F + I + W). Left out: messages, and the searched schedule for unequal times.
"""

from __future__ import annotations

import numpy as np

from gnomon.orders.order import Order
from gnomon.orders.patterns.turns import turns
from gnomon.program.rows import Rows


def zero_bubble_h2(num_ranks: int, num_microbatches: int, num_virtual: int = 1) -> Rows:
    """Stage r on rank r: 2(p - 1 - r) forwards, then F I W in turn with W of the microbatch 2r before. Every rank holds
    2p - 1 microbatches."""
    stages = np.broadcast_to(np.arange(num_ranks)[:, None], (num_ranks, num_microbatches))
    warm_up = num_ranks - 1 - np.arange(num_ranks)
    return turns(stages, stages, np.arange(num_microbatches), 2 * warm_up, num_ranks, delay=2)


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    return min(2 * (ranks - rank) - 1, microbatches)


def _activations(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    # 2(p - r) - 1 in flight, and 2r whose weight gradient still waits.
    return min(2 * ranks - 1, microbatches)


ORDER = Order(
    name="zero_bubble_h2",
    title="ZB-H2",
    paper="Qi et al. 2023",
    build=zero_bubble_h2,
    backward="split",
    in_flight=_in_flight,
    activations=_activations,
    aliases=("zb_h2", "zbh2"),
    preference=30,
    bubble="(p - 1)T from rest, 0 between steps",
    held="2p - 1 on every rank",
    asks="m ≥ 2p - 1 for that",
)
