"""Weights with zeros that are nearest in what a linear gives, by the alternating direction method of multipliers.

`admm(weight, squares, project)` minimises |(W - W0) X| over matrices of a pattern, X the inputs that text gave: W is
solved with the pattern's matrix Z held, Z is what the pattern keeps of W and the multipliers U, and U adds up what they
differ by. Inputs are scaled to one size first, so that what is kept is chosen as Wanda does. The pattern may move in
the first half of the steps. Of all Z the one with the least error is returned. Pure: numpy.
Source: Boza 2024, "Fast and effective weight update for pruned large language models" (the update and the scaling);
NxMTransformer (Holmes et al. 2021) for ADMM on n of m.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

STEPS, PENALTY, DAMPING = 24, 1.0, 0.01
"""Steps; weight of the pattern beside the outputs, whose squares are scaled to 1; what is added to the diagonal."""


def admm(
    weight: NDArray[np.float32],
    squares: NDArray[np.float64],
    project: Callable[[NDArray[np.float32]], NDArray[np.bool_]],
) -> NDArray[np.float32]:
    """Fits a weight to a sparsity pattern by ADMM, so that its outputs change least. weight (outputs, inputs); squares
    (inputs, inputs): the sum of all products of two inputs; project: the mask that is kept of sizes. Returns a matrix
    of the pattern."""
    sizes = np.sqrt(np.maximum(np.diag(squares), 0))
    # An input that was always 0 has no size of its own, and is divided by below.
    sizes = np.where(sizes > 0, sizes, sizes[sizes > 0].min() if (sizes > 0).any() else 1.0)
    h = squares / np.outer(sizes, sizes)
    h[np.diag_indices(len(h))] += DAMPING
    # Inputs divided by their sizes, weights multiplied: the products stay, and magnitudes of weights compare across
    # inputs.
    whole = weight.astype(np.float64) * sizes
    inverse = np.linalg.inv(h + PENALTY * np.eye(len(h)))
    target = whole @ h
    mask = project(np.abs(whole).astype(np.float32))
    pruned, u = np.where(mask, whole, 0), np.zeros_like(whole)
    best, least = pruned, _error(pruned - whole, h)
    for step in range(STEPS):
        # The minimum over W of |(W - W0) X|² + PENALTY |W - Z + U|²: W (h + PENALTY) = W0 h + PENALTY (Z - U). One
        # inverse serves all steps.
        free = (target + PENALTY * (pruned - u)) @ inverse
        if step < STEPS // 2:
            mask = project(np.abs(free + u).astype(np.float32))
        pruned = np.where(mask, free + u, 0)
        u = u + free - pruned
        if (error := _error(pruned - whole, h)) < least:
            best, least = pruned, error
    return np.asarray(best / sizes, np.float32)


def _error(off: NDArray[np.float64], h: NDArray[np.float64]) -> float:
    return float(np.einsum("ij,ij->", off @ h, off))
