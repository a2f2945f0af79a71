"""Sequences of several lengths in one row: which of their tokens a rank holds there, and which keys came before.

A `Unit` says what a microbatch holds: whole sequences behind each other, one chunk of a long sequence, or sequences of
which ranks of cp divide some and have others whole (`local`). `parts_of` lists its `Part`s on one rank, in the order of
the rank's row. `Prefixes` are keys and values of the chunks before, and the gradients that later chunks leave at them.
Leaves out attention itself (`ops.attention`), and which units there are (`lowering.units`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnomon.plans import Unit
from gnomon.sharding.context import chunks_of

Segment = tuple[int, int]
"""(first position, how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens of one sequence on one rank, which lie behind each other in its row."""

    sequence: int
    """Of the global batch."""
    stop: int
    """Tokens of the sequence that there are up to the end of this unit; a later chunk may have more."""
    start: int
    """Its first token in this unit; those before it are in earlier chunks."""
    segments: tuple[Segment, ...]
    """Positions here, in their order."""
    is_chunk: bool
    """Whether other units have more of the sequence."""
    ranks: tuple[tuple[Segment, ...], ...] = ()
    """Positions on each rank of cp, where they divide it; empty where this rank has it whole."""
    style: str = ""
    """How its attention goes over cp: `ring`, `all_gather`, `ulysses`; empty where this rank has it whole."""

    @property
    def tokens(self) -> int:
        """Tokens of the sequence that this rank holds."""
        return sum(count for _, count in self.segments)


def divided(start: int, stop: int, index: int, cp: int, order: str) -> tuple[Segment, ...]:
    """Positions from `start` to `stop` that one of `cp` ranks holds; parts differ by a token where they must."""
    ways = cp * (2 if order == "zigzag" else 1)
    ends = [start + (stop - start) * chunk // ways for chunk in range(ways + 1)]
    segments = ((ends[chunk], ends[chunk + 1] - ends[chunk]) for chunk in chunks_of(index, cp, order))
    return tuple(segment for segment in segments if segment[1])


def parts_of(
    unit: Unit, lengths: tuple[int, ...], *, index: int, cp: int, order: str, style: Callable[[int], str]
) -> tuple[Part, ...]:
    """Lists the parts of sequences that one rank holds, in the unit's order; sequences that other ranks of cp have
    whole are not among them.

    lengths: of every sequence of the global batch. index: the rank's place on cp. style: how ranks attend to a
    divided sequence of so many tokens.
    """
    where = dict(unit.local)
    found = list[Part]()
    for sequence, start, stop in unit.pieces:
        cut = stop - start < lengths[sequence]
        if cp == 1 or where.get(sequence) == index:
            segments: tuple[Segment, ...] = ((start, stop - start),)
            found.append(Part(sequence=sequence, start=start, stop=stop, segments=segments, is_chunk=cut))
        elif sequence not in where:
            ranks = tuple(divided(start, stop, rank, cp, order) for rank in range(cp))
            found.append(
                Part(
                    sequence=sequence,
                    start=start,
                    stop=stop,
                    segments=ranks[index],
                    is_chunk=cut,
                    ranks=ranks,
                    style=style(stop),
                )
            )
    return tuple(found)


@dataclass(slots=True, kw_only=True, eq=False)
class Prefix:
    """Keys and values of one sequence in one layer, (1, kv heads, tokens, dim) each, and what their gradient is yet."""

    keys: Tensor
    values: Tensor
    grad_keys: Tensor | None = None
    grad_values: Tensor | None = None

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors that it holds: keys, values and their gradients so far."""
        yield from (self.keys, self.values)
        yield from (x for x in (self.grad_keys, self.grad_values) if x is not None)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of keys and values, to be added to."""
        if self.grad_keys is None or self.grad_values is None:
            self.grad_keys, self.grad_values = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        return self.grad_keys, self.grad_values


@dataclass(slots=True, kw_only=True, eq=False)
class Prefixes:
    """Those of the sequences that are cut, while their chunks are under way."""

    lengths: tuple[int, ...]
    """Tokens of each sequence of the global batch."""
    prefixes: dict[tuple[str, int], Prefix] = field(default_factory=dict)
    """By attention (layer and op) and sequence."""

    def append(self, at: str, part: Part, keys: Tensor, values: Tensor) -> Prefix:
        """The sequence's keys and values with those of a chunk, which are (1, kv heads, the chunk's tokens, dim)."""
        key = at, part.sequence
        if key not in self.prefixes:
            size = self.lengths[part.sequence]
            self.prefixes[key] = Prefix(
                keys=keys.new_empty((*keys.shape[:2], size, keys.shape[3])),
                values=values.new_empty((*values.shape[:2], size, values.shape[3])),
            )
        prefix = self.prefixes[key]
        prefix.keys[:, :, part.start : part.stop] = keys
        prefix.values[:, :, part.start : part.stop] = values
        return prefix

    def free(self, at: str, part: Part) -> None:
        """Frees a sequence's, once its first chunk has gone backward: that comes last."""
        if not part.start:
            self.prefixes.pop((at, part.sequence), None)

    def clear(self) -> None:
        """Forgets all prefixes, before another batch."""
        self.prefixes.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes that are held."""
        return sum(x.untyped_storage().nbytes() for prefix in self.prefixes.values() for x in prefix.tensors)
