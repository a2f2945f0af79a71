"""Stack as a value: every field that is set has a source, and it survives text. Real records are in `test_stacks`."""

from __future__ import annotations

import pytest

from gnomon.errors import PlanError
from gnomon.schema import dump, load
from gnomon.software import Fact, Stack


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
