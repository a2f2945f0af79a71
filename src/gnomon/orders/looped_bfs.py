"""Looped breadth-first: v stages on each rank, all microbatches through one before the next (Lamy-Poirier 2023,
"Breadth-first pipeline parallelism").

With p ranks, m microbatches, equal stages and F, B the times of a whole rank's layers, a step from rest takes
m(F + B) + (p - 1)(F + B)/v, and every rank holds the activations of all m microbatches. Left out: messages.
"""

from __future__ import annotations

import numpy as np

from gnomon.orders.order import Order
from gnomon.orders.patterns.alternate import alternate
from gnomon.program.rows import Rows


def looped_bfs(num_ranks: int, num_microbatches: int, num_virtual: int) -> Rows:
    """All microbatches through a rank's first stage, then its second …, then backwards in reverse order of stages."""
    n = num_microbatches * num_virtual
    chunk, unit = np.divmod(np.arange(n), num_microbatches)
    rank = np.arange(num_ranks)[:, None]
    units = np.broadcast_to(unit, (num_ranks, n))
    return alternate(
        forward=(chunk * num_ranks + rank, units),
        backward=((num_virtual - 1 - chunk) * num_ranks + rank, units),
        # All forwards before any backward.
        warm_up=np.full(num_ranks, n),
        num_stages=num_ranks * num_virtual,
    )


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    # Every forward of the step is before the first backward.
    return microbatches * virtual


ORDER = Order(
    name="looped_bfs",
    title="looped breadth-first",
    paper="Lamy-Poirier 2023",
    build=looped_bfs,
    stages=(2, None),
    least_ranks=2,
    in_flight=_in_flight,
    names={"torchtitan": "LoopedBFS"},
    aliases=("bfs", "loopedbfs"),
    preference=100,
    bubble="(p - 1)(F + B)/v",
    held="m",
)
