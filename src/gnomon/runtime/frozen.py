"""Weights that are read and not trained: the base of adapters, and tables that never change.

`Frozen` holds them like `Parameters`, without gradients, masters or shards; every product reads them by the same
`Weight`. Leaves out bases in four bits, which `check_runnable` refuses by name, and shares of them under ZeRO 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnomon.runtime.parameters import CPU, Dtypes, Parameters, Slot


class Frozen(Parameters):
    """Whole on every data-parallel rank."""

    trained = False

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype, device: torch.device = CPU) -> None:
        kept = Dtypes(param=dtype, grad=dtype, master=None, states=dtype)
        super().__init__(slots, kept, zero=0, shard=0, num_shards=1, device=device)

    def add_grad(self, name: str, grad: Tensor) -> None:
        """Nothing: it is not trained."""

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Nothing."""

    def add_rows(self, name: str, at: Tensor, rows: Tensor) -> None:
        """Nothing."""


def frozen_of(
    slots: Sequence[Slot], dtype: torch.dtype, values: Callable[[Slot], Tensor], device: torch.device
) -> Frozen | None:
    """The frozen weights of a stage with their values; None where it has none."""
    if not slots:
        return None
    made = Frozen(slots, dtype, device)
    made.fill(values)
    return made
