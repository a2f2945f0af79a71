"""Sets of plans over equal devices, from a family down to one plan: each bounds itself and divides itself.

    FamilyNode ─ RowNode ─ GroupNode ─┬─ FirstBound ─ StallBound ─ ScheduleBound ─ LastBound ─┬─ predicted
                                      └─ PointNode ───────────────────────────────────────────┘

A family is axes, layout and recomputation; a row of it one schedule, with a column (a block) for each size of a
microbatch; a group the plans of a block whose actions last equally long; a point one plan. From `FirstBound` to
`LastBound` the plan is the same and its bound gets better: `StallBound` is made under ZeRO 2 only, `ScheduleBound` is
left under ZeRO 3 only. `PointNode` is a plan without these steps, because its ranks do not meet at a gradient norm,
on which those bounds rest. Bounds are those of `blocks`, `block_points` and `bounds.tighter_time`, times 1 - SLACK
for rounding. Leaves out the order in which nodes are looked at (`best_first`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gnomon.search.best_first import Candidate, Search
from gnomon.search.bounds.families import Family, partly_split
from gnomon.search.bounds.tighter_time import Loose
from gnomon.search.equal.block_points import PointGroup
from gnomon.search.equal.blocks import SLACK, BlockRow
from gnomon.search.equal.devices import EqualDevices
from gnomon.search.results import FoundPlan, sort_of_point
from gnomon.search.shortlist import Likeness
from gnomon.search.space.points import Point

Children = Iterator[tuple[float, Candidate]]
"""Candidates with bounds on them, in seconds."""


POINT_DEPTH = 7
"""Below `LastBound`: a `PointNode` is predicted next, whatever else is open."""


def _distance(devices: EqualDevices, family: Family, depth: int) -> tuple[int, int]:
    """Key of what is looked at while no plan was found that fits (`Candidate.distance`): first what recomputes most,
    and so keeps the fewest activations; of these the deepest node, which is nearest to a prediction. depth: of the
    diagram."""
    # False sorts before True.
    return int(family.recompute != devices.sparest), -depth


def _ranks_of(family: Family) -> Likeness:
    return (family.pp, family.dp, family.cp, family.tp, family.ep), None


@dataclass(frozen=True, slots=True, eq=False)
class FamilyNode:
    """Plans of one family: axes, layout and recomputation are given."""

    devices: EqualDevices
    """What is searched, and what is kept of it."""
    family: Family
    """The family."""

    @property
    def points(self) -> int:
        """Counts the points that stand for themselves and may run: illegal ones and duplicates are counted before."""
        return self.devices.blocks.points(self.family)

    @property
    def likeness(self) -> Likeness:
        """The ranks that all its plans share."""
        return _ranks_of(self.family)

    @property
    def distance(self) -> tuple[int, ...]:
        """Families are the farthest from a plan."""
        return _distance(self.devices, self.family, 0)

    def expand(self, search: Search[FoundPlan], bound: float) -> Children:
        """Yields the family's rows."""
        for row in self.devices.blocks.rows(self.family):
            # A part's bound is never below that of the whole: what was proved of the family holds for the row.
            yield max(bound, row.bounds[0]), RowNode(self.devices, row)


@dataclass(frozen=True, slots=True, eq=False)
class RowNode:
    """Plans of one family and schedule, in blocks by the size of a microbatch."""

    devices: EqualDevices
    """What is searched, and what is kept of it."""
    row: BlockRow
    """The blocks that are left."""

    @property
    def points(self) -> int:
        """Counts the points in all its blocks."""
        return len(self.devices.blocks.legality.choices(self.row.family).choices) * len(self.row.columns)

    @property
    def likeness(self) -> Likeness:
        """The ranks that all its plans share."""
        return _ranks_of(self.row.family)

    @property
    def distance(self) -> tuple[int, ...]:
        """Rows come after families."""
        return _distance(self.devices, self.row.family, 1)

    def expand(self, search: Search[FoundPlan], bound: float) -> Children:
        """Yields the groups of the block with the least bound, and the row of the others."""
        row, opening = self.row, self.devices.opening
        block = opening.block(row.family, row.schedule, row.virtual, row.columns[0])
        if not self.devices.prune:
            for point in opening.points(block):
                yield 0.0, PointNode(self.devices, point)
        else:
            for least, group in opening.open(block):
                yield max(bound, least), GroupNode(self.devices, group)
        if rest := row.rest:
            yield max(bound, rest.bounds[0]), RowNode(self.devices, rest)


@dataclass(frozen=True, slots=True, eq=False)
class GroupNode:
    """Plans of one block whose actions last equally long."""

    devices: EqualDevices
    """What is searched, and what is kept of it."""
    group: PointGroup
    """The points."""

    @property
    def points(self) -> int:
        """Counts one point for each way of sharding."""
        return len(self.group.members)

    @property
    def likeness(self) -> Likeness:
        """The ranks that all its plans share."""
        return _ranks_of(self.group.block.family)

    @property
    def distance(self) -> tuple[int, ...]:
        """Groups come after rows."""
        return _distance(self.devices, self.group.block.family, 2)

    def expand(self, search: Search[FoundPlan], bound: float) -> Children:
        """Yields the same with a better bound if that is worth its time, else its points."""
        opening = self.devices.opening
        if self.group.rough:
            least, group = opening.better(self.group)
            yield max(bound, least), GroupNode(self.devices, group)
            return
        for least, member in opening.members(self.group, search.worst_of(self)):
            node = PointNode(self.devices, member) if isinstance(member, Point) else FirstBound(self.devices, member)
            yield max(bound, least), node


@dataclass(frozen=True, slots=True, eq=False)
class PointNode:
    """One plan, of which no better bound is known: it is predicted next."""

    devices: EqualDevices
    """What is searched, and what is kept of it."""
    point: Point
    """The point."""

    @property
    def points(self) -> int:
        """Counts the one point that it is."""
        return 1

    @property
    def likeness(self) -> Likeness:
        """The plan's ranks and its sort."""
        sort = sort_of_point(self.point)
        return sort[0], sort

    @property
    def distance(self) -> tuple[int, ...]:
        """Points are the nearest to a prediction."""
        return int(self.point.recompute != self.devices.sparest), -POINT_DEPTH

    def expand(self, search: Search[FoundPlan], bound: float) -> Children:
        """Predicts the plan; nothing is left to look at."""
        self.devices.predict(self.point, search)
        return iter(())


@dataclass(frozen=True, slots=True, eq=False)
class _BoundedPoint:
    """One plan whose bound can still be made better."""

    devices: EqualDevices
    loose: Loose

    depth = 0

    @property
    def points(self) -> int:
        """Counts the one point that it is."""
        return 1

    @property
    def likeness(self) -> Likeness:
        """The plan's ranks and its sort."""
        sort = sort_of_point(self.loose.point)
        return sort[0], sort

    @property
    def distance(self) -> tuple[int, ...]:
        """Plans are the nearer to a prediction, the better their bounds are."""
        return int(self.loose.point.recompute != self.devices.sparest), -self.depth

    def by_schedule(self, search: Search[FoundPlan], bound: float) -> Children:
        """Yields the same plan, bounded by a simulation of its schedule without gathers and reductions; nothing if
        the plan's memory is too large."""
        if not self.devices.too_large(self.loose):
            least = max(bound, self.devices.tighten.bound(self.loose, search.worst()) * (1 - SLACK))
            yield (
                least,
                ScheduleBound(self.devices, self.loose) if self.loose.gathers else LastBound(self.devices, self.loose),
            )


class FirstBound(_BoundedPoint):
    """A point with the bound of its group's members."""

    __slots__ = ()
    depth = 3

    def expand(self, search: Search[FoundPlan], bound: float) -> Children:
        """Looks at the ranks one by one first under ZeRO 2, which costs less than a simulation."""
        if self.loose.reductions == "stages" and not partly_split(self.loose.point.schedule):
            least = self.devices.tighten.with_stalls(self.loose) * (1 - SLACK)
            yield max(bound, least), StallBound(self.devices, self.loose)
        else:
            yield from self.by_schedule(search, bound)


class StallBound(_BoundedPoint):
    """A point under ZeRO 2, bounded by what each rank waits for its own reductions (`bounds.zero2_rank`)."""

    __slots__ = ()
    depth = 4

    def expand(self, search: Search[FoundPlan], bound: float) -> Children:
        """Yields the plan with its schedule simulated."""
        return self.by_schedule(search, bound)


class ScheduleBound(_BoundedPoint):
    """A point under ZeRO 3, bounded by a simulation of its schedule without gathers and reductions."""

    __slots__ = ()
    depth = 5

    def expand(self, search: Search[FoundPlan], bound: float) -> Children:
        """Yields the plan with a few ranks simulated by themselves, layer by layer (`bounds.zero3_rank`)."""
        least = self.devices.tighten.by_itself(self.loose) * (1 - SLACK)
        yield max(bound, least), LastBound(self.devices, self.loose)


class LastBound(_BoundedPoint):
    """A plan whose bound on time is as good as it gets."""

    __slots__ = ()
    depth = 6

    def expand(self, search: Search[FoundPlan], bound: float) -> Children:
        """Predicts the plan, unless it is too large."""
        if not self.devices.too_large(self.loose):
            self.devices.predict(self.loose.point, search)
        return iter(())
