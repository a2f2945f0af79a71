"""Layers of experts taken apart at their exchanges: the same parameters, the same stages, and what cannot be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gnomon.errors import PlanError
from gnomon.graph import UNFUSED
from gnomon.models.presets import model
from gnomon.plans import (
    Experts,
    Fp8,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    Saved,
    SavedRule,
    Schedule,
    check,
    stage_layers,
)
from gnomon.plans.expert_rows import EXCHANGES, has_rows, part_of, taken_apart, whole_layer
from gnomon.plans.saving import layer_presets, savings

ROWS = Overlap(experts=True)
PLAN = Plan(mesh=Mesh(pp=4, dp_shard=8, ep=8), schedule=Schedule(num_microbatches=8), overlap=ROWS)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"])
def test_parts_have_the_parameters_and_the_ops_of_the_whole(name: str) -> None:
    graph = model(name)
    apart = taken_apart(PLAN, graph)
    assert apart.graph.parameters() == graph.parameters()
    for block in graph.blocks:
        mine = [part for part in apart.graph.blocks if block in (part, part.part_of)]
        assert sorted(op.path for part in mine for op in part.ops) == sorted(op.path for op in block.ops)
    exchanges = [block for block in apart.graph.blocks if block.part_of and block.name.endswith(EXCHANGES)]
    assert exchanges and not any(block.parameters for block in exchanges)


@pytest.mark.parametrize(
    "schedule", [Schedule(num_microbatches=8), Schedule(num_microbatches=8, layers_per_stage=(5, 9, 9, 9))]
)
def test_stages_have_the_same_layers(schedule: Schedule) -> None:
    graph, plan = model("mixtral-8x7b"), replace(PLAN, schedule=schedule)
    apart = taken_apart(plan, graph)
    for before, after in zip(stage_layers(plan, graph), stage_layers(apart.plan, apart.graph), strict=True):
        labels = dict.fromkeys(whole_layer(apart.graph, layer).label for layer in after)
        assert list(labels) == [layer.label for layer in before]


def test_rules_and_narrow_layers_are_those_of_their_parts() -> None:
    graph = model("mixtral-8x7b")
    plan = replace(
        PLAN,
        saved=Saved(rules=(SavedRule(calls="layers[0:2]", preset="full"),)),
        precision=Precision(fp8=Fp8(recipe="delayed", calls=("layers[3]",))),
    )
    apart = taken_apart(plan, graph)
    full = {label for label, preset in layer_presets(apart.plan, apart.graph).items() if preset == "full"}
    assert {whole_layer(apart.graph, layer).label for layer in apart.graph.layers() if layer.label in full} == {
        "layers[0]",
        "layers[1]",
    }
    made = savings(apart.plan, apart.graph, UNFUSED)
    for layer in apart.graph.layers():
        if part_of(apart.graph, layer) in EXCHANGES:  # what came over the network is kept, and not asked for again
            assert all(action == "keep" for _, action in made[layer.label].policy), layer.label
    assert apart.plan.precision.fp8 is not None
    assert apart.plan.precision.fp8.calls == (
        "layers.route[3:4]",
        "layers.dispatch[3:4]",
        "layers.experts[3:4]",
        "layers.combine[3:4]",
    )


def test_what_is_apart_is_not_taken_apart_again() -> None:
    apart = taken_apart(PLAN, model("mixtral-8x7b"))
    assert taken_apart(apart.plan, apart.graph).graph is apart.graph


def test_without_ranks_of_experts_there_are_no_exchanges() -> None:
    assert has_rows(PLAN) and not has_rows(replace(PLAN, mesh=Mesh(pp=4, dp_shard=8)))


@pytest.mark.parametrize(
    "said, changed",
    [
        ("overlap.buckets", {"overlap": Overlap(experts=True, buckets=(34,))}),
        ("overlap.fused", {"overlap": Overlap(experts=True, fused=(34,))}),
        ("saved.every above 1", {"saved": Saved(preset="full", every=2)}),
        ("first_per_stage", {"saved": Saved(rules=(SavedRule(preset="full", first_per_stage=1),))}),
        ("optimizer.offload", {"optimizer": Optimizer(offload=Offload())}),
        ("experts.replicas", {"experts": Experts(replicas=8)}),
    ],
)
def test_fields_that_need_layers_whole_are_refused(said: str, changed: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="overlap.experts takes layers of experts apart") as error:
        taken_apart(replace(PLAN, **changed), model("mixtral-8x7b"))
    assert said in str(error.value)


def test_a_model_without_exchanges_is_refused() -> None:
    with pytest.raises(PlanError, match="no layer of llama-3.1-8b sends tokens to experts"):
        taken_apart(PLAN, model("llama-3.1-8b"))


def test_exchanges_that_are_none_are_noted() -> None:
    plan = replace(PLAN, mesh=Mesh(dp_shard=8), schedule=Schedule(num_microbatches=1))
    assert [note.name for note in check(plan, model("mixtral-8x7b"))] == ["no_effect"]
    assert check(replace(plan, overlap=Overlap()), model("mixtral-8x7b")) == ()
