"""Durations of a Program's price keys: how long each holds its stream (`busy`) and how much later its readers see
it (`lag`).

`durations(program, busy, lag)` resolves a table by label into vectors aligned with `program.keys`, quantised to the
dyadic grid so that sums and maxima are exact. Prices fill the same vectors from a plan; nothing here knows where
numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import UnpricedError, nearest
from gnomon.program import Key, Program
from gnomon.units import quantise

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Durations:
    """Seconds per price key; a leading axis, if any, is one row per scenario."""

    busy: Doubles
    """[keys] or [scenarios, keys] seconds a row holds its stream."""
    lag: Doubles | None = None
    """[keys] seconds after its end at which other streams may read what a row wrote; None is zero."""


def labels(key: Key) -> tuple[str, ...]:
    """Labels under which a duration may be given, most specific first: `1:2F~4`, `2F~4`, `F~4`, `1:2F`, `2F`,
    `1:F`, `F`.

    The number before the colon is the rank class; a row with a price name goes by that name (`1:NAME`, `NAME`).
    """
    if key.name:
        return (f"{key.rank_class}:{key.name}", key.name)
    plain = (
        f"{key.rank_class}:{key.stage}{key.kind}",
        f"{key.stage}{key.kind}",
        f"{key.rank_class}:{key.kind}",
        key.kind,
    )
    if not key.shape:
        return plain
    shaped = (
        f"{key.rank_class}:{key.stage}{key.kind}~{key.shape}",
        f"{key.stage}{key.kind}~{key.shape}",
        f"{key.kind}~{key.shape}",
    )
    return (*shaped, *plain)


def durations(program: Program, busy: Mapping[str, float], lag: Mapping[str, float] | None = None) -> Durations:
    """Vectors for a Program from seconds by label (see `labels`); `*` is the label of everything not named.

    A lag not given is zero; a missing duration is an UnpricedError, and so is a label that no action uses.
    """
    used: set[str] = set()
    # On the grid, where sums are exact: periods are proved by equality, not by a tolerance.
    values = quantise(np.array([_look_up(key, busy, used) for key in program.keys], float))
    late = None
    if lag:
        late = quantise(np.array([_look_up(key, {"*": 0.0, **lag}, used) for key in program.keys], float))
    # A misspelt label would leave its rows at the price of a wider one, without a word.
    unused = (set(busy) | set(lag or ())) - used - {"*"}
    if unused:
        known = {label for key in program.keys for label in labels(key)}
        name = min(unused)
        raise UnpricedError(f"a duration is given for {name!r}, but no action goes by that label{nearest(name, known)}")
    return Durations(busy=values, lag=late)


def _look_up(key: Key, table: Mapping[str, float], used: set[str]) -> float:
    for label in (*labels(key), "*"):
        if label in table:
            used.add(label)
            return float(table[label])
    raise UnpricedError(f"no duration for action {key.label}: give one of {', '.join(labels(key))}")
