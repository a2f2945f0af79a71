"""Parameters at step 0: a function of the parameter's name and the seed, whatever the plan.

`initial(name, …)` makes one parameter, so a rank makes only what it holds. Matrices are normal with a standard
deviation of 0.02, norms begin at 1 and biases at 0. Leaves out weights that are read from files (`weights`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

INITIAL_STD = 0.02
"""Of matrices (Touvron et al. 2023 follow GPT-2 here)."""


def initial(name: str, shape: Sequence[int], seed: int, dtype: torch.dtype, *, constant: float | None = None) -> Tensor:
    """The whole parameter `name`. constant: the value of all its elements, where the op that reads it says so."""
    if constant is not None:
        return torch.full(tuple(shape), constant, dtype=dtype)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * INITIAL_STD).to(dtype)
