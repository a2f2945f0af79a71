"""The points of one block: which of them fit, and a bound on each one's time.

`Opening.open` looks at the points of a family under one schedule and microbatch size, which differ in sharding, ZeRO
and overlap: memory first, from the order of the schedule's rows, then time, all that last equally long at once. Leaves
out better bounds (`tighten`) and prices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.plans.parts import ScheduleName
from gnomon.search.blocks import SLACK, Blocks, Choice
from gnomon.search.bounds import (
    ACTIONS,
    ENDS,
    MIXED,
    Actions,
    Doubles,
    Ends,
    Family,
    Pipeline,
    actions,
    halves,
    is_split,
    layer_seconds,
    time_bound,
    v_placed,
    weight_at_most,
)
from gnomon.search.flight import flight
from gnomon.search.leaves import Sharding, held_bytes, unsharded
from gnomon.search.skeleton import Reductions
from gnomon.search.space import Point, Recompute
from gnomon.search.tighten import Durations, Loose, Tighten, gathered


@dataclass(frozen=True, eq=False)
class Block:
    """Points that differ in sharding, ZeRO and overlap only."""

    family: Family
    schedule: ScheduleName
    virtual: int
    column: int
    """Index of the microbatch size."""
    count: int
    """Microbatches."""
    pipeline: Pipeline


class Opening:
    """Opens blocks of one search."""

    def __init__(self, blocks: Blocks, tighten: Tighten) -> None:
        self.blocks, self.tighten = blocks, tighten
        self.job, self.space, self.counts = blocks.job, blocks.space, blocks.counts
        self._shardings: dict[object, Sharding] = {}

    def block(self, family: Family, schedule: ScheduleName, virtual: int, column: int) -> Block:
        """A block by what it is of."""
        count = self.space.global_batch // (family.micro[column] * family.dp)
        pipeline = self.job.pipeline(family.pp, virtual, v_placed(schedule))
        return Block(family, schedule, virtual, column, count, pipeline)

    def members(self, block: Block) -> list[Point]:
        """All points of a block."""
        family, layout = block.family, block.family.layout
        micro, preset = family.micro[block.column], cast(Recompute, family.recompute)
        return [
            Point(
                family.tp, family.cp, family.ep, family.pp, replicas, shards, block.schedule, block.virtual, micro,
                layout.sequence_parallel, layout.keep_gathered, layout.context, preset, zero, overlap,
            )
            for replicas, shards, zero, overlap in self.blocks.choices(family).kept
        ]  # fmt: skip

    def open(self, block: Block) -> Iterator[tuple[float, Point | Loose]]:
        """Points that may fit, with bounds; counts the others."""
        if not self.blocks.prune:
            yield from ((0.0, point) for point in self.members(block))
            return
        family, choices = block.family, self.blocks.choices(block.family)
        room = self.blocks.room(family) - self.blocks.workspace
        static = self.blocks.static(family, block.pipeline)
        try:
            rows = flight(block.schedule, family.pp, block.virtual, block.count)
        except PlanError:
            self.counts.reject("schedule", len(choices.kept))
            return
        bare = np.zeros(len(family.table.tensors))
        fits = (static + self._held(block, bare, by_layer=False)).max(axis=1) <= room
        for kind in np.unique(choices.kinds[fits & (choices.effective > 1)]).tolist():
            own = choices.kinds == kind
            index = int(np.argmax(own))
            extra = self._extra(family, choices.kept[index], split_backward=is_split(block.schedule))
            held = self._held(block, extra, by_layer=int(choices.effective[index]) == 3)
            fits[own] &= (static[own] + held).max(axis=1) <= room
        self.counts.too_large += int((~fits).sum())
        if not fits.any():
            return
        members, sends = self.members(block), self.blocks.sends.of(family, block.pipeline)[:, [block.column]]
        groups: dict[int, list[tuple[Point, Sharding]]] = {}
        for i in np.flatnonzero(fits).tolist():
            kind = max(int(choices.effective[i]), 1)
            groups.setdefault(kind, []).append((members[i], self.sharding(family, *choices.kept[i][:3])))
        for group in groups.values():
            yield from self._bounded(block, group, sends, rows.most)

    def _held(self, block: Block, extra: Doubles, *, by_layer: bool) -> Doubles:
        """[ranks] bytes of activations, and of what comes and goes with a backward, at least."""
        rows = flight(block.schedule, block.family.pp, block.virtual, block.count)
        frees = bool(self.job.stack.split_backward_frees)
        return held_bytes(block.family.table, block.column, block.pipeline, rows, extra, by_layer=by_layer, frees=frees)

    def _extra(self, family: Family, choice: Choice, *, split_backward: bool) -> Doubles:
        """[kinds] bytes that come and go with a backward under a choice."""
        return unsharded(self.sharding(family, *choice[:3]), split_backward=split_backward)

    def sharding(self, family: Family, replicas: int, shards: int, zero: int) -> Sharding:
        """One way of sharding a family."""
        key = (id(family.table), family.pp, replicas, shards, zero)
        if key not in self._shardings:
            self._shardings[key] = Sharding(family, replicas, shards, zero)
        return self._shardings[key]

    def _adding(self, sharding: Sharding, count: int) -> Doubles:
        precision = self.space.base.precision
        adding = sharding.adding * (1.0 if precision.grad != precision.compute else (count - 1) / count)
        return adding

    def _actions(self, sharding: Sharding, pipeline: Pipeline, column: int, count: int) -> Actions:
        adding, by_layer = self._adding(sharding, count), sharding.zero == 3
        return actions(
            sharding.table, pipeline.split.counts, adding, sharding.copying, by_layer=by_layer, column=column
        )

    def _bounded(
        self,
        block: Block,
        group: list[tuple[Point, Sharding]],
        sends: Doubles,
        most: NDArray[np.int64],
    ) -> Iterator[tuple[float, Point | Loose]]:
        """Bounds of points of one block whose actions last equally long, one column each."""
        pipeline, column, count = block.pipeline, block.column, block.count
        point, sharding = group[0]
        split_backward, clip = is_split(point.schedule), self.space.base.optimizer.clip
        act = self._actions(sharding, pipeline, column, count)
        given = act
        forward, back = act.forward[:, 0], (act.weight if split_backward else act.whole)[:, 0]
        if point.schedule in MIXED:
            act, beside = halves(act), self._adding(sharding, count)
            back = weight_at_most(sharding.table, pipeline.split.counts, beside, column)
        parts = [each.ends(pipeline, forward, back, overlap=point.overlap) for point, each in group]
        ends = Ends(**{name: np.stack([getattr(p, name) for p in parts], axis=-1) for name in ENDS})
        if sharding.zero == 3:
            wait = [each.waits(pipeline, act) for _, each in group]
            act = Actions(*(np.concatenate([getattr(w, name) for w in wait], axis=1) for name in ACTIONS))
        found = np.broadcast_to(
            time_bound(pipeline, act, sends, count, ends, split_backward=split_backward, clip=clip, most=most[:, None]),
            (len(group),),
        )
        for i, (point, sharding) in enumerate(group):
            bound = float(found[i])
            if sharding.zero == 3 and clip:
                bound = max(bound, sharding.streams(pipeline, given, sends, count))
            item: Point | Loose = point
            if clip:
                durations = self._durations(sharding, pipeline, given, sends, column, count, parts[i])
                item = Loose(
                    point=point,
                    durations=self.tighten.register(point, durations),
                    sharding=sharding,
                    column=column,
                    blocked=parts[i].blocked,
                    norm=float(parts[i].norm),
                    adding=self._adding(sharding, count),
                )
            yield bound * (1 - SLACK), item

    def _durations(
        self,
        sharding: Sharding,
        pipeline: Pipeline,
        act: Actions,
        sends: Doubles,
        column: int,
        count: int,
        ends: Ends,
    ) -> Durations:
        reduce, final = ends.each, ends.reduce
        kind: Reductions = "stages" if reduce.any() else "once" if final.any() and not ends.blocked.any() else ""
        if sharding.zero == 3:
            kind, reduce = "layers", pipeline.split.counts @ sharding.reduced_s
            final = reduce + pipeline.split.counts @ sharding.summed_s * pipeline.own
        found = Durations(
            pipeline=pipeline,
            act=act,
            sends=sends,
            count=count,
            head=ends.head[:, None],
            reduce=reduce[:, None],
            final=final[:, None],
            reductions=kind,
        )
        if sharding.zero < 3 or not sharding.optimizer.reshard_after_forward:
            return found
        seconds = layer_seconds(sharding.table, self._adding(sharding, count), sharding.copying, column)
        prefetch = self.space.base.overlap.prefetch
        lead, gathers, lasts = gathered(pipeline, sharding, seconds, prefetch)
        return replace(found, lead=lead, gathers=gathers, lasts=lasts)
