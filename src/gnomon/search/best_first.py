"""Best-first search: of all items that are open, the one with the least bound is looked at next.

An item is a set of plans with a lower bound on their step. `Frontier` keeps the open items, `Frontier.explore` takes
them in order until no bound is below the best plan's step or a budget is spent, and every plan that is not looked at is
counted. What an item is and how it becomes smaller items is the caller's: equal devices (`exact.solve`) and mixed ones
(`mixed.search`) search by this.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count as counter
from typing import Generic, TypeVar

from gnomon.search.budget import KeepGoing
from gnomon.search.results import Counts

Item = TypeVar("Item")


class Frontier(Generic[Item]):
    """The open items of one search."""

    def __init__(self, points: Callable[[Item], int], counts: Counts) -> None:
        """points: plans of an item. counts: where those go that are not looked at."""
        self._points, self._counts = points, counts
        self._heap: list[tuple[float, int, Item]] = []
        self._serial = counter()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, bound: float, item: Item) -> None:
        """Opens an item. bound: no step of its plans takes less."""
        heapq.heappush(self._heap, (bound, next(self._serial), item))

    def pop(self) -> tuple[float, Item]:
        """The item with the least bound; of equal ones, the one that was opened first."""
        bound, _, item = heapq.heappop(self._heap)
        return bound, item

    def pop_by(self, key: Callable[[Item], tuple[object, ...]]) -> tuple[float, Item]:
        """The item that comes first by another order; of equal ones, the one with the least bound."""
        at = min(range(len(self._heap)), key=lambda i: (*key(self._heap[i][2]), *self._heap[i][:2]))
        bound, _, item = self._heap[at]
        self._heap[at] = self._heap[-1]
        self._heap.pop()
        heapq.heapify(self._heap)
        return bound, item

    def explore(
        self,
        expand: Callable[[Item, float], None],
        worst: Callable[[], float],
        keep_going: KeepGoing,
        pop: Callable[[], tuple[float, Item]] | None = None,
    ) -> None:
        """Expands items until none is open whose bound is below `worst()`, or `keep_going()` says that the budget is
        spent: then items are left open. pop: takes the next item, if not `Frontier.pop`."""
        while self._heap and keep_going():
            bound, item = (pop or self.pop)()
            if bound >= worst():  # and so are all others
                self._counts.too_slow += self._points(item)
                self.leave(-float("inf"))
            else:
                expand(item, bound)

    def leave(self, worst: float) -> float:
        """Closes all items. Their plans are counted as too slow, or as left where the bound is below `worst`; the least
        bound of these, infinity if there are none."""
        least = float("inf")
        for bound, _, item in self._heap:
            if bound >= worst:
                self._counts.too_slow += self._points(item)
            else:
                self._counts.left += self._points(item)
                least = min(least, bound)
        self._heap.clear()
        return least
