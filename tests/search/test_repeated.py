"""The selector of a model's repeated layers names layers that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gnomon.plans.select import select
from gnomon.search.space.points import repeated_layers


def numbered(numbers: set[int]) -> Any:
    """Stands for a Graph of layers of those numbers: selectors read no more of one."""
    calls = [SimpleNamespace(name=f"layers.{n}", group="layers", first=n) for n in sorted(numbers)]
    layers = tuple(SimpleNamespace(call=call, index=0) for call in calls)
    return SimpleNamespace(layers=lambda: layers)


@given(st.sets(st.integers(0, 30), min_size=1, max_size=12))
def test_layers_with_gaps_between_them_are_selected(numbers: set[int]) -> None:
    graph = numbered(numbers)
    selector, count = repeated_layers(graph)
    assert len(select([selector], graph)) == count == len(numbers)


def test_layers_without_gaps_are_a_range() -> None:
    assert repeated_layers(numbered({0, 1, 2})) == ("layers[0:3]", 3)
