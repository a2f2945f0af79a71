"""The floor under errors, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evidence.noise import noise
from evidence.published import Row


def row(value: float, **changes: object) -> Row:
    made = Row(id=str(value), family="f", model="m", device="d", framework="x", metric="s_per_step", value=value)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_repeats() -> None:
    """0.9 and 1.1 lie 10% from their mean; another micro batch is no repeat, nor another metric."""
    result = noise([row(0.9), row(1.1), row(5.0, micro_batch=2), row(7.0, metric="samples_per_s")])
    assert (result.repeats, result.repeat_rows) == (pytest.approx(0.1), 2)
    assert result.twins is None and result.releases is None and result.floor == result.repeats


def test_twins() -> None:
    """Notes that name no release make twins of what would be repeats: 0.8 and 1.2 lie 20% from their mean."""
    result = noise([row(0.8, notes="seed 1"), row(1.2, notes="seed 2")])
    assert (result.twins, result.twin_rows, result.repeat_rows) == (pytest.approx(0.2), 2, 0)
    assert result.floor == result.twins


def test_releases() -> None:
    """Release v1 takes 1.0 on average, v2 0.5: 33% from their mean; rows of one release are repeats."""
    rows = [row(0.9, notes="release v1.0"), row(1.1, notes="release v1.0"), row(0.5, notes="release v2.0")]
    result = noise(rows)
    assert (result.releases, result.release_rows) == (pytest.approx(1 / 3), 3)
    assert (result.repeats, result.repeat_rows) == (pytest.approx(0.1), 2)
    assert result.twins is None
