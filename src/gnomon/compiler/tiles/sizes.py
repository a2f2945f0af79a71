"""Sizes of dims: plain integers, or expressions of symbols that are known when a graph is called.

Returns what a pass may conclude (equal, divides) and the Python text that computes a size from the symbols'
values. Nothing here guards: a fact that is not known statically counts as false, so that one compilation stays
right for all shapes. Leaves out ranges and likely values, which only choose among tiles (`hint`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from gnomon.late import load_late

Size = Any
"""An `int`, or a sympy expression of the ShapeEnv's symbols."""


@cache
def _printer() -> Any:
    """Loads sympy's printer late: sympy takes half a second, and a graph whose sizes are all numbers does not need
    it."""
    return load_late("torch.utils._sympy.printers:PythonPrinter")()


def size_of(value: int | torch.SymInt) -> Size:
    """The size that a shape or stride of a fake tensor says."""
    return _plain(value.node.expr) if isinstance(value, torch.SymInt) else int(value)


def sizes_of(values: Iterable[int | torch.SymInt]) -> tuple[Size, ...]:
    return tuple(size_of(value) for value in values)


def product(sizes: Iterable[Size]) -> Size:
    return _plain(math.prod(sizes))


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are the same for every value of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    difference = _plain(a - b)
    return isinstance(difference, int) and difference == 0


def quotient(a: Size, b: Size) -> Size | None:
    """a / b where that is whole for every value of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    ratio = a / b
    if isinstance(ratio, float):
        return None
    # Whole for every value only where nothing is left to divide by; n / 2 is not, even if n is likely even.
    top, bottom = ratio.as_numer_denom()
    return _plain(top) if bottom == 1 else None


def hint(size: Size, environment: Any) -> int:
    """Returns a likely value of a size: that of the inputs which were traced. `environment`: the ShapeEnv, or None."""
    if isinstance(size, int):
        return size
    known = getattr(environment, "backed_var_to_val", None) or getattr(environment, "var_to_val", {})
    value = size.subs(known)
    # A symbol without a value yet: some size, as it only chooses among tiles.
    return int(value) if value.is_Integer else 64


def text(size: Size) -> str:
    """Python that computes it; the symbols are names."""
    return str(size) if isinstance(size, int) else str(_printer().doprint(size))


def symbols(size: Size) -> set[Any]:
    return set() if isinstance(size, int) else set(size.free_symbols)


def _plain(size: Size) -> Size:
    if isinstance(size, int):
        return size
    return int(size) if size.is_Integer else size
