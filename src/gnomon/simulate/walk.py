"""A step played entry by entry in plain Python: several times faster than vectors where levels are narrow.

`walk(order)` turns what each entry waits for into a list of sums and maxima of two, in the order of play; it is built
once an order and kept. `ends` plays it. The same numbers as vectors level by level, to the last bit, since times are
on the dyadic grid. Leaves out lags, and orders so large that lists of their entries would be a burden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Order

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]

WIDEST = 24
"""Entries of a level, in the mean, from which on vectors are as fast (measured: 0.1 us an entry, 3.5 us a level)."""

LARGEST = 100_000
"""Entries of the largest order that is turned into lists."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """What to do for each entry: the later of two earlier items, plus a duration.

    Items are numbered: 0 is "nothing", then the entries that wait for an earlier step (their earliest start), then
    what is done, one item each. An entry that waits for more than two is several items, all but the last without a
    duration; members of a group wait for one that gathers all that any of them waits for.
    """

    later: Longs
    """Positions that wait for an earlier step."""
    busy: Longs
    """[done] position whose duration is added; `size` for none."""
    first: list[int]
    second: list[int]
    item: Longs
    """[positions] the item of each, counted without those before what is done."""

    def ends(self, busy: Doubles, base: Doubles | None) -> Doubles:
        """[positions] end of each entry. busy: [positions] seconds. base: earliest starts, of which only those of
        `later` are looked at; None starts from rest at 0."""
        least = 0.0 if base is None else -np.inf
        ended = [least, *([0.0] * len(self.later) if base is None else base[self.later].tolist())]
        begin, add = len(ended), ended.append
        for seconds, one, other in zip(np.append(busy, 0.0)[self.busy].tolist(), self.first, self.second, strict=True):
            a, b = ended[one], ended[other]
            add((a if a > b else b) + seconds)
        found: Doubles = np.array(ended[begin:])[self.item]
        return found


@lru_cache(maxsize=64)
def walk(order: Order) -> Walk | None:
    """The walk of an order; None where vectors are as good."""
    levels = len(order.level_ptr) - 1
    if not order.size or order.size > min(LARGEST, WIDEST * levels):
        return None
    size, later = order.size, np.unique(order.before[1])
    joined, members, met = _joined(order)
    # nodes: positions, "nothing", groups, earliest starts
    waits = size + 1 + len(met) + np.arange(len(later))
    every = np.arange(size)
    edges = [(waits, later), *((column, every) for column in (order.lane_before, *order.waits))]
    edges += [(sources, positions) for _, positions, sources, _ in order.more]
    source, target = (np.concatenate(side).astype(np.int64) for side in zip(*edges, strict=True))
    if len(met):
        of = np.arange(size)
        of[members] = joined
        source, target = np.append(source, joined), np.append(of[target], members)
    level = np.repeat(np.arange(levels), np.diff(order.level_ptr))
    when = np.append(2 * level + 1, 2 * met)  # a group before its members
    return _numbered(np.append(every, size + 1 + np.arange(len(met))), when, source, target, size, later)


def _joined(order: Order) -> tuple[Longs, Longs, Longs]:
    """(node of the group of each member, members, [groups] level)."""
    nodes, members, met = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], list[int]()
    for level, each, starts in order.groups:
        lengths = np.diff(np.append(starts, len(each)))
        nodes.append(order.size + 1 + len(met) + np.repeat(np.arange(len(starts)), lengths))
        members.append(each)
        met += [level] * len(starts)
    return np.concatenate(nodes), np.concatenate(members), np.array(met, np.int64)


def _numbered(nodes: Longs, when: Longs, source: Longs, target: Longs, size: int, later: Longs) -> Walk:
    """Items from nodes: those that do something, when they do, and the edges between all of them."""
    nodes = nodes[np.argsort(when, kind="stable")]
    place = np.zeros(int(nodes.max()) + 1, np.int64)
    place[nodes] = np.arange(len(nodes))
    real = source != size
    edge = np.unique(place[target[real]] << 32 | source[real])  # several waits for one entry are one
    into, source = edge >> 32, edge & ((1 << 32) - 1)
    count = np.bincount(into, minlength=len(nodes))
    last = np.cumsum(np.maximum(count - 1, 1)) - 1  # of the items of each node
    start = np.append(0, last[:-1] + 1)
    before = 1 + len(later)
    done = int(last[-1]) + 1
    item = np.zeros(max(int(nodes.max()), int(source.max(initial=0))) + 1, np.int64)
    item[nodes] = before + last
    item[len(item) - len(later) :] = 1 + np.arange(len(later))
    first, second = np.zeros(done, np.int64), np.zeros(done, np.int64)
    inner = np.ones(done, bool)
    inner[start] = False
    first[inner] = before + np.flatnonzero(inner) - 1
    rank = np.arange(len(into)) - np.append(0, np.cumsum(count)[:-1])[into]
    head = rank == 0
    first[start[into[head]]] = item[source[head]]
    second[start[into[~head]] + rank[~head] - 1] = item[source[~head]]
    alone = start[count == 1]
    second[alone] = first[alone]
    busy = np.full(done, size, np.int64)
    own = nodes < size
    busy[last[own]] = nodes[own]
    position = np.zeros(size, np.int64)
    position[nodes[own]] = last[own]
    return Walk(later=later, busy=busy, first=first.tolist(), second=second.tolist(), item=position)
