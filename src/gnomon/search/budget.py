"""How long a search may take: `until` makes a budget of processor time, `always` none at all.

A budget is a function that says whether there is time left. Searches ask it between two plans; a search that ends
before its budget is spent gives the same answer on every machine. Tests pass budgets that count questions.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

KeepGoing = Callable[[], bool]
"""Whether there is time left."""


def always() -> bool:
    """The budget that is never spent."""
    return True


def until(seconds: float) -> KeepGoing:
    """True until the process has used so many seconds of processor time from now on."""
    end = process_time() + seconds
    return lambda: process_time() < end
