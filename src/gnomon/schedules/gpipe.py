"""GPipe: all forwards, then all backwards (Huang et al. 2019).

`gpipe` returns compute rows. With p ranks, m microbatches and equal stages a step from rest takes (m + p - 1)(F + B),
like 1F1B, but every rank holds the activations of all m microbatches. Backwards come in the order of the forwards, as
in PyTorch. Left out: messages.
"""

from __future__ import annotations

from gnomon.program.rows import Rows, check_counts
from gnomon.schedules.one_f_one_b import one_f_one_b


def gpipe(num_ranks: int, num_microbatches: int) -> Rows:
    """Stage r on rank r."""
    check_counts("gpipe", num_ranks, num_microbatches)
    return one_f_one_b(num_ranks, num_microbatches, warm_up=(num_microbatches,) * num_ranks)
