"""The search: every point of a space is priced by the simulator, or shown not to matter.

`solve(graph, cluster, workload, …)` goes from families of points to rows of blocks, to groups, to points, always to
what has the least bound on its time next (`blocks`, `block_points`, `tighter_time`), drops what cannot fit, and
predicts points one by one until no bound is below the best that was found. The result is what predicting every point
would have given, and says how many points went which way. Leaves out reasons (`reasons`) and other questions than the
shortest step (`goals`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice

from gnomon.errors import PlanError, ProgramError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Workload
from gnomon.prediction import Timed, host_memory
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.best_first import Frontier
from gnomon.search.bounds.families import Family, Job, partly_split
from gnomon.search.bounds.tighter_time import Loose, Played, Stalled, Tight, Tighten
from gnomon.search.budget import KeepGoing, always
from gnomon.search.exact.block_points import Group, Opening
from gnomon.search.exact.blocks import SLACK, Blocks, Row
from gnomon.search.exact.shortlist import Diverse, Shortlist
from gnomon.search.exact.sparing import sparest, sparing_points
from gnomon.search.results import Counts, Found, Result, memory_limit, most_alike, sort_of_point, why_not
from gnomon.search.space.points import Point, Space
from gnomon.software import Stack


def solve(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    space: Space,
    stack: Stack = PLAIN_STACK,
    goal: Goal | None = None,
    *,
    top: int = 5,
    prune: bool = True,
    diverse: bool = False,
    known: Iterable[Found] = (),
    job: Job | None = None,
    on_progress: OnProgress | None = None,
    keep_going: KeepGoing = always,
) -> Result:
    """The `top` fastest plans of a space within the goal's memory; with `diverse`, the best and the fastest that are
    unlike it and each other (`exact.shortlist.Diverse`).

    prune: without it every legal point is predicted, which shows that the bounds are right. known: plans of another
    space that are among those looked for. job: of the same request, from a search with another limit, whose prices
    are used again. on_progress: is called with the points covered so far and the best step. keep_going: the budget,
    asked before each item; once it is spent the best plan so far is the result (one that fits is looked for a little
    longer), and `Result.open_s` bounds what was not looked at.
    """
    goal = goal or Goal()
    search = Search(
        graph,
        cluster,
        workload,
        space,
        stack,
        goal,
        top=top,
        prune=prune,
        diverse=diverse,
        job=job,
        on_progress=on_progress,
        keep_going=keep_going,
    )
    for candidate in known:
        search.list.add(candidate)
    search.run()
    return search.result()


OnProgress = Callable[[int, float | None], None]
"""Takes the points covered so far, and the step of the best plan, if there is one."""

DIVE, DEEP = 8, 24
"""After so many predicted plans of which none fits, plans that keep the least are looked for first, until so many
more were predicted."""

OVERTIME = 16
"""Plans that spare memory and are predicted after the budget is spent, as long as none was found that fits."""

FEW = 3
"""Of these so many that fit are enough."""

_Item = Family | Row | Group | Loose | Stalled | Played | Tight | Point


class Search:
    """One search under way: see `solve`."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        workload: Workload,
        space: Space,
        stack: Stack,
        goal: Goal,
        *,
        top: int = 1,
        prune: bool = True,
        diverse: bool = False,
        job: Job | None = None,
        on_progress: OnProgress | None = None,
        keep_going: KeepGoing = always,
    ) -> None:
        self.graph, self.cluster, self.workload, self.space = graph, cluster, workload, space
        self.stack, self.goal, self.top, self.prune, self.on_progress = stack, goal, top, prune, on_progress
        self.keep_going, self.open_s = keep_going, float("inf")
        self.job = job or Job(graph, cluster, workload, stack, space)
        self.counts = Counts(space=space.size)
        self.limit = memory_limit(cluster, goal)
        self.tighten = Tighten(self.job)
        self.blocks = Blocks(self.job, self.counts, self.limit, prune=prune)
        self.opening = Opening(self.blocks, self.tighten)
        self.list = Diverse(top, most_alike(len(set(space.axes())), top)) if diverse else Shortlist(top)
        self.near: list[Found] = []
        self.frontier: Frontier[_Item] = Frontier(self._points, self.counts)
        self.smallest: Found | None = None
        """Of the plans that were predicted and do not fit, the one with the lowest peak."""

    def run(self) -> None:
        """Best first, until nothing that is left can be better, or the budget is spent."""
        families = list(self.blocks.families(self.keep_going))
        for bound, family in families:
            self.frontier.push(bound, family)
        self.frontier.explore(self._look, self._limit, self.keep_going, self._next)
        if self.frontier:
            self._look_for_sparing(families)
            self.open_s = self.frontier.leave(self.worst())

    def _limit(self) -> float:
        """Seconds from which on no item is looked at."""
        return self.worst() if self.prune else float("inf")

    def _look(self, item: _Item, bound: float) -> None:
        """Expands an item whose plans may be among the best, and says so."""
        if self.prune and bound >= self.worst_of(item):
            self.counts.too_slow += self._points(item)
        else:
            self._expand(item, bound)
        if self.on_progress is not None:
            self.on_progress(self.counts.covered, self.best[0].step_s if self.best else None)

    def _expand(self, item: _Item, bound: float) -> None:
        """The smaller items of an item, with bounds; of a point, its prediction."""
        push = self.frontier.push
        if isinstance(item, Family):
            for row in self.blocks.rows(item):
                push(max(bound, row.bounds[0]), row)
        elif isinstance(item, Row):
            self._open(item, bound)
        elif isinstance(item, Group) and item.rough:
            least, group = self.opening.better(item)
            push(max(bound, least), group)
        elif isinstance(item, Group):
            for least, member in self.opening.members(item):
                push(max(bound, least), member)
        elif isinstance(item, Loose) and item.reductions == "stages" and not partly_split(item.point.schedule):
            push(max(bound, self.tighten.stalled(item) * (1 - SLACK)), Stalled(loose=item))
        elif isinstance(item, Loose | Stalled):
            self._play(item if isinstance(item, Loose) else item.loose, bound)
        elif isinstance(item, Played):
            push(max(bound, self.tighten.single(item.loose) * (1 - SLACK)), Tight(loose=item.loose))
        elif isinstance(item, Tight):
            if not self._too_large(item.loose):
                self._price(item.loose.point)
        else:
            self._price(item)

    def _next(self) -> tuple[float, _Item]:
        """The item with the least bound. While none of several plans that were predicted fits, and so nothing bounds
        what is worth a look, the one nearest to a plan that keeps the least."""
        if not self.prune or self.best or self.counts.priced < DIVE or self.counts.priced >= DIVE + DEEP:
            return self.frontier.pop()
        most = sparest(self.space.recompute)
        return self.frontier.pop_by(lambda item: (_recomputed(item) != most, -_depth(item)))

    def _look_for_sparing(self, families: Iterable[tuple[float, Family]]) -> None:
        """A plan that fits, if none was found so far, among those that keep the least. Their points stay counted as
        what they are found in."""
        if self.best:
            return
        most, before = sparest(self.space.recompute), replace(self.counts, why=dict(self.counts.why))
        wanted = [(bound, family) for bound, family in families if family.recompute == most]
        priced = [family for bound, family in wanted if bound] or [family for _, family in wanted]
        for point in islice(sparing_points(self.blocks, priced), OVERTIME):
            self._price(point)
            if len(self.best) >= FEW:
                break
        self.counts.priced, self.counts.illegal, self.counts.why = before.priced, before.illegal, before.why

    def _play(self, loose: Loose, bound: float) -> None:
        """A point whose schedule is played bare, unless it is too large."""
        if not self._too_large(loose):
            least = max(bound, self.tighten.bound(loose, self.worst()) * (1 - SLACK))
            self.frontier.push(least, Played(loose=loose) if loose.gathers else Tight(loose=loose))

    def _open(self, row: Row, bound: float) -> None:
        """The first block of a row is opened; the rest goes back."""
        block = self.opening.block(row.family, row.schedule, row.virtual, row.columns[0])
        if not self.prune:
            for point in self.opening.points(block):
                self.frontier.push(0.0, point)
        else:
            for least, group in self.opening.open(block):
                self.frontier.push(max(bound, least), group)
        row.columns, row.bounds = row.columns[1:], row.bounds[1:]
        if row.columns:
            self.frontier.push(max(bound, row.bounds[0]), row)

    def _points(self, item: _Item) -> int:
        """Points that stand for themselves and may run: illegal ones and duplicates are counted before."""
        if isinstance(item, Family):
            return self.blocks.points(item)
        if isinstance(item, Row):
            return len(self.blocks.legality.choices(item.family).kept) * len(item.columns)
        return len(item.members) if isinstance(item, Group) else 1

    @property
    def best(self) -> list[Found]:
        """What is kept of the plans that fit."""
        return self.list.best

    def worst(self) -> float:
        """What a plan must be faster than."""
        return self.list.worst()

    def worst_of(self, item: _Item) -> float:
        """What the plans of an item must be faster than."""
        if isinstance(item, Family | Row | Group):
            family = item if isinstance(item, Family) else item.family if isinstance(item, Row) else item.block.family
            return self.list.worst_of((family.pp, family.dp, family.cp, family.tp, family.ep))
        sort = sort_of_point(_point(item))
        return self.list.worst_of(sort[0], sort)

    def result(self) -> Result:
        """What was found."""
        assert self.counts.covered == self.counts.space, (self.counts, "points must add up")
        least = self.blocks.memory.least
        return Result(
            graph=self.graph,
            cluster=self.cluster,
            workload=self.workload,
            stack=self.stack,
            goal=self.goal,
            space=self.space,
            best=tuple(self.list.best),
            diverse=isinstance(self.list, Diverse),
            counts=self.counts,
            limit_bytes=self.limit,
            near=tuple(self.near),
            smallest=self.smallest,
            open_s=self.open_s if self.counts.left else None,
            least_bytes=int(least) if least < float("inf") else None,
            why_illegal=dict(sorted(self.counts.why.items(), key=lambda item: -item[1])),
        )

    def _too_large(self, loose: Loose) -> bool:
        """Whether a better bound on memory rules a point out, which is then counted; not asked before `near` is full,
        since what refines a search begins at plans that almost fit too."""
        if not self.prune or len(self.near) < self.top or self.opening.fits(loose):
            return False
        self.counts.too_large += 1
        return True

    def _price(self, point: Point) -> None:
        """What the simulator says."""
        plan = self.space.plan(point)
        try:
            timed = Timed.of(self.graph, self.cluster, plan, self.workload, self.stack)
        except (PlanError, ProgramError) as error:
            self.counts.reject(why_not(error), 1)
            return
        self.counts.priced += 1
        if timed.step_s >= self.worst_of(point) and len(self.near) >= self.top:
            return  # whether it fits does not matter
        prediction = timed.prediction()
        made = Found(point=point, plan=plan, prediction=prediction)
        if all(rank.peak_bytes <= self.limit for rank in prediction.memory) and host_memory(prediction).fits_in(
            self.limit
        ):
            self.list.add(made)
            return
        if self.smallest is None or prediction.tightest.peak_bytes < self.smallest.prediction.tightest.peak_bytes:
            self.smallest = made
        if len(self.near) < self.top:
            self.near = sorted([*self.near, made], key=lambda candidate: candidate.step_s)


def _depth(item: _Item) -> int:
    """How near an item is to a plan that is predicted."""
    order = (Family, Row, Group, Loose, Stalled, Played, Tight, Point)
    return next(i for i, kind in enumerate(order) if isinstance(item, kind))


def _recomputed(item: _Item) -> str:
    """What the plans of an item recompute."""
    if isinstance(item, Family):
        return item.recompute
    if isinstance(item, Row):
        return item.family.recompute
    return item.block.family.recompute if isinstance(item, Group) else _point(item).recompute


def _point(item: Loose | Stalled | Played | Tight | Point) -> Point:
    """What an item is about."""
    if isinstance(item, Point):
        return item
    return item.point if isinstance(item, Loose) else item.loose.point
