"""Turns of a forward, an input gradient and a weight gradient, in cells of one length (Qi et al. 2023, "Zero bubble
pipeline parallelism").

`turns` returns rows. Weight gradients wait so that they fill what were bubbles. Leaves out which numbers are legal, and
the searched schedules for unequal times.
"""

from __future__ import annotations

import numpy as np

from gnomon.program.rows import KIND, Longs, Rows, by_time


def turns(forward: Longs, backward: Longs, unit: Longs, warm_up: Longs, num_stages: int, *, delay: int = 1) -> Rows:
    """Turns of F I W. forward, backward: stages [ranks, n] of the k-th F and I; unit: [n] the microbatch of both.

    A turn is three cells. F k stands in turn k, I k `warm_up` turns later, and W k another `delay` · rank turns later:
    rank r gets its first input gradient earlier than rank 0, and spends the time on forwards.
    """
    num_ranks, n = forward.shape
    rank, k = np.arange(num_ranks)[:, None], np.arange(n)
    # With fewer microbatches than warm-up forwards the first input gradient follows the last forward.
    turn = k + np.minimum(warm_up, n)[:, None]
    return by_time(
        # Cells are compared within a rank only; 0 * rank spreads the forwards over all ranks.
        time=np.concatenate([3 * k + 0 * rank, 3 * turn + 1, 3 * (turn + delay * rank) + 2], axis=1),
        kind=np.repeat(np.array([KIND["F"], KIND["I"], KIND["W"]], np.int8), n),
        stage=np.concatenate([forward, backward, backward], axis=1).astype(np.int16),
        unit=np.tile(unit, 3).astype(np.int32),
        num_stages=num_stages,
        num_units=int(unit.max()) + 1,
    )
