"""`alibi`: what attention with linear biases (Press et al. 2022) adds to the scores in place of positions.

A head's bias is its slope times how far the key lies after the query, so 0 for the token itself and less for earlier
ones. Ranks that divide heads make the biases of theirs. Leaves out rows that hold several documents.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.runtime.ops.site import Site


def alibi(site: Site, positions: Tensor) -> Tensor:
    """(positions) -> (queries, keys, heads of this rank)."""
    if positions.ndim > 1:
        raise PlanError(f"{site.op.path}: the runtime has no linear biases for packed rows; pack one document a row")
    heads = site.block.tensor(site.op.outputs[0]).dims[-1].size or 0
    part = site.axis("tp")
    slopes = torch.tensor(slopes_of(heads), dtype=torch.float64, device=positions.device)
    mine = slopes.chunk(part.ranks)[part.index] if heads % part.ranks == 0 else slopes
    # [queries, keys], key less query. Rounded once, after the product: in bfloat16 neighbouring distances beyond 256
    # would be one number.
    distance = (positions[None, :] - positions[:, None]).to(torch.float64)
    return (distance[..., None] * mine).to(torch.get_default_dtype())


def slopes_of(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n heads; beyond a power of two every second one of twice as many."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    # Of 2 * power heads the slopes are 2^(-4j / power); the even j are those above, the odd ones are between them.
    return slopes + [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
