"""Parameters at step 0: a function of the parameter's name and the seed, whatever the plan.

`initial(name, …)` makes one parameter, so a rank makes only what it holds. Matrices are normal with a standard
deviation of 0.02, norms begin at 1 and biases at 0. Leaves out weights that are read from files (`weights`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.graph import Graph


def tables_of(graph: Graph) -> dict[str, Tensor]:
    """Tables that a model never trains: sines and cosines of the places of patches, where the op that adds them has the
    attribute `sines`."""
    tables: dict[str, Tensor] = {}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        for op in block.ops:
            if op.attr("sines", False):
                rows, width = (dim.size or 0 for dim in block.tensor(op.inputs[1]).dims)
                tables[layer.call.parameter_name(op.inputs[1], layer.index)] = sines_of_places(rows, width)
    return tables


def sines_of_places(rows: int, width: int) -> Tensor:
    """Returns (rows, width): of patches of a square image row by row; half of the width for the column, half for the
    row, each sines, then cosines, at frequencies from 1 to 1/10 000 (Dosovitskiy et al. 2021; Peebles and Xie 2023)."""
    side = math.isqrt(rows)
    speed = 10_000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    place = torch.arange(rows)
    parts = []
    for along in (place % side, place // side):
        angle = along.to(torch.float64)[:, None] * speed
        parts += [angle.sin(), angle.cos()]
    return torch.cat(parts, dim=1)


INITIAL_STD = 0.02
"""Of matrices (Touvron et al. 2023 follow GPT-2 here)."""


def initial(name: str, shape: Sequence[int], seed: int, dtype: torch.dtype, *, constant: float | None = None) -> Tensor:
    """The whole parameter `name`. constant: the value of all its elements, where the op that reads it says so."""
    if constant is not None:
        return torch.full(tuple(shape), constant, dtype=dtype)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * INITIAL_STD).to(dtype)
