"""The collectives that the runtime uses, by the names that this torch has for them.

`all_reduce` is in place; the others go along dim 0. With `wait=False` they return the work under way; a group of None
is one rank and never comes here. `pass_on` is one round of a ring. Left out: messages between stages, which are torch's
own isend and irecv.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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


def all_to_all(
    out: Tensor,
    x: Tensor,
    group: ProcessGroup,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
    *,
    wait: bool = True,
) -> Work | None:
    """Part r of `x` to rank r, part r of `out` from rank r. received, sent: rows of each part; left out, equal ones."""
    coming = None if received is None else list(received)
    work: Work | None = dist.all_to_all_single(out, x, coming, sent and list(sent), group=group, async_op=not wait)
    return work


def pass_on(x: Tensor, group: ProcessGroup, tag: int = 0) -> tuple[Tensor, list[Work]]:
    """Starts sending `x` to the next rank of a ring: (what comes from the one before, what to wait for)."""
    n, me = dist.get_world_size(group), dist.get_rank(group)
    after, before = (dist.get_global_rank(group, (me + step) % n) for step in (1, -1))
    out = torch.empty_like(x)
    # Together: a rank that sent first and only then received would wait for ever where sends wait for their receiver.
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, after, group, tag), dist.P2POp(dist.irecv, out, before, group, tag)]
    )
    return out, works


def arrived(x: Tensor, works: Sequence[Work]) -> Tensor:
    """What `pass_on` brings, once it is here and what was sent is gone."""
    for work in works:
        work.wait()
    return x
