"""Weights that are read and not trained: the base of adapters, and tables that never change.

`Frozen` holds them like `Parameters`, without gradients or masters; every product reads them by the same `Weight`.
`FourBit` holds those of a base in four bits, as bytes (`nf4`): each product makes them wide for itself, in forward and
again in backward. Under ZeRO 3 a rank has a shard of either, which is gathered with the trained ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gnomon.errors import InputError
from gnomon.graph import Block, Graph
from gnomon.models.lora import INT8, NF4
from gnomon.runtime.parameters.nf4 import Form, Nf4Blocks, quantised
from gnomon.runtime.parameters.parameters import CPU, Dtypes, Parameters, Range, Slot, Values
from gnomon.runtime.parameters.weights import WeightReader


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
        dtypes = Dtypes(param=dtype, grad=dtype, master=None, states=dtype)
        zero = 3 if num_shards > 1 or away else 0
        super().__init__(
            slots, dtypes, zero=zero, shard=shard, num_shards=num_shards, away=away, folder=folder, device=device
        )

    def add_grad(self, name: str, grad: Tensor) -> None:
        """Does nothing: a frozen weight is not trained."""

    def add_matmul(self, name: str, lhs: Tensor, right: Tensor) -> None:
        """Does nothing: a frozen weight is not trained."""

    def add_matmuls(self, name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Does nothing: a frozen weight is not trained."""

    def add_rows(self, name: str, at: Tensor, rows: Tensor) -> None:
        """Does nothing: a frozen weight is not trained."""


class FourBit(Frozen):
    """Weights in four bits: `flat` has their bytes, and a value is made of them each time that it is asked for."""

    lies_flat = False

    def __init__(
        self,
        slots: Sequence[Slot],
        read: Callable[[Slot], tuple[Form, Tensor]],
        where: Where,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        """Takes read, which gives a rank's part of a weight as bytes, and the dtype that matmuls read."""
        parts = {slot.name: read(slot) for slot in slots}
        self.forms = {name: form for name, (form, _) in parts.items()}
        self.wide = dtype
        super().__init__(
            slots,
            torch.uint8,
            device,
            shard=where.shard,
            num_shards=where.num_shards,
            away=where.away,
            folder=where.folder,
        )
        flat = torch.zeros(self.size, dtype=torch.uint8)
        for name, (begin, end) in self.ranges.items():
            flat[begin:end] = parts.pop(name)[1]
        self.keep(flat)

    def lay_out(self) -> dict[str, Range]:
        """The range of bytes of each weight in the buffer, by name."""
        ends, end = dict[str, Range](), 0
        for name, form in self.forms.items():
            ends[name] = end, end + form.nbytes
            end += form.nbytes
        return ends

    def value(self, name: str) -> Tensor:
        """One whole local weight, made wide: a new tensor. It must be gathered."""
        begin, end = self.ranges[name]
        assert self.flat is not None, f"{name} is read while its stage is not gathered"
        return self.forms[name].wide(self.flat[begin:end]).to(self.wide).view(self.by_name[name].shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The part of frozen weights that a rank holds, and the place of each."""

    shard: int = 0
    """Its number."""
    num_shards: int = 1
    """Ranks that divide them."""
    away: bool = False
    """Whether they wait on the host."""
    folder: Path | None = None
    """Where they wait in files instead."""


def frozen_of(
    slots: Iterable[Slot],
    dtype: torch.dtype,
    values: Callable[[Slot], Tensor],
    device: torch.device,
    where: Where = Where(),  # noqa: B008 (frozen)
) -> Frozen | None:
    """The frozen weights of a stage with their values; None where it has none."""
    if not (own := place_slots(slots)):
        return None
    frozen = Frozen(
        own,
        dtype,
        device,
        shard=where.shard,
        num_shards=where.num_shards,
        away=where.away,
        folder=where.folder,
    )
    frozen.fill(values)
    return frozen


def four_bit_of(
    slots: Iterable[Slot],
    dtype: torch.dtype,
    values: Callable[[Slot], Tensor],
    stored: Values | None,
    device: torch.device,
    where: Where = Where(),  # noqa: B008 (frozen)
) -> FourBit | None:
    """The weights of a stage that are in four bits; None where it has none. stored: who reads them from a folder that
    has them so. Otherwise `values` has them, and they are quantised whole, one after the other, whatever part of them
    a rank holds: all plans compute with the same numbers."""

    def read(slot: Slot) -> tuple[Form, Tensor]:
        blocks: Nf4Blocks | None = stored.blocks(slot.name) if isinstance(stored, WeightReader) else None
        if blocks is None:
            blocks = quantised(values(replace(slot, shape=slot.whole, offset=(0,) * len(slot.whole))))
        return blocks.part(slot.name, slot.whole, slot.offset, slot.shape)

    own = place_slots(slots)
    return FourBit(own, read, where, dtype, device) if own else None


def place_slots(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """One after the other."""
    placed, start = list[Slot](), 0
    for slot in slots:
        placed.append(replace(slot, start=start))
        start = placed[-1].stop
    return tuple(placed)


def in_four_bits(graph: Graph) -> frozenset[str]:
    """Weights that a graph has in four bits, by full name; buffers of a captured model are of their own dtype.
    InputError for a base in eight bits."""
    if any(tensor.dtype == INT8 for block in graph.blocks if not _captured(block) for tensor in block.frozen):
        raise InputError(
            f"{graph.name}: frozen weights in eight bits are predicted and not trained beside; store them in four "
            f"(+qlora16) or in the compute dtype (+lora16)"
        )
    return frozenset(
        layer.call.parameter_name(tensor.name, layer.index)
        for layer in graph.layers()
        for tensor in graph.block(layer.call.block).frozen
        if tensor.dtype == NF4 and not _captured(graph.block(layer.call.block))
    )


def _captured(block: Block) -> bool:
    return any(op.captured is not None for op in block.ops)
