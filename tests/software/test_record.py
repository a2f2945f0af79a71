"""Stack as a value: every field that is set has a source, and it survives text. Real records are in `test_stacks`."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from gnomon.errors import PlanError
from gnomon.schema import dump, load
from gnomon.software import GROUPS, Fact, Stack, with_facts


def test_a_stack_needs_a_source_for_every_field() -> None:
    fact = Fact(field="attention", source="example.org, engine.py:10", date="2026-11-21")
    stack = Stack(name="example", version="1.0").changed((fact,), attention="flash")
    assert load(Stack, dump(stack)) == stack
    with pytest.raises(PlanError, match="sets recompute_stops without a source"):
        Stack(name="example", version="1.0").changed((fact,), attention="flash", recompute_stops=False)
    with pytest.raises(PlanError, match=r"fact on 'atention'.*did you mean 'attention'"):
        Stack(name="example", version="1.0", facts=(Fact(field="atention", source="x", date="2026"),))
    with pytest.raises(PlanError, match="needs a source and a date"):
        Fact(field="attention", source="", date="2026-11-21")


def test_every_field_drives_something() -> None:
    """Each is read by a price, by memory or by the search, and not only written by a reader of files."""
    package = Path(__file__).parents[2] / "src/gnomon"
    rooms = ("prices", "prediction", "search", "lowering")
    trees = [ast.parse(path.read_text("utf-8")) for room in rooms for path in (package / room).rglob("*.py")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert [name for name in GROUPS if name not in read and name not in used] == []


def test_a_name_of_a_field_is_in_one_group() -> None:
    stack = Stack(name="example", version="1.0")
    groups = {group for group in GROUPS.values() if group}
    assert sum(len(fields(getattr(stack, group))) for group in groups) + 1 == len(GROUPS)
    changed = with_facts(stack, "engine.py", "2026-11-25", attention="flash", nearest=True, zero=(0, 1), norm=None)
    assert (changed.layers.attention, changed.nearest, changed.runs.zero) == ("flash", True, (0, 1))
    assert changed.settings() == {"attention": "flash", "nearest": True, "zero": (0, 1)}
    assert [fact.field for fact in changed.facts] == ["attention", "nearest", "zero"]
