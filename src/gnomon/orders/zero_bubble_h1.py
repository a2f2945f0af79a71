"""ZB-H1: 1F1B with the backward split into input gradient (I) and weight gradient (W) (Qi et al. 2023, "Zero bubble
pipeline parallelism").

No rank holds more than the p microbatches that rank 0 of 1F1B holds; with equal stages and m >= p a step from rest
takes m(F + I + W) + (p - 1)(F + I - W) while W <= F and W <= I. Left out: messages, and the searched schedule for
unequal times.
"""

from __future__ import annotations

import numpy as np

from gnomon.orders.order import Order
from gnomon.orders.patterns.turns import turns
from gnomon.program.rows import Rows


def zero_bubble_h1(num_ranks: int, num_microbatches: int, num_virtual: int = 1) -> Rows:
    """Stage r on rank r: p - 1 - r forwards, then F I W in turn with W of the microbatch r before."""
    stages = np.broadcast_to(np.arange(num_ranks)[:, None], (num_ranks, num_microbatches))
    return turns(stages, stages, np.arange(num_microbatches), num_ranks - 1 - np.arange(num_ranks), num_ranks)


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    return min(ranks - rank, microbatches)


def _activations(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    # p - r in flight, and r whose weight gradient still waits.
    return min(ranks, microbatches)


ORDER = Order(
    name="zero_bubble_h1",
    title="ZB-H1",
    paper="Qi et al. 2023",
    build=zero_bubble_h1,
    backward="split",
    in_flight=_in_flight,
    activations=_activations,
    names={"megatron-lm": "enable_zbh1_pipeline"},
    aliases=("zb_h1", "zbh1"),
    preference=20,
    tried=True,
    bubble="(p - 1)(F + I - W), a third of 1F1B's",
    held="p on every rank",
)
