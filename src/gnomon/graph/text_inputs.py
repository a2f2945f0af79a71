"""Which inputs of a graph are a text's token ids and labels: followed back from the ops that read them.

`labels_of(graph)` is what the cross-entropy of its loss compares with, `ids_of(graph)` what its first lookup reads.
Only views may lie between: labels that the model computes are not counted from outside. Leaves out batches.
"""

from __future__ import annotations

from gnomon.errors import GraphError
from gnomon.graph.graph import Graph
from gnomon.graph.types import Layer
from gnomon.ops.op import Op


def labels_of(graph: Graph) -> str:
    """Name of the input with the labels. GraphError for a graph that returns no mean cross-entropy of one."""
    call, loss = graph.source(graph.outputs[0])
    block = None if call is None else graph.block(call.block)
    producer = None if block is None else next((op for op in block.ops if loss.name in op.outputs), None)
    if call is None or producer is None or producer.does != "compares labels":
        raise GraphError(
            f"{graph.name} returns no loss that is a mean cross-entropy: let its forward return "
            f"torch.nn.functional.cross_entropy(logits, labels), alone or among others"
        )
    name = _source(graph, Layer(call=call, index=call.repeat - 1), producer.inputs[1])
    if name is None:
        raise GraphError(
            f"{graph.name} computes the labels of its loss from its inputs; give it the labels as an input that "
            f"cross_entropy reads as it is (shift them outside of the forward)"
        )
    return name


def ids_of(graph: Graph) -> str:
    """Name of the input with the token ids: the first that an embedding looks up. GraphError for none."""
    for layer in graph.layers():
        for op in graph.block(layer.call.block).ops:
            name = _source(graph, layer, op.inputs[0]) if op.does == "looks up" else None
            if name is not None:
                return name
    raise GraphError(f"{graph.name} looks up none of its inputs in an embedding, so there is none for token ids")


def _source(graph: Graph, layer: Layer, name: str) -> str | None:
    """The graph's input that a tensor of a layer is, through views; None where something computes it."""
    block = graph.block(layer.call.block)
    while name not in block.inputs:
        op = next((op for op in block.ops if name in op.outputs), None)
        if op is None or not _is_view(op):
            return None
        name = op.inputs[0]
    before = dict((own, out) for out, own in layer.call.chain)
    if layer.index and name in before:
        return _source(graph, Layer(call=layer.call, index=layer.index - 1), before[name])
    source = dict(layer.call.inputs)[name]
    call, tensor = graph.source(source)
    return source if call is None else _source(graph, Layer(call=call, index=call.repeat - 1), tensor.name)


def _is_view(op: Op) -> bool:
    return op.rules.memory == "view"
