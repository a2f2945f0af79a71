"""What a rank has of each parameter and optimizer state, as boxes of the whole tensor: `pieces(parameters)`.

A rank's part is a range of a flat buffer, which is a few boxes of the whole parameter (`boxes`), so any plan can read
what any other wrote. Leaves out files (`files`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.runtime.optim.update import Update
from gnomon.runtime.parameters.parameters import Parameters, Range, Slot

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A box of a parameter or state, and where this rank has it."""

    name: str
    """`parameters/model.layers.0.mlp.up_proj.weight`, `first/…`, `second/…`, `master/…`, `rows/…` or `columns/…`."""
    whole: tuple[int, ...]
    """Shape of all of it, over all ranks."""
    offset: tuple[int, ...]
    """Where the box begins in each dim of that."""
    value: Tensor
    """A view, of the box's shape."""

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.name}@{','.join(map(str, self.offset))}"


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """Elements low to high of a tensor in row-major order, as boxes, in order. Each is contiguous."""
    if low >= high:
        return
    if len(shape) <= 1:
        yield ((low,), (high - low,)) if shape else ((), ())
        return
    row_size = int(torch.Size(shape[1:]).numel())
    row, start = divmod(low, row_size)
    # A range that starts within a row: the rest of that row first, then from a row's start on.
    if start or high - low < row_size:
        stop = min(row_size, start + high - low)
        for offset, size in boxes(shape[1:], start, stop):
            yield (row, *offset), (1, *size)
        yield from boxes(shape, low + stop - start, high)
        return
    # Whole rows in one box, then what is left of the last one.
    rows = (high - low) // row_size
    yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
    yield from boxes(shape, low + rows * row_size, high)


def pieces(parameters: Iterable[tuple[Parameters, Update]], *, writes: bool) -> Iterator[Piece]:
    """What a rank writes of what it holds, a tied parameter for the first stage that has it: others may divide it at
    other places. Or what it reads, which under ZeRO 1 and 2 is every part of the parameters."""
    for parameters_, adam in parameters:
        # A tied parameter is written once, but each stage that has it reads it.
        slots = [slot for slot in parameters_.slots if slot.holders or not writes]
        states = {"first": adam.first, "second": adam.second, "master": parameters_.master}
        for name, state in states.items():
            if state is not None:
                yield from _of_buffer(name, state, parameters_.mine, slots)
        chosen = {slot.name for slot in slots}
        for slot, (low, high) in parameters_.pieces():
            if slot.name in chosen and slot.name in adam.factored:
                part = parameters_.mine[0] + low, parameters_.mine[0] + high
                yield from _of_moments(adam.factored[slot.name], part, slot)
        if writes or parameters_.flat is None:
            yield from _of_buffer("parameters", parameters_.shard, parameters_.mine, slots)
        else:
            yield from _of_buffer("parameters", parameters_.flat, (0, parameters_.size), slots)


def _of_moments(moments: tuple[Tensor, Tensor], part: Range, slot: Slot) -> Iterator[Piece]:
    """Pieces of second moments: means by rows and columns, which every rank with elements of a matrix has; or a rank's
    own elements."""
    rows, columns = moments
    if rows.ndim == 1:
        yield from _of_buffer("second", rows, part, [slot])
        return
    assert slot.split is not None
    many, first = slot.whole[: slot.split[0]], 0
    for size, at in zip(many, slot.offset, strict=False):  # of matrices side by side, those of this rank
        first = first * size + at
    for kind, value in (("rows", rows), ("columns", columns)):
        whole = torch.Size(many).numel(), value.shape[1]
        yield Piece(name=f"{kind}/{slot.name}", whole=whole, offset=(first, 0), value=value)


def shared_out(everyone: Sequence[Mapping[str, int]]) -> list[set[str]]:
    """Deals out which keys each rank writes; a key that several have goes to the one with the least to write. everyone:
    bytes of each key that a rank has."""
    holders: dict[str, list[int]] = {}
    for rank, keys in enumerate(everyone):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    load = [0] * len(everyone)
    chosen = [set[str]() for _ in everyone]
    # The same loop over the same table on every rank: all come to the same shares without another message.
    for key, ranks in holders.items():
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += everyone[writer][key]
        chosen[writer].add(key)
    return chosen


def _of_buffer(kind: str, buffer: Tensor, part: Range, slots: Iterable[Slot]) -> Iterator[Piece]:
    """Pieces of a buffer that has the elements `part` of the flat one."""
    for slot in (one for placed in slots for one, _ in placed.each_expert()):
        low, high = max(slot.start, part[0]), min(slot.stop, part[1])
        at = low - part[0]
        for offset, size in boxes(slot.shape, low - slot.start, high - slot.start):
            count = torch.Size(size).numel()
            yield Piece(
                name=f"{kind}/{slot.name}",
                whole=slot.whole,
                offset=tuple(a + b for a, b in zip(slot.offset, offset, strict=True)),
                value=buffer[at : at + count].view(size),
            )
            at += count
