"""Weights that are read and not trained: the base of adapters, and tables that never change.

`Frozen` holds them like `Parameters`, without gradients or masters; every product reads them by the same `Weight`.
Under ZeRO 3 a rank has a shard of them, which is gathered with the trained ones. Leaves out bases in four bits, which
`check_runnable` refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gnomon.runtime.parameters import CPU, Dtypes, Parameters, Slot


class Frozen(Parameters):
    """Whole on every data-parallel rank, or a shard of them under ZeRO 3."""

    trained = False

    def __init__(
        self,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        device: torch.device = CPU,
        *,
        shard: int = 0,
        num_shards: int = 1,
        away: bool = False,
        folder: Path | None = None,
    ) -> None:
        kept = Dtypes(param=dtype, grad=dtype, master=None, states=dtype)
        zero = 3 if num_shards > 1 or away else 0
        super().__init__(
            slots, kept, zero=zero, shard=shard, num_shards=num_shards, away=away, folder=folder, device=device
        )

    def add_grad(self, name: str, grad: Tensor) -> None:
        """Nothing: it is not trained."""

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Nothing."""

    def add_rows(self, name: str, at: Tensor, rows: Tensor) -> None:
        """Nothing."""


def frozen_of(
    slots: Sequence[Slot],
    dtype: torch.dtype,
    values: Callable[[Slot], Tensor],
    device: torch.device,
    *,
    shard: int = 0,
    num_shards: int = 1,
    away: bool = False,
    folder: Path | None = None,
) -> Frozen | None:
    """The frozen weights of a stage with their values; None where it has none. num_shards: ranks that divide them.
    away: whether they wait on the host. folder: where they wait in files instead."""
    if not slots:
        return None
    made = Frozen(slots, dtype, device, shard=shard, num_shards=num_shards, away=away, folder=folder)
    made.fill(values)
    return made
