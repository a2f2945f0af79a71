"""From axes to blocks: families of points, and the rows of blocks in each, bounded before any point is looked at.

`Blocks.families` yields every legal arrangement of axes, layout and recompute with a bound that holds for all of its
points; `Blocks.rows` those of one family by schedule, with a bound for each microbatch size. A block (a row and a
microbatch size) holds points that differ in sharding, ZeRO and overlap only: see `block_points`. Points that are
illegal, duplicates or too large are counted on the way. Leaves out which are opened (`solve`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon import orders
from gnomon.plans import Layout, Mesh, Plan, Workload
from gnomon.plans.check import problems
from gnomon.prices.allocator import workspace_bytes
from gnomon.search.bounds.families import (
    GRID_S,
    Actions,
    Doubles,
    Family,
    Job,
    Pipeline,
    Sends,
    actions,
    halves,
    is_split,
    no_ends,
    partly_split,
    time_bound,
    v_placed,
)
from gnomon.search.bounds.in_flight import under_way
from gnomon.search.bounds.layer_tables import KindTable
from gnomon.search.bounds.point_memory import least_held, room, state_sizes
from gnomon.search.bounds.point_time import adding_s
from gnomon.search.budget import More, always
from gnomon.search.results import Counts
from gnomon.search.space.points import Point
from gnomon.sharding.parameters import shard_ranks

SLACK = 1e-9
"""Bounds are lowered by this share: sums of floats are rounded."""

ROUNDED = 64.0
"""Bytes: a mean of whole elements may be rounded up too far."""

Choice = tuple[int, int, int, bool]
"""(dp_replicate, dp_shard, ZeRO stage, overlap)."""


@dataclass(frozen=True, eq=False)
class Choices:
    """What the points of a block differ in: those that stand for themselves and may run."""

    kept: tuple[Choice, ...]
    illegal: int
    """Of the others, those that cannot run: experts that do not divide, ZeRO 3 that waits with its reductions, what
    the stack has not."""
    zero: NDArray[np.int64]
    """[kept] ZeRO stage that is asked for."""
    effective: NDArray[np.int64]
    """[kept] ZeRO stage that has an effect: 0 where there is one rank to divide over."""
    ways: Doubles
    """[kept, 2] ranks that ZeRO divides dense and routed parameters over."""
    kinds: NDArray[np.int64]
    """[kept] equal for those whose actions last equally long: effective stage, whether experts are divided, and whether
    anything is."""
    holding: NDArray[np.int64]
    """[kept] 0, or under ZeRO 2 and 3 equal for those with the same bytes that come and go: 4 x stage, and what kinds
    and overlap add."""


@dataclass(slots=True, eq=False)
class Row:
    """Blocks of one family and schedule that have not been opened, the least bound first."""

    family: Family
    schedule: str
    virtual: int
    columns: tuple[int, ...]
    """Index of a microbatch size of each block."""
    bounds: tuple[float, ...]
    """Of each block."""


@dataclass(frozen=True, eq=False)
class _Legal:
    """Which schedules and microbatch sizes go together on so many ranks."""

    rows: tuple[tuple[str, int, tuple[int, ...]], ...]
    """(schedule, virtual stages, columns that run)."""
    blocks: int
    """Blocks in all of them."""
    why: dict[str, int]
    """Name of a rule -> blocks that break it."""


class Blocks:
    """The blocks of a space, and how many of its points never get that far."""

    def __init__(self, job: Job, counts: Counts, limit: int, *, prune: bool) -> None:
        """limit: bytes that a rank's peak may be. prune: whether bounds are looked at."""
        self.job, self.space, self.counts, self.limit, self.prune = job, job.space, counts, limit, prune
        self.sends = Sends(job)
        self.clip = self.space.base.optimizer.clip
        self.workspace = min(workspace_bytes(device, job.stack) for device in job.devices)
        self.meeting = max(job.meeting_s - GRID_S, 0.0) if self.clip else 0.0
        self.least = float("inf")
        """Bytes that every point holds on some rank, at least."""
        self._legal: dict[object, str] = {}
        self._scheduled: dict[tuple[int, int], _Legal] = {}
        self._choices: dict[object, Choices] = {}
        self._static: dict[object, Doubles] = {}
        self._work: dict[KindTable, Doubles] = {}
        self._adding: dict[KindTable, Doubles] = {}
        self._rooms: dict[int, float] = {}
        self._counts: dict[int, Doubles] = {}
        self._acts: dict[object, Actions] = {}
        """Of the family whose rows are made."""
        self._firsts: dict[object, tuple[float, Doubles]] = {}
        self._layers = np.array([len(kind.layers) for kind in job.kinds.kinds], float)

    def families(self, more: More = always) -> Iterator[tuple[float, Family]]:
        """Every family that may run, with a bound; counts what is illegal or a duplicate. more: once there is no time
        left, families come without a price, under a bound of 0."""
        space = self.space
        for tp, cp, ep, pp, dp in space.axes():
            each = len(space.shardings(dp)) * space.leaves
            if not each:
                continue
            legal = self.scheduled(pp, dp)
            for sequence, keep, context in space.layouts(cp):
                layout = replace(space.base.layout, sequence_parallel=sequence, keep_gathered=keep, context=context)
                why = self.illegal(tp, cp, ep, layout)
                if why:
                    blocks = len(space.pipelines(pp)) * len(space.micro_batch_size)
                    self.counts.reject(why, each * blocks * len(space.recompute))
                    continue
                for recompute in space.recompute:
                    family = Family(self.job, tp, cp, ep, pp, dp, layout, recompute, space.micro_batch_size)
                    choices = self.choices(family)
                    for rule, blocks in legal.why.items():
                        self.counts.reject(rule, each * blocks)
                    self.counts.reject("sharding", legal.blocks * choices.illegal)
                    self.counts.duplicates += legal.blocks * (each - choices.illegal - len(choices.kept))
                    if self.prune and self.hopeless(family):
                        self.counts.too_large += legal.blocks * len(choices.kept)
                    elif legal.blocks and choices.kept:
                        yield self.family_bound(family) if more() else 0.0, family

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
        counts = self._every_count(family)
        found = (self._work[key] * counts)[counts > 0].min() / family.pp + self.meeting
        return float(found) * (1 - SLACK)

    def _layers_s(self, table: KindTable) -> Doubles:
        """[microbatch sizes] seconds of all layers, at least: those of their kernels and collectives, of copies to the
        host and back, or of their launches."""
        adding = self.adding(table)[:, None] / table.rates.compute
        back = table.input_s + table.weight_s + adding
        device, away = self._layers @ (table.forward_s + back), self._layers @ table.copied_s
        if away.any():
            device = np.maximum(self._layers @ table.forward_s, away) + np.maximum(self._layers @ back, away)
        host = self._layers @ sum(table.host_s)
        least: Doubles = np.maximum(np.maximum(device, host) - 3 * self._layers.sum() * GRID_S, 0.0)
        return least

    def adding(self, table: KindTable) -> Doubles:
        """[kinds] seconds of adding weight gradients up, the least of all ZeRO stages."""
        key = table
        if key not in self._adding:
            parts = [adding_s(table, self.job, divided=divided) for divided in (False, True)]
            self._adding[key] = np.minimum(*parts)
        return self._adding[key]

    def _count(self, family: Family, column: int) -> int:
        """Microbatches; 0 where the batch does not divide."""
        count, rest = divmod(self.space.global_batch, family.micro[column] * family.dp)
        return 0 if rest else count

    def _every_count(self, family: Family) -> Doubles:
        """[microbatch sizes] microbatches."""
        if family.dp not in self._counts:
            counts = [self._count(family, column) for column in range(len(family.micro))]
            self._counts[family.dp] = np.array(counts, float)
        return self._counts[family.dp]

    def points(self, family: Family) -> int:
        """Points of a family that stand for themselves and may run."""
        return self.scheduled(family.pp, family.dp).blocks * len(self.choices(family).kept)

    def rows(self, family: Family) -> Iterator[Row]:
        """The rows of a family, with bounds; counts what is too large."""
        legal, kept = self.scheduled(family.pp, family.dp), len(self.choices(family).kept)
        if not self.prune:
            for schedule, virtual, columns in legal.rows:
                yield Row(family, schedule, virtual, columns, (0.0,) * len(columns))
            return
        if self.too_large(family):
            self.counts.too_large += legal.blocks * kept
            return
        self._acts.clear()
        bounds: dict[tuple[int, bool, str], Doubles] = {}
        rooms: dict[tuple[int, bool], NDArray[np.bool_]] = {}
        for schedule, virtual, columns in legal.rows:
            way = "mixed" if partly_split(schedule) else "split" if is_split(schedule) else "whole"
            at = virtual, v_placed(schedule)
            pipeline = self.job.pipeline(family.pp, *at)
            if at not in rooms:
                rooms[at] = self._may_fit(family, pipeline)
            fits = rooms[at] & self._has_room(family, schedule, virtual, pipeline)
            wanted = [c for c in columns if fits[c]]
            self.counts.too_large += (len(columns) - len(wanted)) * kept
            if wanted:
                if (*at, way) not in bounds:
                    bounds[*at, way] = self._bounded(family, pipeline, way)
                chosen = sorted((float(bounds[*at, way][c]), c) for c in wanted)
                yield Row(family, schedule, virtual, tuple(c for _, c in chosen), tuple(b for b, _ in chosen))

    def row_bound(self, family: Family, schedule: str, virtual: int, column: int) -> float:
        """Bound on the time of a block, without sharding."""
        way = "mixed" if partly_split(schedule) else "split" if is_split(schedule) else "whole"
        return float(self._bounded(family, self.job.pipeline(family.pp, virtual, v_placed(schedule)), way)[column])

    def _bounded(self, family: Family, pipeline: Pipeline, way: str) -> Doubles:
        """[microbatch sizes] bound on the time without sharding."""
        act = self.acts(family, pipeline)
        found = time_bound(
            pipeline,
            halves(act) if way == "mixed" else act,
            self.sends.of(family, pipeline),
            self._every_count(family),
            no_ends(len(act.forward)),
            split_backward=way != "whole",
            clip=self.clip,
        )
        return (found + self.meeting) * (1 - SLACK)

    def acts(self, family: Family, pipeline: Pipeline) -> Actions:
        """Actions of every microbatch size, whatever the sharding."""
        key = family.table, pipeline.name
        if key not in self._acts:
            none = np.zeros(len(self._layers))
            counts = pipeline.split.counts
            self._acts[key] = actions(family.table, counts, self.adding(family.table), none, by_layer=False)
        return self._acts[key]

    def hopeless(self, family: Family) -> bool:
        """Whether no point of a family fits by what is known before its layers are priced: ranks hold the parameters of
        the whole model, each once, and what stays with them between steps."""
        choices = self.choices(family)
        if not choices.kept:
            return False
        ways = np.array([family.tp, family.ep * family.mesh.etp], float) * family.pp
        elements = (self.job.elements / ways)[None, :]
        least = float(self._state(choices, elements, np.zeros((1, 2))).min()) + self.workspace - ROUNDED
        if least > self.room(family):
            self.least = min(self.least, least)
            return True
        return False

    def too_large(self, family: Family) -> bool:
        """Whether no point of a family fits: what stays on ranks between steps, in the mean of ranks, is more than
        there is room for. (Tied weights may lie on several ranks or on one; they are left to `rows`.)"""
        if self.job.kinds.shared:
            return False
        choices = self.choices(family)
        if not choices.kept:  # no sharding is legal: no point that could fit
            return True
        elements, frozen = (
            (self._layers @ each)[None, :] / family.pp for each in (family.table.elements, family.table.frozen)
        )
        least = float(self._state(choices, elements, frozen).min()) + self.workspace - ROUNDED
        self.least = min(self.least, least)
        return least > self.room(family)

    def _may_fit(self, family: Family, pipeline: Pipeline) -> NDArray[np.bool_]:
        """[microbatch sizes] whether some sharding may fit, going by one unit under way."""
        held = least_held(family.table, pipeline) + self.workspace
        least = (self.static(family, pipeline)[:, :, None] + held).max(axis=1).min(axis=0)
        self.least = min(self.least, float(least.min()))
        fits: NDArray[np.bool_] = least <= self.room(family)
        return fits

    def _has_room(self, family: Family, schedule: str, virtual: int, pipeline: Pipeline) -> NDArray[np.bool_]:
        """[microbatch sizes] whether the first rank may have room for the units that are under way together."""
        units = [under_way(schedule, family.pp, virtual, int(count)) for count in self._every_count(family).tolist()]
        least, kept = self._first_rank(family, pipeline)
        found: NDArray[np.bool_] = least + np.array(units, float) * kept <= self.room(family)
        return found

    def held(self, family: Family, schedule: str, virtual: int) -> Doubles:
        """[kept, microbatch sizes] bytes that the fullest rank holds, at least: with one unit under way, and on the
        first rank those that are under way together."""
        pipeline = self.job.pipeline(family.pp, virtual, v_placed(schedule))
        static = self.static(family, pipeline)
        units = [under_way(schedule, family.pp, virtual, int(count)) for count in self._every_count(family).tolist()]
        _, kept = self._first_rank(family, pipeline)
        one = (static[:, :, None] + least_held(family.table, pipeline)).max(axis=1)
        found: Doubles = np.maximum(one, static[:, :1] + np.array(units, float) * kept) + self.workspace
        return found

    def _first_rank(self, family: Family, pipeline: Pipeline) -> tuple[float, Doubles]:
        """(bytes that the first rank holds between steps, [microbatch sizes] that a unit holds on it), at least."""
        key = family.table, family.dp, pipeline.name
        if key not in self._firsts:
            kept = (pipeline.split.counts[pipeline.rank_of == 0] @ family.table.kept_bytes).min(axis=0)
            self._firsts[key] = float(self.static(family, pipeline)[:, 0].min()) + self.workspace, kept
        return self._firsts[key]

    def static(self, family: Family, pipeline: Pipeline) -> Doubles:
        """[kept, ranks] bytes that stay on a rank between steps."""
        key = family.tp, family.cp, family.ep, family.dp, family.layout, pipeline.name
        if key not in self._static:
            table, parts = family.table, pipeline.split
            elements = parts.counts @ table.elements
            for stage, kind, tensor in parts.repeated:
                elements[stage, 0] -= int(table.prices[kind].sharded.local_elements[tensor])
            frozen = parts.counts @ table.frozen
            self._static[key] = self._state(self.choices(family), elements, frozen) @ pipeline.on_rank.T
        return self._static[key]

    def _state(self, choices: Choices, elements: Doubles, frozen: Doubles) -> Doubles:
        """[kept, stages] bytes of parameters, gradients and states. elements, frozen (bytes of weights that are not
        trained): [stages, dense and routed]."""
        total = np.zeros((len(choices.kept), len(elements)))
        for column in range(2):
            own = elements[None, :, column]
            divided = np.ceil(own / choices.ways[:, column, None])
            for size, first in state_sizes(self.space.base, self.job.stack):
                total += np.where(choices.zero[:, None] >= first, divided, own) * size
            asleep = frozen[None, :, column] * (not self.space.base.optimizer.offload_parameters)
            total += np.where(choices.zero[:, None] >= 3, asleep / choices.ways[:, column, None], asleep)
        return total

    def room(self, family: Family) -> float:
        """Bytes of tensors at most: communicators take the rest, at least one of the pipeline, the norm's, and one of
        data-parallel ranks."""
        groups = (family.pp > 1) + (self.clip and self.space.devices > 1) + (family.dp * family.cp > 1)
        return self.room_beside(groups)

    def room_beside(self, groups: int) -> float:
        """Bytes of tensors at most, beside so many communicators. A prediction gives a job that needs all of a device
        the room that communicators usually take: there the fewest are counted."""
        if self.limit >= min(device.memory_bytes for device in self.job.devices):
            groups = min(groups, 1)
        if groups not in self._rooms:
            self._rooms[groups] = room(self.job, self.limit, groups)
        return self._rooms[groups]

    def choices(self, family: Family) -> Choices:
        """The same in every block of a family."""
        layout = family.layout
        flags = layout.sequence_parallel, layout.keep_gathered
        key = family.tp, family.cp, family.ep, family.dp, family.pp > 1, flags
        if key not in self._choices:
            self._choices[key] = self._chosen(family)
        return self._choices[key]

    def _chosen(self, family: Family) -> Choices:
        kept: list[Choice] = []
        illegal, layout, space = 0, family.layout, self.space
        for replicas, shards in space.shardings(family.dp):
            if shards * family.cp * family.tp % (family.ep * space.base.mesh.etp):
                illegal += space.leaves
                continue
            for zero in space.zero:
                for overlap in space.overlap:
                    point = Point(
                        family.tp, family.cp, family.ep, family.pp, replicas, shards, orders.DEFAULT, 1, 1,
                        layout.sequence_parallel, layout.keep_gathered, layout.context, "none", zero, overlap,
                    )  # fmt: skip
                    away = space.base.optimizer.offload_parameters
                    if zero == 3 and not overlap and (shards * family.cp > 1 or away):
                        illegal += 1  # full sharding reduces layer by layer
                    elif space.canonical(point) == point:
                        if space.runs(family.pp, zero):
                            kept.append((replicas, shards, zero, overlap))
                        else:
                            illegal += 1
        return self.choose(family, tuple(kept), illegal)

    def choose(self, family: Family, kept: tuple[Choice, ...], illegal: int = 0) -> Choices:
        """Choices from what is kept."""
        meshes = {
            (r, s): replace(family.mesh, pp=1, dp_replicate=r, dp_shard=s)
            for r, s in dict.fromkeys(each[:2] for each in kept)
        }
        ways = [[shard_ranks(meshes[r, s], experts=e) for e in (False, True)] for r, s, _, _ in kept]
        divided = [shards * family.cp > 1 for _, shards, _, _ in kept]
        zero = np.array([each[2] for each in kept], np.int64)
        of_ranks = np.array(ways, float).reshape(-1, 2)
        by_layer = (zero == 3) & self.space.base.optimizer.offload_parameters
        effective = np.where(divided, zero, 3 * by_layer)
        overlap = np.array([each[3] for each in kept], np.int64)
        return Choices(
            kept=kept,
            illegal=illegal,
            zero=zero,
            effective=effective,
            ways=of_ranks,
            kinds=2 * effective + (of_ranks[:, 1] > 1) + 8 * (by_layer & ~np.array(divided, bool)),
            holding=np.where(effective > 1, 4 * effective + 2 * (of_ranks[:, 1] > 1) + overlap, 0),
        )

    def scheduled(self, pp: int, dp: int) -> _Legal:
        """Schedules and microbatch sizes that run on so many ranks."""
        if (pp, dp) not in self._scheduled:
            counts = [divmod(self.space.global_batch, micro * dp) for micro in self.space.micro_batch_size]
            rows, why = [], dict[str, int]()
            for schedule, virtual in self.space.pipelines(pp):
                columns = []
                for column, (count, rest) in enumerate(counts):
                    rule = "batch" if rest or not count else _unscheduled(schedule, count, pp, virtual)
                    if rule:
                        why[rule] = why.get(rule, 0) + 1
                    else:
                        columns.append(column)
                if columns:
                    rows.append((schedule, virtual, tuple(columns)))
            blocks = sum(len(columns) for _, _, columns in rows)
            self._scheduled[pp, dp] = _Legal(rows=tuple(rows), blocks=blocks, why=why)
        return self._scheduled[pp, dp]

    def illegal(self, tp: int, cp: int, ep: int, layout: Layout) -> str:
        """Name of the rule that axes and layout break; empty if none.

        A rule is about heads, tokens and feed-forwards over tp and cp, or about experts over ep, so the two are asked
        apart; of the layout, only what rules read.
        """
        ulysses = layout.context == "ulysses" and cp > 1
        seen = replace(layout, keep_gathered=False, context="ulysses" if ulysses else "ring")
        return self._rule(tp, cp, 1, seen) or self._rule(1, 1, ep, replace(seen, sequence_parallel=False))

    def _rule(self, tp: int, cp: int, ep: int, layout: Layout) -> str:
        key = tp, cp, ep, layout
        if key not in self._legal:
            base = self.space.base
            need = ep * base.mesh.etp
            shards = need // np.gcd(need, tp * cp)
            mesh = Mesh(tp=tp, cp=cp, ep=ep, etp=base.mesh.etp, dp_shard=int(shards), order=base.mesh.order)
            plan = Plan(mesh=mesh, layout=layout, precision=base.precision, saved=base.saved)
            given = self.job.workload
            one = Workload(global_batch_size=1, seq_len=given.sequence_lengths()[0], sizes=given.sizes)
            found = problems(plan, self.job.graph, None, one)
            wrong = [p.name for p in found if p.severity == "error" and p.name != "batch"]
            self._legal[key] = wrong[0] if wrong else ""
        return self._legal[key]


@lru_cache(maxsize=4096)
def _unscheduled(schedule: str, count: int, pp: int, virtual: int) -> str:
    """The rule of schedules that a number of microbatches breaks."""
    return "microbatches" if orders.find(schedule).microbatches(pp, count, virtual) else ""
