"""1F1B: warm-up forwards, then one forward and one backward in turn (PipeDream-Flush, Narayanan et al. 2021; DAPPLE,
Fan et al. 2021).

With p ranks, m microbatches and equal stages a step from rest takes (m + p - 1)(F + B), and rank r holds the
activations of min(p - r, m) microbatches. DAPPLE's second warm-up policy injects 2(p - r) - 1 microbatches, which hides
the latency of messages at the price of memory. Left out: messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

from gnomon.errors import PlanError
from gnomon.orders.order import Order
from gnomon.orders.patterns.alternate import alternate
from gnomon.orders.patterns.vocabulary import interlaced, with_heads
from gnomon.program.rows import Rows


def one_f_one_b(num_ranks: int, num_microbatches: int, num_virtual: int = 1, *, warm_up: Sequence[int] = ()) -> Rows:
    """Stage r on rank r. warm_up: forwards of each rank before its first pair, p - 1 - r when left out.

    PlanError when a rank would warm up with more forwards than the rank before it.
    """
    # What counts of a warm-up is at most all microbatches: GPipe's is m on every rank, and more would be the same.
    warm = np.array(warm_up or range(num_ranks - 1, -1, -1), np.int64)
    if len(warm) != num_ranks or (warm < 0).any() or (np.diff(np.minimum(warm, num_microbatches)) > 0).any():
        raise PlanError(
            f"warm-up forwards {tuple(warm.tolist())} must be one number >= 0 for each of {num_ranks} ranks, "
            f"not increasing: a rank cannot be ahead of the one that feeds it"
        )
    ranks = np.arange(num_ranks)[:, None]
    units = np.broadcast_to(np.arange(num_microbatches), (num_ranks, num_microbatches))
    stages = np.broadcast_to(ranks, units.shape)
    return alternate(forward=(stages, units), backward=(stages, units), warm_up=warm, num_stages=num_ranks)


DAPPLE = "dapple_warmup"
"""The pass with more forwards before the first backward, as plans write it."""


def dapple_warm_up(policy: Literal["p", "2p"], num_ranks: int) -> tuple[int, ...]:
    """Warm-up forwards of each rank under DAPPLE's policies: min(p - r) or 2(p - r) - 1 microbatches injected.

    `p` is plain 1F1B; `2p` is for communication comparable to compute. Source: DAPPLE, section 3.
    """
    if policy not in ("p", "2p"):
        raise PlanError(f"{DAPPLE} policy {policy!r}: use 'p' (p - r microbatches) or '2p' (2(p - r) - 1)")
    injected = [n if policy == "p" else 2 * n - 1 for n in range(num_ranks, 0, -1)]
    return tuple(n - 1 for n in injected)


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    return min(ranks - rank, microbatches)


ORDER = Order(
    name="one_f_one_b",
    title="1F1B",
    paper="PipeDream-Flush, Narayanan et al. 2021; DAPPLE, Fan et al. 2021",
    build=one_f_one_b,
    in_flight=_in_flight,
    vocabulary={
        "vocab_1": partial(with_heads, "vocab_1"),
        "vocab_2": partial(with_heads, "vocab_2"),
        "interlaced": interlaced,
    },
    names={
        "megatron-lm": "forward_backward_pipelining_without_interleaving",
        "torchtitan": "1F1B",
        "deepspeed": "TrainSchedule",
        "nanotron": "1f1b",
    },
    aliases=("1f1b",),
    preference=0,
    tried=True,
    bubble="(p - 1)(F + B)",
    held="p - r on rank r",
)
