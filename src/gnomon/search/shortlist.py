"""Which plans a search keeps of those that fit: the fastest, or the fastest that are unlike.

`Shortlist` keeps the fastest; `Diverse` of each sort (ranks on each axis, recomputation, ZeRO stage) the fastest, and
of these the fastest, few of one mesh. Both say what a plan must be faster than to change them, so that a search that
leaves out the others finds exactly what predicting every plan would. `Fastest` looks for the one fastest plan alone,
`First` for any that fits. Leaves out the search (`best_first`).
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, Protocol, TypeVar

from gnomon.search.results import UP_TO, FoundPlan, Ranks, Sort, sort_of_point

Likeness = tuple[Ranks, Sort | None]
"""Ranks on each axis, and the sort where plans are of one."""


class TimedPlan(Protocol):
    """A plan that was predicted."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""


Plan = TypeVar("Plan", bound=TimedPlan)


class Shortlist(Generic[Plan]):
    """The `few` fastest plans."""

    def __init__(self, few: int) -> None:
        self.few = few
        self.best: list[Plan] = []

    def add(self, candidate: Plan) -> None:
        """A plan that fits."""
        self.best = sorted([*self.best, candidate], key=lambda candidate: candidate.step_s)[: self.few]

    def worst(self) -> float:
        """What every plan must be faster than."""
        return self.best[-1].step_s if len(self.best) >= self.few else float("inf")

    def worst_of(self, ranks: Ranks, sort: Sort | None = None) -> float:
        """What a plan with such ranks, of such a sort, must be faster than."""
        return self.worst()


class Fastest(Shortlist[Plan]):
    """Keeps the fastest plan; the next `few` - 1 are those met on the way."""

    def worst(self) -> float:
        """What a plan must be faster than to be looked at."""
        return self.best[0].step_s if self.best else float("inf")


class First(Shortlist[Plan]):
    """The first plan that fits."""

    def worst(self) -> float:
        """Nothing is looked at beyond it."""
        return -float("inf") if self.best else float("inf")


class Diverse(Shortlist[FoundPlan]):
    """The `few` fastest that are unlike; none that takes more than UP_TO times the best one's step.

    Proof that what is left out does not matter: going through sorts by the step of their fastest plan, those of a mesh
    after the first `same` are passed over, and the list is full with the `few`-th. A plan changes none of that unless
    it is faster than the last of a full list, than that sort of its mesh, and than the fastest of its sort.
    """

    def __init__(self, few: int, same: int) -> None:
        """same: plans of one mesh, at most."""
        super().__init__(few)
        self.same = same
        self._fastest: dict[Sort, FoundPlan] = {}
        self._meshes: dict[Ranks, list[float]] = {}

    def add(self, candidate: FoundPlan) -> None:
        """Takes a plan that fits, where it is the fastest of its sort so far."""
        sort = sort_of_point(candidate.point)
        if sort in self._fastest and self._fastest[sort].step_s <= candidate.step_s:
            return
        self._fastest[sort] = candidate
        every = sorted(self._fastest.items(), key=lambda item: item[1].step_s)
        # Sorts are gone through by step, so counts[ranks] is the place of a sort among those of its mesh.
        limit, counts = UP_TO * every[0][1].step_s, Counter[Ranks]()
        self.best = []
        for (ranks, *_), other in every:
            counts[ranks] += 1
            if counts[ranks] <= self.same and other.step_s < limit:
                self.best.append(other)
        self.best = self.best[: self.few]
        self._meshes[sort[0]] = sorted(other.step_s for (ranks, *_), other in every if ranks == sort[0])

    def worst(self) -> float:
        """Returns the worst step still listed; a plan of the list also takes less than UP_TO times the best one's
        step."""
        return min(super().worst(), UP_TO * self.best[0].step_s) if self.best else float("inf")

    def worst_of(self, ranks: Ranks, sort: Sort | None = None) -> float:
        """The same for a plan with such ranks, of such a sort."""
        mesh = self._meshes.get(ranks, [])
        # The last sort of this mesh that may be listed.
        of_mesh = mesh[self.same - 1] if len(mesh) >= self.same else float("inf")
        own = self._fastest.get(sort) if sort is not None else None
        return min(self.worst(), of_mesh, own.step_s if own is not None else float("inf"))
