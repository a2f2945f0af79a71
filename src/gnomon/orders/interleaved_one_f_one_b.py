"""Interleaved 1F1B: v stages on each rank, stage s on rank s mod p (Narayanan et al. 2021).

With p ranks, m microbatches, equal stages and F, B the times of a whole rank's layers, a step from rest takes
m(F + B) + (p - 1)(F + B)/v. Microbatches go through a rank's stages in rounds of p, so m must be a multiple of p
(Megatron-LM's rounds of another size are not expressed here). Left out: messages.
"""

from __future__ import annotations

import numpy as np

from gnomon.orders.order import Order, multiple_of_ranks
from gnomon.orders.patterns.alternate import alternate, rounds
from gnomon.program.rows import Rows


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, num_virtual: int) -> Rows:
    """`num_virtual` stages on each rank. Rank r warms up with 2(p - 1 - r) + (v - 1)p forwards, as in Megatron-LM."""
    chunk, unit = rounds(num_ranks, num_microbatches, num_virtual)
    rank = np.arange(num_ranks)[:, None]
    units = np.broadcast_to(unit, (num_ranks, len(unit)))
    return alternate(
        forward=(chunk * num_ranks + rank, units),
        backward=((num_virtual - 1 - chunk) * num_ranks + rank, units),
        warm_up=2 * (num_ranks - 1 - rank[:, 0]) + (num_virtual - 1) * num_ranks,
        num_stages=num_ranks * num_virtual,
    )


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    # The warm-up and the forward of the first turn.
    return min(2 * (ranks - 1 - rank) + (virtual - 1) * ranks + 1, microbatches * virtual)


ORDER = Order(
    name="interleaved_one_f_one_b",
    title="interleaved 1F1B",
    paper="Narayanan et al. 2021",
    build=interleaved_one_f_one_b,
    stages=(2, None),
    least_ranks=2,
    microbatches=multiple_of_ranks,
    in_flight=_in_flight,
    names={"megatron-lm": "forward_backward_pipelining_with_interleaving", "torchtitan": "Interleaved1F1B"},
    aliases=("interleaved", "interleaved_1f1b", "interleaved1f1b", "vpp"),
    preference=10,
    tried=True,
    bubble="(p - 1)(F + B)/v",
    held="(2(p - 1 - r) + (v - 1)p + 1)/v",
    asks="m a multiple of p",
)
