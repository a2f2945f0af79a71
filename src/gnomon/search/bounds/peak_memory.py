"""What a plan holds at every row of its schedule: a better bound on memory than the first, for points about to run.

`least_peak(loose)` looks at all rows, those of weight gradients too, which `point_memory.held_bytes` leaves out, and
`groups` counts all communicators that are sure: both cost more than the first bounds and are asked for points that a
bound on time has left. Leaves out rows of ZeRO 3, which are layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.search.bounds.in_flight import schedule_rows
from gnomon.search.bounds.point_memory import inside_bytes, unsharded
from gnomon.search.bounds.tighter_time import Loose

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """Counts during every row of one pipeline rank."""

    stages: Longs
    """The stages of the rank, ascending."""
    counts: Longs
    """[rows, stages] units whose activations of the stage are held."""
    open: Longs
    """[rows, stages] of these, units whose input gradient is not over."""
    begun: NDArray[np.bool_]
    """[rows, stages] whether a unit's weight gradients of the stage are over or under way."""
    at: Longs
    """[rows] index into `stages` of the stage that computes."""
    backward: NDArray[np.bool_]
    """[rows] whether it computes a backward, or its input gradient."""
    weight: NDArray[np.bool_]
    """[rows] whether it computes a backward, or its weight gradients."""


@lru_cache(maxsize=64)
def rank_rows(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[RankRows, ...]:
    """The rows of each pipeline rank."""
    rows = schedule_rows(schedule, pp, virtual, microbatches)
    forward, ends, frees = rows.is_kind("F", "C"), rows.is_kind("B", "I"), rows.is_kind("B", "W")
    by_rank = []
    for low, high in zip(rows.class_ptr[:-1].tolist(), rows.class_ptr[1:].tolist(), strict=True):
        mine = slice(low, high)
        stages, at = np.unique(rows.stage[mine].astype(np.int64), return_inverse=True)
        here = at[:, None] == np.arange(len(stages))
        f, e, w = (here * flag[mine, None].astype(np.int64) for flag in (forward, ends, frees))
        # Running counts over rows: forwards, input gradients and weight gradients of each stage.
        open_units = np.cumsum(f, axis=0)
        over = np.cumsum(w, axis=0)
        by_rank.append(
            RankRows(
                stages=stages,
                # + w, + e: the row itself still holds the unit that it is about to free.
                counts=open_units - over + w,
                open=open_units - np.cumsum(e, axis=0) + e,
                begun=over > 0,
                at=at,
                backward=ends[mine],
                weight=frees[mine],
            )
        )
    return tuple(by_rank)


def least_peak(loose: Loose) -> Doubles:
    """[ranks] bytes of what comes and goes, at least, at the fullest row; 0 under ZeRO 3.

    During a row a rank holds the activations of every unit from its forward to its weight gradients (until its input
    gradient where the stack frees between the two), and what a backward needs inside a layer. Under ZeRO 2 the whole
    gradients of a stage, two buckets, are there from the start of its weight gradients: until the reduction behind
    them, or, where reductions do not overlap, until after the last backward. All of it is allocated before the row
    ends and freed no sooner, so the sum is held at one moment; messages only add to it.
    """
    sharding, table, pipeline, point = loose.sharding, loose.table, loose.pipeline, loose.point
    if sharding.zero == 3:
        return np.zeros(point.pp)
    counts, none = pipeline.split.counts, np.zeros(len(sharding.collectives))
    saved_bytes = counts @ table.kept_bytes[:, loose.column]
    inside = inside_bytes(table, loose.column, pipeline, none, by_layer=False)
    gradients = np.zeros(len(counts))
    if sharding.zero == 2:
        # Two buckets: the one that is filled and the one that is reduced.
        gradients = 2 * np.where(counts > 0, unsharded(sharding, split_backward=False), 0.0).max(axis=1)
    frees = bool(sharding.job.stack.gradients.split_backward_frees)
    peaks = []
    for rank in rank_rows(point.schedule, point.pp, point.virtual_stages, loose.count):
        peak = (rank.open if frees else rank.counts) @ saved_bytes[rank.stages]
        # [rows, stages] @ [stages] bytes of activations at each row.
        peak += np.where(rank.backward, inside[rank.stages][rank.at], 0.0)
        if sharding.zero == 2 and not point.overlap:
            peak += rank.begun @ gradients[rank.stages]
        elif sharding.zero == 2:
            peak += np.where(rank.weight, gradients[rank.stages][rank.at], 0.0)
        peaks.append(peak.max())
    return np.array(peaks)


def groups(loose: Loose, *, clip: bool) -> list[int]:
    """[ranks] groups that a rank communicates in, at least: as predictions count them, by the layers of its first
    stage, but for the group of tied parameters."""
    sharding, pipeline, point = loose.sharding, loose.pipeline, loose.point
    # The pipeline's group, and that of the norm.
    norm_reductions = (point.pp > 1) + (clip and sharding.mesh.world_size * point.pp > 1)
    counts = []
    for stage in pipeline.lowest:
        used: set[tuple[str, ...]] = set()
        for kind in np.flatnonzero(pipeline.split.counts[stage]).tolist():
            price = loose.table.prices[kind]
            for phase in (price.forward, price.input_grad, price.weight_grad):
                used |= {(axis,) for axis in phase.comm_s}
            for collective in sharding.collectives[kind]:
                # Groups of one rank send nothing and have no communicator.
                used.add(tuple(axis for axis in collective.axes if getattr(sharding.mesh, axis) > 1))
        counts.append(len(used - {()}) + norm_reductions)
    return counts
