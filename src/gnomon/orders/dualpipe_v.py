"""DualPipe-V: two stages a rank in a V, forward of one microbatch overlapped with backward of another (DeepSeek-V3's
DualPipe, cut in half by Sea AI Lab).

In its rows `(0F3&7B1)` is one action: both start and end together, because the all-to-all of each hides behind the
compute of the other. A rank goes through eight phases. Rank 0 is idle for (p - 1)(F&B + B - 3W) of a step from rest.
Left out: messages, and the overlap inside the composite, which is priced.
"""

from __future__ import annotations

from gnomon.orders.order import Order
from gnomon.orders.patterns.v_placement import VRank, rows
from gnomon.program.rows import Rows


def dualpipe_v(num_ranks: int, num_microbatches: int, num_virtual: int = 2) -> Rows:
    """Stages r and 2p - 1 - r on rank r."""
    return rows([_rank(r, num_ranks, num_microbatches) for r in range(num_ranks)], num_microbatches)


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> VRank:
    """The eight phases of one rank."""
    out, below = VRank(rank, num_ranks), num_ranks - 1 - rank
    # The rank's second stage is 2 · below + 1 stages after its first, so that as many forwards of chunk 0 go before the
    # first of chunk 1: those of phase 1, and one of phase 2.
    for _ in range(2 * below):  # 1: forwards going down
        out.forward(0)
    for _ in range(rank + 1):  # 2: both directions
        out.forward(0)
        out.forward(1)
    for _ in range(below):  # 3: first backwards, split so that the ranks below get their input gradients early
        out.input_gradient(1)
        out.weight_gradient()
        out.forward(1)
    # Phases 1 and 2 took 2p - 1 - r forwards of chunk 0: these are the others of all m.
    for turn in range(num_microbatches - 2 * num_ranks + rank + 1):  # 4: the steady turns
        if turn == 0 and below == 0:
            out.forward(0)  # apart: the last rank has no other work that its first backward could hide behind
            out.backward(1)
        else:
            out.forward_and_backward(0, 1)
        out.forward_and_backward(1, 0)
    for _ in range(below):  # 5: no forwards are left in chunk 0
        out.backward(1)
        out.forward_and_backward(1, 0)
    _drain(out, rank, below)
    return out


def _drain(out: VRank, rank: int, below: int) -> None:
    """Phases 6 to 8: the last backwards, from half-way on split, with weight gradients in the gaps and at the end."""
    # r + 1 backwards of each chunk are left, and `below` more of chunk 0 for phase 7.
    for step in range(2 * (rank + 1)):  # 6: both chunks in turn; the second half of the steps is split
        backward = out.input_gradient if step >= rank + 1 else out.backward
        backward(1 - step % 2)
    for _ in range(below):  # 7
        out.weight_gradient()
        out.input_gradient(0)
    while out.waiting:  # 8
        out.weight_gradient()


def _two_a_rank(ranks: int, microbatches: int, virtual: int) -> str:
    """Says what DeepSeek's dualpipev.py asserts and this shape breaks; empty where nothing does."""
    if microbatches >= 2 * ranks:
        return ""
    return (
        f"needs at least 2 x {ranks} = {2 * ranks} microbatches (two for each pipeline rank), not {microbatches}; use "
        f"more, or zero_bubble_v"
    )


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    # Phases 1 and 2 start 2p forwards on every rank, phase 3 frees one unit for each that it takes, and the forward of
    # a composite in phase 4 begins before its backward is over.
    return min(2 * ranks + 1, microbatches * virtual)


ORDER = Order(
    name="dualpipe_v",
    title="DualPipe-V",
    paper="DeepSeek-V3's DualPipe, cut in half by Sea AI Lab",
    build=dualpipe_v,
    stages=(2, 2),
    placement="v",
    microbatches=_two_a_rank,
    backward="both",
    composite=True,
    in_flight=_in_flight,
    names={"torchtitan": "DualPipeV"},
    aliases=("dualpipev",),
    preference=80,
    bubble="(p - 1)(F&B + B - 3W), of one stage",
    held="p + 1/2",
    asks="m ≥ 2p",
)
