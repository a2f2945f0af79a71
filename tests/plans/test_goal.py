"""Goal as a value: its limits are positive, and it survives text."""

from __future__ import annotations

import pytest

from gnomon.errors import PlanError
from gnomon.plans import Goal
from gnomon.schema import dump, load


def test_goal_survives_text() -> None:
    goal = Goal(memory_fraction=0.8, memory_bytes=70 * 2**30)
    assert load(Goal, dump(goal)) == goal


def test_goal_refuses_limits_that_nothing_meets() -> None:
    with pytest.raises(PlanError, match="memory_fraction = 0"):
        Goal(memory_fraction=0.0)
    with pytest.raises(PlanError, match="memory_bytes = 0 must be above 0"):
        Goal(memory_bytes=0)
