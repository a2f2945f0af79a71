"""Forwards and backwards of each rank in turn, after some forwards that warm it up.

`alternate` returns rows of whole backwards, `rounds` the order in which a rank's stages take microbatches where it has
several (Narayanan et al. 2021). Leaves out split backwards, which are `turns`.
"""

from __future__ import annotations

import numpy as np

from gnomon.program.rows import KIND, Longs, Rows, of_table


def alternate(*, forward: tuple[Longs, Longs], backward: tuple[Longs, Longs], warm_up: Longs, num_stages: int) -> Rows:
    """Each rank's forwards and backwards in their own order, merged: `warm_up` forwards, then F B F B …, then the rest.

    forward, backward: (stage, unit), each [ranks, n]. warm_up: [ranks].
    """
    num_ranks, n = forward[0].shape
    # w [ranks, 1] against k [n]: what follows is [ranks, n]. A warm-up beyond n is n: then all forwards come first.
    k, w = np.arange(n), np.minimum(warm_up, n)[:, None]
    # Position of the k-th forward: first w of them in a row, then every second place; of the k-th backward: every
    # second place from w + 1 on, until forwards run out.
    forward_at = np.where(k < w, k, 2 * k - w)
    backward_at = np.where(k < n - w, w + 2 * k + 1, n + k)
    # The positions are a permutation of 0 … 2n - 1 in each row, so what is not set to B stays F, and `empty` is filled.
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


def rounds(num_ranks: int, num_microbatches: int, num_virtual: int) -> tuple[Longs, Longs]:
    """(chunk, microbatch) of the k-th forward of every rank: p microbatches through each chunk in turn."""
    # k-th forward = round · (p v) + chunk · p + place in the round.
    k = np.arange(num_microbatches * num_virtual)
    round_, within = np.divmod(k, num_ranks * num_virtual)
    return within // num_ranks, round_ * num_ranks + within % num_ranks
