"""Sets of time as sorted, disjoint intervals: union, difference, intersection, length.

An array of shape [n, 2] with starts and ends; empty intervals are dropped. Times on the grid of `gnomon.units` make
every length exact, so parts of a window add up to it to the bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]

NOTHING: Intervals = np.zeros((0, 2))


def union(start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> Intervals:
    """What any of them covers."""
    lasting = end_s > start_s
    start, end = start_s[lasting], end_s[lasting]
    if not len(start):
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    # A new interval begins where a start lies after everything before it has ended.
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((start[first], end[last]), axis=1)


def join(*sets: Intervals) -> Intervals:
    """What any of the sets covers."""
    whole = np.concatenate(sets) if sets else NOTHING
    return union(whole[:, 0], whole[:, 1])


def complement(covered: Intervals, start_s: float, end_s: float) -> Intervals:
    """What of [start, end) is not covered."""
    starts = np.concatenate(([start_s], covered[:, 1]))
    ends = np.concatenate((covered[:, 0], [end_s]))
    starts, ends = np.maximum(starts, start_s), np.minimum(ends, end_s)
    lasting = ends > starts
    return np.stack((starts[lasting], ends[lasting]), axis=1)


def clip(covered: Intervals, start_s: float, end_s: float) -> Intervals:
    """What lies within [start, end)."""
    starts, ends = np.maximum(covered[:, 0], start_s), np.minimum(covered[:, 1], end_s)
    lasting = ends > starts
    return np.stack((starts[lasting], ends[lasting]), axis=1)


def minus(one: Intervals, other: Intervals) -> Intervals:
    """What `one` covers and `other` does not."""
    if not len(one) or not len(other):
        return one
    return common(one, complement(other, float(one[0, 0]), float(one[-1, 1])))


def common(one: Intervals, other: Intervals) -> Intervals:
    """What both cover, by a sweep over the edges."""
    if not len(one) or not len(other):
        return NOTHING
    edges = np.concatenate((one[:, 0], other[:, 0], one[:, 1], other[:, 1]))
    change = np.concatenate((np.ones(len(one) + len(other)), -np.ones(len(one) + len(other))))
    # Ends before starts at one time, so that intervals that touch have nothing in common.
    order = np.lexsort((change, edges))
    depth = np.cumsum(change[order])
    edges = edges[order]
    # Each set is disjoint in itself, so a depth of two is one interval of either.
    both = np.flatnonzero(depth[:-1] == 2)
    return union(edges[both], edges[both + 1])


def length(covered: Intervals) -> float:
    """Total seconds that disjoint intervals cover."""
    return float((covered[:, 1] - covered[:, 0]).sum())
