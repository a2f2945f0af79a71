"""What a plan's `Saved` means for each layer of a graph: tensor by tensor keep, recompute or offload.

`savings` resolves preset and rules into a policy for the graph's `saved`, one for each layer. Presets are about
repeated layers: an embedding or a head is kept unless a rule names it. Leaves out bytes and the ops to run again,
which follow from the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gnomon.graph import Block, Graph, Kernels, Layer, lower
from gnomon.plans.parts import Action, Saved, SavedRule
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
    preset `full`, where it is made again from the first layer's input."""


def savings(plan: Plan, graph: Graph, kernels: Kernels) -> dict[str, LayerSaving]:
    """The saving of each layer, by label, when its blocks are lowered to `kernels`.

    PlanError if a rule names a layer that the graph has not. A rule whose patterns match nothing in a layer leaves it
    as it is.
    """
    blocks = {block.name: lower(block, kernels) for block in graph.blocks}
    layers = graph.layers()
    repeated = {layer.label for layer in layers if layer.call.first is not None} or {layer.label for layer in layers}
    chosen = [{layer.label for layer in select((rule.calls,), graph)} for rule in plan.saved.rules]
    found: dict[str, LayerSaving] = {}
    for part in stage_layers(plan, graph):
        seen = [0] * len(chosen)
        run = 0  # repeated layers since the stage began
        for layer in part:
            rules: list[SavedRule] = []
            for index, (rule, labels) in enumerate(zip(plan.saved.rules, chosen, strict=True)):
                if layer.label in labels:
                    seen[index] += 1
                    if rule.first_per_stage is None or seen[index] <= rule.first_per_stage:
                        rules.append(rule)
            applies = layer.label in repeated
            found[layer.label] = _saving(plan.saved, rules, blocks[layer.call.block], graph, layer, applies, run)
            run += applies
    return found


def _saving(
    saved: Saved, rules: Sequence[SavedRule], block: Block, graph: Graph, layer: Layer, applies: bool, run: int
) -> LayerSaving:
    actions = _preset(saved, graph.block(layer.call.block), block) if applies else {}
    paths = {name: op.path for op in block.ops for name in op.outputs}
    for rule in rules:
        for name in _inner(block):
            if any(fnmatchcase(name, pattern) or fnmatchcase(paths[name], pattern) for pattern in rule.tensors):
                actions[name] = rule.action
    again = applies and saved.preset == "full" and run % saved.every > 0
    policy = tuple((name, action) for name, action in actions.items() if action != "keep" or saved.preset != "none")
    return LayerSaving(policy=policy, input="recompute" if again else "keep")


def _inner(block: Block) -> tuple[str, ...]:
    """Activations that the block makes."""
    return tuple(
        tensor.name for tensor in block.tensors if tensor.kind == "activation" and tensor.name not in block.inputs
    )


def _preset(saved: Saved, original: Block, block: Block) -> dict[str, Action]:
    if saved.preset == "full":
        return {name: "recompute" for name in _inner(block)}
    if saved.preset == "none":
        return {}
    cores = [f"{op.path}:*" for op in original.ops if op.kind == "attention"]
    return {name: "recompute" for name in _inner(block) if any(fnmatchcase(name, core) for core in cores)}


def as_policy(saving: LayerSaving) -> Mapping[str, Action]:
    """The policy that `gnomon.graph.saved` takes."""
    return dict(saving.policy)
