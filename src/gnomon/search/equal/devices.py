"""A space of plans over equal devices, as the search sees it: what its candidates share.

`EqualDevices` holds prices, bounds and counts, predicts a point, and says what ends a search early and what it does
then. Leaves out the candidates (`candidates`) and the order in which they are looked at (`best_first`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from gnomon.errors import PlanError, ProgramError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Workload
from gnomon.prediction import TimedPlan, fits_within
from gnomon.search.best_first import Ended, Search
from gnomon.search.bounds.families import Family, SearchJob
from gnomon.search.bounds.tighter_time import Loose, Tighten
from gnomon.search.budget import KeepGoing, always
from gnomon.search.equal.block_points import Opening
from gnomon.search.equal.blocks import Blocks
from gnomon.search.equal.sparing import sparest, sparing_points
from gnomon.search.results import Counts, FoundPlan, Result, memory_limit, sort_of_point, why_not
from gnomon.search.shortlist import Diverse
from gnomon.search.space.points import Point, Space
from gnomon.software import Stack

DIVE, DEEP = 8, 24
"""The number of predicted plans of which none fits after which plans that keep the least are looked for first, and the
number of further predictions for which that lasts."""

OVERTIME = 16
"""The number of plans that spare memory and are predicted after the budget is spent, as long as none was found that
fits."""

FEW = 3
"""The number of these that fit and are enough."""


class EqualDevices:
    """A space of plans over equal devices, with what its candidates share: prices, bounds, counts."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        workload: Workload,
        space: Space,
        stack: Stack,
        goal: Goal,
        *,
        near: int = 1,
        prune: bool = True,
        job: SearchJob | None = None,
        keep_going: KeepGoing = always,
    ) -> None:
        """Takes near, the number of plans that are kept of those that are faster and do not fit."""
        self.graph, self.cluster, self.workload, self.space = graph, cluster, workload, space
        self.stack, self.goal, self.prune, self.keep_going = stack, goal, prune, keep_going
        self.job = job or SearchJob(graph, cluster, workload, stack, space)
        self.counts = Counts(space=space.size)
        self.limit = memory_limit(cluster, goal)
        self.tighten = Tighten(self.job)
        self.blocks = Blocks(self.job, self.counts, self.limit, prune=prune)
        self.opening = Opening(self.blocks, self.tighten)
        self.sparest = sparest(space.recompute)
        """The way of recomputing that keeps least."""
        self.near: list[FoundPlan] = []
        self.smallest: FoundPlan | None = None
        """The plan with the lowest peak of those that were predicted and do not fit."""
        self._most_near = near
        self._families: list[tuple[float, Family]] = []

    def families(self) -> list[tuple[float, Family]]:
        """What a search begins with, with bounds in seconds; once there is no time left, of 0."""
        self._families = list(self.blocks.families(self.keep_going))
        return self._families

    def spent(self) -> Ended:
        """Says whether the budget is spent, which alone ends the search."""
        return "" if self.keep_going() else "budget"

    def dives(self, search: Search[Any]) -> bool:
        """Whether several plans were predicted and none fits, so that nothing bounds what is worth a look."""
        return self.prune and not search.best and DIVE <= self.counts.num_predicted < DIVE + DEEP

    def last_resort(self, search: Search[Any]) -> None:
        """Looks for a plan that fits, if none was found so far, among those that keep the least. Their points stay
        counted as what they are found in."""
        if search.best:
            return
        # These points belong to families that are still open and counted there: what they add to the counts is undone.
        before = replace(self.counts, why=dict(self.counts.why))
        recomputing = [(bound, family) for bound, family in self._families if family.recompute == self.sparest]
        # A bound of 0 marks a family that came after the budget, without prices: those with prices go first.
        priced = [family for bound, family in recomputing if bound] or [family for _, family in recomputing]
        for point in islice(sparing_points(self.blocks, priced), OVERTIME):
            self.predict(point, search)
            if len(search.best) >= FEW:
                break
        self.counts.num_predicted, self.counts.illegal, self.counts.why = (
            before.num_predicted,
            before.illegal,
            before.why,
        )

    def too_large(self, loose: Loose) -> bool:
        """Whether a better bound on memory rules a point out, which is then counted; not asked before `near` is full,
        since what refines a search begins at plans that almost fit too."""
        if not self.prune or len(self.near) < self._most_near or self.opening.fits(loose):
            return False
        self.counts.too_large += 1
        return True

    def predict(self, point: Point, search: Search[FoundPlan]) -> None:
        """Predicts a point; kept where it fits and is fast enough."""
        plan = self.space.plan(point)
        try:
            timed = TimedPlan.of(self.graph, self.cluster, plan, self.workload, self.stack)
        except (PlanError, ProgramError) as error:
            self.counts.reject(why_not(error), 1)
            return
        self.counts.num_predicted += 1
        sort = sort_of_point(point)
        # Too slow for the best, and enough plans are known that were faster but did not fit.
        if timed.step_s >= search.shortlist.worst_of(sort[0], sort) and len(self.near) >= self._most_near:
            return  # whether it fits does not matter
        prediction = timed.prediction()
        found = FoundPlan(point=point, plan=plan, prediction=prediction)
        if fits_within(prediction, self.limit):
            search.shortlist.add(found)
            return
        if self.smallest is None or prediction.tightest.peak_bytes < self.smallest.prediction.tightest.peak_bytes:
            self.smallest = found
        if len(self.near) < self._most_near:
            self.near = sorted([*self.near, found], key=lambda candidate: candidate.step_s)

    def result(self, search: Search[FoundPlan]) -> Result:
        """Sums up what a search of it found."""
        least = self.blocks.memory.least
        return Result(
            graph=self.graph,
            cluster=self.cluster,
            workload=self.workload,
            stack=self.stack,
            goal=self.goal,
            space=self.space,
            best=tuple(search.best),
            diverse=isinstance(search.shortlist, Diverse),
            counts=self.counts,
            limit_bytes=self.limit,
            near=tuple(self.near),
            smallest=self.smallest,
            open_s=search.open_s if self.counts.num_unseen else None,
            least_bytes=int(least) if least < float("inf") else None,
            why_illegal=dict(sorted(self.counts.why.items(), key=lambda item: -item[1])),
        )
