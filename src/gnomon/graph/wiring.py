"""Where the tensors that a layer reads come from, and what those that it makes are called.

`reads(layer)` and `writes(graph, layer)` map names of its block to names in the graph: of a graph input, of
`call.tensor`, and within a run of repeats of `call#2.tensor`. Leaves out what crosses stages of a plan.
"""

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
