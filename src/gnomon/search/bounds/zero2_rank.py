"""A lower bound on the step under ZeRO 2: what a rank waits for reductions between two of its own backwards.

`ranks_with_stalls_s` adds to each rank's computing the time by which a stage's reduction is longer than what the rank
computes before it adds to the same gradients again. It is a bound, because only dependencies of the plan's Program are
used. Leaves out messages and other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.search.bounds.families import ACTIONS, GRID_S, Actions
from gnomon.search.bounds.in_flight import schedule_rows
from gnomon.search.bounds.zero3_rank import ADDING

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Pairs of rows of one rank that add to gradients of one stage, with no other such row of the rank between them."""

    key: Longs
    """[rows] kind x stage, kinds in the order of `ACTIONS`."""
    starts: Longs
    """[ranks + 1] where the rows of each rank begin."""
    begin: Longs
    """[gaps] the row after the first of the pair."""
    end: Longs
    """[gaps] the second of the pair: what lies between is [begin, end)."""
    stage: Longs
    """[gaps] the stage of both rows."""
    rank: Longs
    """[gaps] their rank."""


_KINDS = ("F", "B", "I", "W")


@lru_cache(maxsize=256)
def gaps_of(schedule: str, pp: int, virtual: int, microbatches: int) -> Gaps:
    """The gaps in a schedule without composites."""
    rows = schedule_rows(schedule, pp, virtual, microbatches)
    kinds = np.array(
        [_KINDS.index("F" if kind.name == "C" else kind.name) if kind.name in "FCBIW" else 0 for kind in rows.kinds]
    )
    stage, starts = rows.stage.astype(np.int64), rows.class_ptr.astype(np.int64)
    adds, rank = np.flatnonzero(rows.is_kind(*ADDING)), rows.rank_class.astype(np.int64)
    # Consecutive rows of a rank that add to gradients of one stage: the second waits for the first one's reduction.
    same = (stage[adds[1:]] == stage[adds[:-1]]) & (rank[adds[1:]] == rank[adds[:-1]])
    one, other = adds[:-1][same], adds[1:][same]
    return Gaps(
        key=kinds[rows.kind] * rows.num_stages + stage,
        starts=starts,
        begin=one + 1,
        end=other,
        stage=stage[one],
        rank=rank[one],
    )


def ranks_with_stalls_s(gaps: Gaps, act: Actions, reduce_s: Doubles) -> Doubles:
    """[ranks] seconds that the rows of a rank take one after another, at least, where each stage's gradients are
    reduced after every row that adds to them and before the next (ZeRO 2). act: [stages, 1]. reduce_s: [stages] seconds
    of a reduction.

    In a gap the rank computes what lies between, or waits for the reduction if that takes longer; gaps do not overlap.
    """
    # done[i]: seconds of all rows before row i, if none waited. What lies between two rows is a difference of it.
    done = np.append(0.0, np.cumsum(np.concatenate([getattr(act, name)[:, 0] for name in ACTIONS])[gaps.key]))
    # The simulator rounds the reduction to its grid, so it may be shorter than its price by as much.
    waits = np.maximum(reduce_s[gaps.stage] - (done[gaps.end] - done[gaps.begin]) - GRID_S, 0.0)
    return np.diff(done[gaps.starts]) + np.bincount(gaps.rank, waits, len(gaps.starts) - 1)
