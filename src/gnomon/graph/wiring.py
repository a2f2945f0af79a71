"""Where a layer's tensors come from, and names of those that it makes: `reads(layer)`, `writes(graph, layer)`."""

from __future__ import annotations

from gnomon.graph.graph import Graph
from gnomon.graph.types import Layer


def reads(layer: Layer) -> dict[str, str]:
    """Input of the layer's block -> where it comes from: a graph input, or `call.tensor`."""
    bound = dict(layer.call.inputs)
    if layer.index:
        before = f"{layer.call.name}#{layer.index - 1}"
        bound |= {own: f"{before}.{out}" for out, own in layer.call.chain}
    return bound


def writes(graph: Graph, layer: Layer) -> dict[str, str]:
    """Output of the layer's block -> its name: that of the call for the last repeat, as later calls read it."""
    name = layer.call.name if layer.index == layer.call.repeat - 1 else f"{layer.call.name}#{layer.index}"
    return {out: f"{name}.{out}" for out in graph.block(layer.call.block).outputs}
