"""Integers that a model reads and nobody trains: positions, and how far apart two positions are, in buckets.

`places(block, name, positions)` makes the state `name` of a block from the positions of its tokens. Which integers
follows from the op that reads it: `alibi` has positions as they are; of an embedding the attribute `first` is the row
of the first token (OPT, RoBERTa), and a table of two dims of positions has T5's buckets, with `two_sided` and
`max_distance`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.graph import Block


def places(block: Block, name: str, positions: Tensor) -> Tensor:
    """Looks up a table of positions. positions: of the tokens, (positions) or, in rows that hold several documents,
    (rows, positions)."""
    reader = next((op for op in block.ops if op.does == "looks up" and op.inputs[0] == name), None)
    dims = block.tensor(name).dims
    if any(op.does == "measures distance" and op.inputs[0] == name for op in block.ops):
        return positions
    if reader is None or len(dims) > 2 or (len(dims) == 2 and positions.ndim > 1):
        raise PlanError(f"block {block.name!r}: the runtime has no values for the state {name!r}")
    if len(dims) == 1:
        first = reader.attr("first", 0)
        assert isinstance(first, int)
        return positions + first if first else positions
    buckets = block.tensor(reader.inputs[1]).dims[0].size or 0
    farthest, two_sided = reader.attr("max_distance", 128), bool(reader.attr("two_sided", False))
    assert isinstance(farthest, int)
    return relative_buckets(positions, buckets, farthest, two_sided=two_sided)


def relative_buckets(
    positions: Tensor, buckets: int, farthest: int, *, two_sided: bool, queries: Tensor | None = None
) -> Tensor:
    """Returns (queries, keys): T5's bucket of a key's distance (Raffel et al. 2020, section 2.1): near ones have one
    each, others share them by the logarithm, from `farthest` on the last one. two_sided: half of them for later keys.
    positions: of the keys. queries: theirs; None: the same."""
    later = positions[None, :] - (positions if queries is None else queries)[:, None]
    first = torch.zeros_like(later)
    if two_sided:
        buckets //= 2
        first = (later > 0).long() * buckets
        distance = later.abs()
    else:
        distance = (-later).clamp(min=0)
    near = buckets // 2
    # The clamp keeps log finite at distance 0, which is near and does not use it. float32 as in transformers: a wider
    # type could put a distance at a border into another bucket.
    share = torch.log(distance.clamp(min=1).float() / near) / math.log(farthest / near)
    far = (near + (share * (buckets - near)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < near, distance, far)
