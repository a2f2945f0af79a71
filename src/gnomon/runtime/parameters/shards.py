"""Gradients beside each other, so that one message takes several.

A rank's shard of a layer is a range of that layer's flat buffer, so a reduce-scatter over several layers wants, of each
rank, their ranges together: `interleaved` copies them so, and `kept_shards` puts what comes back where the update reads
it. `packed` is for sums of parts here and there. Left out: the collectives (`state`). Source of the layout: torch's
FSDP2, which copies in before and out after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gnomon.runtime.parameters.parameters import Parameters

PACKED_BYTES = 64 << 10
"""Gradients below it go into one message with others; larger ones would take long to copy, and be held twice."""


def interleaved(members: Sequence[Parameters]) -> Tensor:
    """(ranks, elements of a shard of each member, one after the other): a copy of their gradients."""
    ranks = members[0].num_shards
    grads = [one.whole_grad().view(ranks, -1) for one in members]
    return torch.cat(grads, dim=1)


def kept_shards(parts: Iterable[tuple[Parameters, Tensor]]) -> None:
    """Puts reduced shards into place: under ZeRO 1 into the whole gradient, else added to the shard that is kept."""
    for parameters, part in parts:
        if parameters.zero == 1:
            parameters.my_grad().copy_(part)
        else:
            parameters.add_shard(part)


def packed(grads: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """(what to sum in place of these: small ones copied beside each other, large ones where they lie; what brings the
    small ones back)."""
    small = [grad for grad in grads if grad.nbytes < PACKED_BYTES]
    large = tuple(grad for grad in grads if grad.nbytes >= PACKED_BYTES)
    if not small:
        return large, lambda: None
    together = torch.cat(small)

    def unpack() -> None:
        for part, value in zip(small, torch.split(together, [len(part) for part in small]), strict=True):
            part.copy_(value)

    return (together, *large), unpack
