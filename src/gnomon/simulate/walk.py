"""A step played entry by entry in plain Python: several times faster than vectors where levels are narrow.

`walk(order, busy)` turns what each entry waits for into a list of sums and maxima of two, in the order of play; it is
built once an order and kept. `ends` plays it. The same numbers as vectors level by level, to the last bit, since times
are on the dyadic grid. Leaves out lags, and orders so large that lists of their entries would be a burden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Order
from gnomon.simulate.together import together
from gnomon.units import distinct

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
    duration; members of a group wait for one that gathers all that any of them waits for; an entry without a duration
    that waits for one other is that one's item.
    """

    later: Longs
    """Positions that wait for an earlier step."""
    busy: Longs
    """[done] position whose duration is added; `size` for none."""
    first: list[int]
    """[done] an item that each waits for."""
    second: list[int]
    """[done] the other, or 0."""
    item: Longs
    """[positions] the item of each."""

    def ends(self, busy: Doubles, base: Doubles | None) -> Doubles:
        """[positions] end of each entry. busy: [positions] seconds. base: earliest starts, of which only those of
        `later` are looked at; None starts from rest at 0."""
        # Item 0 is "nothing": from rest it is time 0; in a steady step everything waits for the step before instead.
        least = 0.0 if base is None else -np.inf
        # Plain lists and floats: an index into an array would box a number each time, and cost more than the addition.
        ended = [least, *([0.0] * len(self.later) if base is None else base[self.later].tolist())]
        add = ended.append
        for seconds, one, other in zip(np.append(busy, 0.0)[self.busy].tolist(), self.first, self.second, strict=True):
            a, b = ended[one], ended[other]
            add((a if a > b else b) + seconds)
        by_position: Doubles = np.fromiter(ended, float, len(ended))[self.item]
        return by_position


@lru_cache(maxsize=64)
def walk(order: Order, free: bytes) -> Walk | None:
    """The walk of an order; None where vectors are as good. free: [positions] of bool, what has no duration."""
    levels = len(order.level_ptr) - 1
    if not order.size or order.size > min(LARGEST, WIDEST * levels):
        return None
    # An entry starts when the last of what it waits for has ended: start = max over its edges. The edges come from five
    # places: the entry before it on its stream (`lane_before`), up to a few waits as columns (`waits`), further waits
    # as lists (`more`), groups whose members start together, and the step before (`before`).
    size, later = order.size, distinct(order.before[1])
    members, _, group = together(order)
    joined = size + 1 + group  # node of the group of each member
    met = np.array([level for level, _, starts in order.groups for _ in starts], np.int64)  # [groups] level
    # Nodes are numbered: [0, size) positions, `size` is "nothing", then a node for each group, then one for the
    # earliest start of each position in `later`.
    total = size + 1 + len(met) + len(later)
    every = np.arange(size)
    edges: list[tuple[NDArray[np.integer], Longs]] = [(total - len(later) + np.arange(len(later)), later)]
    edges += [(column, every) for column in (order.lane_before, *order.waits)]
    edges += [(sources, positions) for _, positions, sources, _ in order.further]
    source, target = (np.concatenate(side).astype(np.int64) for side in zip(*edges, strict=True))
    real = source != size  # waiting for "nothing" is no edge
    source, target = source[real], target[real]
    if len(met):
        # What a member waits for, its group waits for; each member waits for its group alone. So all of them start when
        # the last can, without an edge from every member's sources to every member.
        of = np.arange(size)
        of[members] = joined
        source, target = np.append(source, joined), np.append(of[target], members)
    # Nodes that are no positions are each a stream of their own: none of them replaces another in `_fewer`.
    lane = np.append(_lanes(order), np.arange(size, total))
    none = np.append(np.frombuffer(free, bool), np.zeros(total - size, bool))
    source, target, same = _fewer(source, target, lane, none)
    # Levels are an order in which they can be played: an entry's sources are all on lower ones.
    level = np.repeat(np.arange(levels), np.diff(order.level_ptr))
    when = np.append(2 * level + 1, 2 * met)  # a group before its members
    nodes = np.append(every, size + 1 + np.arange(len(met)))[np.argsort(when, kind="stable")]
    return _numbered(nodes[same[nodes] == nodes], source, target, same, size, later)


def _lanes(order: Order) -> Longs:
    """[positions] the first position of each one's stream."""
    every = np.arange(order.size)
    # Pointer jumping: each round doubles how far back a position points, so a stream of n takes log2 n rounds.
    firsts = np.where(order.lane_before < order.size, order.lane_before, every).astype(np.int64)
    while not np.array_equal(firsts, further := firsts[firsts]):
        firsts = further
    return firsts


def _fewer(source: Longs, target: Longs, lane: Longs, none: NDArray[np.bool_]) -> tuple[Longs, Longs, Longs]:
    """(source, target, [nodes] the node that ends when it does): edges that matter, sorted by target.

    Of several on one stream, which follow each other, an entry waits for the last. One without a duration that waits
    for one other ends with it; what waited for it then waits for that other.
    """
    same = np.arange(len(lane))
    # Each of the two rules makes room for the other; after three rounds what is left is not worth another sort.
    for _ in range(3):
        if not len(source):
            break
        # Of the edges into one target from one stream only the last counts: sorted by (target, stream, position), it is
        # the one before the target or the stream changes.
        order = np.lexsort((source, lane[source], target))
        source, target = source[order], target[order]
        last = np.append((target[1:] != target[:-1]) | (lane[source[1:]] != lane[source[:-1]]), True)
        source, target = source[last], target[last]
        # end = start + 0 = end of the only source: the target is another name for its source.
        single_source = np.bincount(target, minlength=len(lane))[target] == 1
        dropped = single_source & none[target]
        if not dropped.any():
            break
        same[target[dropped]] = source[dropped]
        while not np.array_equal(same, further := same[same]):  # names of names, as in `_lanes`
            same = further
        source, target = same[source[~dropped]], target[~dropped]
    return source, target, same


def _numbered(nodes: Longs, source: Longs, target: Longs, same: Longs, size: int, later: Longs) -> Walk:
    """Items from nodes in the order in which they end, and the edges into them."""
    # A node with k edges is max(k - 1, 1) items: the first takes two of its sources, each further one the item before
    # it and one source more. Only the last item has the node's duration; the others only find the maximum.
    place = np.zeros(len(same), np.int64)
    place[nodes] = np.arange(len(nodes))
    order = np.argsort(place[target], kind="stable")
    source, into = source[order], place[target[order]]
    count = np.bincount(into, minlength=len(nodes))
    stop = np.cumsum(np.maximum(count - 1, 1))  # of the items of each node
    last, start = stop - 1, stop - np.maximum(count - 1, 1)
    before, done = 1 + len(later), int(stop.max(initial=0))
    # Numbers of items: 0 "nothing", 1 .. len(later) earliest starts, then those of nodes in order.
    item = np.zeros(len(same), np.int64)
    item[nodes] = before + last
    item[len(item) - len(later) :] = 1 + np.arange(len(later))
    first, second = np.zeros(done, np.int64), np.zeros(done, np.int64)
    inner = np.ones(done, bool)  # items that go on from the one before
    inner[start] = False
    first[inner] = before + np.flatnonzero(inner) - 1
    rank = np.arange(len(into)) - (np.cumsum(count) - count)[into]  # of an edge among those of its node
    head = rank == 0
    first[start[into[head]]] = item[source[head]]
    second[start[into[~head]] + rank[~head] - 1] = item[source[~head]]
    single_source = start[count == 1]  # one source: the maximum of it and itself
    second[single_source] = first[single_source]
    busy = np.full(done, size, np.int64)
    own = nodes < size  # groups and earliest starts take no time
    busy[last[own]] = nodes[own]
    return Walk(later=later, busy=busy, first=first.tolist(), second=second.tolist(), item=item[same[:size]])
