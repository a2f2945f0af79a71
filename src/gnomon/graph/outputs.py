"""What of a graph's outputs is trained on, and graphs that return what lies before it.

`losses(graph)` are the outputs that are added up, `without_loss(graph)` gives logits, for generation and comparison:
its blocks are the same but for their cross-entropy, so weights are those of the graph itself. Leaves out logits of
models whose loss is no cross-entropy, and of predictions of further tokens.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.errors import GraphError
from gnomon.graph.graph import Graph
from gnomon.graph.types import Block, Call


def losses(graph: Graph) -> tuple[str, ...]:
    """Outputs whose sum is trained on: all cross-entropies where one is weighted among others (multi-token
    prediction) or experts are balanced, otherwise the first that the last layer makes."""
    calls = {call.name: graph.block(call.block) for call in graph.calls}
    weighted = {name for name, block in calls.items() if _is_weighted(block) or block.does("balances")}
    if weighted:
        loss_calls = {name for name, block in calls.items() if block.does("compares labels")}
        return tuple(name for name in graph.outputs if name.partition(".")[0] in loss_calls)
    last = graph.layers()[-1].call.name
    return tuple(name for name in graph.outputs if name.partition(".")[0] == last)[:1]


def _is_weighted(block: Block) -> bool:
    return any(op.does == "compares labels" and op.attr("loss_weight", 0.0) for op in block.ops)


def without_loss(graph: Graph) -> Graph:
    """The graph whose outputs are logits in place of losses, and that wants no labels. GraphError for one without a
    cross-entropy."""
    cut = {block.name: _cut(block) for block in graph.blocks if not _is_weighted(block)}
    remaining = {name: block for name, block in cut.items() if block is not None}
    if not remaining:
        raise GraphError(f"{graph.name} has no cross-entropy, so there are no logits before one")
    calls = tuple(
        _call(call, remaining[call.block]) if call.block in remaining else call
        for call in graph.calls
        if call.block in cut
    )
    read = {source for call in calls for _, source in call.inputs}
    ends = tuple(f"{call.name}.{remaining[call.block].outputs[0]}" for call in calls if call.block in remaining)
    return replace(
        graph,
        blocks=tuple(remaining.get(block.name, block) for block in graph.blocks if block.name in cut),
        calls=calls,
        inputs=tuple(tensor for tensor in graph.inputs if tensor.name in read),
        outputs=ends,
    )


def _cut(block: Block) -> Block | None:
    """The block without its cross-entropy and what else is trained on; None where it has none."""
    loss = next((op for op in block.ops if op.does == "compares labels"), None)
    if loss is None:
        return None
    ops = tuple(op for op in block.ops if op is not loss and op.does != "balances")
    logits = loss.inputs[0]
    used = {name for op in ops for name in (*op.inputs, *op.outputs)}
    return replace(
        block,
        inputs=tuple(name for name in block.inputs if name in used),
        outputs=(logits,),
        tensors=tuple(tensor for tensor in block.tensors if tensor.name in used),
        ops=ops,
    )


def _call(call: Call, block: Block) -> Call:
    return replace(call, inputs=tuple((own, source) for own, source in call.inputs if own in block.inputs))
