"""Pipelines over heterogeneous devices, rank by rank: least time of a partial one, most layers of a rank.

`Pipe` is a block as its partial pipelines see it, `PipelineNode` a pipeline whose first ranks have their layers;
`Ranks` bounds the next rank. Leaves out whole pipelines (`point_bounds`) and the order of the search
(`search.best_first`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.search.bounds.families import is_split
from gnomon.search.bounds.in_flight import under_way
from gnomon.search.mixed.bounds import Doubles, LayerTables, Longs, held_bytes, static_bytes
from gnomon.search.mixed.point_bounds import Bounds
from gnomon.search.mixed.rough_bounds import RoughBounds
from gnomon.search.mixed.space import MixedBlock, MixedSpace


class Pipe:
    """A block of pipelines over kinds, as its nodes see it: tables and numbers of its ranks."""

    def __init__(self, rough: RoughBounds, rows: Bounds, block: MixedBlock) -> None:
        space, tables = rough.space, rough.tables
        self.block, self.shape = block, block.shape
        self.count, self.virtual = block.microbatches, block.shape.virtual
        self.workers = space.workers(block.shape)
        self.variants = tuple(
            variant
            for variant in space.variants(block.shape, block.microbatches)
            if rows.has_room(block, variant[0], (variant[1],))
        )
        """The variants of which some point may fit."""
        size = space.global_batch // self.count
        self.tables = [tables.of(block, rank, -(-size // n)) for rank, n in enumerate(self.workers)]
        # Layers outside begin … end are the embedding's and the head's; they go with the first and the holding rank.
        begin, end = tables.counted[0], tables.counted[-1] + 1
        self.holder = 0 if self.shape.v_placement else self.shape.pp - 1
        last = self.tables[self.holder]
        # sums[-1] - sums[end] is the head alone, sums[begin] - sums[0] the embedding alone.
        self.head = [float(sums[-1] - sums[end]) for sums in (last.forward, last.back)]
        first = self.tables[0]
        self.embed = [float(sums[begin] - sums[0]) for sums in (first.forward, first.back)]
        least = [(float(table.least[0]), float(table.least[3])) for table in self.tables]
        self.head_layers = sum(self.head) / least[-1][1] if self.holder else 0.0
        """What the head takes on the last rank, counted in layers."""
        self.rates = {
            split: [rough.rate(least[rank:], self.count, self.virtual, split=split) for rank in range(len(least))]
            for split in (False, True)
        }
        """Layers a second that the ranks from each one on take through."""
        zero, schedules = (
            max((zero_stage for zero_stage, _ in self.variants), default=0),
            {name for _, name in self.variants},
        )
        ranks = range(self.shape.pp) if self.variants else ()
        rooms = [rows.most_layers(block, rank, zero, schedules) for rank in ranks]
        self.room = [sum(rooms[rank:]) for rank in range(len(rooms) + 1)]
        """Layers that the ranks from each one on have room for, at most."""


@dataclass(frozen=True, slots=True)
class PipelineNode:
    """A pipeline whose first ranks have their layers."""

    pipe: Pipe
    split: bool
    layers: tuple[int, ...]
    """Layers of each rank that has some."""
    used: int
    ahead: float
    """Seconds of one forward through their first stages, and with clipping one backward unless it is split."""
    most: float
    """The largest bound of the ranks that have layers, in seconds."""

    @property
    def variants(self) -> list[tuple[int, str]]:
        """(ZeRO stage, schedule) of its points."""
        return [variant for variant in self.pipe.variants if is_split(variant[1]) == self.split]


class Ranks:
    """Bounds the rank after those of a node."""

    def __init__(self, tables: LayerTables, space: MixedSpace, rows: Bounds, limits: tuple[int, ...]) -> None:
        """Takes the limits, bytes that a device of each kind may hold."""
        self.tables, self.space, self.rows, self.limits = tables, space, rows, limits

    def seconds(self, node: PipelineNode, choices: Longs) -> tuple[Any, Any, tuple[Any, Any]]:
        """Seconds of a microbatch forward and backward, at least, on the rank after those of a node with so many
        layers, and those of its first stage."""
        pipe, rank = node.pipe, len(node.layers)
        table, tables = pipe.tables[rank], self.tables
        # One stage a rank: the layers of the next rank are known exactly, since those before it are.
        if pipe.virtual == 1:
            first = 0 if not rank else tables.counted[node.used]
            last = rank == pipe.shape.pp - 1
            ends = [tables.num_layers if last else tables.counted[node.used + n] for n in choices.tolist()]
            forward, back = (sums[ends] - sums[first] for sums in (table.forward, table.back))
            return forward, back, (forward, back)
        # Several stages a rank: which layers they are depends on later ranks, so the smallest layer stands for each.
        embed = pipe.embed if not rank else (0.0, 0.0)
        head = pipe.head if rank == pipe.holder else (0.0, 0.0)
        # The first stage has the most layers of a rank's stages, ceil(n / virtual).
        begins = -(-choices // pipe.virtual)
        least = [float(seconds) for seconds in table.least[:2]]
        forward, back = (choices * least[i] + (embed[i] + head[i]) for i in (0, 1))
        return forward, back, (begins * least[0] + embed[0], begins * least[1] + embed[1])

    def may_begin(self, node: PipelineNode, choices: Longs) -> NDArray[np.bool_]:
        """Whether the rank after those of a node may fit with so many layers, and those after it with the rest."""
        rest = self.space.num_layers - node.used - choices
        # The layers left must find room on the ranks left.
        able = rest <= node.pipe.room[len(node.layers) + 1]
        return self._fits(node, choices) & able if able.any() else able

    def _fits(self, node: PipelineNode, choices: Longs) -> NDArray[np.bool_]:
        """Whether the rank after those of a node may fit with so many layers."""
        pipe, rank = node.pipe, len(node.layers)
        kind, table, tables = pipe.shape.kinds[rank], pipe.tables[rank], self.tables
        variants = node.variants
        # The most ZeRO of the variants holds the least, so the bound holds for all of them.
        zero = max(v[0] for v in variants)
        if pipe.virtual > 1:
            dense: Doubles = choices * table.least[4]
            needed_bytes = static_bytes(
                dense, 0.0, self.space.base, zero, self.rows.ways(pipe.shape, pipe.workers, rank), tables.stack
            )
            saved_bytes = choices * float(table.least[5])  # a microbatch in each stage
            if not rank:
                # On the first rank more (stage, microbatch) pairs are alive at some moment than one a stage.
                ways = min(under_way(s, pipe.shape.pp, pipe.virtual, pipe.count) for _, s in variants)
                saved_bytes = np.maximum(saved_bytes, choices // pipe.virtual * ways * float(table.least[5]))
            needed_bytes = np.asarray(needed_bytes + saved_bytes)
            return np.asarray(needed_bytes + tables.workspace[kind] <= self.limits[kind])
        schedules = tuple(dict.fromkeys(schedule for _, schedule in variants))
        first = 0 if not rank else tables.counted[node.used]
        last = rank == pipe.shape.pp - 1
        ends = np.array([tables.num_layers if last else tables.counted[node.used + n] for n in choices.tolist()])
        needed_bytes = static_bytes(
            table.dense[ends] - table.dense[first],
            table.routed[ends] - table.routed[first],
            self.space.base,
            zero,
            self.rows.ways(pipe.shape, pipe.workers, rank),
            tables.stack,
        )
        needed_bytes = needed_bytes + held_bytes(
            [table.kept_bytes[ends] - table.kept_bytes[first]], 0.0, schedules, rank, pipe.shape.pp, pipe.count
        )
        return np.asarray(needed_bytes + tables.workspace[kind] <= self.limits[kind])
