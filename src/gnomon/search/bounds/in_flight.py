"""What the order of a schedule fixes before anything has a price: units under way, and stages held at once.

`flight(schedule, pp, virtual, microbatches)` looks at the rows of the schedule itself, so it holds for every schedule
that has rows. Leaves out messages, sharding and prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon import orders
from gnomon.program.rows import Rows

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class HeldUnits:
    """Activations of stages during rows at which memory may be at its peak, one pipeline rank after another."""

    starts: Longs
    """[ranks] the first of the rows chosen of each pipeline rank."""
    stages: Longs
    """[rows chosen, stages of a rank] the stages of the row's rank."""
    counts: Longs
    """[rows chosen, stages of a rank] units whose activations of the stage are held."""
    open: Longs
    """[rows chosen, stages of a rank] units, of these, whose input gradient is not over: the rest may hold less."""
    begun: NDArray[np.bool_]
    """[rows chosen, stages of a rank] whether a unit's weight gradients of the stage are over."""
    inside: Longs
    """[rows chosen] the stage that computes."""
    backward: NDArray[np.bool_]
    """[rows chosen] whether it computes a backward that needs room of its own."""

    def least(self, rank: int, saved_bytes: Doubles, inside: Doubles) -> Doubles:
        """[points] bytes on a pipeline rank at the fullest of its rows, at least. saved_bytes, inside: [stages of
        the rank, points] of one unit of each stage, and what its backward needs beside that."""
        chosen = slice(self.starts[rank], self.starts[rank + 1] if rank + 1 < len(self.starts) else None)
        # [rows, 1] == [rows, stages]: True where a row computes on the stage of the column.
        at = (self.inside[chosen, None] == self.stages[chosen]) & self.backward[chosen, None]
        peak: Doubles = (self.open[chosen] @ saved_bytes + at @ inside).max(axis=0)
        return peak


@dataclass(frozen=True, kw_only=True)
class Flight:
    """Counts that follow from the order of rows."""

    rank_of: Longs
    """[stages] the pipeline rank of each stage."""
    most: Longs
    """[stages] the most units between the start of their forward and the end of their input gradient."""
    turns: Longs
    """[stages] passes that read the stage's parameters right after one in the other direction did so on its rank."""
    again: Longs
    """[stages] passes that read the stage's parameters right after one in the same direction."""
    open_units: HeldUnits
    """The rows at each of which memory is at least what they hold."""


@lru_cache(maxsize=256)
def schedule_rows(schedule: str, pp: int, virtual: int, microbatches: int) -> Rows:
    """The rows of a schedule. PlanError if it has none for these numbers."""
    return orders.find(schedule).rows(pp, microbatches, virtual)


def under_way(schedule: str, pp: int, virtual: int, microbatches: int) -> int:
    """Units of the stages of the first pipeline rank, at least, that are under way at some moment together: without the
    rows, which is quicker. (A unit counts once for each stage of the rank that it is under way on.)"""
    return orders.find(schedule).least_in_flight(0, pp, microbatches, virtual)


@lru_cache(maxsize=1024)
def flight(schedule: str, pp: int, virtual: int, microbatches: int) -> Flight:
    """The counts of a schedule. PlanError if it has no rows for these numbers."""
    rows = schedule_rows(schedule, pp, virtual, microbatches)
    forward, ends, frees = rows.is_kind("F", "C"), rows.is_kind("B", "I"), rows.is_kind("B", "W")
    ranks, most, turns, again = np.zeros((4, rows.num_stages), np.int64)
    held_rows = []
    for rank in range(rows.num_classes):
        mine = slice(int(rows.class_ptr[rank]), int(rows.class_ptr[rank + 1]))
        stage = rows.stage[mine].astype(np.int64)
        stages = np.unique(stage)
        ranks[stages] = rank
        at = np.searchsorted(stages, stage)
        # here: [rows of the rank, stages of the rank] 1 where the row computes on the stage.
        here = at[:, None] == np.arange(len(stages))
        f, e, w = forward[mine], ends[mine], frees[mine]
        # Passes that read parameters, in order of issue; a row after one over the same stage may share its gather.
        reads, forwards = stage[f | e], f[f | e]
        same, turned = reads[1:] == reads[:-1], forwards[1:] != forwards[:-1]
        turns += np.bincount(reads[1:][same & turned], minlength=len(turns))
        again += np.bincount(reads[1:][same & ~turned], minlength=len(again))
        # open_after: units between forward and input gradient after each row; after: between forward and weight
        # gradient.
        open_after = np.cumsum(here * (f.astype(np.int64) - e)[:, None], axis=0)
        most[stages] = open_after.max(axis=0)
        after = np.cumsum(here * (f.astype(np.int64) - w)[:, None], axis=0)
        # A backward still holds what it reads while it runs, so its own unit is added back.
        during = after + here * w[:, None]
        chosen = _peaks(during, f, e)
        still = (open_after + here * e[:, None])[chosen]
        # begun: some unit's weight gradients of this stage are done before the row starts.
        begun = (np.cumsum(here * w[:, None], axis=0) - here * w[:, None])[chosen] > 0
        on_rank = np.broadcast_to(stages, still.shape)
        held_rows.append((on_rank, during[chosen], still, begun, stage[chosen], e[chosen]))
    names = "stages", "counts", "open", "begun", "inside", "backward"
    columns = dict(zip(names, map(np.concatenate, zip(*held_rows, strict=True)), strict=True))
    starts = np.cumsum([0, *(len(part[0]) for part in held_rows[:-1])])
    return Flight(rank_of=ranks, most=most, turns=turns, again=again, open_units=HeldUnits(starts=starts, **columns))


def _peaks(during: Longs, forward: NDArray[np.bool_], ends: NDArray[np.bool_]) -> Longs:
    """Rows where most is held in all, or of one stage, among forwards and among backwards."""
    total = during.sum(axis=1)
    peaks = []
    for kind in (forward, ends):
        # The row with most in all, and for every stage the row with most of it. Any row is a bound, so these need not
        # be all that could be the peak.
        rows = np.flatnonzero(kind)
        peaks.append(rows[np.argmax(total[rows])])
        peaks += rows[np.argmax(during[rows], axis=0)].tolist()
    return np.unique(np.array(peaks, np.int64))
