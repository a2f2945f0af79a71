"""Tensors joined along a dim: `cat` of parts of equal size, as in rotary embeddings.

The joined dim is an axis of parts, outside the axes of one part; each point takes the value of its part. Leaves out
parts of unequal size, which stay ATen's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gnomon.compiler.tiles.body import Tensor, UnfitError
from gnomon.compiler.tiles.lowering import Lowering
from gnomon.compiler.tiles.sizes import equal
from gnomon.compiler.tiles.values import index, where

aten = torch.ops.aten
MOST = 4
"""Parts: every point computes all of them."""


def cat(node: Lowering, tensors: Sequence[Any], dim: int = 0) -> Tensor:
    shapes = [node.shape(part) for part in tensors]
    if not 2 <= len(shapes) <= MOST:
        raise UnfitError("one part, or many")
    if any(len(shape) != len(shapes[0]) or not all(map(equal, shape, shapes[0])) for shape in shapes):
        raise UnfitError("parts of unequal size")
    dims = node.dims_of(shapes[0], tensors)
    parts = [node.operand(part, dims) for part in tensors]
    body, at = node.body, dim % len(dims)
    # The joined dim becomes two axes, which part and where in it, so that parts are read by the indices that they had;
    # hence parts of one size.
    body.axes.append(len(parts))
    axis = len(body.axes) - 1
    body.joined_axes.append((axis, *dims[at]))
    value = parts[-1]
    for number in reversed(range(len(parts) - 1)):
        value = where(index(body, axis).eq(number), parts[number], value)
    return node.result(value, (*dims[:at], (axis, *dims[at]), *dims[at + 1 :]))


JOINS = frozenset({aten.cat.default})

RULES: dict[Any, Callable[..., Any]] = {aten.cat.default: cat}
