"""A sample of plans drawn at random trains as the plain model does; `benchmarks/runtime_grid.py` tries many more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import grid  # noqa: E402

pytestmark = pytest.mark.torch

SAMPLE = (4, 5, 11, 15, 18, 26, 80, 84, 97)
"""Of `hf_grid`'s first seed."""


def test_every_value_of_every_field_is_right_or_refused() -> None:
    """A plan for each, with tied and untied weights in turn."""
    cases = sorted((grid.draw(number) for number in range(len(grid.FIELDS))), key=lambda case: case.plan.world_size)
    with grid.Workers() as workers:
        actual = [(case, *workers.judged(case)) for case in cases]
    wrong = [f"{case}: {verdict}: {message}" for case, verdict, message in actual if verdict in grid.BAD]
    assert not wrong, "\n".join(wrong)
    verdicts = Counter(verdict for _, verdict, _ in actual)
    assert verdicts["equal"] >= 24, verdicts
    assert {case.plan.world_size for case, verdict, _ in actual if verdict == "equal"} == {1, 2, 4}
    assert {case.config.tied for case, verdict, _ in actual if verdict == "equal"} == {True, False}


def test_plans_train_as_transformers_does_in_train_mode(tmp_path: Path) -> None:
    """Cases of `hf_grid`: those that once were wrong, and others of other types."""
    pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    from runtime import hf_grid

    with grid.Workers() as workers:
        cases = sorted((hf_grid.draw(number, tmp_path) for number in SAMPLE), key=lambda case: case.plan.world_size)
        actual = [(case, *workers.judged(case)) for case in cases]
    wrong = [f"{case}: {verdict}: {message}" for case, verdict, message in actual if verdict in grid.BAD]
    assert not wrong, "\n".join(wrong)
    assert sum(verdict == "equal" for _, verdict, _ in actual) >= 7


def test_a_case_that_hangs_or_fails_is_told_from_one_that_trains() -> None:
    """And ranks that do not agree are wrong, whatever each of them says."""
    case = next(case for case in map(grid.draw, range(99)) if case.plan.world_size == 2)
    trained = grid.Answer(kind="trained", curve=((1.0, 1.0),) * grid.STEPS)
    failed = grid.Answer(kind="failed", message="error")
    refused = grid.Answer(kind="refused", message="not done")
    assert grid.judge(case, {0: refused, 1: refused}) == ("refused", "not done")
    assert grid.judge(case, {0: refused, 1: trained})[0] == "wrong"
    assert grid.judge(case, {0: failed, 1: trained}) == ("crashed", "rank 0: error")
    assert grid.judge(case, {0: trained})[0] == "hung"
    assert grid.judge(case, {0: trained, 1: trained})[0] == "wrong"
