"""From axes to blocks: families of points, and the rows of blocks in each, bounded before any point is looked at.

`Blocks.families` yields every legal arrangement of axes, layout and recompute with a bound that holds for all of its
points; `Blocks.rows` those of one family by schedule, with a bound for each microbatch size. A block (a row and a
microbatch size) holds points that differ in sharding, ZeRO and overlap only: see `block_points`. Points that are
illegal, duplicates or too large are counted on the way. Leaves out which are opened (`solve`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gnomon.search.bounds.families import (
    GRID_S,
    Actions,
    Doubles,
    Family,
    Pipeline,
    SearchJob,
    Sends,
    actions,
    halves,
    is_split,
    no_ends,
    partly_split,
    time_bound,
    v_placed,
)
from gnomon.search.bounds.layer_tables import KindTable
from gnomon.search.bounds.point_time import adding_s
from gnomon.search.budget import KeepGoing, always
from gnomon.search.equal.block_memory import BlockMemory
from gnomon.search.equal.legality import Legality
from gnomon.search.results import Counts

SLACK = 1e-9
"""The share by which bounds are lowered, because sums of floats are rounded."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRow:
    """Blocks of one family and schedule that have not been opened, the least bound first."""

    family: Family
    """The axes, layout and recompute of its points."""
    schedule: str
    """Name of their schedule."""
    virtual: int
    """Stages on each pipeline rank."""
    columns: tuple[int, ...]
    """The index of each block's microbatch size."""
    bounds: tuple[float, ...]
    """The bound of each block, ascending."""

    @property
    def rest(self) -> BlockRow | None:
        """The blocks without that of the least bound; None if it is the last."""
        if len(self.columns) == 1:
            return None
        return replace(self, columns=self.columns[1:], bounds=self.bounds[1:])


class Blocks:
    """The blocks of a space, and how many of its points never get that far."""

    def __init__(self, job: SearchJob, counts: Counts, limit: int, *, prune: bool) -> None:
        """Takes the limit, bytes that a rank's peak may be, and prune, whether bounds are looked at."""
        self.job, self.space, self.counts, self.prune = job, job.space, counts, prune
        self.legality = Legality(job)
        self.memory = BlockMemory(job, self.legality, limit)
        self.sends = Sends(job)
        self.clip = self.space.base.optimizer.clip
        self.meeting = max(job.meeting_s - GRID_S, 0.0) if self.clip else 0.0
        self._work: dict[KindTable, Doubles] = {}
        self._adding: dict[KindTable, Doubles] = {}
        self._acts: dict[object, Actions] = {}
        """Actions of the family whose rows are made."""
        self._layers = np.array([len(kind.layers) for kind in job.kinds.kinds], float)

    def families(self, keep_going: KeepGoing = always) -> Iterator[tuple[float, Family]]:
        """Every family that may run, with a bound; counts what is illegal or a duplicate. keep_going: once there is no
        time left, families come without a price, under a bound of 0."""
        space = self.space
        for tp, cp, ep, pp, dp in space.axes():
            points = len(space.shardings(dp)) * space.leaves
            if not points:
                continue
            legal = self.legality.scheduled(pp, dp)
            for sequence, keep, context in space.layouts(cp):
                layout = replace(space.base.layout, sequence_parallel=sequence, keep_gathered=keep, context=context)
                why = self.legality.illegal(tp, cp, ep, layout)
                if why:
                    # Rules on axes and layout rule out all blocks and ways of recomputing at once.
                    blocks = len(space.pipelines(pp)) * len(space.micro_batch_size)
                    self.counts.reject(why, points * blocks * len(space.recompute))
                    continue
                for recompute in space.recompute:
                    family = Family(self.job, tp, cp, ep, pp, dp, layout, recompute, space.micro_batch_size)
                    choices = self.legality.choices(family)
                    for rule, blocks in legal.why.items():
                        self.counts.reject(rule, points * blocks)
                    self.counts.reject("sharding", legal.blocks * choices.illegal)
                    # Choices that change no row (ZeRO on one rank, say) stand for each other: one is kept, the rest are
                    # duplicates.
                    self.counts.duplicates += legal.blocks * (points - choices.illegal - len(choices.choices))
                    if self.prune and self.memory.hopeless(family):
                        self.counts.too_large += legal.blocks * len(choices.choices)
                    elif legal.blocks and choices.choices:
                        yield self.family_bound(family) if keep_going() else 0.0, family

    def family_bound(self, family: Family) -> float:
        """Seconds that every point of a family takes, at least.

        All layers' forwards and backwards of all microbatches, divided among pp ranks: the busiest rank has at least
        the mean of them, whatever the stages and the schedule, and actions of one stream do not overlap. With a common
        norm, all ranks meet once a step, and the meeting holds the same stream.
        """
        if not self.prune:
            return 0.0
        key = family.table
        if key not in self._work:
            self._work[key] = self._layers_s(family.table)
        counts = self.legality.microbatches(family)
        # The smallest product over microbatch sizes: the bound holds for every block of the family.
        bound = (self._work[key] * counts)[counts > 0].min() / family.pp + self.meeting
        return float(bound) * (1 - SLACK)

    def _layers_s(self, table: KindTable) -> Doubles:
        """[microbatch sizes] seconds of all layers, at least: those of their kernels and collectives, of copies to the
        host and back, or of their launches."""
        adding = self.adding(table)[:, None] / table.rates.compute
        back = table.input_s + table.weight_s + adding
        # [kinds] @ [kinds, sizes] = [sizes] seconds of all layers of the model.
        device, away = self._layers @ (table.forward_s + back), self._layers @ table.copied_s
        if away.any():
            # Copies to the host have their own stream: forward takes the longer of computing and copying, and so does
            # backward.
            device = np.maximum(self._layers @ table.forward_s, away) + np.maximum(self._layers @ back, away)
        host = self._layers @ sum(table.host_s)
        # Three actions a layer (forward, input, weight gradients) are rounded to the grid.
        least: Doubles = np.maximum(np.maximum(device, host) - 3 * self._layers.sum() * GRID_S, 0.0)
        return least

    def adding(self, table: KindTable) -> Doubles:
        """[kinds] seconds of adding weight gradients up, the least of all ZeRO stages."""
        key = table
        if key not in self._adding:
            parts = [adding_s(table, self.job, divided=divided) for divided in (False, True)]
            self._adding[key] = np.minimum(*parts)
        return self._adding[key]

    def points(self, family: Family) -> int:
        """Points of a family that stand for themselves and may run."""
        return self.legality.scheduled(family.pp, family.dp).blocks * len(self.legality.choices(family).choices)

    def rows(self, family: Family) -> Iterator[BlockRow]:
        """The rows of a family, with bounds; counts what is too large."""
        legal, num_choices = self.legality.scheduled(family.pp, family.dp), len(self.legality.choices(family).choices)
        if not self.prune:
            for schedule, virtual, columns in legal.rows:
                yield BlockRow(family, schedule, virtual, columns, (0.0,) * len(columns))
            return
        if self.memory.too_large(family):
            self.counts.too_large += legal.blocks * num_choices
            return
        self._acts.clear()
        bounds: dict[tuple[int, bool, str], Doubles] = {}
        rooms: dict[tuple[int, bool], NDArray[np.bool_]] = {}
        for schedule, virtual, columns in legal.rows:
            # Rows with one way of splitting backward and one placement share their bounds.
            way = "mixed" if partly_split(schedule) else "split" if is_split(schedule) else "whole"
            at = virtual, v_placed(schedule)
            pipeline = self.job.pipeline(family.pp, *at)
            if at not in rooms:
                rooms[at] = self.memory.may_fit(family, pipeline)
            fits = rooms[at] & self.memory.has_room(family, schedule, virtual, pipeline)
            fitting = [c for c in columns if fits[c]]
            self.counts.too_large += (len(columns) - len(fitting)) * num_choices
            if fitting:
                if (*at, way) not in bounds:
                    bounds[*at, way] = self._bounded(family, pipeline, way)
                chosen = sorted((float(bounds[*at, way][c]), c) for c in fitting)
                yield BlockRow(family, schedule, virtual, tuple(c for _, c in chosen), tuple(b for b, _ in chosen))

    def row_bound(self, family: Family, schedule: str, virtual: int, column: int) -> float:
        """Bound on the time of a block, without sharding."""
        way = "mixed" if partly_split(schedule) else "split" if is_split(schedule) else "whole"
        return float(self._bounded(family, self.job.pipeline(family.pp, virtual, v_placed(schedule)), way)[column])

    def _bounded(self, family: Family, pipeline: Pipeline, way: str) -> Doubles:
        """[microbatch sizes] bound on the time without sharding."""
        act = self.acts(family, pipeline)
        bounds = time_bound(
            pipeline,
            halves(act) if way == "mixed" else act,
            self.sends.of(family, pipeline),
            self.legality.microbatches(family),
            no_ends(len(act.forward)),
            split_backward=way != "whole",
            clip=self.clip,
        )
        return (bounds + self.meeting) * (1 - SLACK)

    def acts(self, family: Family, pipeline: Pipeline) -> Actions:
        """Actions of every microbatch size, whatever the sharding."""
        key = family.table, pipeline.name
        if key not in self._acts:
            none = np.zeros(len(self._layers))
            counts = pipeline.split.counts
            self._acts[key] = actions(family.table, counts, self.adding(family.table), none, by_layer=False)
        return self._acts[key]
