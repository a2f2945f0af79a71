"""ZB-V: two stages a rank in a V, backward split in two, no more activations than 1F1B (Qi et al. 2023, "Zero bubble
pipeline parallelism", section 6).

When a chunk's F, I and W take the same time T, a step from rest takes 6mT + (p - 1)T: rank p - 1 waits p - 1 forwards
for its first microbatch, and no rank waits again until its last input gradient. A rank never holds more than 2p chunk
activations, which is what rank 0 of 1F1B holds. Left out: messages, and the searched schedule for unequal times.
"""

from __future__ import annotations

from gnomon.orders.order import Order
from gnomon.orders.patterns.v_placement import VRank, rows
from gnomon.program.rows import Rows


def zero_bubble_v(num_ranks: int, num_microbatches: int, num_virtual: int = 2) -> Rows:
    """Stages r and 2p - 1 - r on rank r."""
    return rows([_rank(r, num_ranks, num_microbatches) for r in range(num_ranks)], num_microbatches)


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> VRank:
    """The actions of one rank: fill the V, steady turns of both chunks, drain with weight gradients in the gaps."""
    out, to_bottom = VRank(rank, num_ranks), num_ranks - rank

    def whole_backward(chunk: int) -> None:
        out.input_gradient(chunk)
        out.weight_gradient(chunk)

    # Down the V and back up: the first microbatch reaches this rank's second chunk after 2(p - r) - 1 hops.
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
    # The loop had m - p turns: p input gradients of chunk 0 are left, and r of chunk 1.
    for _ in range(rank):
        out.input_gradient(0)
        out.input_gradient(1)
    for _ in range(to_bottom):
        out.input_gradient(0)
        out.weight_gradient(0)
    # What is left of weight gradients: nothing waits for them.
    for chunk in (1, 0):
        while any(waiting == chunk for waiting, _ in out.waiting):
            out.weight_gradient(chunk)
    return out


def _fills_the_v(ranks: int, microbatches: int, virtual: int) -> str:
    if microbatches >= 2 * ranks - 1:
        return ""
    least = f"2 x {ranks} - 1 = {2 * ranks - 1}"
    return f"needs at least {least} microbatches, not {microbatches}; use more, or zero_bubble_h1"


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    # 2(p - r) - 1 forwards, r pairs of them, and the forward before the first input gradient. No `activations` of its
    # own: W follows its I at once until the last forward, and after it a rank only lets go.
    return min(2 * ranks, microbatches * virtual)


ORDER = Order(
    name="zero_bubble_v",
    title="ZB-V",
    paper="Qi et al. 2023",
    build=zero_bubble_v,
    stages=(2, 2),
    placement="v",
    microbatches=_fills_the_v,
    backward="split",
    in_flight=_in_flight,
    names={"torchtitan": "ZBVZeroBubble"},
    aliases=("zbv", "zb_v", "zbvzerobubble"),
    preference=50,
    tried=True,
    bubble="(p - 1)T/2 from rest, 0 between steps",
    held="p at most",
    asks="m ≥ 2p - 1",
)
