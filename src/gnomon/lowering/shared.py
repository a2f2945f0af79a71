"""Stages of one rank that hold the same parameters: a block called twice has one weight, one gradient and one update.

`shared_stages` finds them; `shared_buffers` makes their P and G one buffer each; the stage that stands for the others
is the only one that is reduced and updated. Left out: stages on one rank of which each has parameters of its own
besides shared ones (embedding and head in a V): they keep two buffers, and sizes count what they share once. Stages on
other ranks add up their gradients (`with_tied_all_reduce`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gnomon.graph import Graph, Layer
from gnomon.plans.stages import held_by_several
from gnomon.program import BufferRef

Shared = tuple[int, int]
"""(stage that stands for both, stage whose parameters it holds too)."""


def shared_stages(graph: Graph, stages: Sequence[Sequence[Layer]], pipeline_ranks: Sequence[int]) -> tuple[Shared, ...]:
    """Pairs of stages on one rank of which the first holds all parameters of the second; each second stage once.

    Of two stages that hold the same, the earlier one stands for both. stages: layers of each.
    """
    several = held_by_several(graph, stages)
    if not {
        holder for holders in several.values() for holder in holders if _holds_only(several, graph, stages[holder])
    }:
        return ()
    of_classes = [
        {
            layer.call.parameter_name(tensor.name, layer.index)
            for layer in layers
            for tensor in graph.block(layer.call.block).parameters
        }
        for layers in stages
    ]
    pairs = []
    for same, names in enumerate(of_classes):
        wider = [
            stage
            for stage, others in enumerate(of_classes)
            if pipeline_ranks[stage] == pipeline_ranks[same] and names and names <= others
        ]
        one = max(wider, key=lambda stage: (len(of_classes[stage]), -stage), default=same)
        if one != same:
            pairs.append((one, same))
    return tuple(sorted(pairs))


def _holds_only(several: Mapping[str, object], graph: Graph, layers: Sequence[Layer]) -> bool:
    """Whether all parameters of these layers are among `several`."""
    return all(
        layer.call.parameter_name(tensor.name, layer.index) in several
        for layer in layers
        for tensor in graph.block(layer.call.block).parameters
    )


def shared_buffers(pairs: Sequence[Shared]) -> tuple[tuple[BufferRef, BufferRef], ...]:
    """Aliases of P and G; the size is that of the stage that stands for the other."""
    return tuple((BufferRef(name, one), BufferRef(name, same)) for one, same in pairs for name in ("P", "G"))
