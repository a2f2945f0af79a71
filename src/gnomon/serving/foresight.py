"""Experts that the next layer's tokens will ask for, foreseen from those that they have chosen, and copied in time.

`Paths` counts, layer by layer, which experts tokens choose after the same path: P(expert of layer i + 1 | first
choices of the last `LENGTH` layers). Of a batch that gives how many rows each expert of the next layer is to expect,
n_e = sum over tokens of P(e | path), and `choose_copies` which experts ranks of ep hold copies of meanwhile, so that
the rank that all wait for has least to do: its hottest expert goes to the rank with the least, again and again, while
that gains. Every rank routes all tokens and counts the same, so that all decide the same without a message. When the
layer comes, rows are shared out by what routers really chose (`shares`); a wrong guess costs time and changes nothing.
`replay(record, …)` is what a recorded server would have gained. Leaves out how copies are fetched (`serve.copies`), and
planning anew where the guess was wrong, which Lina does before a layer whose popular experts are others than foreseen:
a fetch that nothing hides takes longer than the rows that it would save.
Source: Li et al. 2023 (Lina, ATC), section 5: popularity by paths of three layers, replicas of popular experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gnomon.plans.replicas import shared_out

LENGTH = 3
"""Layers of a path, as Lina has it."""
Ints = NDArray[np.int64]
Copies = tuple[tuple[int, ...], ...]
"""Experts of other ranks that each rank of ep holds copies of, in the order of its slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What ranks pay beside rows, in rows of an expert that take as long."""

    touch: float
    """Reading an expert's weights: with fewer rows an expert takes as long as with these."""
    fetch: float
    """Bringing a copy of one, as far as no other work hides it."""


class Paths:
    """What tokens chose after what: counts that grow while a model serves."""

    def __init__(self, layers: int, experts: int, length: int = LENGTH) -> None:
        self.layers, self.experts, self.length = layers, experts, length
        self.seen: list[list[dict[int, Ints]]] = [[{} for _ in range(length + 1)] for _ in range(layers)]
        """By layer and length of the path: path -> (experts + 1): rows of each expert after it, and tokens. A path is
        its experts as digits (one more: a token may have no expert), so that one of no layers is 0."""

    def _codes(self, path: Ints, length: int) -> Ints:
        """(tokens) of the last choices. path: (layers, tokens)."""
        codes = np.zeros(path.shape[1], np.int64)
        for row in path[len(path) - length :]:
            codes = codes * (self.experts + 1) + row
        return codes

    def note(self, layer: int, path: Ints, chosen: Ints) -> None:
        """Counts what tokens chose. path: (layers before it, tokens), first choices. chosen: (tokens, topk)."""
        for length in range(min(self.length, len(path)) + 1):
            table = self.seen[layer][length]
            known, which = np.unique(self._codes(path, length), return_inverse=True)
            counts = np.zeros((len(known), self.experts + 1), np.int64)
            # add.at counts pairs that occur several times; `counts[…] += 1` would count each once.
            np.add.at(counts, (np.repeat(which, chosen.shape[1]), chosen.ravel()), 1)
            counts[:, -1] = np.bincount(which, minlength=len(known))
            for code, row in zip(known.tolist(), counts, strict=True):
                table[code] = table[code] + row if code in table else row

    def foresee(self, layer: int, path: Ints) -> NDArray[np.float64]:
        """Returns (experts): rows that each expert of a layer is to expect of tokens with these paths. A path that
        was not seen yet counts as its last part that was; tokens without any part are left out."""
        made = np.zeros(self.experts)
        left = np.ones(path.shape[1], bool)
        for length in range(min(self.length, len(path)), -1, -1):
            table = self.seen[layer][length]
            codes, many = np.unique(self._codes(path, length)[left], return_counts=True)
            known = [code in table for code in codes.tolist()]
            for code, tokens in zip(codes[known].tolist(), many[known].tolist(), strict=True):
                row = table[code]
                # Rows of each expert a token after this path, times the tokens that have it now.
                made += tokens / row[-1] * row[:-1]
            # Tokens with a known path are done; the others are looked up by shorter ones.
            left &= ~np.isin(self._codes(path, length), codes[known])
        return made


def holders_of(copies: Copies, experts: int) -> list[list[int]]:
    """Ranks that have each expert: where it lives first, then those with a copy."""
    each = experts // len(copies)
    # Experts live on ranks in order, `each` on every rank.
    held = [[expert // each] for expert in range(experts)]
    for rank, own in enumerate(copies):
        for expert in own:
            held[expert].append(rank)
    return held


def shares(rows: Sequence[int], copies: Copies, costs: Costs) -> list[list[int]]:
    """Rows of each expert that each of its holders computes, as `holders_of` lists them. An expert whose rows do not
    keep two ranks busy longer than reading its weights twice stays where it lives."""
    held = holders_of(copies, len(rows))
    split = [ranks if count >= 2 * costs.touch else ranks[:1] for count, ranks in zip(rows, held, strict=True)]
    made = shared_out(rows, split, len(copies))
    return [[*own, *[0] * (len(ranks) - len(own))] for own, ranks in zip(made, held, strict=True)]


def rank_costs(rows: Sequence[int], copies: Copies, costs: Costs) -> list[float]:
    """How long each rank computes a layer, in rows; what copies cost to fetch is in it."""
    load = [costs.fetch * len(own) for own in copies]
    for ranks, made in zip(holders_of(copies, len(rows)), shares(rows, copies, costs), strict=True):
        for rank, some in zip(ranks, made, strict=True):
            # An expert without rows is not read at all.
            load[rank] += max(some, costs.touch) if some else 0.0
    return load


def choose_copies(rows: Sequence[float], ep: int, room: int, costs: Costs) -> Copies:
    """Chooses the copies of a layer. rows: that each expert is to expect. room: slots of a rank for copies."""
    whole = [round(one) for one in rows]
    each = len(whole) // ep
    best: Copies = ((),) * ep
    load = rank_costs(whole, best, costs)
    while True:
        busiest = max(range(ep), key=load.__getitem__)
        # The second hottest is tried too: a copy of the first may be there already, or not be worth its fetch.
        hot = sorted(range(busiest * each, (busiest + 1) * each), key=lambda one: -whole[one])[:2]
        free = [rank for rank in range(ep) if rank != busiest and len(best[rank]) < room]
        if not free:
            return best
        takes = min(free, key=load.__getitem__)
        found = None
        for expert in hot:
            if expert in best[takes]:
                continue
            tried = tuple((*own, expert) if rank == takes else own for rank, own in enumerate(best))
            after = rank_costs(whole, tried, costs)
            if max(after) < max(load) and (found is None or max(after) < max(found[1])):
                found = tried, after
        if found is None:
            return best
        best, load = found


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRecord:
    """What routers chose while a server ran, token by token."""

    model: str
    """Name of the model."""
    layers: tuple[str, ...]
    """Labels of its layers with experts."""
    experts: int
    """Of a layer."""
    begins: tuple[int, ...]
    """First token of each iteration, and one past the last."""
    chosen: Ints
    """(layers, tokens, topk), the expert with the largest weight first."""

    @property
    def counts(self) -> Ints:
        """Returns (layers, experts): rows of each expert."""
        return np.stack([np.bincount(layer.ravel(), minlength=self.experts) for layer in self.chosen])


@dataclass(slots=True, kw_only=True)
class Foreseen:
    """How a record would have gone, summed over iterations and layers."""

    mean: float = 0.0
    """Rows of the mean rank; of the busiest: where experts live in order, …"""
    in_order: float = 0.0
    foreseen: float = 0.0
    """… with copies that were foreseen, fetching and reading them included, …"""
    known: float = 0.0
    """… and with those that are best for what routers then chose."""
    fetched: int = 0
    """Copies."""
    layers: int = 0
    """Layers of all iterations."""
    first: int = 0
    """Tokens whose first choice was the expert that was likeliest after their path, …"""
    second: int = 0
    """… or one of the two likeliest, …"""
    tokens: int = 0
    """… of so many, in layers that have one before them."""
    by_iteration: list[tuple[int, float, float]] = field(default_factory=list)
    """(tokens, busiest in order, busiest foreseen) of each."""

    @property
    def load(self) -> float:
        """Rows of the busiest rank over the mean, with copies."""
        return self.foreseen / self.mean if self.mean else 1.0


def replay(record: PathRecord, ep: int, room: int, costs: Costs, *, learnt: int = 0) -> Foreseen:
    """Plays a record: every iteration is foreseen from those before it, as a server does. learnt: iterations at the
    beginning that are counted for the paths and for nothing else."""
    paths, found = Paths(len(record.layers), record.experts), Foreseen()
    none: Copies = ((),) * ep
    for number, (begin, end) in enumerate(zip(record.begins, record.begins[1:], strict=False)):
        before, after = 0.0, 0.0
        for layer, chosen in enumerate(record.chosen[:, begin:end]):
            path = record.chosen[max(0, layer - LENGTH) : layer, begin:end, 0]
            copies = none
            if layer:
                copies = choose_copies(paths.foresee(layer, path).tolist(), ep, room, costs)
            if number >= learnt:
                rows = np.bincount(chosen.ravel(), minlength=record.experts).tolist()
                plain = rank_costs(rows, none, costs)
                best = choose_copies(rows, ep, room, costs) if layer else none
                before, after = before + max(plain), after + max(rank_costs(rows, copies, costs))
                found.mean += sum(plain) / ep
                found.known += max(rank_costs(rows, best, costs))
                found.fetched += sum(map(len, copies))
                found.layers += 1
                if layer:
                    _hits(paths, layer, path, chosen[:, 0], found)
            # Only now, so that no iteration is foreseen from itself.
            paths.note(layer, path, chosen)
        if number >= learnt:
            found.in_order += before
            found.foreseen += after
            found.by_iteration.append((end - begin, before, after))
    return found


def _hits(paths: Paths, layer: int, path: Ints, first: Ints, found: Foreseen) -> None:
    """How often a path's likeliest experts were a token's first choice."""
    found.tokens += len(first)
    known: dict[tuple[int, ...], list[int]] = {}
    for own, chosen in zip(map(tuple, path.T.tolist()), first.tolist(), strict=True):
        if own not in known:
            likely = paths.foresee(layer, np.array(own, np.int64)[:, None])
            known[own] = np.argsort(-likely, kind="stable")[:2].tolist() if likely.any() else []
        found.first += known[own][:1] == [chosen]
        found.second += chosen in known[own]
