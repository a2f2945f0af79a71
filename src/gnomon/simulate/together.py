"""Entries that start together: the groups of an `Order`, all levels at once, and what their members have together.

Groups come as the positions of their members, one group after another, and where each begins among these.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnomon.program import Order

Longs = NDArray[np.int64]


class Together(NamedTuple):
    """The groups of a step."""

    members: Longs
    """Positions, one group after another."""
    starts: Longs
    """[groups] where each begins among the members."""
    group: Longs
    """[members] the group of each."""


@lru_cache(maxsize=64)
def together(order: Order) -> Together:
    """The groups of all levels, in the order of play."""
    none = np.zeros(0, np.int64)
    members = [none, *(positions for _, positions, _ in order.groups)]
    # `members` begins with an empty part, so that item i + 1 is where the i-th level's members begin.
    before = np.cumsum([0, *map(len, members)])
    starts = [none, *(first + at for (_, _, first), at in zip(order.groups, before[1:], strict=False))]
    first = np.concatenate(starts)
    return Together(np.concatenate(members), first, group_of(first, int(before[-1])))


def group_of(starts: Longs, num_members: int) -> Longs:
    """[members] the group of each."""
    return np.repeat(np.arange(len(starts)), np.diff(np.append(starts, num_members)))


def joint(values: NDArray[Any], starts: Longs, of: np.ufunc = np.maximum) -> NDArray[Any]:
    """[members, ...] what the members of each one's group have together, as in their maximum, from the values of each,
    in the order of members."""
    return np.repeat(of.reduceat(values, starts, axis=0), np.diff(np.append(starts, len(values))), axis=0)
