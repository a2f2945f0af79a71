"""One rank by itself under ZeRO 3: its gathers, layers and reductions in order, without waiting for other ranks.

`alone` plays the rows of one pipeline rank as the simulator would if messages took no time, so that what gathers and
reductions leave exposed is in the bound. A bound, because other ranks only make it wait longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.search.bounds.families import ACTIONS, GRID_S, Actions
from gnomon.search.bounds.in_flight import schedule_rows

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]

Pass = tuple[str, int]
"""The kind and the stage of a row."""

FORWARD, BACKWARD, ADDING = ("F", "C"), ("B", "I"), ("B", "W")
"""Kinds of rows that read parameters with layers in order, in the opposite order, and kinds that add to gradients."""


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """What lies between rows that follow each other among those of a rank that add to gradients, of one stage each."""

    key: Longs
    """[rows] kind x stage, kinds in the order of `ACTIONS`."""
    ends: Longs
    """[ranks + 1] where the rows of each rank begin."""
    after: Longs
    """[gaps] the first row after one of the two."""
    before: Longs
    """[gaps] the second of the two rows."""
    stage: Longs
    """[gaps] the stage of both rows."""
    rank: Longs
    """[gaps]"""


_KINDS = ("F", "B", "I", "W")


@lru_cache(maxsize=256)
def gaps(schedule: str, pp: int, virtual: int, microbatches: int) -> Gaps:
    """The gaps in a schedule without composites."""
    rows = schedule_rows(schedule, pp, virtual, microbatches)
    kinds = np.array(
        [_KINDS.index("F" if kind.name == "C" else kind.name) if kind.name in "FCBIW" else 0 for kind in rows.kinds]
    )
    stage, ends = rows.stage.astype(np.int64), rows.class_ptr.astype(np.int64)
    adds, rank = np.flatnonzero(rows.is_kind(*ADDING)), rows.rank_class.astype(np.int64)
    # Consecutive rows of a rank that add to gradients of one stage: the second waits for the first one's reduction.
    same = (stage[adds[1:]] == stage[adds[:-1]]) & (rank[adds[1:]] == rank[adds[:-1]])
    one, other = adds[:-1][same], adds[1:][same]
    return Gaps(
        key=kinds[rows.kind] * rows.num_stages + stage,
        ends=ends,
        after=one + 1,
        before=other,
        stage=stage[one],
        rank=rank[one],
    )


def stalled(stalls: Gaps, act: Actions, reduce_s: Doubles) -> Doubles:
    """[ranks] seconds that the rows of a rank take one after another, at least, where each stage's gradients are
    reduced after every row that adds to them and before the next (ZeRO 2). act: [stages, 1]. each: [stages] seconds of
    a reduction.

    Between two such rows of one stage, with no other such row between them, the rank computes what lies between them,
    or waits for the reduction if that takes longer; these times do not overlap.
    """
    # done[i]: seconds of all rows before row i, if none waited. What lies between two rows is a difference of it.
    done = np.append(0.0, np.cumsum(np.concatenate([getattr(act, name)[:, 0] for name in ACTIONS])[stalls.key]))
    waits = np.maximum(reduce_s[stalls.stage] - (done[stalls.before] - done[stalls.after]) - GRID_S, 0.0)
    return np.diff(done[stalls.ends]) + np.bincount(stalls.rank, waits, len(stalls.ends) - 1)


@lru_cache(maxsize=64)
def passes(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[tuple[Pass, ...], ...]:
    """Rows of each pipeline rank in order of issue."""
    rows = schedule_rows(schedule, pp, virtual, microbatches)
    names = [kind.name for kind in rows.kinds]
    flat = list(zip([names[k] for k in rows.kind.tolist()], rows.stage.tolist(), strict=True))
    edges = rows.class_ptr.tolist()
    return tuple(tuple(flat[a:b]) for a, b in zip(edges, edges[1:], strict=False))


def alone(
    rows: Sequence[Pass],
    layers: Sequence[Sequence[int]],
    seconds: Mapping[str, Sequence[float]],
    gathered: Sequence[float],
    reduced: Sequence[float],
    summed: Sequence[float],
    *,
    prefetch: int,
    start: float,
    behind: float,
) -> float:
    """Seconds from the beginning of a step to its end, of one rank, at least.

    layers: kind of each layer, by stage. seconds: kind of row -> seconds of each kind of layer. gathered, reduced,
    summed: of each kind of layer; the last is the sum over replicas, once a step. start: before it nothing computes.
    behind: what other ranks do after its last input gradient.

    A layer waits for the one before it, for its gather, and (where it adds to a gradient) for that layer's last
    reduction. Gathers follow each other, each waits until at most `prefetch` others are held; reductions follow each
    other and their backwards. A gather serves neighbouring reads of one layer. All of these are dependencies of the
    plan's Program, so no step is shorter; waiting for messages and other ranks is left out.
    """
    # now: the compute stream's clock; gathers and reductions: those of the two communication streams.
    now, gathers, reductions, last_input, last_read = start, 0.0, 0.0, start, start
    freed: list[float] = []
    held: tuple[int, int] | None = None
    left = Counter(stage for kind, stage in rows if kind in ADDING)
    done: dict[tuple[int, int], float] = {}
    for kind, stage in rows:
        order = layers[stage]
        times = seconds[kind]
        reads, adds = kind in FORWARD or kind in BACKWARD, kind in ADDING
        left[stage] -= adds
        ends = adds and not left[stage]
        # Forward reads layers from the first, backward from the last.
        indices = range(len(order)) if kind in FORWARD else range(len(order) - 1, -1, -1)
        for i in indices:
            layer = order[i]
            at = stage, i
            # A layer that is still held from the row before needs no gather.
            if reads and at != held:
                if held is not None:
                    freed.append(last_read)
                # At most `prefetch` further layers are held: the gather waits for the layer that many before it to be
                # let go.
                if len(freed) > prefetch:
                    gathers = max(gathers, freed[-1 - prefetch])
                gathers += gathered[layer]
                now = max(now, gathers)
                held = at
            # The gradient buffer of this layer is busy until its reduction of the microbatch before is done.
            if adds:
                now = max(now, done.get(at, 0.0))
            now += times[layer]
            if reads:
                last_read = now
            if adds:
                reductions = max(reductions, now) + reduced[layer]
                if ends:
                    reductions += summed[layer]
                done[at] = reductions
        if kind in BACKWARD:
            last_input = now
    return max(now, reductions, last_input + behind)
