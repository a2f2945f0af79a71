"""A few numbers from a few measurements: least squares of log errors, held to what was known before.

`shrunk_fit` minimises the weighted Huber loss of the errors plus the squared distance of the numbers from a centre,
each over its own spread, by damped Gauss-Newton steps with slopes from differences. Pure; knows nothing of prices.
Leaves out: which numbers, and what their errors are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Errors = Callable[[Array], Array]
"""[points, numbers] -> [points, runs] of log(predicted / measured)."""

MOVE = 0.04
"""The step over which slopes are taken; the numbers are logs."""

ENOUGH = 1e-3
"""The share of the loss below which a step's gain ends the fit."""


def shrunk_fit(
    errors: Errors,
    centre: Array,
    spread: Array,
    *,
    limits: tuple[Array, Array],
    weights: Array,
    scale: float,
    start: Array | None = None,
    steps: int = 8,
) -> Array:
    """The numbers (logs), from `start` or the centre, within `limits`.

    spread: how far from the centre a number may be at the price of half a unit of loss. scale: an error of this size
    costs half a unit; beyond it the cost is linear, so that one-off slow runs do not lead. weights: of each run.
    """
    low, high = limits

    def loss(e: Array, x: Array) -> float:
        size = np.abs(e) / scale
        # Huber: quadratic within `scale`, linear beyond.
        huber = np.where(size < 1, size**2 / 2, size - 0.5)
        return float((weights * huber).sum() + (((x - centre) / spread) ** 2).sum() / 2)

    x = np.clip(centre if start is None else start, low, high)
    now, damping = errors(x[None])[0], 1e-2
    for _ in range(steps):
        slopes = _slopes(errors, x, now, high)
        # Iteratively reweighted least squares: weight 1/|error| beyond the scale makes the Gauss-Newton step follow the
        # Huber loss.
        w = weights * np.minimum(1.0, scale / np.maximum(np.abs(now), 1e-12)) / scale**2
        # Gauss-Newton Hessian: Jᵀ W J, plus the prior's curvature 1/spread².
        hessian = slopes.T @ (w[:, None] * slopes) + np.diag(1 / spread**2)
        downhill = -(slopes.T @ (w * now) + (x - centre) / spread**2)
        gain = 0.0
        for _ in range(4):
            # Levenberg-Marquardt: damping along the diagonal; steps of more than e in a number are cut.
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), downhill)
            tried = np.clip(x + np.clip(step, -1.0, 1.0), low, high)
            then = errors(tried[None])[0]
            gain = 1 - loss(then, tried) / max(loss(now, x), 1e-12)
            if gain > 0:
                x, now, damping = tried, then, damping / 4
                break
            # No gain: a shorter, steeper step.
            damping = damping * 10 + 1e-2
        if gain < ENOUGH:
            break
    return x


def _slopes(errors: Errors, x: Array, now: Array, high: Array) -> Array:
    moves = np.where(x + MOVE <= high, MOVE, -MOVE)
    # Forward differences; towards the other side where the limit is near. One call evaluates all of them.
    slopes: Array = (errors(x + np.diag(moves)) - now).T / moves
    return slopes
