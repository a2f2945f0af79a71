"""A lower bound on the step under ZeRO 3: one pipeline rank by itself, its all-gathers, layers and reduce-scatters.

`rank_by_itself_s` simulates the rows of one pipeline rank with three clocks (compute, all-gathers, reductions), so that
what gathers and reductions leave exposed is in the bound. It is one, because messages take no time here and other ranks
could only make this one wait longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gnomon.search.bounds.in_flight import schedule_rows

KindAndStage = tuple[str, int]
"""The kind and the stage of a row."""

FORWARD, BACKWARD, ADDING = ("F", "C"), ("B", "I"), ("B", "W")
"""Kinds of rows that read parameters with layers in order (forward; C keeps only its input), in the opposite order
(whole backward; input gradients alone), and kinds that add to gradients (whole backward; weight gradients alone)."""


@lru_cache(maxsize=64)
def rows_of_ranks(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[tuple[KindAndStage, ...], ...]:
    """Rows of each pipeline rank in order of issue."""
    rows = schedule_rows(schedule, pp, virtual, microbatches)
    names = [kind.name for kind in rows.kinds]
    flat = list(zip([names[k] for k in rows.kind.tolist()], rows.stage.tolist(), strict=True))
    edges = rows.class_ptr.tolist()
    return tuple(tuple(flat[a:b]) for a, b in zip(edges, edges[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """What layers take, the same for every rank of a candidate."""

    layers: Sequence[Sequence[int]]
    """Kind of each layer, by stage."""
    seconds: Mapping[str, Sequence[float]]
    """Kind of row -> seconds of each kind of layer."""
    gathered: Sequence[float]
    """Seconds of the all-gather of each kind of layer."""
    reduced: Sequence[float]
    """The same of the reduce-scatter."""
    summed: Sequence[float]
    """The same of the all-reduce over replicas, once a step."""


def rank_by_itself_s(
    rows: Sequence[KindAndStage], times: LayerTimes, *, prefetch: int, start: float, behind: float
) -> float:
    """Seconds from the beginning of a step to its end, of one rank, at least.

    start: before it nothing computes. behind: seconds that other ranks compute after its last input gradient.

    A layer waits for the one before it, for its gather, and (where it adds to a gradient) for that layer's last
    reduction. Gathers follow each other, each waits until at most `prefetch` others are held; reductions follow each
    other and their backwards. A gather serves neighbouring reads of one layer. All of these are dependencies of the
    plan's Program, so no step is shorter; waiting for messages and other ranks is left out.
    """
    # now: the compute stream's clock; gathers and reductions: those of the two communication streams.
    now, gathers, reductions, last_input, last_read = start, 0.0, 0.0, start, start
    freed: list[float] = []
    gathered_at: tuple[int, int] | None = None
    adds_left = Counter(stage for kind, stage in rows if kind in ADDING)
    done: dict[tuple[int, int], float] = {}
    for kind, stage in rows:
        order = times.layers[stage]
        seconds = times.seconds[kind]
        reads, adds = kind in FORWARD or kind in BACKWARD, kind in ADDING
        adds_left[stage] -= adds
        ends = adds and not adds_left[stage]
        # Forward reads layers from the first, backward from the last.
        indices = range(len(order)) if kind in FORWARD else range(len(order) - 1, -1, -1)
        for i in indices:
            layer = order[i]
            at = stage, i
            # A layer that is still held from the row before needs no gather.
            if reads and at != gathered_at:
                if gathered_at is not None:
                    freed.append(last_read)
                # At most `prefetch` further layers are held: the gather waits for the layer that many before it to be
                # let go.
                if len(freed) > prefetch:
                    gathers = max(gathers, freed[-1 - prefetch])
                gathers += times.gathered[layer]
                now = max(now, gathers)
                gathered_at = at
            # The gradient buffer of this layer is busy until its reduction of the microbatch before is done.
            if adds:
                now = max(now, done.get(at, 0.0))
            now += seconds[layer]
            if reads:
                last_read = now
            if adds:
                reductions = max(reductions, now) + times.reduced[layer]
                if ends:
                    reductions += times.summed[layer]
                done[at] = reductions
        if kind in BACKWARD:
            last_input = now
    return max(now, reductions, last_input + behind)
