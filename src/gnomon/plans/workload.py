"""What comes in: sequences and router load; and `Unit`, what a microbatch really is.

A `Workload` is one global batch given by length and count or sequence by sequence, or a distribution to draw it from.
A `Unit` is the tokens that pass through the pipeline together: an ordinary microbatch, a chunk of a long sequence, a
pack of short ones, a decode batch. Loss weights over the units of one global batch add up to 1 (normalised by global
tokens), so that how a batch is cut does not change the gradient. Leaves out the token values and how long anything
takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError

MAX_TOKENS = 10**9
"""Most tokens of a sequence: a hundred times the longest context that anyone has published."""

MAX_SEQUENCES = 10**7
"""Most sequences of a step: a hundred times the largest batch that anyone has published."""

Piece = tuple[int, int, int]
"""(sequence, start, stop): tokens start … stop-1 of that sequence of the global batch."""


def _whole(name: str, value: object) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise PlanError(f"{name} = {str(value)[:40]} must be a whole number")


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
            total += queries * start + (queries * (queries + 1) // 2 if causal else queries * queries)
        return total


def normalised(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """The same units with weight = tokens / global tokens, so that the weights of the batch add up to 1."""
    total = sum(unit.tokens for unit in units)
    return tuple(replace(unit, weight=unit.tokens / total) for unit in units)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """How a router spreads tokens over experts, as a share of the routed tokens for each expert, largest first or as
    listed."""

    kind: Literal["balanced", "zipf", "histogram"] = "balanced"
    """`balanced`: equal shares. `zipf`: share of the k-th expert ∝ 1/k^s. `histogram`: counts as observed."""
    s: float = 0.0
    """Exponent of `zipf`; 0 is balanced."""
    counts: tuple[float, ...] = ()
    """Tokens seen by each expert, for `histogram`; only the ratios matter."""
    capacity: float = 0.0
    """Rows that an expert takes, over the mean; what is routed to it beyond them is dropped (GShard, Lepikhin et al.
    2020; Switch Transformer, Fedus et al. 2021). 0: none is."""
    padded: bool = False
    """Every expert computes its whole capacity, filled up with zeros, however few rows it gets (GShard, DeepSpeed-MoE;
    Megatron-LM with `--moe-pad-expert-input-to-capacity`)."""

    def __post_init__(self) -> None:
        if self.capacity and not 1 <= self.capacity < float("inf"):
            raise PlanError(f"router capacity = {self.capacity} must be at least 1 (the mean), or 0 for no limit")
        if self.padded and not self.capacity:
            raise PlanError("router padded fills experts up to their capacity; give one, as in capacity = 1.25")
        if (self.kind == "zipf") != (self.s != 0.0) and not (self.kind == "zipf" and self.s == 0.0):
            raise PlanError(f"router load {self.kind!r} does not use s = {self.s}; write kind = 'zipf' or leave s out")
        if (self.kind == "histogram") != bool(self.counts):
            raise PlanError("router load 'histogram' needs counts, one for each expert, and only it takes them")
        if not 0 <= self.s < float("inf"):
            raise PlanError(f"router load has s = {self.s}; the exponent of zipf is a finite number of at least 0")
        if not all(0 <= count < float("inf") for count in self.counts) or (self.counts and not sum(self.counts) > 0):
            raise PlanError("router load needs finite counts of at least 0 with a positive sum")

    def fractions(self, num_experts: int) -> NDArray[np.float64]:
        """Share of routed tokens of each expert: shape (num_experts,), adding up to 1. PlanError if counts are not as
        many."""
        if self.kind == "histogram":
            if len(self.counts) != num_experts:
                raise PlanError(
                    f"router histogram has {len(self.counts)} counts, but the block has {num_experts} experts"
                )
            weights = np.asarray(self.counts, dtype=np.float64)
        else:
            weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -self.s
        fractions: NDArray[np.float64] = weights / weights.sum()
        return fractions

    def computed(self, num_experts: int) -> NDArray[np.float64]:
        """Rows that each expert computes, as a share of all that are routed: shape (num_experts,). Without a capacity
        that is `fractions`."""
        if self.padded:
            return np.full(num_experts, self.capacity / num_experts)
        found = self.fractions(num_experts)
        return np.minimum(found, self.capacity / num_experts) if self.capacity else found

    def dropped(self, num_experts: int) -> float:
        """Share of routed (token, expert) pairs that no expert has room for."""
        if not self.capacity:
            return 0.0
        return float(np.maximum(self.fractions(num_experts) - self.capacity / num_experts, 0.0).sum())

    def busiest(self, num_experts: int, ep: int) -> float:
        """Rows that the busiest of `ep` ranks computes over those of balanced routing without drops."""
        if self.kind == "balanced" and not self.padded:
            return 1.0
        return float(self.rank_fractions(num_experts, ep).max() * ep)

    def rank_fractions(self, num_experts: int, ep: int) -> NDArray[np.float64]:
        """Share of routed tokens that each of `ep` ranks computes; a rank holds consecutive experts. The largest times
        `ep` is the slowdown of the slowest rank; 1 when balanced."""
        if num_experts % ep:
            raise PlanError(
                f"{num_experts} experts do not divide over ep = {ep}; choose ep from the divisors of {num_experts}"
            )
        fractions: NDArray[np.float64] = self.computed(num_experts).reshape(ep, -1).sum(axis=1)
        return fractions


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of sequence lengths: each length with its weight (probabilities or counts)."""

    values: tuple[int, ...]
    """Lengths in tokens."""
    weights: tuple[float, ...]
    """Weight of each; only the ratios matter."""

    def __post_init__(self) -> None:
        if not self.values or len(self.values) != len(self.weights):
            raise PlanError(
                f"{len(self.values)} lengths with {len(self.weights)} weights; give one weight for each length"
            )
        for value in self.values:
            _whole("values", value)
        if max(self.values) > MAX_TOKENS:
            raise PlanError(f"a length of {max(self.values)} tokens is over the limit of {MAX_TOKENS:,}")
        if not all(map(isfinite, self.weights)):
            raise PlanError(f"weights {self.weights} must be finite numbers")
        if min(self.values) < 1 or min(self.weights) < 0 or sum(self.weights) <= 0:
            raise PlanError("lengths must be at least 1 token, weights >= 0 with a positive sum")

    def draw(self, count: int, seed: int) -> tuple[int, ...]:
        """`count` lengths, reproducible from `seed`."""
        probabilities = np.asarray(self.weights, dtype=np.float64) / sum(self.weights)
        return tuple(int(n) for n in np.random.default_rng(seed).choice(self.values, size=count, p=probabilities))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One global batch, or a distribution to draw one from.

    Give `seq_len` (all equal), or `lengths` (each sequence), or `distribution`. Only with `lengths` may
    `global_batch_size` be left out: it is their number.
    """

    SCHEMA: ClassVar[str] = "gnomon.workload/1"

    global_batch_size: int = 0
    """Sequences in one optimizer step over all ranks."""
    seq_len: int = 0
    """Tokens of every sequence."""
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, in batch order."""
    distribution: Lengths | None = None
    """Lengths to draw."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes of further dims that the graph leaves open, as `["kv_seq", 512]` for the other side of an
    encoder–decoder."""
    router: RouterLoad = RouterLoad()
    """How tokens spread over experts."""

    def __post_init__(self) -> None:
        _whole("global_batch_size", self.global_batch_size)
        for name, size in (("seq_len", self.seq_len), *(("lengths", length) for length in self.lengths), *self.sizes):
            _whole(name, size)
            if size > MAX_TOKENS:
                raise PlanError(f"{name} = {size} is over the limit of {MAX_TOKENS:,}; give the tokens of one sequence")
        given = [name for name in ("seq_len", "lengths", "distribution") if getattr(self, name)]
        if len(given) != 1:
            raise PlanError(
                f"a workload takes exactly one of seq_len, lengths, distribution, not {' and '.join(given) or 'none'}"
            )
        if self.seq_len < 0 or any(length < 1 for length in self.lengths):
            raise PlanError("sequences have at least 1 token")
        if self.lengths and self.global_batch_size not in (0, len(self.lengths)):
            raise PlanError(
                f"global_batch_size = {self.global_batch_size}, but lengths lists {len(self.lengths)}; leave it out"
            )
        if not self.lengths and self.global_batch_size < 1:
            raise PlanError("a workload needs global_batch_size >= 1: sequences in one optimizer step over all ranks")
        if self.global_batch_size > MAX_SEQUENCES:
            raise PlanError(
                f"a global batch of {self.global_batch_size:,} sequences is over the limit of {MAX_SEQUENCES:,}; give "
                f"the sequences of one optimizer step"
            )
        names = [name for name, _ in self.sizes]
        if len(set(names)) != len(names) or any(size < 1 for _, size in self.sizes):
            raise PlanError(f"workload sizes {self.sizes} must name each dim once, with a size of at least 1")

    @property
    def batch_size(self) -> int:
        """Sequences in one optimizer step."""
        return len(self.lengths) or self.global_batch_size

    def sequence_lengths(self, seed: int = 0) -> tuple[int, ...]:
        """Tokens of each sequence of one global batch; a distribution is drawn with `seed`."""
        if self.distribution is not None:
            return self.distribution.draw(self.batch_size, seed)
        return self.lengths or (self.seq_len,) * self.batch_size
