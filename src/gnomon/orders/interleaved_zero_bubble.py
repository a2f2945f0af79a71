"""ZB-H1 for interleaved stages: v of them on each rank, backward split into input gradient (I) and weight gradient (W)
(Qi et al. 2023, "Zero bubble pipeline parallelism").

The order is that of interleaved 1F1B with as few warm-up forwards as possible. With two stages a rank, F = I = W = T
and 2T a rank's forward, a step from rest takes (p - 1)T/2 beside its work. Left out: messages, and the searched
schedule for unequal times.
"""

from __future__ import annotations

import numpy as np

from gnomon.orders.order import Order, multiple_of_ranks
from gnomon.orders.patterns.alternate import rounds
from gnomon.orders.patterns.turns import turns
from gnomon.program.rows import Rows


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_virtual: int) -> Rows:
    """`num_virtual` stages on each rank; rank r warms up with (v - 1)p + p - 1 - r forwards."""
    chunk, unit = rounds(num_ranks, num_microbatches, num_virtual)
    rank = np.arange(num_ranks)[:, None]
    return turns(
        chunk * num_ranks + rank,
        (num_virtual - 1 - chunk) * num_ranks + rank,
        unit,
        num_virtual * num_ranks - 1 - rank[:, 0],
        num_ranks * num_virtual,
    )


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    # One more than the warm-up: the forward of the first turn.
    return min(virtual * ranks - rank, microbatches * virtual)


def _activations(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    # W comes r turns after I, which adds back what rank r has fewer in flight.
    return min(virtual * ranks, microbatches * virtual)


ORDER = Order(
    name="interleaved_zero_bubble",
    title="interleaved zero bubble",
    paper="Qi et al. 2023",
    build=interleaved_zero_bubble,
    stages=(2, None),
    least_ranks=2,
    microbatches=multiple_of_ranks,
    backward="split",
    in_flight=_in_flight,
    activations=_activations,
    names={"torchtitan": "InterleavedZeroBubble"},
    aliases=("interleavedzerobubble",),
    preference=40,
    bubble="(p - 1)T/v (tested for v = 2)",
    held="p",
    asks="m a multiple of p",
)
