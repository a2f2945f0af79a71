"""What comes in: sequences and router load.

A `Workload` is one global batch given by length and count or sequence by sequence, or a distribution to draw it from.
Leaves out the token values, how a batch is cut into units (`program.units`) and how long anything takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.schema import typed

MAX_TOKENS = 10**9
"""Most tokens of a sequence: a hundred times the longest context that anyone has published."""

MAX_SEQUENCES = 10**7
"""Most sequences of a step: a hundred times the largest batch that anyone has published."""


def _whole(name: str, value: object) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise PlanError(f"{name} = {str(value)[:40]} must be a whole number")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """How a router spreads tokens over experts, as a share of the routed tokens for each expert, largest first or as
    listed."""

    kind: Literal["balanced", "zipf", "histogram", "recorded"] = "balanced"
    """`balanced`: equal shares. `zipf`: share of the k-th expert ∝ 1/k^s. `histogram`: counts as observed, the same in
    every layer. `recorded`: counts of each layer."""
    s: float = 0.0
    """Exponent of `zipf`; 0 is balanced."""
    counts: tuple[float, ...] = ()
    """Tokens seen by each expert, for `histogram`; only the ratios matter."""
    layers: tuple[tuple[float, ...], ...] = ()
    """(layers with experts, experts): tokens seen by each expert of each layer, for `recorded`; only the ratios within
    a layer matter."""
    capacity: float = 0.0
    """Rows that an expert takes, over the mean; what is routed to it beyond them is dropped (GShard, Lepikhin et al.
    2020; Switch Transformer, Fedus et al. 2021). 0: none is."""
    padded: bool = False
    """Every expert computes its whole capacity, filled up with zeros, however few rows it gets (GShard, DeepSpeed-MoE;
    Megatron-LM with `--moe-pad-expert-input-to-capacity`)."""
    alone: float = 0.0
    """Share of tokens that go to the first of their two experts alone, under a plan's `experts.threshold`."""

    @typed
    def __post_init__(self) -> None:
        if self.capacity and not 1 <= self.capacity < float("inf"):
            raise PlanError(f"router capacity = {self.capacity} must be at least 1 (the mean), or 0 for no limit")
        if self.padded and not self.capacity:
            raise PlanError("router padded fills experts up to their capacity; give one, as in capacity = 1.25")
        if (self.kind == "zipf") != (self.s != 0.0) and not (self.kind == "zipf" and self.s == 0.0):
            raise PlanError(f"router load {self.kind!r} does not use s = {self.s}; write kind = 'zipf' or leave s out")
        if (self.kind == "histogram") != bool(self.counts):
            raise PlanError("router load 'histogram' needs counts, one for each expert, and only it takes them")
        if (self.kind == "recorded") != bool(self.layers):
            raise PlanError("router load 'recorded' needs layers, the counts of each layer, and only it takes them")
        if len({len(layer) for layer in self.layers}) > 1:
            raise PlanError("router load 'recorded' needs as many counts in every layer: one for each expert")
        if not 0.0 <= self.alone <= 1.0:
            raise PlanError(f"router load has alone = {self.alone}; it is a share of tokens, from 0 to 1")
        if not 0 <= self.s < float("inf"):
            raise PlanError(f"router load has s = {self.s}; the exponent of zipf is a finite number of at least 0")
        for counts in (self.counts, *self.layers):
            if not all(0 <= count < float("inf") for count in counts) or (counts and not sum(counts) > 0):
                raise PlanError("router load needs finite counts of at least 0 with a positive sum")

    def shares(self, num_experts: int) -> NDArray[np.float64]:
        """Share of a layer's routed tokens of each expert: shape (layers, num_experts), rows adding up to 1; one row
        where all layers have the same. PlanError if counts are not as many."""
        measured = self.layers or ((self.counts,) if self.counts else ())
        if measured and len(measured[0]) != num_experts:
            raise PlanError(
                f"router {'record' if self.layers else 'histogram'} has {len(measured[0])} counts, but the block has "
                f"{num_experts} experts"
            )
        weights = np.asarray(
            measured or (np.arange(1, num_experts + 1, dtype=np.float64) ** -self.s,), dtype=np.float64
        )
        shares: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return shares

    def fractions(self, num_experts: int) -> NDArray[np.float64]:
        """Share of routed tokens of each expert, the mean over layers: shape (num_experts,), adding up to 1. PlanError
        if counts are not as many."""
        fractions: NDArray[np.float64] = self.shares(num_experts).mean(axis=0)
        return fractions

    def computed_shares(self, num_experts: int) -> NDArray[np.float64]:
        """Rows that each expert computes, as a share of all that are routed, the mean over layers: shape
        (num_experts,). Without a capacity that is `fractions`."""
        computed: NDArray[np.float64] = self.computed_by_layer(num_experts).mean(axis=0)
        return computed

    def computed_by_layer(self, num_experts: int) -> NDArray[np.float64]:
        """The same of each layer, (layers, num_experts); one row where all layers have the same."""
        if self.padded:
            return np.full((1, num_experts), self.capacity / num_experts)
        shares = self.shares(num_experts) * (1.0 - self.alone / 2)
        return np.minimum(shares, self.capacity / num_experts) if self.capacity else shares

    def dropped(self, num_experts: int) -> float:
        """Share of routed (token, expert) pairs that no expert has room for."""
        if not self.capacity:
            return 0.0
        over_capacity = np.maximum(self.shares(num_experts) * (1.0 - self.alone / 2) - self.capacity / num_experts, 0.0)
        return float(over_capacity.sum(axis=1).mean())

    def busiest(self, num_experts: int, ep: int) -> float:
        """Rows that the busiest of `ep` ranks computes over those of balanced routing without drops. Every layer waits
        for its own busiest rank: the mean over layers of these."""
        if self.kind == "balanced" and not self.padded:
            return 1.0 - self.alone / 2
        return float(self._by_rank(num_experts, ep).max(axis=1).mean() * ep)

    def rank_fractions(self, num_experts: int, ep: int) -> NDArray[np.float64]:
        """Share of routed tokens that each of `ep` ranks computes, the mean over layers; a rank holds consecutive
        experts. Where all layers are alike, the largest times `ep` is the slowdown of the slowest rank; 1 when
        balanced."""
        fractions: NDArray[np.float64] = self._by_rank(num_experts, ep).mean(axis=0)
        return fractions

    def _by_rank(self, num_experts: int, ep: int) -> NDArray[np.float64]:
        """The same of each layer, (layers, ep)."""
        if num_experts % ep:
            raise PlanError(
                f"{num_experts} experts do not divide over ep = {ep}; choose ep from the divisors of {num_experts}"
            )
        computed = self.computed_by_layer(num_experts)
        by_rank: NDArray[np.float64] = computed.reshape(len(computed), ep, -1).sum(axis=2)
        return by_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of sequence lengths: each length with its weight (probabilities or counts)."""

    values: tuple[int, ...]
    """Lengths in tokens."""
    weights: tuple[float, ...]
    """Weight of each; only the ratios matter."""

    @typed
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

    @typed
    def __post_init__(self) -> None:
        _whole("global_batch_size", self.global_batch_size)
        for name, size in (("seq_len", self.seq_len), *(("lengths", length) for length in self.lengths), *self.sizes):
            _whole(name, size)
            if size > MAX_TOKENS:
                raise PlanError(f"{name} = {size} is over the limit of {MAX_TOKENS:,}; give the tokens of one sequence")
        stated = [name for name in ("seq_len", "lengths", "distribution") if getattr(self, name)]
        if len(stated) != 1:
            raise PlanError(
                f"a workload takes exactly one of seq_len, lengths, distribution, not {' and '.join(stated) or 'none'}"
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


def whole_sequences(tokens: int, seq_len: int) -> int:
    """Sequences of a step with so many tokens. PlanError, with the nearest numbers of tokens, if they are not whole."""
    count, rest = divmod(tokens, seq_len)
    if rest:
        near = f"{count * seq_len:,} ({count}) or " if count else ""
        raise PlanError(
            f"{tokens:,} tokens are not whole sequences of {seq_len}; the nearest are {near}{(count + 1) * seq_len:,} "
            f"({count + 1} sequences)"
        )
    return count
