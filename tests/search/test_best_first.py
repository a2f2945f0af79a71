"""The search: takes candidates in order of their bounds, and counts every plan once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gnomon.search.best_first import Candidate, Ended, Search
from gnomon.search.results import Counts
from gnomon.search.shortlist import Shortlist

TREES = st.recursive(
    st.integers(1, 9).map(lambda step: (step, ())),
    lambda inner: st.tuples(st.just(0), st.lists(inner, min_size=1, max_size=4).map(tuple)),
    max_leaves=30,
)
"""A plan is (its step, ()); a set of plans (0, its parts)."""


def plans(tree: tuple) -> list[int]:
    return [tree[0]] if not tree[1] else [step for part in tree[1] for step in plans(part)]


@dataclass(frozen=True)
class Step:
    step_s: float


class Budget:
    """A space that is left after so many looks, whose candidates are looked at in their order or the nearest first."""

    prune = True

    def __init__(self, counts: Counts, looks: int, *, dive: bool) -> None:
        self.counts, self.looks, self.dive, self.resorted = counts, looks, dive, False

    def spent(self) -> Ended:
        self.looks -= 1
        return "budget" if self.looks < 0 else ""

    def dives(self, search: Search) -> bool:
        return self.dive and not search.best

    def last_resort(self, search: Search) -> None:
        self.resorted = True


@dataclass(frozen=True)
class OfTree:
    """The bound on a set is the least step of its plans less one."""

    counts: Counts
    tree: tuple

    likeness = None

    @property
    def points(self) -> int:
        return len(plans(self.tree))

    @property
    def distance(self) -> tuple[int, ...]:
        return (len(plans(self.tree)),)

    @property
    def bound(self) -> float:
        return min(plans(self.tree)) - 1

    def expand(self, search: Search, bound: float) -> Iterable[tuple[float, Candidate]]:
        assert bound < search.worst()
        if not self.tree[1]:
            self.counts.num_predicted += 1
            search.shortlist.add(Step(self.tree[0]))
        for part in self.tree[1]:
            child = OfTree(self.counts, part)
            yield max(bound, child.bound), child


@given(tree=TREES, looks=st.integers(0, 40), dive=st.booleans())
def test_it_ends_with_the_least_step_or_says_what_may_be_below(tree: tuple, looks: int, dive: bool) -> None:
    counts = Counts(space=len(plans(tree)))
    space, root = Budget(counts, looks, dive=dive), OfTree(counts, tree)
    search = Search(space, Shortlist[Step](1))
    search.run([(root.bound, root)])
    best = search.best[0].step_s if search.best else float("inf")
    assert counts.covered == counts.space
    assert (search.open_s < best) == (counts.num_unseen > 0) == (search.ended == "budget")
    assert not counts.num_unseen or space.resorted
    assert min(best, search.open_s + 1) <= min(plans(tree))
    if not counts.num_unseen:
        assert best == min(plans(tree))


def test_what_is_nearest_to_a_plan_is_looked_at_first_while_there_is_none() -> None:
    """Else what has the least bound, here a large set."""
    few, many = ((0, ((5, ()),)), (0, ((2, ()), (7, ()), (9, ()))))
    met = {}
    for dive in (False, True):
        counts = Counts(space=4)
        order: list[float] = []
        kept = Shortlist[Step](9)
        kept.add = lambda step, kept=kept, order=order: (order.append(step.step_s), Shortlist.add(kept, step))[1]  # type: ignore[method-assign]
        search = Search(Budget(counts, 99, dive=dive), kept)
        search.run((child.bound, child) for child in (OfTree(counts, few), OfTree(counts, many)))
        met[dive] = order
    assert met[False][0] == 2 and met[True][0] == 5 and sorted(met[True]) == sorted(met[False]) == [2, 5, 7, 9]
