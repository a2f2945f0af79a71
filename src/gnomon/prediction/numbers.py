"""Arithmetic that serves one layer and many at once: on a number, or on an array of one number a context.

Arrays come of arrays of sizes (`layer.price_layer`); a number that is none stays a plain float or int.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def as_float(value: Any) -> Any:
    """Converts to a float; arrays stay as they are."""
    return value if isinstance(value, np.ndarray) else float(value)


def as_int(value: Any) -> Any:
    """Converts to an int; arrays stay as they are."""
    return value if isinstance(value, np.ndarray) else int(value)


def larger(a: Any, b: Any) -> Any:
    """The larger, element by element for arrays."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


def smaller(a: Any, b: Any) -> Any:
    """The smaller, element by element for arrays."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)
