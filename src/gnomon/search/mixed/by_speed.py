"""Data parallelism over all kinds with shares by speed: what a search of mixed plans is never slower than.

`points(space, tables)` lists those of its space. A search goes by bounds, and may use its tries up on pipelines whose
bounds are low before it comes to them. Leaves out their predictions (`plan_mixed`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gnomon.search.mixed.bounds import LayerTables
from gnomon.search.mixed.space import MixedBlock, MixedPoint, MixedSpace, equal_layers, point_of

MOST_MICROBATCHES = 4
"""Of those that are listed."""


def points(space: MixedSpace, tables: LayerTables) -> Iterator[MixedPoint]:
    """Points of few microbatches, with the least ZeRO and recomputation of the space and with the most."""
    for shape, blocks in space.by_shape:
        if shape.form != "replicas" or shape.pp > 1 or max(shape.tp) > 1 or shape.cp > 1:
            continue
        if len(shape.kinds) < len(space.kinds) or shape.virtual > 1 or max(shape.ep) > 1:
            continue
        few = [block for block in blocks if block.microbatches <= MOST_MICROBATCHES and not block.sequence_parallel]
        for block in few:
            if block.recompute in (space.recompute[0], space.recompute[-1]) and (
                shares := shares_by_speed(space, tables, block)
            ):
                variants = space.variants(shape, block.microbatches)
                for zero, schedule in dict.fromkeys((variants[0], variants[-1])):
                    yield point_of(block, equal_layers(space.num_layers, 1), shares, zero, schedule)


def shares_by_speed(space: MixedSpace, tables: LayerTables, block: MixedBlock) -> tuple[int, ...]:
    """Sequences of a microbatch that the workers of each kind take together: one each, and every further one for the
    kind whose busiest worker then takes least; empty where that is no choice of the space."""
    workers, size = space.workers(block.shape), space.global_batch // block.microbatches
    shares = list(workers)
    if sum(shares) > size:
        return ()
    every = [tables.every(block, entry) for entry in range(len(workers))]
    seconds = [np.asarray(table.forward[-1] + table.back[-1]) for table in every]
    for _ in range(size - sum(shares)):
        busiest = [-(-(total + 1) // count) for total, count in zip(shares, workers, strict=True)]
        after = [
            float(of[tables.column[n]]) if n in tables.column else np.inf
            for of, n in zip(seconds, busiest, strict=True)
        ]
        if not np.isfinite(min(after)):
            return ()
        shares[int(np.argmin(after))] += 1
    return tuple(shares)
