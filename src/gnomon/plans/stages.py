"""Which layers each stage computes, and what one stage sends another.

`resolve` writes a plan's stages out for a graph, `stage_layers` lists their layers, `shared_parameters` what several
of them hold, `transfers` the tensors that one stage sends another: residuals down the pipeline, an encoder's output
to every decoder stage, the skips of a U-Net, directly or through the stages between. Leaves out sizes and how a
tensor lies on the ranks (`sharding`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from gnomon.errors import PlanError
from gnomon.graph import Graph, Layer
from gnomon.plans.mesh import Mesh
from gnomon.plans.parts import Stage
from gnomon.plans.plan import Plan
from gnomon.plans.select import format_layers, format_ranks, select


def resolve(plan: Plan, graph: Graph) -> Plan:
    """The same plan with every stage written out: calls, mesh and ranks.

    Indexed layers are divided as equally as possible, or as `schedule.layers_per_stage` says; a layer without an
    index (embedding, final norm, head) goes with the one before it, or with the first. A graph without indexed layers
    is divided layer by layer. A plan that has stages only gets their ranks. PlanError when there are too few layers,
    or other numbers than listed.
    """
    ranks = tuple(format_ranks(r) for r in plan.stage_ranks)
    if plan.stages:
        return replace(plan, stages=tuple(replace(s, devices=r) for s, r in zip(plan.stages, ranks, strict=True)))
    mesh = replace(plan.mesh, pp=1)
    parts = _uniform_parts(plan, graph)
    stages = tuple(Stage(calls=format_layers(p), mesh=mesh, devices=r) for p, r in zip(parts, ranks, strict=True))
    return replace(plan, mesh=Mesh(), stages=stages, schedule=replace(plan.schedule, layers_per_stage=()))


def stage_layers(plan: Plan, graph: Graph) -> tuple[tuple[Layer, ...], ...]:
    """Layers of each stage, in graph order. PlanError if a selector matches nothing; coverage is for `check`."""
    if not plan.stages:
        return _uniform_parts(plan, graph)
    return tuple(select(stage.calls, graph) for stage in plan.stages)


def layers_per_stage(plan: Plan, num_layers: int) -> tuple[int, ...]:
    """Indexed layers of each stage of a uniform plan. PlanError if they cannot be divided so."""
    stages = plan.num_stages
    if listed := plan.schedule.layers_per_stage:
        if sum(listed) != num_layers:
            raise PlanError(
                f"schedule layers_per_stage {listed} adds up to {sum(listed)} layers, but the graph has {num_layers}"
            )
        return listed
    if num_layers < stages:
        raise PlanError(
            f"{stages} stages (pp = {plan.mesh.pp} x virtual_stages = {plan.schedule.virtual_stages}) need "
            f"as many layers, "
            f"but the graph has {num_layers}; lower pp or virtual_stages to a product of at most {num_layers}"
        )
    # The first stages take what is left over.
    per_stage, remainder = divmod(num_layers, stages)
    return tuple(per_stage + (stage < remainder) for stage in range(stages))


def _uniform_parts(plan: Plan, graph: Graph) -> tuple[tuple[Layer, ...], ...]:
    layers = graph.layers()
    counted = [i for i, layer in enumerate(layers) if layer.call.first is not None] or list(range(len(layers)))
    counts = layers_per_stage(plan, len(counted))
    # A stage begins at its first counted layer. A stage of none holds nothing, except the first (what comes before) and
    # the last (what follows all of them), so that an embedding or a head can have a stage of its own.
    firsts = (0, *accumulate(counts[:-1]))
    starts = [counted[first] if first < len(counted) else counted[-1] + 1 for first in firsts]
    starts[0] = 0
    parts = tuple(tuple(layers[a:b]) for a, b in zip(starts, [*starts[1:], len(layers)], strict=True))
    if empty := [stage for stage, part in enumerate(parts) if not part]:
        raise PlanError(
            f"stage {empty[0]} of {len(parts)} gets no layer from layers_per_stage {counts}; give it at least one"
        )
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Tensors that one stage sends another in forward; their gradients return in backward."""

    source: int
    """Stage that sends."""
    target: int
    """Stage that receives."""
    tensors: tuple[tuple[str, str], ...]
    """(layer, tensor): label of the layer that made it, name of the tensor in its block; in order of need. Some may
    only pass through the target on their way."""


def transfers(plan: Plan, graph: Graph) -> tuple[Transfer, ...]:
    """Tensors that one stage sends another, by source and target. Each is sent over a hop once, whoever reads it.

    A stage without `inputs` gets each tensor from the stage that made it. With `inputs`, a tensor comes from the
    maker if that is listed, otherwise through the listed stages, by the fewest hops. PlanError when no listed stage
    leads to the maker.
    """
    stage_of = {layer.label: s for s, layers in enumerate(stage_layers(plan, graph)) for layer in layers}
    hops: dict[tuple[int, int], dict[tuple[str, str], None]] = {}
    for reader, made_by, tensor in dependencies(graph):
        source, target = stage_of[made_by], stage_of[reader]
        if source == target:
            continue
        route = _route(plan, source, target, f"{made_by}'s {tensor}, which {reader} reads")
        for pair in zip(route, route[1:], strict=False):
            hops.setdefault(pair, {})[made_by, tensor] = None
    return tuple(Transfer(source=a, target=b, tensors=tuple(sent)) for (a, b), sent in sorted(hops.items()))


def dependencies(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """(reading layer, making layer, tensor) by labels, for every tensor that passes between layers; graph inputs are
    left out."""
    last: Mapping[str, str] = {call.name: call.label(call.repeat - 1) for call in graph.calls}
    for layer in graph.layers():
        call = layer.call
        # A repeat after the first reads what the repeat before it made; whoever reads the call from outside gets the
        # last one's.
        chained = {own: out for out, own in call.chain} if layer.index else {}
        for own, source in call.inputs:
            if own in chained:
                yield layer.label, call.label(layer.index - 1), chained[own]
            elif "." in source:
                name, _, tensor = source.partition(".")
                yield layer.label, last[name], tensor


def shared_parameters(plan: Plan, graph: Graph) -> dict[str, tuple[int, ...]]:
    """Stages of each parameter that more than one stage holds, by full name: a tied embedding, a block called twice.

    Their gradients are added up over those stages before the update.
    """
    return held_by_several(graph, stage_layers(plan, graph))


def held_by_several(graph: Graph, stages: Sequence[Sequence[Layer]]) -> dict[str, tuple[int, ...]]:
    """The same for lists of layers."""
    labels = Counter(layer.label for layers in stages for layer in layers)
    shared = _sharing(graph)
    holders: dict[str, dict[int, None]] = {}
    for stage, layers in enumerate(stages):
        for layer in layers:
            # Few layers share anything; the names of all others need not be made.
            if layer.label in shared or labels[layer.label] > 1:
                for name in _names(graph, layer):
                    holders.setdefault(name, {})[stage] = None
    return {name: tuple(holding) for name, holding in holders.items() if len(holding) > 1}


@lru_cache(maxsize=64)
def _sharing(graph: Graph) -> frozenset[str]:
    """Labels of layers that hold a parameter which another holds too: few, and the same in every plan."""
    holders: dict[str, list[str]] = {}
    for layer in graph.layers():
        for name in _names(graph, layer):
            holders.setdefault(name, []).append(layer.label)
    return frozenset(label for labels in holders.values() if len(labels) > 1 for label in labels)


def _names(graph: Graph, layer: Layer) -> list[str]:
    parameters = graph.block(layer.call.block).parameters
    return [layer.call.parameter_name(tensor.name, layer.index) for tensor in parameters]


def _route(plan: Plan, source: int, target: int, what: str) -> tuple[int, ...]:
    """Stages from source to target along declared inputs, fewest hops first."""
    if source > target:
        raise PlanError(
            f"stage {target} comes before stage {source}, but needs {what}; order the stages as the graph runs"
        )
    frontier: list[tuple[int, ...]] = [(target,)]
    seen = {target}
    while frontier:
        route = frontier.pop(0)
        inputs = plan.stages[route[0]].inputs if plan.stages else None
        sources = (source,) if inputs is None else inputs
        if source in sources:
            return (source, *route)
        # Breadth first, each stage once, nearest stages first. None before the source can lead to it: tensors only go
        # forward.
        frontier.extend((s, *route) for s in sorted(sources, reverse=True) if s not in seen and s > source)
        seen.update(sources)
    listed = plan.stages[target].inputs
    raise PlanError(
        f"stage {target} has inputs {listed}, none of which leads to stage {source} for {what}; add {source}"
    )
