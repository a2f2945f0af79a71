"""The assignment of rows to columns that gains most, each row and column at most once.

`assign(gains)` returns the column of each row, or -1 where none gains. Exact: the Hungarian method with shortest
augmenting paths, a row at a time. Source: Kuhn 1955; Jonker and Volgenant, Computing 1987.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def assign(gains: Floats) -> list[int]:
    """The column of each row; -1 for none. Only gains over 0 count."""
    rows, columns = gains.shape
    if rows > columns:
        chosen = [-1] * rows
        for column, row in enumerate(assign(gains.T)):
            if row >= 0:
                chosen[row] = column
        return chosen
    if not rows:
        return []
    of_row = _cheapest(-np.maximum(gains, 0.0))
    return [column if gains[row, column] > 0 else -1 for row, column in enumerate(of_row)]


def _cheapest(costs: Floats) -> list[int]:
    """A column for every row with the least sum of costs; no fewer columns than rows.

    Prices of rows and columns keep every cost minus its prices at 0 or more; an augmenting path goes along those that
    are 0. Column 0 stands for the row that is added.
    """
    rows, columns = costs.shape
    of_row, of_column = np.zeros(rows), np.zeros(columns + 1)
    holder = np.full(columns + 1, -1)
    for row in range(rows):
        holder[0], at = row, 0
        slack, came_from = np.full(columns + 1, np.inf), np.zeros(columns + 1, dtype=np.int64)
        reached = np.zeros(columns + 1, dtype=bool)
        while holder[at] >= 0:
            reached[at] = True
            reduced = costs[holder[at]] - of_row[holder[at]] - of_column[1:]
            closer = ~reached[1:] & (reduced < slack[1:])
            slack[1:][closer], came_from[1:][closer] = reduced[closer], at
            nearest = int(np.where(reached[1:], np.inf, slack[1:]).argmin()) + 1
            step = slack[nearest]
            of_row[holder[reached]] += step
            of_column[reached] -= step
            slack[~reached] -= step
            at = nearest
        while at:
            holder[at] = holder[came_from[at]]
            at = int(came_from[at])
        holder[0] = -1
    out = [0] * rows
    for column in range(1, columns + 1):
        if holder[column] >= 0:
            out[holder[column]] = column - 1
    return out
