"""1F1B: warm-up forwards, then one forward and one backward in turn (PipeDream-Flush, Narayanan et al. 2021; DAPPLE,
Fan et al. 2021).

`one_f_one_b` returns compute rows. With p ranks, m microbatches and equal stages a step from rest takes
(m + p - 1)(F + B), and rank r holds the activations of min(p - r, m) microbatches. DAPPLE's second warm-up policy
injects 2(p - r) - 1 microbatches, which hides the latency of messages at the price of memory. Left out: messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from gnomon.errors import PlanError
from gnomon.program.rows import KIND, Longs, Rows, check_counts, of_table


def one_f_one_b(num_ranks: int, num_microbatches: int, *, warm_up: Sequence[int] = ()) -> Rows:
    """Stage r on rank r. warm_up: forwards of each rank before its first pair, p - 1 - r when left out.

    PlanError when a rank would warm up with more forwards than the rank before it.
    """
    check_counts("one_f_one_b", num_ranks, num_microbatches)
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


def dapple_warm_up(policy: Literal["p", "2p"], num_ranks: int) -> tuple[int, ...]:
    """Warm-up forwards of each rank under DAPPLE's policies: min(p - r) or 2(p - r) - 1 microbatches injected.

    `p` is plain 1F1B; `2p` is for communication comparable to compute. Source: DAPPLE, section 3.
    """
    if policy not in ("p", "2p"):
        raise PlanError(f"dapple_warmup policy {policy!r}: use 'p' (p - r microbatches) or '2p' (2(p - r) - 1)")
    injected = [n if policy == "p" else 2 * n - 1 for n in range(num_ranks, 0, -1)]
    return tuple(n - 1 for n in injected)


def alternate(*, forward: tuple[Longs, Longs], backward: tuple[Longs, Longs], warm_up: Longs, num_stages: int) -> Rows:
    """Each rank's forwards and backwards in their own order, merged: `warm_up` forwards, then F B F B …, then the rest.

    forward, backward: (stage, unit), each [ranks, n]. warm_up: [ranks].
    """
    num_ranks, n = forward[0].shape
    k, w = np.arange(n), np.minimum(warm_up, n)[:, None]
    forward_at = np.where(k < w, k, 2 * k - w)
    backward_at = np.where(k < n - w, w + 2 * k + 1, n + k)
    kind = np.full((num_ranks, 2 * n), KIND["F"], np.int8)
    stage, unit = np.empty((num_ranks, 2 * n), np.int16), np.empty((num_ranks, 2 * n), np.int32)
    rank = np.arange(num_ranks)[:, None]
    kind[rank, backward_at] = KIND["B"]
    for at, (stages, units) in ((forward_at, forward), (backward_at, backward)):
        stage[rank, at] = stages
        unit[rank, at] = units
    return of_table(
        kind.ravel(),
        stage.ravel(),
        unit.ravel(),
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_units=int(forward[1].max()) + 1,
    )
