"""ZB-H1: 1F1B with the backward split into input gradient (I) and weight gradient (W) (Qi et al. 2023, "Zero bubble
pipeline parallelism").

`zero_bubble_h1` returns compute rows. Weight gradients wait so that they fill what were bubbles, but no rank holds
more than the p microbatches that rank 0 of 1F1B holds. With equal stages and m >= p a step from rest takes
m(F + I + W) + (p - 1)(F + I - W) for F = I = W. Left out: messages, and the schedule for unequal times.
"""

from __future__ import annotations

import numpy as np

from gnomon.schedules.rows import KIND, Rows, by_time, check_counts


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Rows:
    """Stage r on rank r: p - 1 - r forwards, then F I W in turn with W of the microbatch r before."""
    check_counts("zero_bubble_h1", num_ranks, num_microbatches)
    rank, k = np.arange(num_ranks)[:, None], np.arange(num_microbatches)
    warm = np.minimum(num_ranks - 1 - rank, num_microbatches)
    # Three cells per turn: the forward of turn k + warm comes with input gradient k and weight gradient k - rank.
    turn = k + warm
    time = np.concatenate([3 * k + 0 * rank, 3 * turn + 1, 3 * (turn + rank) + 2], axis=1)
    kind = np.repeat(np.array([KIND["F"], KIND["I"], KIND["W"]], np.int8), num_microbatches)
    return by_time(
        time=time,
        kind=kind,
        stage=rank.astype(np.int16),
        unit=np.tile(k, 3).astype(np.int32),
        num_stages=num_ranks,
        num_units=num_microbatches,
    )
