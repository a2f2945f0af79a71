"""What each operation computes, one file a family; the folder is the list of what the compiler claims.

`RULES`: overload of an ATen operation -> function of a `Lowering` (one node being placed in one body). A rule
gives the `Tensor` of the result, or of each result, or raises `UnfitError` and the node stays outside that
group. A new operation is one function in one file here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gnomon.compiler.rules import join, lookup, loss, normalise, pointwise, reduce, views

RULES: dict[Any, Callable[..., Any]] = {
    **views.RULES,
    **pointwise.RULES,
    **reduce.RULES,
    **normalise.RULES,
    **loss.RULES,
    **lookup.RULES,
    **join.RULES,
}
