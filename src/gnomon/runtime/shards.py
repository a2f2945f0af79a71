"""Gradients of several layers beside each other, so that one reduce-scatter gives each rank its shard of every one.

A rank's shard of a layer is a range of that layer's flat buffer, so a collective over several layers wants, for each
rank, their ranges together: `interleaved` copies them so, and `kept_shards` puts what comes back where the update reads
it. Left out: the collective (`state`). Source of the layout: torch's FSDP2, which copies in before and out after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gnomon.runtime.parameters import Parameters


def interleaved(members: Sequence[Parameters]) -> Tensor:
    """(ranks, elements of a shard of each member, one after the other): a copy of their gradients."""
    ranks = members[0].num_shards
    grads = [one.whole_grad().view(ranks, -1) for one in members]
    return torch.cat(grads, dim=1)


def kept_shards(parts: Iterable[tuple[Parameters, Tensor]]) -> None:
    """Puts reduced shards into place: under ZeRO 1 into the whole gradient, else added to the shard that is kept."""
    for held, part in parts:
        if held.zero == 1:
            held.my_grad().copy_(part)
        else:
            held.add_shard(part)
