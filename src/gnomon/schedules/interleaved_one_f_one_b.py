"""Interleaved 1F1B: v stages on each rank, stage s on rank s mod p (Narayanan et al. 2021); and looped
breadth-first (Lamy-Poirier 2023).

Both return compute rows. With p ranks, m microbatches, equal stages and F, B the times of a whole rank's layers, a step
of interleaved 1F1B from rest takes m(F + B) + (p - 1)(F + B)/v. Microbatches go through a rank's stages in rounds of p,
so m must be a multiple of p. Left out: messages.
"""

from __future__ import annotations

import numpy as np

from gnomon.errors import PlanError
from gnomon.program.rows import Longs, Rows, check_counts
from gnomon.schedules.one_f_one_b import alternate


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, num_virtual: int) -> Rows:
    """`num_virtual` stages on each rank. PlanError unless microbatches are a multiple of the ranks.

    Rank r warms up with 2(p - 1 - r) + (v - 1)p forwards, as in Megatron-LM.
    """
    check_interleaved("interleaved_one_f_one_b", num_ranks, num_microbatches, num_virtual)
    chunk, unit = rounds(num_ranks, num_microbatches, num_virtual)
    rank = np.arange(num_ranks)[:, None]
    units = np.broadcast_to(unit, (num_ranks, len(unit)))
    return alternate(
        forward=(chunk * num_ranks + rank, units),
        backward=((num_virtual - 1 - chunk) * num_ranks + rank, units),
        warm_up=2 * (num_ranks - 1 - rank[:, 0]) + (num_virtual - 1) * num_ranks,
        num_stages=num_ranks * num_virtual,
    )


def looped_bfs(num_ranks: int, num_microbatches: int, num_virtual: int) -> Rows:
    """All microbatches through a rank's first stage, then its second …, then backwards in reverse order of stages."""
    check_counts("looped_bfs", num_ranks, num_microbatches)
    n = num_microbatches * num_virtual
    chunk, unit = np.divmod(np.arange(n), num_microbatches)
    rank = np.arange(num_ranks)[:, None]
    units = np.broadcast_to(unit, (num_ranks, n))
    return alternate(
        forward=(chunk * num_ranks + rank, units),
        backward=((num_virtual - 1 - chunk) * num_ranks + rank, units),
        warm_up=np.full(num_ranks, n),
        num_stages=num_ranks * num_virtual,
    )


def rounds(num_ranks: int, num_microbatches: int, num_virtual: int) -> tuple[Longs, Longs]:
    """(chunk, microbatch) of the k-th forward of every rank: p microbatches through each chunk in turn."""
    k = np.arange(num_microbatches * num_virtual)
    round_, within = np.divmod(k, num_ranks * num_virtual)
    return within // num_ranks, round_ * num_ranks + within % num_ranks


def check_interleaved(name: str, num_ranks: int, num_microbatches: int, num_virtual: int) -> None:
    """PlanError unless there are at least two ranks and chunks, and microbatches in rounds of the ranks."""
    check_counts(name, num_ranks, num_microbatches)
    if num_virtual < 2 or num_ranks < 2:
        raise PlanError(
            f"schedule {name} needs at least 2 pipeline ranks and 2 virtual stages, but has {num_ranks} and "
            f"{num_virtual}; raise them, or use one_f_one_b"
        )
    if num_microbatches % num_ranks:
        raise PlanError(
            f"schedule {name} needs a multiple of {num_ranks} microbatches (its pipeline ranks), not "
            f"{num_microbatches}; the nearest is {max(1, round(num_microbatches / num_ranks)) * num_ranks}"
        )
