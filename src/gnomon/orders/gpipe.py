"""GPipe: all forwards, then all backwards (Huang et al. 2019).

With p ranks, m microbatches and equal stages a step from rest takes (m + p - 1)(F + B), like 1F1B, but every rank holds
the activations of all m microbatches. Backwards come in the order of the forwards, as in PyTorch. Left out: messages.
"""

from __future__ import annotations

from gnomon.orders.one_f_one_b import one_f_one_b
from gnomon.orders.order import Order
from gnomon.program.rows import Rows


def gpipe(num_ranks: int, num_microbatches: int, num_virtual: int = 1) -> Rows:
    """Stage r on rank r."""
    return one_f_one_b(num_ranks, num_microbatches, warm_up=(num_microbatches,) * num_ranks)


def _in_flight(rank: int, ranks: int, microbatches: int, virtual: int) -> int:
    return microbatches


ORDER = Order(
    name="gpipe",
    title="GPipe",
    paper="Huang et al. 2019",
    build=gpipe,
    in_flight=_in_flight,
    names={"torchtitan": "GPipe", "nanotron": "afab"},
    preference=90,
    bubble="(p - 1)(F + B)",
    held="m",
)
