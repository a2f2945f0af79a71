"""Stack as a value: every field that is set has a source, and it survives text. Real records are in `test_stacks`."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from gnomon.errors import PlanError
from gnomon.plans import Layout, Mesh, Offload, Optimizer, Plan, Saved, Schedule, Workload
from gnomon.prediction import predict
from gnomon.schema import dump, load
from gnomon.software import GROUPS, Fact, Stack, able, proposes, stack, stacks, unsupported, with_facts


def test_a_stack_needs_a_source_for_every_field() -> None:
    fact = Fact(field="attention", source="example.org, engine.py:10", date="2026-11-21")
    stack = Stack(name="example", version="1.0").with_values((fact,), attention="flash")
    assert load(Stack, dump(stack)) == stack
    with pytest.raises(PlanError, match="sets recompute_stops without a source"):
        Stack(name="example", version="1.0").with_values((fact,), attention="flash", recompute_stops=False)
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


def test_what_a_record_does_not_list_is_named() -> None:
    zero, vpp = Optimizer(zero=3), Schedule(name="interleaved_one_f_one_b", virtual_stages=2, micro_batch_size=1)
    wide = Plan(mesh=Mesh(dp_shard=4), optimizer=zero, schedule=Schedule(micro_batch_size=1))
    assert unsupported(stack("megatron-lm"), wide) == ("ZeRO 3 (it has 0, 1)",)
    assert unsupported(stack("torchtitan"), wide) == unsupported(stack("megatron-lm"), Plan()) == ()
    assert unsupported(Stack(name="unknown", version=""), wide) == ()
    split = Plan(mesh=Mesh(pp=4), schedule=Schedule(name="zero_bubble_h1"))
    assert unsupported(stack("megatron-lm"), split) == (
        "schedule zero_bubble_h1 (it has one_f_one_b, interleaved_one_f_one_b)",
    )
    looped, gathered = Plan(mesh=Mesh(pp=2), schedule=vpp), Plan(mesh=Mesh(cp=2), layout=Layout(context="all_gather"))
    assert any("interleaved" in entry for entry in unsupported(stack("deepspeed"), looped))
    assert unsupported(stack("nanotron"), gathered) == ("context parallelism by all_gather (it has ring)",)
    with_note = predict(
        "llama-tiny", "1x4xh100-sxm", wide, Workload(global_batch_size=4, seq_len=256), stack("megatron")
    )
    assert "stack 'megatron-lm' does not run ZeRO 3 (it has 0, 1), by its record" in with_note.assumptions


@pytest.mark.parametrize("name", [name for name in stacks() if name != "gnomon"])
def test_a_plan_of_a_programs_own_file_is_within_its_record(name: str) -> None:
    """Whatever a file of the program says, the program runs: a Megatron-LM script with its FSDP has ZeRO 3."""
    for plan in (
        Plan(mesh=Mesh(dp_shard=2, tp=2, cp=2), optimizer=Optimizer(zero=3), saved=Saved(preset="selective")),
        Plan(
            mesh=Mesh(pp=2, dp_shard=2, dp_replicate=2),
            optimizer=Optimizer(zero=2, offload=Offload(), clip=False),
            schedule=Schedule(name="v_half", virtual_stages=2, placement="v"),
            layout=Layout(sequence_parallel=False),
        ),
    ):
        record = stack(name)
        assert unsupported(able(record, plan, "its own file"), plan) == ()
        assert proposes(record, plan, plan) and (not unsupported(record, plan) or not proposes(record, Plan(), plan))


def test_a_name_of_a_field_is_in_one_group() -> None:
    stack = Stack(name="example", version="1.0")
    groups = {group for group in GROUPS.values() if group}
    assert sum(len(fields(getattr(stack, group))) for group in groups) + 1 == len(GROUPS)
    changed = with_facts(stack, "engine.py", "2026-11-25", attention="flash", nearest=True, zero=(0, 1), norm=None)
    assert (changed.layers.attention, changed.nearest, changed.runs.zero) == ("flash", True, (0, 1))
    assert changed.settings() == {"attention": "flash", "nearest": True, "zero": (0, 1)}
    assert [fact.field for fact in changed.facts] == ["attention", "nearest", "zero"]
