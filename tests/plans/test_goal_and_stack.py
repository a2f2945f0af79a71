"""Goal and Stack as values: limits are positive, every fact about a stack has a source, both survive text.

Records of real stacks are tested where they are kept.
"""

from __future__ import annotations

import pytest

from gnomon.errors import PlanError
from gnomon.plans import Fact, Goal, Stack
from gnomon.schema import dump, load


def test_goal_survives_text() -> None:
    goal = Goal(memory_fraction=0.8, memory_bytes=70 * 2**30)
    assert load(Goal, dump(goal)) == goal


def test_goal_refuses_limits_that_nothing_meets() -> None:
    with pytest.raises(PlanError, match="memory_fraction = 0"):
        Goal(memory_fraction=0.0)
    with pytest.raises(PlanError, match="memory_bytes = 0 must be above 0"):
        Goal(memory_bytes=0)


def test_a_stack_needs_a_source_for_every_field() -> None:
    fact = Fact(field="attention", source="example.org, engine.py:10", date="2026-11-21")
    stack = Stack(name="example", version="1.0", attention="flash", facts=(fact,))
    assert load(Stack, dump(stack)) == stack
    with pytest.raises(PlanError, match="sets causal_skip without a source"):
        Stack(name="example", version="1.0", attention="flash", causal_skip=False, facts=(fact,))
    with pytest.raises(PlanError, match=r"fact on 'atention'.*did you mean 'attention'"):
        Stack(name="example", version="1.0", facts=(Fact(field="atention", source="x", date="2026"),))
    with pytest.raises(PlanError, match="needs a source and a date"):
        Fact(field="attention", source="", date="2026-11-21")
