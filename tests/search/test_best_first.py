"""The frontier: takes items in order of their bounds, and counts every plan once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gnomon.search.best_first import Frontier
from gnomon.search.results import Counts

TREES = st.recursive(
    st.integers(1, 9).map(lambda step: (step, ())),
    lambda inner: st.tuples(st.just(0), st.lists(inner, min_size=1, max_size=4).map(tuple)),
    max_leaves=30,
)
"""A plan is (its step, ()); a set of plans (0, its parts)."""


def plans(tree: tuple) -> list[int]:
    return [tree[0]] if not tree[1] else [step for part in tree[1] for step in plans(part)]


@given(tree=TREES, budget=st.integers(0, 40))
def test_it_ends_with_the_least_step_or_says_what_may_be_below(tree: tuple, budget: int) -> None:
    """The bound on a set is the least step of its plans less one."""
    counts, best, looks = Counts(space=len(plans(tree))), float("inf"), 0
    frontier: Frontier[tuple] = Frontier(lambda item: len(plans(item)), counts)
    frontier.push(min(plans(tree)) - 1, tree)

    def expand(item: tuple, bound: float) -> None:
        nonlocal best, looks
        looks += 1
        assert bound < best
        if not item[1]:
            counts.priced += 1
            best = min(best, item[0])
        for part in item[1]:
            frontier.push(max(bound, min(plans(part)) - 1), part)

    frontier.explore(expand, lambda: best, lambda: looks < budget)
    least = frontier.leave(best)
    assert counts.covered == counts.space and not frontier
    assert (least < best) == (counts.left > 0)
    assert min(best, least + 1) <= min(plans(tree))
    if not counts.left:
        assert best == min(plans(tree))


def test_another_order_takes_the_one_with_the_least_bound_of_equals() -> None:
    frontier: Frontier[str] = Frontier(len, Counts())
    for bound, item in ((3.0, "late"), (2.0, "last"), (1.0, "other")):
        frontier.push(bound, item)
    assert frontier.pop_by(lambda item: (not item.startswith("la"),)) == (2.0, "last")
    assert frontier.pop() == (1.0, "other") and frontier.pop() == (3.0, "late")
