"""The fit of a few numbers, on functions whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.prices.shrink import Array, shrunk_fit


def fit(matrix: Array, target: Array, *, spread: float = 1.0, scale: float = 1.0) -> Array:
    """Errors linear in the numbers: matrix @ x - target."""
    count = matrix.shape[1]
    return shrunk_fit(
        lambda points: points @ matrix.T - target,
        np.zeros(count),
        np.full(count, spread),
        limits=(np.full(count, -5.0), np.full(count, 5.0)),
        weights=np.ones(len(matrix)),
        scale=scale,
        steps=50,
    )


def test_one_measurement_as_strong_as_the_prior_goes_half_way() -> None:
    """(x - 0.6)² / 2 + x² / 2 is least at 0.3."""
    assert fit(np.ones((1, 1)), np.array([0.6])) == pytest.approx([0.3], abs=2e-3)


def test_many_measurements_outweigh_the_prior() -> None:
    """Nine of them: 9 (x - 0.6) + x = 0."""
    assert fit(np.ones((9, 1)), np.full(9, 0.6)) == pytest.approx([0.54], abs=2e-3)


def test_an_outlier_pulls_no_harder_than_one_scale() -> None:
    """Beyond the scale the pull is constant: (x - 0) · 3 for three runs at 0 and the prior at 0 make 4x = 1."""
    assert fit(np.ones((4, 1)), np.array([0.0, 0.0, 0.0, 50.0])) == pytest.approx([0.25], abs=2e-3)


def test_what_no_run_depends_on_stays() -> None:
    fitted = fit(np.array([[1.0, 0.0]]), np.array([0.6]))
    assert fitted[1] == 0.0


def test_limits_hold() -> None:
    assert fit(np.full((100, 1), 1.0), np.full(100, 0.9), scale=0.01)[0] <= 5.0
    result = shrunk_fit(
        lambda points: points - 3.0,
        np.zeros(1),
        np.ones(1),
        limits=(np.full(1, -1.0), np.full(1, 1.0)),
        weights=np.full(1, 100.0),
        scale=10.0,
    )
    assert result == pytest.approx([1.0])


@given(st.integers(0, 10_000))
def test_it_is_least_squares_where_everything_is_small(seed: int) -> None:
    """Within the scale and without a limit: the solution of the normal equations with the prior's ridge."""
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(6, 2)), random.normal(size=6) * 0.1
    wanted = np.linalg.solve(matrix.T @ matrix + np.eye(2), matrix.T @ target)
    assert fit(matrix, target) == pytest.approx(wanted, abs=2e-3)
