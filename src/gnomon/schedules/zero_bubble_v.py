"""ZB-V: two stages a rank in a V, backward split in two, no more activations than 1F1B (Qi et al. 2023, "Zero bubble
pipeline parallelism", section 6).

`zero_bubble_v` returns compute rows. When a chunk's F, I and W take the same time T, a step from rest takes
6mT + (p - 1)T: rank p - 1 waits p - 1 forwards for its first microbatch, and no rank waits again until its last input
gradient. A rank never holds more than 2p chunk activations, which is what rank 0 of 1F1B holds. Left out: messages,
and the searched schedule for unequal times.
"""

from __future__ import annotations

from gnomon.errors import PlanError
from gnomon.program.rows import Rows, check_counts
from gnomon.schedules.v_placement import VRank, rows


def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Rows:
    """Stages r and 2p - 1 - r on rank r. PlanError with fewer than 2p - 1 microbatches, which cannot fill the V."""
    check_counts("zero_bubble_v", num_ranks, num_microbatches)
    if num_microbatches < 2 * num_ranks - 1:
        raise PlanError(
            f"schedule zero_bubble_v needs at least 2 x {num_ranks} - 1 = {2 * num_ranks - 1} microbatches, not "
            f"{num_microbatches}; use more, or zero_bubble_h1"
        )
    return rows([_rank(r, num_ranks, num_microbatches) for r in range(num_ranks)], num_microbatches)


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> VRank:
    """The actions of one rank: fill the V, steady turns of both chunks, drain with weight gradients in the gaps."""
    out, to_bottom = VRank(rank, num_ranks), num_ranks - rank

    def whole_backward(chunk: int) -> None:
        out.input_gradient(chunk)
        out.weight_gradient(chunk)

    for _ in range(2 * to_bottom - 1):
        out.forward(0)
    for _ in range(rank):
        out.forward(1)
        out.forward(0)
    for _ in range(to_bottom):
        out.forward(1)
        whole_backward(1)
    while out.forwards[1] < num_microbatches:
        if out.forwards[0] < num_microbatches:
            out.forward(0)
        whole_backward(0)
        out.forward(1)
        whole_backward(1)
    for _ in range(rank):
        out.input_gradient(0)
        out.input_gradient(1)
    for _ in range(to_bottom):
        out.input_gradient(0)
        out.weight_gradient(0)
    for chunk in (1, 0):
        while any(waiting == chunk for waiting, _ in out.waiting):
            out.weight_gradient(chunk)
    return out
