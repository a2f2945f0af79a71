"""Points of a block that have one variant: bounds on their steps and on the memory of their ranks, as arrays.

`Bounds.bounds` and `Bounds.ratio` answer for all points of `PointRows` at once. What they add up is in `mixed.bounds`,
with proofs. Leaves out which points are looked at (`best_first`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gnomon.plans import Mesh
from gnomon.prices.collectives import CollectiveKind
from gnomon.search.bounds.families import Actions, is_split
from gnomon.search.bounds.in_flight import flight, under_way
from gnomon.search.mixed.bounds import (
    SLACK,
    Doubles,
    LayerTable,
    LayerTables,
    Longs,
    held_bytes,
    in_flight,
    least_of_ranks,
    least_step_s,
    played_s,
    static_bytes,
    tails_s,
)
from gnomon.search.mixed.space import MixedBlock, MixedSpace, Shape, stages_of_ranks


@dataclass(frozen=True, slots=True)
class PointRows:
    """Points of a block that have one variant, in order of their bounds."""

    block: MixedBlock
    """The block that they are of."""
    variant: tuple[int, str]
    """Their (ZeRO stage, schedule)."""
    layers: Longs
    """[points, stages]"""
    shares: Longs
    """[points, kinds] of workers side by side; [points, 0] of pipelines over kinds."""
    bounds: Doubles
    """[points]"""
    played: bool
    """Whether their schedule was played, after which the bound is as good as it gets."""

    def part(self, which: Any, bounds: Doubles | None = None, *, played: bool = False) -> PointRows:
        """Some of the points. bounds: better ones."""
        chosen = (self.bounds if bounds is None else bounds)[which]
        return replace(
            self, layers=self.layers[which], shares=self.shares[which], bounds=chosen, played=self.played or played
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """What one kind of replica does in the points of a block."""

    act: Actions
    """[stages, points]"""
    kind: int
    """The kind of the first rank's device."""
    ways: Sequence[tuple[int, int]]
    """[ranks] numbers of ranks over which ZeRO divides dense and routed parameters."""
    dense: Doubles
    """[stages, points] elements that a rank holds before ZeRO."""
    routed: Doubles


class Bounds:
    """Bounds of the points of one search."""

    def __init__(self, tables: LayerTables, space: MixedSpace, limits: tuple[int, ...]) -> None:
        """Takes the limits, bytes that a device of each kind may hold."""
        self.tables, self.space, self.limits = tables, space, limits
        self._ratios: dict[object, float] = {}
        self._most: dict[object, int] = {}
        self._flights: dict[object, int] = {}
        optimizer = space.base.optimizer
        self.clip = optimizer.clip and optimizer.offload is None
        """Whether all ranks meet once a step, in the norm."""

    def _actions(self, block: MixedBlock, tables: Sequence[tuple[LayerTable, Longs]], layers: Longs) -> Actions:
        """Seconds of the actions of every stage, [stages, points]. tables: of each pipeline rank, and the column (of
        sizes) of each point. layers: [points, stages]."""
        edges, of_stage = self.tables.edges(layers), stages_of_ranks(block.shape)
        rank_of = {stage: rank for rank, stages in enumerate(of_stage) for stage in stages}

        def seconds_of(name: str) -> Doubles:
            seconds = np.empty(layers.T.shape)
            for stage in range(layers.shape[1]):
                # column[edges[s + 1]] - column[edges[s]]: prefix sums, so a stage of any cut is one subtraction for all
                # points.
                table, columns = tables[rank_of[stage]]
                column: Doubles = getattr(table, name)
                seconds[stage] = column[edges[stage + 1], columns] - column[edges[stage], columns]
            return seconds

        return Actions(
            forward=seconds_of("forward"),
            whole=seconds_of("back"),
            input=seconds_of("drain"),
            weight=seconds_of("weight"),
        )

    def _works(self, rows: PointRows) -> list[_Work]:
        """Each kind of replica at work on the points."""
        block, shape, workers = rows.block, rows.block.shape, self.space.workers(rows.block.shape)
        micro, size = self.tables.micro, self.space.global_batch // rows.block.microbatches
        every = [self.tables.every(block, entry) for entry in range(len(workers))]
        if shape.form == "stages":
            # Stages: each rank's data-parallel workers divide the whole microbatch, ceil(size / n) sequences at the
            # fullest.
            parts = [int(np.searchsorted(micro, -(-size // n))) for n in workers]
            columns = [np.full(len(rows.bounds), part) for part in parts]
            tables_of_ranks = [(list(zip(every, columns, strict=True)), list(shape.kinds))]
            ways = [self.ways(shape, workers, rank) for rank in range(shape.pp)]
        else:
            # Replicas: `shares` is what all workers of a kind take together; a worker takes ceil(share / workers of the
            # kind).
            shares_at = np.searchsorted(micro, -(-rows.shares // np.array(workers)))
            tables_of_ranks = [
                ([(t, shares_at[:, k])] * shape.pp, [shape.kinds[k]] * shape.pp) for k, t in enumerate(every)
            ]
            ways = [self.ways(shape, (sum(workers),), 0)] * shape.pp
        edges, works = self.tables.edges(rows.layers), []
        rank_of = {stage: rank for rank, stages in enumerate(stages_of_ranks(shape)) for stage in stages}
        for tables, kinds in tables_of_ranks:
            of_stages = [tables[rank_of[stage]][0] for stage in range(rows.layers.shape[1])]
            open_of_kinds = [
                np.stack([getattr(t, name)[edges[s + 1]] - getattr(t, name)[edges[s]] for s, t in enumerate(of_stages)])
                for name in ("dense", "routed")
            ]
            works.append(
                _Work(self._actions(block, tables, rows.layers), kinds[0], ways, open_of_kinds[0], open_of_kinds[1])
            )
        return works

    def _reduced(self, work: _Work, shape: Shape, zero: int) -> Doubles:
        """[stages, points] seconds of adding a stage's dense gradients up, at least."""
        devices = self.space.rank_devices(shape.form, shape.kinds, shape.pp)
        workers, reduced = self.space.workers(shape), np.zeros_like(work.dense)
        for rank, stages in enumerate(map(list, stages_of_ranks(shape))):
            count, tp = (sum(workers), shape.tp[0]) if shape.form == "replicas" else (workers[rank], shape.tp[rank])
            mesh = Mesh(dp_shard=count, tp=tp, cp=shape.cp)
            kind: CollectiveKind = "reduce_scatter" if zero else "all_reduce"
            reduced[stages] = self.tables.reduced_s(kind, work.dense[stages], devices[rank], mesh)
        return reduced

    def bounds(self, rows: PointRows, variants: Sequence[tuple[int, str]], *, played: bool) -> list[Doubles]:
        """[points] bounds on a step of each variant: of its kinds of replica the longest, with what the update of the
        first rank takes before it and reductions after it, and reductions by themselves. played: by the order of the
        schedule."""
        shape, count = rows.block.shape, rows.block.microbatches
        bounds = [np.zeros(len(rows.bounds)) for _ in variants]
        meets = self.clip or shape.pp == 1
        for work in self._works(rows):
            known: dict[object, Doubles] = {}
            reduced = {z: self._reduced(work, shape, z) for z in {min(zero, 1) for zero, _ in variants}}
            for i, (zero, schedule) in enumerate(variants):
                split, divided = is_split(schedule), min(zero, 1)
                # Without a play only whether weight gradients are split matters, so schedules of one sort share their
                # bound.
                key = schedule if played else split, divided
                if key not in known:
                    ranks = least_of_ranks(work.act, shape)
                    tails = tails_s(reduced[divided], work.act, shape, split=split)
                    known[key] = least_step_s(ranks, count, split=split, clip=self.clip, tails=tails)
                    if played:
                        whole, ends = played_s(work.act, shape, schedule, count)
                        known[key] = np.maximum(known[key], np.maximum(whole, (ends + tails).max(axis=0)))
                    # Ranks meet in the norm's sum (clip) or are one rank: then the first rank's update delays the next
                    # step whole.
                    if meets:
                        known[key] = known[key] + self._updated(work, shape, divided)
                # ZeRO 3, and ZeRO 2 with overlapped reduction, add gradients up after every microbatch; others once a
                # step.
                every = zero == 3 or (zero == 2 and self.space.base.overlap.grad_reduce)
                of_ranks = [reduced[divided][list(stages)].sum(axis=0) for stages in stages_of_ranks(shape)]
                sums = np.max(of_ranks, axis=0) * (count if every else 1)
                # The longest of: the pipeline with the meeting, the played order, reductions of one rank back to back.
                bounds[i] = np.maximum(bounds[i], np.maximum(known[key], sums))
        return bounds

    def _updated(self, work: _Work, shape: Shape, zero: int) -> Doubles:
        """[points] seconds of the first rank's update, at least."""
        stages, ways = list(stages_of_ranks(shape)[0]), work.ways[0] if zero else (1, 1)
        parts = zip((work.dense, work.routed), ways, strict=True)
        return sum(
            (self.tables.update_s(work.kind, elements[stages].sum(axis=0), n) for elements, n in parts), np.zeros(())
        )

    def ratio(self, item: PointRows, *, played: bool = False) -> Doubles:
        """[points] bytes that the fullest rank holds, at least, over what its device may: above 1 it does not fit.
        played: by what the rows of the schedule hold."""
        block, shape, (zero, schedule) = item.block, item.block.shape, item.variant
        workers, micro = self.space.workers(shape), self.tables.micro
        size, edges = self.space.global_batch // block.microbatches, self.tables.edges(item.layers)
        ratios = np.zeros(len(item.bounds))
        for rank, stages in enumerate(stages_of_ranks(shape)):
            parts = [(edges[s], edges[s + 1]) for s in stages]
            if shape.form == "stages":
                column = int(np.searchsorted(micro, -(-size // workers[rank])))
                columns = np.full(len(ratios), column)
                ranks = [(rank, columns, self.ways(shape, workers, rank))]
            # In stages a rank holds one share; in replicas each kind has its own, and the fullest decides.
            else:
                columns = np.searchsorted(micro, -(-item.shares // np.array(workers)))
                ranks = [(k, columns[:, k], self.ways(shape, (sum(workers),), 0)) for k in range(len(workers))]
            for entry, own, ways in ranks:
                table = self.tables.every(block, entry)
                dense = sum(table.dense[b] - table.dense[a] for a, b in parts)
                routed = sum(table.routed[b] - table.routed[a] for a, b in parts)
                held_bytes_ = static_bytes(dense, routed, self.space.base, zero, ways, self.tables.stack)
                saved_bytes = [table.kept_bytes[b, own] - table.kept_bytes[a, own] for a, b in parts]
                inside = table.inside[parts[-1][1] - 1, own]
                least = held_bytes(saved_bytes, inside, (schedule,), rank, shape.pp, block.microbatches)
                # What the schedule's rows hold, stage by stage, is at least as large as what the closed form knows.
                if played:
                    open_units = flight(schedule, shape.pp, shape.virtual, block.microbatches).open_units
                    insides = np.stack([table.inside[b - 1, own] for _, b in parts])
                    least = np.maximum(least, open_units.least(rank, np.stack(saved_bytes), insides))
                held_bytes_ = held_bytes_ + least
                kind = shape.kinds[entry]
                ratios = np.maximum(ratios, (held_bytes_ + self.tables.workspace[kind]) / self.limits[kind])
        return ratios

    def least_ratio(self, block: MixedBlock) -> float:
        """Bytes that the fullest rank of any point of a block holds, at least, over what its device may.

        Proof: a rank of n layers holds n times what the smallest layer takes, of parameters and of one microbatch, and
        what its device's workspace takes. Were all ranks filled to the same share x of their limits, they would hold
        all layers: no point has a smaller largest share. Side by side every worker takes a sequence at least. Where
        ranks have one stage, and what is held once fits, so many microbatches as are under way in each are counted.
        """
        shape = block.shape
        zero = max(z for z, _ in self.space.variants(shape, block.microbatches))
        ranks = tuple(sorted(zip(shape.kinds, shape.tp, shape.ep, strict=True)))
        # The order of ranks does not matter to this bound, so permutations of the same ranks share it.
        key = shape.form, ranks, shape.kinds[0 if shape.v_placement else -1], shape.pp, shape.cp, block[1:], zero
        if key not in self._ratios:
            self._ratios[key] = self._least_ratio(block, zero, (1,) * shape.pp)
        if shape.virtual > 1 or shape.pp == 1 or self._ratios[key] > 1:
            return self._ratios[key]
        # Bubbles of in-flight microbatches depend on the order of ranks: the key keeps it.
        ordered = shape, block[1:], zero  # what is under way differs by rank
        if ordered not in self._ratios:
            self._ratios[ordered] = self._least_ratio(block, zero, self.flights(block))
        return self._ratios[ordered]

    def flights(self, block: MixedBlock) -> tuple[int, ...]:
        """Microbatches that each pipeline rank of any point of a block holds all its layers' activations of, at
        least."""
        shape, count = block.shape, block.microbatches
        if shape.virtual > 1 or shape.pp == 1:
            return (1,) * shape.pp
        schedules = tuple(dict.fromkeys(schedule for _, schedule in self.space.variants(shape, count)))
        return tuple(in_flight(schedules, rank, shape.pp, count) for rank in range(shape.pp))

    def most_layers(self, block: MixedBlock, rank: int, zero: int, schedules: Iterable[str]) -> int:
        """Layers that a rank of a pipeline over kinds has room for, at most, with ZeRO up to a stage and any of the
        schedules.

        Proof: it holds so many times what the smallest layer takes, of parameters, and of activations what
        `held_bytes` says of stages of such layers; beside these what the backward of its last layer needs, which of
        the model's last layers is one before a layer that is counted unless the rank ends the model; and on the ends
        what is before and after the layers that are counted.
        """
        shape, tables = block.shape, self.tables
        workers = self.space.workers(shape)
        column = tables.column[-(-(self.space.global_batch // block.microbatches) // workers[rank])]
        under_way = self._under_way(shape, block.microbatches, schedules, rank)
        holder = rank == (0 if shape.v_placement else shape.pp - 1)
        table, ways = tables.every(block, rank), self.ways(shape, workers, rank)
        kind = shape.kinds[rank]
        key = table, column, ways, zero, under_way, shape.virtual, not rank, holder, kind
        if key not in self._most:
            room = self.limits[kind] - tables.workspace[kind]
            held_bytes_ = self._held_by(
                table, column, zero, ways, under_way, shape.virtual, first=not rank, holder=holder
            )
            # `held` never falls with more layers (see `_held_by`), so counting those within the room gives the largest
            # number.
            self._most[key] = int(np.count_nonzero(held_bytes_ * (1 - SLACK) <= room))
        return self._most[key]

    def _held_by(
        self, table: LayerTable, column: int, zero: int, ways: tuple[int, int], under_way: int, virtual: int,
        *, first: bool, holder: bool,
    ) -> Doubles:  # fmt: skip
        """[layers] bytes that a pipeline rank with 1, 2, … layers holds, at least, which more layers never lower."""
        counted, total = self.tables.counted, self.tables.num_layers
        layers = np.arange(1, self.space.num_layers + 1)
        dense, saved_bytes = table.least[4:6, column].tolist()
        ends = [(0, counted[0])] if first else []
        ends += [(counted[-1] + 1, total)] if holder else []
        end_elements = sum(float(table.dense[b] - table.dense[a]) for a, b in ends)
        end_saved = sum(float(table.kept_bytes[b, column] - table.kept_bytes[a, column]) for a, b in ends)
        # The last layer of a rank is one before a counted layer, or the model's last if this rank holds the head.
        lasts = [total - 1] if holder else [layer - 1 for layer in counted[1:]] or [total - 1]
        inside = float(table.inside[lasts, column].min())
        static: Doubles = np.zeros(()) + static_bytes(
            dense * layers + end_elements, 0.0, self.space.base, zero, ways, self.tables.stack
        )
        if virtual == 1:
            return np.asarray(static + under_way * (saved_bytes * layers + end_saved) + inside)
        every: Doubles = saved_bytes * layers + end_saved + inside
        # A first rank of several stages: `under_way` (stage, microbatch) pairs, each of at least layers // virtual
        # layers.
        if first:
            every = np.maximum(every, under_way * saved_bytes * (layers // virtual))
        return np.asarray(static + every)

    def _under_way(self, shape: Shape, count: int, schedules: Iterable[str], rank: int) -> int:
        """Microbatches, or stages of microbatches on a first rank of several, that a rank holds at once, at least."""
        key = shape.pp, shape.virtual, count, tuple(schedules), rank
        if key not in self._flights:
            self._flights[key] = min(
                (in_flight((schedule,), rank, shape.pp, count) if shape.virtual == 1 else
                 under_way(schedule, shape.pp, shape.virtual, count) if not rank else 1)
                for schedule in key[3]
            )  # fmt: skip
        return self._flights[key]

    def has_room(self, block: MixedBlock, zero: int, schedules: Iterable[str]) -> bool:
        """Whether the ranks of a pipeline over kinds may have room for all layers together."""
        shape, layers_left, schedules = block.shape, self.space.num_layers, tuple(schedules)
        for rank in range(shape.pp):
            most = self.most_layers(block, rank, zero, schedules)
            if most < shape.virtual:
                return False
            # Subtract rank by rank: if the ranks' rooms do not add up to all layers, no cut of this block fits.
            layers_left -= most
        return layers_left <= 0

    def roomiest_ratio(self, shape: Shape, blocks: Sequence[MixedBlock]) -> float:
        """What `least_ratio` is at least for every block of a shape, without looking at them one by one."""
        zero = max(z for count in {b.microbatches for b in blocks} for z, _ in self.space.variants(shape, count))
        layouts = tuple(sorted({(block.sequence_parallel, block.context) for block in blocks}))
        ranks = tuple(sorted(zip(shape.kinds, shape.tp, shape.ep, strict=True)))
        key = "shape", shape.form, ranks, shape.kinds[0 if shape.v_placement else -1], shape.pp, shape.cp, layouts, zero
        if key not in self._ratios:
            needs = [
                self.tables.roomiest(k, tp, shape.cp, ep, blocks)
                for k, tp, ep in zip(shape.kinds, shape.tp, shape.ep, strict=True)
            ]
            self._ratios[key] = self._filled(shape, zero, needs)
        return self._ratios[key]

    def _least_ratio(self, block: MixedBlock, zero: int, flights: Sequence[int]) -> float:
        shape, needs = block.shape, []
        workers = self.space.workers(shape)
        size = self.space.global_batch // block.microbatches
        for entry in range(len(shape.kinds)):
            is_replicas = shape.form == "replicas"
            column = 0 if is_replicas else self.tables.column[-(-size // workers[entry])]
            table = self.tables.every(block, entry)
            dense, saved_bytes = table.least[4:6, column].tolist()
            needs.append((dense, saved_bytes * flights[0 if is_replicas else entry], float(table.inside[-1, column])))
        return self._filled(shape, zero, needs)

    def _filled(self, shape: Shape, zero: int, needs: Sequence[tuple[float, float, float]]) -> float:
        """Share of what its device may hold that the fullest rank does at least. needs: of every entry of the kinds,
        what a layer has of parameters and keeps, and what the backward of the model's last layer needs."""
        # Ranks in a pipeline share layers: with l_i layers, rank i fills (workspace_i + layer_i x l_i) / limit_i of its
        # device. Setting all equal to x and adding up the l_i gives x = (L + sum of workspace_i / layer_i) / sum of
        # limit_i / layer_i: the least possible maximum.
        space, workers = self.space, self.space.workers(shape)
        layers, room, most = float(space.num_layers), 0.0, 0.0
        for entry, (kind, (dense, saved_bytes, inside)) in enumerate(zip(shape.kinds, needs, strict=True)):
            is_replicas = shape.form == "replicas"
            ways = self.ways(shape, (sum(workers),) if is_replicas else workers, 0 if is_replicas else entry)
            layer = float(static_bytes(dense, 0.0, space.base, zero, ways, self.tables.stack)) + saved_bytes
            limit, workspace = self.limits[kind], self.tables.workspace[kind]
            if is_replicas or entry == (0 if shape.v_placement else shape.pp - 1):  # the rank of the last layer
                most = max(most, (workspace + inside) / limit)
            if is_replicas:
                most = max(most, (workspace + layer * layers / shape.pp) / limit)
            elif layer:
                layers, room = layers + workspace / layer, room + limit / layer
        return max(most, layers / room) if room else most

    def ways(self, shape: Shape, workers: Sequence[int], rank: int) -> tuple[int, int]:
        """Ranks over which ZeRO divides dense and routed parameters."""
        # Routed experts lie on ep of the tp x dp x cp ranks, so fewer ranks hold copies that ZeRO can divide.
        ranks = workers[rank] * shape.cp
        return ranks, ranks * shape.tp[rank] // shape.ep[rank]
