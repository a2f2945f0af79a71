"""`Unit`: what a microbatch really is.

The tokens that pass through the pipeline together: an ordinary microbatch, a chunk of a long sequence, a pack of short
ones, a decode batch. Loss weights over the units of one global batch add up to 1 (`normalised` by global tokens), so
that how a batch is cut does not change the gradient. Leaves out the token values and how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from gnomon.errors import PlanError

Piece = tuple[int, int, int]
"""(sequence, start, stop): tokens start … stop-1 of that sequence of the global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Tokens that pass through the pipeline together on one data-parallel worker."""

    pieces: tuple[Piece, ...]
    """Parts of sequences. Attention stays within a sequence (block-diagonal), and reaches back to its token 0."""
    weight: float = 0.0
    """Share of the global batch's loss. `normalised` sets it to tokens / global tokens; 0 while unknown, and when
    decoding."""
    worker: int = 0
    """Data-parallel worker that takes it, 0 … data_ranks-1."""
    local: tuple[tuple[int, int], ...] = ()
    """(sequence, rank) for sequences that one context-parallel rank of the worker has whole (Skrull); cp divides the
    others."""

    def __post_init__(self) -> None:
        if not self.pieces:
            raise PlanError("a unit has no pieces; give at least one (sequence, start, stop)")
        for sequence, start, stop in self.pieces:
            if sequence < 0 or start < 0 or stop <= start:
                raise PlanError(f"piece ({sequence}, {start}, {stop}) must have sequence >= 0 and 0 <= start < stop")
        ordered = sorted(self.pieces)
        for (a, _, stop), (b, start, _) in zip(ordered, ordered[1:], strict=False):
            # Sorted by sequence and start, so that an overlap is always between neighbours.
            if a == b and start < stop:
                raise PlanError(
                    f"a unit holds token {start} of sequence {a} twice; pieces of a sequence must not overlap"
                )
        if not 0.0 <= self.weight <= 1.0:
            raise PlanError(f"unit weight {self.weight} must be between 0 and 1: it is a share of the global batch")
        placed = [sequence for sequence, _ in self.local]
        if len(set(placed)) != len(placed) or not set(placed) <= {sequence for sequence, _, _ in self.pieces}:
            raise PlanError(f"unit local {self.local} must name sequences of the unit, each once")
        if self.worker < 0 or any(rank < 0 for _, rank in self.local):
            raise PlanError(f"unit worker {self.worker} and the ranks of local {self.local} must be 0 or more")

    @property
    def tokens(self) -> int:
        """Tokens computed in this unit."""
        return sum(stop - start for _, start, stop in self.pieces)

    def rank_tokens(self, cp: int) -> tuple[Fraction, ...]:
        """Tokens on each of `cp` context-parallel ranks: local sequences whole, the others in equal parts."""
        return self._on_ranks(cp, {sequence: count for sequence, count, _ in self._by_sequence(causal=True)})

    def _on_ranks(self, cp: int, amounts: dict[int, int]) -> tuple[Fraction, ...]:
        where = dict(self.local)
        if any(rank >= cp for rank in where.values()):
            raise PlanError(f"unit local {self.local} names a rank beyond cp = {cp} (0 to {cp - 1})")
        # Exact, since shares of several ranks are added up and compared.
        divided = Fraction(sum(n for sequence, n in amounts.items() if sequence not in where), cp)
        return tuple(
            divided + sum(n for sequence, n in amounts.items() if where.get(sequence) == rank) for rank in range(cp)
        )

    def _by_sequence(self, *, causal: bool) -> Iterator[tuple[int, int, int]]:
        """(sequence, tokens, pairs) of each sequence in the unit."""
        for sequence in dict.fromkeys(sequence for sequence, _, _ in self.pieces):
            own = Unit(pieces=tuple(piece for piece in self.pieces if piece[0] == sequence))
            yield sequence, own.tokens, own.attention_pairs(causal=causal)

    def attention_pairs(self, *, causal: bool = True) -> int:
        """(query, key) pairs over all pieces: a query sees its sequence's tokens up to itself, or all of the prefix
        and its own piece when not `causal`."""
        total = 0
        for _, start, stop in self.pieces:
            queries = stop - start
            # Every query sees the prefix before its piece; within it the i-th sees i.
            total += queries * start + (queries * (queries + 1) // 2 if causal else queries * queries)
        return total


def normalised(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """The same units with weight = tokens / global tokens, so that the weights of the batch add up to 1."""
    total = sum(unit.tokens for unit in units)
    return tuple(replace(unit, weight=unit.tokens / total) for unit in units)
