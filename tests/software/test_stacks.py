"""The stacks on record: each is readable, sourced field by field, and found by the names that people use."""

from __future__ import annotations

import re

import pytest

from gnomon import orders
from gnomon.errors import CatalogueError
from gnomon.plans import Overlap
from gnomon.software import ALIASES, stack, stacks

REQUIRED = {
    "megatron-lm",
    "megatron-deepspeed",
    "megatron-bridge",
    "llm-foundry",
    "torchtitan",
    "nanotron",
    "internevo",
    "deepspeed",
    "pytorch-fsdp",
    "gnomon",
    "vtrain",
}


def test_all_are_on_record() -> None:
    assert set(stacks()) == REQUIRED
    assert set(ALIASES.values()) <= REQUIRED and not set(ALIASES) & REQUIRED


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_every_fact_names_a_place_and_a_day(name: str) -> None:
    record = stack(name)
    assert record.name == name and record.version and record.facts
    for fact in record.facts:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", fact.date)
        assert re.match(r"[\w.-]+/[\w.-]+ (\w|v\d)|Gnomon (docs|src|evidence)/", fact.source), fact.source
    assert set(record.runs.schedules) <= set(orders.names())
    assert set(record.runs.overlaps) <= {field for field in Overlap.__dataclass_fields__}


def test_what_tells_the_programs_apart() -> None:
    assert (
        stack("megatron-lm").gradients.grad_accumulation_fused
        and not stack("torchtitan").gradients.grad_accumulation_fused
    )
    assert (
        stack("megatron-lm").loss.cross_entropy == "in_place" and stack("megatron-bridge").loss.cross_entropy == "fused"
    )
    assert (
        "zero_bubble_v" in stack("torchtitan").runs.schedules
        and "zero_bubble_v" not in stack("nanotron").runs.schedules
    )
    assert stack("deepspeed").layers.attention is None  # the model's own code decides


def test_names() -> None:
    assert stack("nemo") is stack("megatron-bridge") and stack("fsdp1") is stack("llm-foundry")
    with pytest.raises(CatalogueError, match="did you mean 'megatron-lm'"):
        stack("megatron-llm")
    for hostile in ("../plan", "", "megatron-lm.toml", "__init__"):
        with pytest.raises(CatalogueError, match="known: "):
            stack(hostile)
