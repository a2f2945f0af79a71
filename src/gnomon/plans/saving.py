"""What a plan's `Saved` means for each layer of a graph: tensor by tensor keep, recompute or offload.

`savings` resolves preset and rules into a policy for the graph's `saved`, one for each layer; `layer_presets` says only
which preset a layer has. Presets are about repeated layers: an embedding or a head is kept unless a rule names it.
Leaves out bytes and the ops to run again, which follow from the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from gnomon.graph import Block, Graph, Kernels, Layer, lower
from gnomon.plans.parts import INPUT, Action, Preset, SavedRule
from gnomon.plans.plan import Plan
from gnomon.plans.select import select
from gnomon.plans.stages import stage_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSaving:
    """What happens to one layer's tensors between forward and backward."""

    policy: tuple[tuple[str, Action], ...]
    """(tensor of the lowered block, action) for each that is not simply kept; `dict` of it is the policy for
    `graph.saved`."""
    input: Action
    """What happens to what the layer reads from the one before: `recompute` only in a run of several layers under
    preset `full`, where it is recomputed from the first layer's input; `offload` where a rule names `input`."""
    whole: bool = False
    """Its whole forward is run again, as under preset `full` unless `Kernels.full_recompute` says otherwise, not the
    least that makes again what was not kept."""


def savings(plan: Plan, graph: Graph, kernels: Kernels) -> dict[str, LayerSaving]:
    """The saving of each layer, by label, when its blocks are lowered to `kernels`.

    PlanError if a rule names a layer that the graph has not. A rule whose patterns match nothing in a layer leaves it
    as it is.
    """
    blocks = {block.name: lower(block, kernels) for block in graph.blocks}
    known: dict[tuple[str, _Decided], LayerSaving] = {}
    by_label: dict[str, LayerSaving] = {}
    # in a run of layers each is the input of the next
    to_the_end = kernels.full_recompute == "whole" or plan.saved.every > 1
    for layer, decided in _decisions(plan, graph):
        # A hundred layers have a few different decisions; lowering and matching patterns is what costs.
        alike = layer.call.block, decided
        if alike not in known:
            # torch's selective checkpointing stops when it has made what backward misses; a plain checkpoint runs to
            # its end.
            least = bool(decided.rules) and kernels.ruled_recompute == "needed"
            original = graph.block(layer.call.block)
            known[alike] = _saving(decided, blocks[original.name], original, to_the_end=to_the_end and not least)
        by_label[layer.label] = known[alike]
    return by_label


def layer_presets(plan: Plan, graph: Graph) -> dict[str, Preset]:
    """Preset of each repeated layer, by label; rules over single tensors are left out."""
    return {layer.label: decided.preset for layer, decided in _decisions(plan, graph) if decided.applies}


def named_by_tensor(plan: Plan, graph: Graph) -> frozenset[str]:
    """Labels of layers in which rules name single tensors."""
    return frozenset(layer.label for layer, decided in _decisions(plan, graph) if decided.rules)


def in_runs(plan: Plan, graph: Graph) -> frozenset[str]:
    """Labels of layers that are recomputed from the input of the first of a run (`saved.every`), but for that one."""
    return frozenset(layer.label for layer, decided in _decisions(plan, graph) if decided.again)


class _Decided(NamedTuple):
    """What a plan says of one layer."""

    preset: Preset
    rules: tuple[SavedRule, ...]
    """Those that change the preset, in order."""
    applies: bool
    """Whether presets are about it: it is a repeated layer."""
    again: bool
    """Its input is recomputed."""


def _decisions(plan: Plan, graph: Graph) -> Iterator[tuple[Layer, _Decided]]:
    """Each layer, stage by stage, with what the plan says of it."""
    layers = graph.layers()
    # Presets leave embedding and head alone, as all programs do; a model without repeated layers has them everywhere.
    repeated = {layer.label for layer in layers if layer.call.first is not None} or {layer.label for layer in layers}
    chosen = [{layer.label for layer in select((rule.calls,), graph)} for rule in plan.saved.rules]
    for stage, part in enumerate(stage_layers(plan, graph)):
        seen = [0] * len(chosen)
        run = 0  # repeated layers since the stage began, or since one that rules make otherwise
        for layer in part:
            applies = layer.label in repeated
            preset, every, rules = plan.saved.preset, plan.saved.every, list[SavedRule]()
            for index, (rule, labels) in enumerate(zip(plan.saved.rules, chosen, strict=True)):
                # `seen` counts only layers that the rule is about: "the first four" are the first four of those.
                if layer.label not in labels or (rule.stages and stage not in rule.stages):
                    continue
                if rule.preset is not None and not applies:
                    continue
                seen[index] += 1
                if rule.first_per_stage is not None and seen[index] > rule.first_per_stage:
                    continue
                if rule.preset is None:
                    rules.append(rule)
                else:
                    # A later preset decides anew: what rules before it said of single tensors counts no more.
                    preset, every, rules = rule.preset, 1, []
            joins = preset == "full" and every > 1 and not rules
            yield layer, _Decided(preset, tuple(rules), applies, again=applies and joins and run % every > 0)
            # Layers that are no repeated ones neither count nor end a run.
            run = 0 if applies and not joins else run + applies


def _saving(decided: _Decided, block: Block, original: Block, *, to_the_end: bool) -> LayerSaving:
    """Returns what one layer saves. block: lowered; original: as the graph has it. to_the_end: what is recomputed in
    full runs its whole forward."""
    # Later rules overwrite what the preset and earlier ones said of a tensor.
    actions = _preset(decided.preset, original, block) if decided.applies else {}
    paths = {name: op.path for op in block.ops for name in op.outputs}
    for rule in decided.rules:
        for name in _inner(block):
            if any(fnmatchcase(name, pattern) or fnmatchcase(paths[name], pattern) for pattern in rule.tensors):
                actions[name] = rule.action
    # `keep` alone says nothing: without recomputation all is kept. Left out, equal layers compare as equal.
    explicit = decided.preset != "none" or "recompute" in actions.values()
    policy = tuple((name, action) for name, action in actions.items() if action != "keep" or explicit)
    whole = to_the_end and decided.preset == "full" and any(action == "recompute" for _, action in policy)
    away = any(rule.action == "offload" and INPUT in rule.tensors for rule in decided.rules)
    what: Action = "recompute" if decided.again else "offload" if away else "keep"
    return LayerSaving(policy=policy, input=what, whole=whole)


def _inner(block: Block) -> tuple[str, ...]:
    """Activations that the block makes."""
    return tuple(tensor.name for tensor in block.tensors if tensor.is_activation and tensor.name not in block.inputs)


def _preset(preset: Preset, original: Block, block: Block) -> dict[str, Action]:
    if preset == "full":
        return {name: "recompute" for name in _inner(block)}
    if preset == "none":
        return {}
    # By the graph's ops: where no kernel fuses attention, its lowered steps are named `path:…` (scores, softmax,
    # dropout).
    cores = [f"{op.path}:*" for op in original.ops if op.does == "attends"]
    return {name: "recompute" for name in _inner(block) if any(fnmatchcase(name, core) for core in cores)}
