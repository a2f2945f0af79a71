"""The points of one block: which of them fit, and a bound on each one's time.

`Opening.open` looks at the points of a family under one schedule and microbatch size, which differ in sharding, ZeRO
and overlap: memory first, from the order of the schedule's rows. It returns those that may fit in groups whose actions
last equally long; `Opening.members` bounds the points of one. Leaves out better bounds (`tighter_time`) and prices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.search.bounds.contention import layer_work, slowed
from gnomon.search.bounds.families import (
    ACTIONS,
    ENDS,
    Actions,
    Doubles,
    Ends,
    Family,
    Pipeline,
    actions,
    halves,
    idle_bound,
    is_split,
    no_ends,
    partly_split,
    time_bound,
    v_placed,
    weight_at_most,
)
from gnomon.search.bounds.in_flight import flight
from gnomon.search.bounds.layer_tables import KindTable, parameters_of
from gnomon.search.bounds.peak_memory import groups, least_peak
from gnomon.search.bounds.point_memory import held_bytes, inside_bytes, unsharded
from gnomon.search.bounds.point_time import Sharding, ends_of, streams, waiting
from gnomon.search.bounds.tighter_time import Loose, Tighten
from gnomon.search.equal.blocks import SLACK, Blocks
from gnomon.search.equal.legality import Choice
from gnomon.search.space.points import Point, Recompute

KEPT = 1024
"""The number of pipelines whose actions are remembered, because blocks of one family come close together."""


@dataclass(frozen=True, eq=False)
class Block:
    """Points that differ in sharding, ZeRO and overlap only."""

    family: Family
    """The axes, layout and recompute of its points."""
    schedule: str
    """Name of their schedule."""
    virtual: int
    """Stages on each pipeline rank."""
    column: int
    """Index of the microbatch size."""
    count: int
    """Microbatches."""
    pipeline: Pipeline
    """How layers are cut into stages."""


@dataclass(frozen=True, eq=False)
class PointGroup:
    """Points of a block whose actions last equally long."""

    block: Block
    """The block that it is of."""
    members: tuple[int, ...]
    """Indices into the choices of the block's family."""
    rough: bool = False
    """Whether a better bound than the first is worth its time (`Opening.better`)."""


class Opening:
    """Opens blocks of one search."""

    def __init__(self, blocks: Blocks, tighten: Tighten) -> None:
        self.blocks, self.tighten = blocks, tighten
        self.job, self.space, self.counts = blocks.job, blocks.space, blocks.counts
        self._shardings: dict[object, Sharding] = {}
        self._parameters: dict[KindTable, KindTable] = {}
        self._same: dict[object, KindTable] = {}
        """Maps parameters to the first table that has just these."""
        self._acts: dict[object, Actions] = {}
        self._inside: dict[object, Doubles] = {}
        self._coming: dict[object, Doubles] = {}

    def block(self, family: Family, schedule: str, virtual: int, column: int) -> Block:
        """The block of a family with a schedule, virtual stages and a microbatch size."""
        count = self.space.global_batch // (family.micro[column] * family.dp)
        pipeline = self.job.pipeline(family.pp, virtual, v_placed(schedule))
        return Block(family, schedule, virtual, column, count, pipeline)

    def points(self, block: Block, members: Sequence[int] | None = None) -> list[Point]:
        """All points of a block, or those of its choices that `members` indexes."""
        family, layout = block.family, block.family.layout
        micro, preset = family.micro[block.column], cast(Recompute, family.recompute)
        choices = self.blocks.legality.choices(family).choices
        chosen = choices if members is None else [choices[i] for i in members]
        return [
            Point(
                family.tp, family.cp, family.ep, family.pp, replicas, shards, block.schedule, block.virtual, micro,
                layout.sequence_parallel, layout.keep_gathered, layout.context, preset, zero, overlap,
            )
            for replicas, shards, zero, overlap in chosen
        ]  # fmt: skip

    def open(self, block: Block) -> Iterator[tuple[float, PointGroup]]:
        """Yields groups of points that may fit, with bounds; counts the others."""
        family, choices = block.family, self.blocks.legality.choices(block.family)
        # Bytes of tensors that the emptiest device takes beyond the workspace.
        room = self.blocks.memory.room(family) - self.blocks.memory.workspace
        static = self.blocks.memory.static(family, block.pipeline)
        # Some numbers of microbatches have no rows in a schedule (interleaved: multiples of pp).
        try:
            flight(block.schedule, family.pp, block.virtual, block.count)
        except PlanError:
            self.counts.reject("schedule", len(choices.choices))
            return
        # First without what ZeRO 2 and 3 hold for a moment, which is the same for all points; then that for each kind
        # of it.
        bare = np.zeros(len(family.table.tensors))
        fits = (static + self._least_bytes(block, bare, by_layer=False)).max(axis=1) <= room
        for kind in np.unique(choices.holding[fits]).tolist():
            if kind:
                own = choices.holding == kind
                zero_bytes = self._zero_held(block, choices.choices[int(np.argmax(own))], kind // 4)
                fits[own] &= (static[own] + zero_bytes).max(axis=1) <= room
        self.counts.too_large += int((~fits).sum())
        # ZeRO 2 and 3 differ in what comes and goes with a backward, so points are grouped by it; 0 stands for ZeRO 0
        # and 1.
        alike: dict[int, list[int]] = {}
        for i in np.flatnonzero(fits).tolist():
            alike.setdefault(int(choices.kinds[i]) if choices.effective[i] > 1 else 0, []).append(i)
        for members in alike.values():
            # Contention is bounded only under ZeRO 3 with a norm.
            rough = self.blocks.clip and int(choices.effective[members[0]]) == 3
            group = PointGroup(block, tuple(members), rough)
            yield self._group_bound(group), group

    def better(self, group: PointGroup) -> tuple[float, PointGroup]:
        """A rough group with a better bound: with what kernels lose to collectives."""
        act = self._act(group)
        bound = float(self._slowed(group, act, no_ends(len(act.forward))).min())
        return bound * (1 - SLACK), replace(group, rough=False)

    def _group_bound(self, group: PointGroup) -> float:
        """Seconds that every point of a group takes, at least: without what begins and ends a step, and under ZeRO 3
        with the fastest gathers and reductions of any of them."""
        block, act_of_group = group.block, self._act(group)
        pipeline, sends, clip = block.pipeline, self._sends(block), self.blocks.clip
        every = self._shardings_of(group)
        # Of a schedule that splits some backwards, weight gradients are bounded by what a whole backward takes beyond
        # its input gradients.
        act, longest = halves(act_of_group) if partly_split(block.schedule) else act_of_group, 0.0
        if every[0].zero == 3:
            # The least of all shardings, kind by kind: a bound for every point of the group.
            reduced, summed = (np.minimum.reduce([getattr(e, n) for e in every]) for n in ("reduced_s", "summed_s"))
            gathers = None
            if every[0].optimizer.reshard_after_forward:
                gathers = np.minimum.reduce([sharding.gathered_s for sharding in every])
                act = waiting(pipeline, act, gathers, self.space.base.overlap.prefetch)
            longest = (
                streams(pipeline, act_of_group, sends, block.count, self._joins(block), reduced, summed, gathers)
                if clip
                else 0.0
            )
        chains = time_bound(
            pipeline,
            act,
            sends,
            block.count,
            no_ends(len(act.forward)),
            split_backward=is_split(block.schedule),
            clip=clip,
            most=self._most(block),
        )
        return (max(float(chains.max()), longest) + self.blocks.meeting) * (1 - SLACK)

    def _slowed(self, group: PointGroup, act: Actions, ends: Ends) -> Doubles:
        """[members] `slowed` of a group under ZeRO 3."""
        block, every, split_backward = group.block, self._shardings_of(group), is_split(group.block.schedule)
        around = idle_bound(block.pipeline, act, self._sends(block), ends, split_backward=split_backward)
        adding, joins = self._adding(every[0], block.count), self._joins(block)
        work = layer_work(block.family.table, every[0].copying, adding, block.column, split_backward=split_backward)
        return slowed(block.pipeline, around, block.count, joins, every, work)

    def members(self, group: PointGroup, worst: float = float("inf")) -> Iterator[tuple[float, Point | Loose]]:
        """The points of a group, with bounds; those that take `worst` seconds or more are counted as too slow."""
        block, act = group.block, self._act(group)
        pipeline, count, sends, act_of_member = block.pipeline, block.count, self._sends(block), act
        every, table = self._shardings_of(group), block.family.table
        choices = self.blocks.legality.choices(block.family).choices
        overlap = np.array([choices[i][3] for i in group.members], np.bool_)
        split_backward, clip, first = is_split(block.schedule), self.blocks.clip, every[0]
        adding = self._adding(first, count)
        forward, back = act.forward[:, 0], (act.weight if split_backward else act.whole)[:, 0]
        # Weight gradients at their longest: what may hide a reduction must not be underestimated, or the bound would be
        # too high.
        if partly_split(block.schedule):
            act = halves(act)
            back = weight_at_most(table, pipeline.split.counts, adding, block.column)
        # [stages, members] what reductions run next to.
        backs = np.broadcast_to(back[:, None], (len(back), len(every)))
        if first.zero == 3:
            wait = [sharding.waits(pipeline, act) for sharding in every]
            act = Actions(*(np.concatenate([getattr(w, name) for w in wait], axis=1) for name in ACTIONS))
            if not split_backward:  # reductions begin beside a backward that waits for gathers
                backs = np.concatenate([waited.whole for waited in wait], axis=1)
        together = ends_of(every, pipeline, forward, backs, overlap)
        bounds = np.broadcast_to(
            time_bound(
                pipeline,
                act,
                sends,
                count,
                together,
                split_backward=split_backward,
                clip=clip,
                most=self._most(block),
            ),
            (len(every),),
        )
        # Updates on the host have a stream of their own, which may be the longest.
        bounds = np.maximum(bounds, [sharding.updates.host_s(pipeline) for sharding in every])
        if first.zero == 3 and clip:
            bounds = np.maximum(bounds, self._slowed(group, act_of_member, together))
        static, joins = self.blocks.memory.static(block.family, pipeline), self._joins(block)
        for at, (member, bound, sharding) in enumerate(zip(group.members, bounds.tolist(), every, strict=True)):
            least = bound * (1 - SLACK)
            # The dearest bound is looked at only for points that the cheaper ones leave.
            if least < worst and clip:
                least = max(bound, sharding.streams(pipeline, act_of_member, sends, count, joins)) * (1 - SLACK)
            if least >= worst:
                self.counts.too_slow += 1
                continue
            (point,) = self.points(block, [member])
            # Without a norm no better bound is known: the point is predicted next.
            if not clip:
                yield least, point
                continue
            loose = Loose(
                point=point,
                pipeline=pipeline,
                act=act_of_member,
                sends=sends,
                count=count,
                ends=Ends(**{name: getattr(together, name)[..., at] for name in ENDS}),
                sharding=sharding,
                table=table,
                column=block.column,
                adding=adding,
                static=static[member],
            )
            self.tighten.register(loose, least)
            yield least, loose

    def fits(self, loose: Loose) -> bool:
        """Whether a point may fit, by all rows of its schedule and all communicators that are sure."""
        # All rows of the schedule and all communicators: dearer than what `open` looked at.
        peaks = (loose.static + least_peak(loose) + self.blocks.memory.workspace).tolist()
        counted = groups(loose, clip=self.blocks.clip)
        return all(
            size <= self.blocks.memory.tensor_bytes_with(count) for size, count in zip(peaks, counted, strict=True)
        )

    def _act(self, group: PointGroup) -> Actions:
        block, sharding = group.block, self._shardings_of(group)[0]
        table, counts, column = block.family.table, block.pipeline.split.counts, block.column
        adding, copying = self._adding(sharding, block.count), sharding.copying
        # What the actions of a pipeline depend on; arrays are compared by their bytes.
        key = table, block.pipeline.name, sharding.zero == 3, adding.tobytes(), copying.tobytes()
        if key not in self._acts:  # of all microbatch sizes
            if len(self._acts) >= KEPT:
                self._acts.clear()
            self._acts[key] = actions(table, counts, adding, copying, by_layer=sharding.zero == 3)
        every = self._acts[key]
        # A slice of one column keeps arrays two-dimensional, [stages, 1].
        return Actions(*(getattr(every, name)[:, column : column + 1] for name in ACTIONS))

    def _adding(self, sharding: Sharding, count: int) -> Doubles:
        precision = self.space.base.precision
        # Gradients of the compute width are added in place but for the first microbatch, which only writes them.
        return sharding.adding * (1.0 if precision.grad != precision.compute else (count - 1) / count)

    def _shardings_of(self, group: PointGroup) -> list[Sharding]:
        family = group.block.family
        choices = self.blocks.legality.choices(family).choices
        return [self.sharding(family, *choices[i][:3]) for i in group.members]

    def _sends(self, block: Block) -> Doubles:
        return self.blocks.sends.of(block.family, block.pipeline)[:, block.column : block.column + 1]

    def _most(self, block: Block) -> NDArray[np.int64]:
        return flight(block.schedule, block.family.pp, block.virtual, block.count).most[:, None]

    def _joins(self, block: Block) -> NDArray[np.int64]:
        """[stages] how often two passes over a stage may share the gather of one layer: where they turn, and where the
        stage has no other."""
        in_flight = flight(block.schedule, block.family.pp, block.virtual, block.count)
        joins: NDArray[np.int64] = in_flight.turns + in_flight.again * (block.pipeline.split.counts.sum(axis=1) == 1)
        return joins

    def _least_bytes(self, block: Block, extra: Doubles, *, by_layer: bool, waiting: Doubles | None = None) -> Doubles:
        """[ranks] bytes of activations, and of what comes and goes with a backward, at least."""
        rows = flight(block.schedule, block.family.pp, block.virtual, block.count)
        frees = bool(self.job.stack.gradients.split_backward_frees)
        table, column, pipeline = block.family.table, block.column, block.pipeline
        key = table, column, pipeline.name, by_layer, extra.tobytes()
        if key not in self._inside:
            self._inside[key] = inside_bytes(table, column, pipeline, extra, by_layer=by_layer)
        return held_bytes(table, column, pipeline, rows, self._inside[key], frees=frees, waiting=waiting)

    def _zero_held(self, block: Block, choice: Choice, zero: int) -> Doubles:
        """[ranks] bytes that come and go under ZeRO 2 and 3, at least."""
        sharding = self.sharding(block.family, *choice[:3])
        if zero == 2 and not choice[3]:  # gradients of all stages wait for the last backward
            none, extra = np.zeros(len(sharding.collectives)), self._unsharded(sharding, split_backward=False)
            present = np.where(block.pipeline.split.counts > 0, extra, 0.0)
            return self._least_bytes(block, none, by_layer=False, waiting=2 * present.max(axis=1))
        extra = self._unsharded(sharding, split_backward=is_split(block.schedule))
        return self._least_bytes(block, extra, by_layer=zero == 3)

    def _unsharded(self, sharding: Sharding, *, split_backward: bool) -> Doubles:
        key = sharding, split_backward
        if key not in self._coming:
            self._coming[key] = unsharded(sharding, split_backward=split_backward)
        return self._coming[key]

    def sharding(self, family: Family, replicas: int, shards: int, zero: int) -> Sharding:
        """The sharding of a family by replicas, shards and ZeRO stage."""
        table = family.table
        if table not in self._parameters:
            # Families whose tables have equal parameters share their shardings, whatever their layers keep.
            self._parameters[table] = self._same.setdefault(parameters_of(table), table)
        key = self._parameters[table], family.tp, family.cp, family.ep, family.pp, replicas, shards, zero
        if key not in self._shardings:
            self._shardings[key] = Sharding(family, replicas, shards, zero)
        return self._shardings[key]
