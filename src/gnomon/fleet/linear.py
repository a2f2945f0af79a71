"""Linear programmes with room at 0: the most of c x, where A x <= b, x >= 0 and b >= 0.

`maximise(c, a, b)` returns x by the simplex method on a tableau; Bland's rule keeps it from going in circles. Leaves
out equalities and programmes of which 0 is no solution. Source: Dantzig 1963; Bland, Mathematics of OR 1977.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError

Floats = NDArray[np.float64]
_EPS = 1e-9


def maximise(c: Floats, a: Floats, b: Floats) -> Floats:
    """The x that maximises c x. InputError where there is no bound, or b is negative."""
    rows, columns = a.shape
    if (b < 0).any():
        raise InputError("0 is no solution of this linear programme")
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns], table[:rows, columns:-1], table[:rows, -1] = a, np.eye(rows), b
    # The last row is the objective, the last column b. It begins at x = 0, with the slack variables in the basis.
    table[-1, :columns] = -c
    basis = list(range(columns, columns + rows))
    while True:
        gaining = np.flatnonzero(table[-1, :-1] < -_EPS)
        if not len(gaining):
            break
        # Bland's rule: of the columns that gain the first, and below of the rows that bound it the one whose variable
        # is first. No basis comes a second time.
        entering = int(gaining[0])
        column = table[:rows, entering]
        able = np.flatnonzero(column > _EPS)
        if not len(able):
            raise InputError("this linear programme has no bound")
        ratios = table[able, -1] / column[able]
        least = able[ratios <= ratios.min() + _EPS]
        leaving = min(least.tolist(), key=lambda row: basis[row])
        table[leaving] /= table[leaving, entering]
        factors = table[:, entering].copy()
        # The row of the pivot itself stays.
        factors[leaving] = 0.0
        table -= np.outer(factors, table[leaving])
        basis[leaving] = entering
    out = np.zeros(columns + rows)
    out[basis] = table[:rows, -1]
    return out[:columns]
