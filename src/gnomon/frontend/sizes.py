"""Which sizes of a trace follow from the sizes of its inputs, by comparing two traces.

The same forward is recorded with inputs of two sets of sizes. `fit` finds factor · (product of named dims) + plus for a
number that differs; `Sizes` holds what each value's shape is in those terms. Leaves out division (a length that a
convolution halves): such a number is kept as it was in the first trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from math import prod

from gnomon.frontend.records import ForwardTrace
from gnomon.graph import Size

Extent = int | Size
"""A number that is the same in both traces, or one that follows from named sizes."""

MOST_FACTORS = 3
"""Named dims in a product: batch · positions · positions is what attention's scores have."""

MOST_MORE = 8
"""Elements that a length may be longer or shorter than a product: 2 · seq − 1 relative positions, a token more."""


def fit(
    x: int, y: int, first: Mapping[str, int], second: Mapping[str, int], most_more: int = MOST_MORE
) -> Extent | None:
    """What a number is that was x with the sizes `first` and y with `second`. None: nothing that is known here."""
    if x == y:
        return x
    names = [name for name in first if first[name] != second[name]]
    for count in range(1, MOST_FACTORS + 1):
        for chosen in combinations_with_replacement(names, count):
            a, b = prod(first[n] for n in chosen), prod(second[n] for n in chosen)
            if x * b == y * a and x % a == 0:
                return Size(x // a, chosen)
    near: list[Size] = []
    for count in range(1, MOST_FACTORS):
        for chosen in combinations_with_replacement(names, count):
            a, b = prod(first[n] for n in chosen), prod(second[n] for n in chosen)
            if a != b and (x - y) % (a - b) == 0 and (factor := (x - y) // (a - b)) > 0:
                near.append(Size(factor, chosen, x - factor * a))
    near = [size for size in near if abs(size.plus) <= most_more]
    return min(near, key=lambda size: (size.factor > 1, abs(size.plus)), default=None)


@dataclass(slots=True)
class Sizes:
    """Sizes of a trace in terms of its inputs' dims."""

    first: Mapping[str, int]
    """Size of each named dim in the trace."""
    second: Mapping[str, int]
    """In the other one; equal where a dim is taken as fixed."""
    other: ForwardTrace | None
    """None: nothing is known to follow."""
    fixed: set[str] = field(default_factory=set)
    """Places where a size differs and no rule was found: it is as in the first trace."""

    def extent(self, x: int, y: int, where: str) -> Extent:
        """What a number is; as in the first trace where nothing fits."""
        by_chance = self.other is not None and self.other.reads_values  # as the rows of an expert
        fitted = fit(x, y, self.first, self.second, 1 if by_chance else MOST_MORE)
        if fitted is None:
            self.fixed.add(where)
            return x
        return fitted


def aligned(a: ForwardTrace, b: ForwardTrace) -> bool:
    """Whether two traces ran the same ops in the same order."""
    if len(a.steps) != len(b.steps) or len(a.values) != len(b.values):
        return False
    return all(
        s.func == t.func and s.module == t.module and len(s.nodes) == len(t.nodes)
        and all(m.target == n.target for m, n in zip(s.nodes, t.nodes, strict=True))
        for s, t in zip(a.steps, b.steps, strict=True)
    )  # fmt: skip
