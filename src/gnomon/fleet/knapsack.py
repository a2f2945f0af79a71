"""The multiple-choice knapsack: from each group at most one item, the most value within a capacity.

`choose` returns the item of each group, or -1 for none. Exact: by marginal value where every group has one item for
each unit of weight with value that grows ever less, which is when that is optimal; else by dynamic programming over the
capacity. Source: Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

Item = tuple[int, float]
"""(weight, value)."""


def choose(groups: Sequence[Sequence[Item]], capacity: int) -> list[int]:
    """Index of the chosen item in each group, -1 for none; weights at least 1."""
    if capacity <= 0:
        return [-1] * len(groups)
    if all(_concave(group) for group in groups):
        return _greedy(groups, capacity)
    return _dynamic(groups, capacity)


def _concave(group: Sequence[Item]) -> bool:
    """Whether weights are 1, 2, 3 … and values grow by less and less, but never fall."""
    last, gain = 0.0, float("inf")
    for place, (weight, value) in enumerate(group, start=1):
        step = value - last
        # 1e-12: values are differences of floats, and linear ones must count as concave.
        if weight != place or step < 0 or step > gain + 1e-12 * abs(gain):
            return False
        last, gain = value, step
    return True


def _greedy(groups: Sequence[Sequence[Item]], capacity: int) -> list[int]:
    chosen = [-1] * len(groups)
    heap = [(-group[0][1], index) for index, group in enumerate(groups) if group]
    heapify(heap)
    while heap and capacity:
        gain, index = heappop(heap)
        # Gains are negated: nothing more is worth its weight.
        if gain >= 0:
            break
        chosen[index] += 1
        capacity -= 1
        group, at = groups[index], chosen[index]
        if at + 1 < len(group):
            heappush(heap, (group[at][1] - group[at + 1][1], index))
    return chosen


def _dynamic(groups: Sequence[Sequence[Item]], capacity: int) -> list[int]:
    """Solves the multiple-choice knapsack by dynamic programming; returns the item that each group takes, -1 for none.

    best[c] is the most value of the groups so far within capacity c, picks[g][c] the item of group g in it."""
    best = np.zeros(capacity + 1)
    picks = np.full((len(groups), capacity + 1), -1, dtype=np.int32)
    for index, group in enumerate(groups):
        after = best.copy()
        for item, (weight, value) in enumerate(group):
            if weight > capacity or value <= 0:
                continue
            # From `best`, not `after`: the table without this group, so that it gives one item at most.
            with_item = best[: capacity + 1 - weight] + value
            better = with_item > after[weight:]
            after[weight:][better] = with_item[better]
            picks[index, weight:][better] = item
        best = after
    chosen = [-1] * len(groups)
    room_left = capacity
    # Read back from the last group at full capacity.
    for index in range(len(groups) - 1, -1, -1):
        item = int(picks[index, room_left])
        chosen[index] = item
        if item >= 0:
            room_left -= groups[index][item][0]
    return chosen
