"""The three collectives that the runtime uses, by the names that this torch has for them.

`all_reduce` is in place; `all_gather` and `reduce_scatter` go along dim 0. With `wait=False` they return the work under
way; a group of None is one rank and never comes here. Left out: messages, which are torch's own isend and irecv.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""Torch renamed both; the older names warn where the newer exist."""


def all_reduce(x: Tensor, group: ProcessGroup, *, wait: bool = True, largest: bool = False) -> Work | None:
    """Adds up `x` over the group, in place; or takes the largest."""
    op: Any = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    work: Work | None = dist.all_reduce(x, op=op, group=group, async_op=not wait)
    return work


def all_gather(out: Tensor, part: Tensor, group: ProcessGroup, *, wait: bool = True) -> Work | None:
    """Parts of all ranks, in order, into `out`."""
    work: Work | None = getattr(dist, GATHER)(out, part, group=group, async_op=not wait)
    return work


def reduce_scatter(out: Tensor, whole: Tensor, group: ProcessGroup, *, wait: bool = True) -> Work | None:
    """This rank's part of the sum of `whole` over the group, into `out`."""
    work: Work | None = getattr(dist, SCATTER)(out, whole, group=group, async_op=not wait)
    return work
