"""The search: of all candidates that are open, the one with the least bound is looked at next.

A candidate is a set of plans that bounds itself and divides itself into smaller ones, down to a plan that is predicted;
a space says where a search of it begins, and what ends it early. `Search` keeps the open candidates and expands them
until no bound is below what a plan must be faster than; every plan that is not looked at is counted. That devices are
equal (`equal.devices`) or of several kinds, with shares that differ (`mixed.devices`), is a choice of the space.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count as counter
from typing import Any, Generic, Literal, Protocol, TypeVar

from gnomon.search.budget import KeepGoing
from gnomon.search.results import Counts
from gnomon.search.shortlist import Likeness, Shortlist, TimedPlan

Ended = Literal["", "tries", "nodes", "budget"]
"""What ended a search before its bounds did; empty where nothing did."""

OnProgress = Callable[[int, float | None], None]
"""Takes the points covered so far, and the step of the best plan, if there is one."""

Plan = TypeVar("Plan", bound=TimedPlan)


class Candidate(Protocol):
    """A set of plans."""

    @property
    def points(self) -> int:
        """Plans in it that may run, each counted once."""

    @property
    def likeness(self) -> Likeness | None:
        """What its plans have in common; None where a plan needs only be faster than the best."""

    @property
    def distance(self) -> tuple[int, ...]:
        """How far it is from a plan that most likely fits: what is looked at first while no plan was found."""

    def expand(self, search: Search[Any], bound: float) -> Iterable[tuple[float, Candidate]]:
        """The smaller candidates that it consists of, with a bound on each: no step of its plans takes less. What is
        too large or cannot run is counted; a plan by itself is predicted, and kept. bound: its own."""


class SearchSpace(Protocol):
    """A space of plans, as the search sees it."""

    counts: Counts
    prune: bool
    """Whether bounds end anything; without it every legal plan is predicted, which shows that they are right."""

    def spent(self) -> Ended:
        """What ends the search now, whatever is open."""

    def dives(self, search: Search[Any]) -> bool:
        """Whether the next candidate is the one nearest to a plan, because no plan bounds what is worth a look."""

    def last_resort(self, search: Search[Any]) -> None:
        """Looks for one plan at least, once the search is ended with candidates open."""


class Search(Generic[Plan]):
    """One search under way."""

    def __init__(self, space: SearchSpace, shortlist: Shortlist[Plan], on_progress: OnProgress | None = None) -> None:
        """shortlist: the plans that are looked for. on_progress: is called after every candidate."""
        self.space, self.shortlist, self.counts, self.on_progress = space, shortlist, space.counts, on_progress
        self.ended: Ended = ""
        self.open_s = float("inf")
        """The least bound of what was left; infinity where nothing was."""
        self._heap: list[tuple[float, int, Candidate]] = []
        self._serial = counter()

    @property
    def best(self) -> list[Plan]:
        """What is kept of the plans that fit, the fastest first."""
        return self.shortlist.best

    def run(self, roots: Iterable[tuple[float, Candidate]]) -> None:
        """Best first, until nothing that is left can be better, or the search is ended: then candidates are left.
        roots: the candidates of a whole space, with bounds."""
        for bound, candidate in roots:
            self.push(bound, candidate)
        self.explore(self._goes_on)
        if self._heap:
            self.space.last_resort(self)
        self.open_s = self._close(self.worst())
        self.ended = self.ended if self.counts.num_unseen else ""
        assert self.counts.covered == self.counts.space, (self.counts, "points must add up")

    def _goes_on(self) -> bool:
        self.ended = self.space.spent()
        return not self.ended

    def worst(self) -> float:
        """Seconds that every plan must be faster than."""
        return self.shortlist.worst() if self.space.prune else float("inf")

    def push(self, bound: float, candidate: Candidate) -> None:
        """Opens a candidate, unless it is too slow already. bound: no step of its plans takes less."""
        if bound >= self.worst_of(candidate):  # which no later plan raises
            self.counts.too_slow += candidate.points
        else:
            # Of equal bounds the serial number decides, so that candidates are never compared.
            heapq.heappush(self._heap, (bound, next(self._serial), candidate))

    def explore(self, keep_going: KeepGoing, *, dive: bool = False) -> None:
        """Expands candidates until none is open that is worth it, or `keep_going()` says that there is no time left:
        then they stay open. dive: always on from what is nearest to a plan."""
        while self._heap and keep_going():
            # Of (bound, serial, candidate), [::2] takes the bound and the candidate.
            near = dive or self.space.dives(self)
            bound, candidate = self._nearest() if near else heapq.heappop(self._heap)[::2]
            if bound < self.worst_of(candidate):
                for least, smaller in candidate.expand(self, bound):
                    self.push(least, smaller)
            else:
                self.counts.too_slow += candidate.points
                if not near and bound >= self.worst():  # and so are all others
                    self._close(-float("inf"))
            if self.on_progress is not None:
                self.on_progress(self.counts.covered, self.best[0].step_s if self.best else None)

    def worst_of(self, candidate: Candidate) -> float:
        """Seconds that the plans of a candidate must be faster than."""
        likeness = candidate.likeness
        if likeness is None or not self.space.prune:
            return self.worst()
        return self.shortlist.worst_of(*likeness)

    def _nearest(self) -> tuple[float, Candidate]:
        """The candidate nearest to a plan; of equal ones, the one with the least bound, and that was opened first."""
        at = min(range(len(self._heap)), key=lambda i: (self._heap[i][2].distance, *self._heap[i][:2]))
        bound, _, candidate = self._heap[at]
        # The last entry takes the free place. That breaks the heap's order, so it is made anew.
        self._heap[at] = self._heap[-1]
        self._heap.pop()
        heapq.heapify(self._heap)
        return bound, candidate

    def _close(self, worst: float) -> float:
        """Closes all candidates that are open. Their plans are counted as too slow, or as left where the bound is below
        `worst`; the least bound of these, infinity if there are none."""
        least = float("inf")
        for bound, _, candidate in self._heap:
            if bound >= worst:
                self.counts.too_slow += candidate.points
            else:
                self.counts.num_unseen += candidate.points
                least = min(least, bound)
        self._heap.clear()
        return least
