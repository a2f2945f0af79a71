"""ZB-H1 and ZB-H2: 1F1B with the backward split into input gradient (I) and weight gradient (W) (Qi et al. 2023, "Zero
bubble pipeline parallelism"); and ZB-H1 for interleaved stages.

All return compute rows. Weight gradients wait so that they fill what were bubbles. In ZB-H1 no rank holds more than the
p microbatches that rank 0 of 1F1B holds; with equal stages and m >= p a step from rest takes
m(F + I + W) + (p - 1)(F + I - W) while W <= F and W <= I. ZB-H2 holds up to 2p - 1 and, with F = I = W, waits only
before a rank's first action and after its last: the period is m(F + I + W). Left out: messages, and the searched
schedules for unequal times.
"""

from __future__ import annotations

import numpy as np

from gnomon.program.rows import KIND, Longs, Rows, by_time, check_counts
from gnomon.schedules.interleaved_one_f_one_b import check_interleaved, rounds


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Rows:
    """Stage r on rank r: p - 1 - r forwards, then F I W in turn with W of the microbatch r before."""
    check_counts("zero_bubble_h1", num_ranks, num_microbatches)
    stages = np.broadcast_to(np.arange(num_ranks)[:, None], (num_ranks, num_microbatches))
    return _split(stages, stages, np.arange(num_microbatches), num_ranks - 1 - np.arange(num_ranks), num_ranks)


def zero_bubble_h2(num_ranks: int, num_microbatches: int) -> Rows:
    """Stage r on rank r: 2(p - 1 - r) forwards, then F I W in turn with W of the microbatch 2r before. Every rank holds
    2p - 1 microbatches."""
    check_counts("zero_bubble_h2", num_ranks, num_microbatches)
    stages = np.broadcast_to(np.arange(num_ranks)[:, None], (num_ranks, num_microbatches))
    warm_up = num_ranks - 1 - np.arange(num_ranks)
    return _split(stages, stages, np.arange(num_microbatches), 2 * warm_up, num_ranks, delay=2)


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_virtual: int) -> Rows:
    """`num_virtual` stages on each rank, in the order of interleaved 1F1B with as few warm-up forwards as possible:
    (v - 1)p + p - 1 - r. PlanError unless microbatches are a multiple of the ranks."""
    check_interleaved("interleaved_zero_bubble", num_ranks, num_microbatches, num_virtual)
    chunk, unit = rounds(num_ranks, num_microbatches, num_virtual)
    rank = np.arange(num_ranks)[:, None]
    return _split(
        chunk * num_ranks + rank,
        (num_virtual - 1 - chunk) * num_ranks + rank,
        unit,
        num_virtual * num_ranks - 1 - rank[:, 0],
        num_ranks * num_virtual,
    )


def _split(forward: Longs, backward: Longs, unit: Longs, warm_up: Longs, num_stages: int, *, delay: int = 1) -> Rows:
    """Turns of F I W. forward, backward: stages [ranks, n] of the k-th F and I; unit: [n] the microbatch of both.

    A turn is three cells. F k stands in turn k, I k `warm_up` turns later, and W k another `delay` · rank turns later:
    rank r gets its first input gradient earlier than rank 0, and spends the time on forwards.
    """
    num_ranks, n = forward.shape
    rank, k = np.arange(num_ranks)[:, None], np.arange(n)
    turn = k + np.minimum(warm_up, n)[:, None]
    return by_time(
        time=np.concatenate([3 * k + 0 * rank, 3 * turn + 1, 3 * (turn + delay * rank) + 2], axis=1),
        kind=np.repeat(np.array([KIND["F"], KIND["I"], KIND["W"]], np.int8), n),
        stage=np.concatenate([forward, backward, backward], axis=1).astype(np.int16),
        unit=np.tile(unit, 3).astype(np.int32),
        num_stages=num_stages,
        num_units=int(unit.max()) + 1,
    )
