"""Presets and rules of `saved`, layer by layer, and what they make of a GPT layer's activations.

The oracle is Korthikanti et al. 2022: s·b·h·(34 + 5·a·s/h) bytes kept by a layer with dropout and unfused attention,
34·s·b·h with selective recomputation, 2·s·b·h (the input) with full.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.errors import PlanError
from gnomon.graph import BF16, FUSED, UNFUSED, Graph, backward, nbytes, saved
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Plan, Saved, SavedRule, Schedule, check, layer_presets, savings

S, B, H, A = 64, 2, 128, 4
GPT = gpt(
    GptConfig(
        name="small",
        num_layers=8,
        hidden_size=H,
        num_heads=A,
        vocab_size=512,
        max_positions=S,
        dropout=0.1,
        attention_dropout=0.1,
        activation="gelu",
    )
)


def kept_bytes(a_plan: Plan, label: str, graph: Graph = GPT) -> int:
    saving = savings(a_plan, graph, UNFUSED)[label]
    back = backward(graph.block("layers"), UNFUSED, BF16)
    kept = saved(back, dict(saving.policy), BF16).on_device
    # Norm statistics (two fp32 numbers a row) are not in the paper's count.
    count = sum(
        int(nbytes(k.tensor, {"batch": B, "seq": S}, BF16)) for k in kept if k.tensor.name[-4:] not in ("mean", "rstd")
    )
    return count


def plan(saved_: Saved, pp: int = 1) -> Plan:
    return Plan(mesh=Mesh(pp=pp), saved=saved_)


def test_presets_against_korthikanti() -> None:
    sbh = S * B * H
    assert kept_bytes(plan(Saved()), "layers[3]") == sbh * 34 + 5 * A * S * S * B
    assert kept_bytes(plan(Saved(preset="selective")), "layers[3]") == 34 * sbh
    assert kept_bytes(plan(Saved(preset="full")), "layers[3]") == 2 * sbh


def test_presets_are_about_repeated_layers() -> None:
    result = savings(plan(Saved(preset="full")), GPT, FUSED)
    assert result["embed"].policy == () and result["head"].policy == ()
    assert {action for _, action in result["layers[0]"].policy} == {"recompute"}


def test_runs_of_layers_keep_one_input() -> None:
    result = savings(plan(Saved(preset="full", every=3), pp=2), GPT, FUSED)
    # Two stages of four layers; a run begins with each stage.
    inputs = [result[f"layers[{i}]"].input for i in range(8)]
    assert inputs == ["keep", "recompute", "recompute", "keep"] * 2


def test_the_last_rule_that_matches_decides() -> None:
    rules = (
        SavedRule(calls="layers[0:4]", tensors=("mlp.*",), action="recompute"),
        SavedRule(calls="layers[1]", tensors=("mlp.c_fc",), action="offload"),
        SavedRule(calls="layers[2]", tensors=("mlp.*",), action="keep"),
    )
    result = savings(plan(Saved(rules=rules)), GPT, FUSED)
    assert dict(result["layers[0]"].policy)["mlp.c_fc"] == "recompute"
    assert dict(result["layers[1]"].policy)["mlp.c_fc"] == "offload"
    assert dict(result["layers[1]"].policy)["mlp.c_proj"] == "recompute"
    assert result["layers[2]"].policy == ()
    assert result["layers[4]"].policy == ()


def test_a_rule_for_the_first_layers_of_each_stage() -> None:
    rule = SavedRule(calls="layers", action="recompute", first_per_stage=1)
    result = savings(plan(Saved(rules=(rule,)), pp=2), GPT, FUSED)
    assert [bool(result[f"layers[{i}]"].policy) for i in range(8)] == [True, False, False, False] * 2


def test_an_exception_from_full() -> None:
    exception = SavedRule(calls="layers[7]", action="keep")
    a_plan = plan(Saved(preset="full", rules=(exception,)))
    assert kept_bytes(a_plan, "layers[7]") == kept_bytes(plan(Saved()), "layers[7]")
    assert kept_bytes(a_plan, "layers[6]") == 2 * S * B * H


def test_unknown_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="matches no layer"):
        savings(plan(Saved(rules=(SavedRule(calls="blocks"),))), GPT, FUSED)


def test_a_stage_has_a_preset_of_its_own() -> None:
    """Stage 0 of three and five layers: two recomputed whole, one at its attention; stage 1 keeps all."""
    rules = (SavedRule(stages=(0,), preset="selective"), SavedRule(stages=(0,), first_per_stage=2, preset="full"))
    a_plan = Plan(mesh=Mesh(pp=2), schedule=Schedule(layers_per_stage=(3, 5)), saved=Saved(rules=rules))
    result = layer_presets(a_plan, GPT)
    assert [result[f"layers[{i}]"] for i in range(8)] == ["full", "full", "selective", *["none"] * 5]
    assert "embed" not in result and "head" not in result
    made = savings(a_plan, GPT, UNFUSED)
    assert [made[f"layers[{i}]"].whole for i in range(4)] == [True, True, False, False]
    assert kept_bytes(a_plan, "layers[0]") == kept_bytes(plan(Saved(preset="full")), "layers[0]")
    assert kept_bytes(a_plan, "layers[2]") == kept_bytes(plan(Saved(preset="selective")), "layers[2]")
    assert kept_bytes(a_plan, "layers[3]") == kept_bytes(plan(Saved()), "layers[3]")


def test_a_rule_on_tensors_changes_the_preset_before_it() -> None:
    rules = (SavedRule(calls="layers", preset="full"), SavedRule(calls="layers[1]", tensors=("mlp.*",)))
    result = savings(plan(Saved(rules=rules)), GPT, FUSED)
    assert result["layers[0]"] == savings(plan(Saved(preset="full")), GPT, FUSED)["layers[0]"]
    assert dict(result["layers[1]"].policy)["mlp.c_fc"] == "keep"


def test_what_keeps_everything_runs_nothing_again() -> None:
    result = savings(plan(Saved(preset="full", rules=(SavedRule(calls="layers[7]"),))), GPT, FUSED)
    assert result["layers[6]"].whole and not result["layers[7]"].whole


def test_rules_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(PlanError, match="give one of both"):
        SavedRule(preset="full", action="recompute")
    with pytest.raises(PlanError, match="list each once"):
        SavedRule(stages=(1, 1))
    with pytest.raises(PlanError, match="is for stage 2"):
        check(plan(Saved(rules=(SavedRule(stages=(2,), preset="full"),)), pp=2), GPT)


def test_a_checkpoint_that_stops_early_leaves_out_the_last_product() -> None:
    """torch's checkpoints without reentry stop at what the backward reads last; Megatron-LM runs a layer to its end. In
    runs of several layers every output is the next one's input."""
    graph = gpt(GptConfig(name="g", num_layers=2, hidden_size=64, num_heads=4, vocab_size=128, max_positions=32))
    early = replace(FUSED, full_recompute="needed")
    plan = Plan(saved=Saved(preset="full"))
    label = "layers[0]"
    assert savings(plan, graph, FUSED)[label].whole and not savings(plan, graph, early)[label].whole
    assert savings(Plan(saved=Saved(preset="full", every=2)), graph, early)[label].whole
