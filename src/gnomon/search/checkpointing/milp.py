"""Integer programmes with yes-or-no variables and amounts, solved by HiGHS in scipy.

A `Programme` collects variables, limits and costs; `solve` returns the chosen variables, or None where nothing meets
the limits. Leaves out what they mean.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError

INFEASIBLE = 2
"""Status of `scipy.optimize.milp`."""


@dataclass(slots=True)
class Programme:
    """Minimise a sum of costs; each variable is 0 or 1, or an amount of 0 or more."""

    costs: list[float] = field(default_factory=list)
    """What one of each variable adds to the sum."""
    rows: list[tuple[dict[int, float], float]] = field(default_factory=list)
    """(variable -> factor, what the sum may be at most)."""
    equal: list[tuple[dict[int, float], float]] = field(default_factory=list)
    """(variable -> factor, what the sum must be)."""
    amounts: list[int] = field(default_factory=list)
    """Variables that are amounts."""

    def variable(self, cost: float) -> int:
        """Adds a variable to the programme."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def amount(self, cost: float) -> int:
        """A new variable that is any number from 0 on."""
        self.amounts.append(self.variable(cost))
        return self.amounts[-1]

    def at_most(self, factors: Mapping[int, float], limit: float) -> None:
        """The sum of factors of the chosen variables is at most `limit`."""
        self.rows.append((dict(factors), limit))

    def equals(self, factors: Mapping[int, float], value: float) -> None:
        """The sum is `value`."""
        self.equal.append((dict(factors), value))

    def solve(self, *, gap: float = 0.0, seconds: float = 10.0) -> NDArray[np.bool_] | None:
        """[variables] which are chosen (of amounts: above a half); None where no choice meets the limits.

        gap: share of the cost by which the choice may be worse than the best. seconds: of HiGHS at most, after which
        the best choice so far is returned. InputError where scipy is not installed, or no choice was found in time.
        """
        optimize, sparse = _scipy()
        count = len(self.costs)
        constraints = []
        for rows, exact in ((self.rows, False), (self.equal, True)):
            if rows:
                # (row, variable, factor) of each entry: the matrix is sparse, as most variables are in few rows.
                entries = [(i, at, value) for i, (factors, _) in enumerate(rows) for at, value in factors.items()]
                place, at, value = (np.array(column) for column in zip(*entries, strict=True))
                matrix = sparse.csr_array((value.astype(float), (place, at)), shape=(len(rows), count))
                limit = np.array([limit for _, limit in rows])
                constraints.append(optimize.LinearConstraint(matrix, limit if exact else -np.inf, limit))
        options, whole, most = {"mip_rel_gap": gap, "time_limit": seconds}, np.ones(count), np.ones(count)
        # Amounts are neither whole numbers nor at most 1.
        whole[self.amounts], most[self.amounts] = 0, np.inf
        with _silent_stdout():  # HiGHS prints there now and then, whatever `disp` says
            result = optimize.milp(
                np.array(self.costs),
                integrality=whole,
                bounds=optimize.Bounds(0, most),
                constraints=constraints,
                options=options,
            )
        if result.x is None:
            if result.status == INFEASIBLE:
                return None
            raise InputError(f"HiGHS found no choice of what to recompute in {seconds:g} s; give it more")
        chosen: NDArray[np.bool_] = np.asarray(result.x) > 0.5
        return chosen


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """What C code writes to standard output goes nowhere meanwhile: a command's own output may be JSON."""
    # What Python has buffered so far belongs to the real output.
    sys.stdout.flush()
    stdout_fd = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(stdout_fd, 1)
        os.close(stdout_fd)


def _scipy() -> tuple[Any, Any]:
    """scipy's `optimize` and `sparse`. InputError without it."""
    try:
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        raise InputError(
            "choosing tensors to recompute by an integer programme needs scipy, whose solver is HiGHS: "
            "pip install 'gnomon[solve]'"
        ) from error
    return optimize, sparse
