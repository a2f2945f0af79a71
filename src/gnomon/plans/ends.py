"""A graph whose embedding and head are divided over the pipeline, in two: what each stage runs whole, and the parts.

`cut_ends(plan, graph)` takes the lookup out of the embedding and the product with its loss out of the head. What stands
beside them (positions, scales, the last norm) stays with the first and the last stage. Parameters keep their names.
Leaves out which plans can have it (`vocabulary.vocabulary_errors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gnomon.errors import PlanError
from gnomon.graph import Block, Call, Graph, Op, Tensor
from gnomon.plans.plan import Plan
from gnomon.plans.select import format_layers
from gnomon.plans.stages import stage_layers
from gnomon.plans.vocabulary import divided_layers, has_vocab

EMBEDDED, HIDDEN = "embedded_tokens", "last_hidden"
"""Inputs that the two graphs have in place of what the other one makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two graphs that a graph is cut into: its layers, and its ends."""

    inside: Graph
    """Layers of the stages, without what is divided. Reads EMBEDDED; has no outputs."""
    parts: Graph
    """The lookup, if the graph has one, and the head's product and loss. Reads HIDDEN."""
    embedded: str
    """What the lookup makes, `call.tensor`; empty without one."""
    hidden: str
    """What the last stage makes for the head, `call.tensor`."""
    plan: Plan
    """For `inside`."""


@lru_cache(maxsize=8)
def cut_ends(plan: Plan, graph: Graph) -> Ends:
    """The graphs of a plan that divides the vocabulary. PlanError where the ends do not come apart."""
    *first, last = divided_layers(plan, graph)
    calls, blocks = list(graph.calls), {block.name: block for block in graph.blocks}
    embedded, parts, tables = "", list[tuple[Block, Call]](), list[Tensor]()
    for layer in first:
        call = layer.call
        table, rest = _without_lookup(blocks[call.block])
        (output,) = table.outputs
        embedded = f"{call.name}.{output}"
        parts.append((table, _reading(call, table)))
        tables.append(replace(table.tensor(output), name=EMBEDDED))
        at = calls.index(call)
        if rest is None:
            calls = [_renamed(other, embedded, EMBEDDED) for other in calls if other is not call]
        else:
            blocks[rest.name] = rest
            calls[at] = _reading(call, rest, **{output: EMBEDDED})
    call = last.call
    before, head, hidden = _without_head(blocks[call.block])
    # By name, since the lookup's cut may have put another call in its place.
    at = next(i for i, other in enumerate(calls) if other.name == call.name)
    source = dict(calls[at].inputs).get(hidden, f"{call.name}.{hidden}")
    hidden_input = replace(head.tensor(hidden), name=HIDDEN)
    parts.append((head, _reading(calls[at], head, **{hidden: HIDDEN})))
    if before is None:
        del calls[at]
    else:
        blocks[before.name] = before
        calls[at] = _reading(calls[at], before)
    used = {call.block for call in calls}
    inside = replace(
        graph,
        inputs=(*graph.inputs, *tables),
        blocks=tuple(block for block in blocks.values() if block.name in used),
        calls=tuple(calls),
        outputs=(),
    )
    cut = replace(
        graph,
        inputs=(*graph.inputs, hidden_input),
        blocks=tuple(block for block, _ in parts),
        calls=tuple(call for _, call in parts),
        outputs=tuple(f"{parts[-1][1].name}.{name}" for name in head.outputs),
    )
    # What is left inside has no vocabulary to divide any more.
    ends_plan = replace(plan, schedule=replace(plan.schedule, vocabulary="ends"))
    if plan.stages:
        inner_labels = {layer.label for layer in inside.layers()}
        inner_layers = [[layer for layer in part if layer.label in inner_labels] for part in stage_layers(plan, graph)]
        chosen = zip(plan.stages, inner_layers, strict=True)
        ends_plan = replace(
            ends_plan, stages=tuple(replace(stage, calls=format_layers(part)) for stage, part in chosen)
        )
    for stage in stage_layers(ends_plan, inside)[1:]:
        for layer in stage:
            if EMBEDDED in dict(layer.call.inputs).values() and not layer.index:
                raise PlanError(f"vocabulary: {layer.label} reads the embedded tokens on another stage; use 'ends'")
    return Ends(inside=inside, parts=cut, embedded=embedded, hidden=source, plan=ends_plan)


def _without_lookup(block: Block) -> tuple[Block, Block | None]:
    """(its lookup in the table, what remains)."""
    chosen = [op for op in block.ops if any(has_vocab(block.tensor(name)) for name in (*op.inputs, *op.outputs))]
    if len(chosen) != 1 or chosen[0].does != "looks up" or chosen[0].inputs[0] not in block.inputs:
        raise PlanError(f"vocabulary: {block.name} does more with its table than one lookup; use 'ends'")
    (op,) = chosen
    (output,) = op.outputs
    others = [other for other in block.ops if other is not op]
    if not others:
        return block, None
    if output in block.outputs:
        raise PlanError(f"vocabulary: {block.name} hands on its lookup beside other tensors; use 'ends'")
    return _block(block, (op,), (output,)), _block(block, others, block.outputs)


def _without_head(block: Block) -> tuple[Block | None, Block, str]:
    """(what comes before the product with the table, that with the loss, the tensor between)."""
    first = next(i for i, op in enumerate(block.ops) if any(has_vocab(block.tensor(name)) for name in op.inputs))
    before, after = block.ops[:first], block.ops[first:]
    outputs = {name for op in after for name in op.outputs}
    read = [name for op in after for name in op.inputs if name not in outputs]
    hidden = list(dict.fromkeys(n for n in read if block.tensor(n).is_activation and block.tensor(n).is_float))
    matmul, *others = after
    weights = [block.tensor(name) for name in read if not block.tensor(name).is_activation]
    plain = matmul.does == "multiplies" and all(has_vocab(weight) for weight in weights) and len(hidden) == 1
    if (
        not plain
        or any(op.captured is not None or op.does == "multiplies" for op in others)
        or set(block.outputs) - outputs
    ):
        raise PlanError(f"vocabulary: {block.name} is no product with a table that a loss follows; use 'ends'")
    head = _block(block, after, block.outputs)
    return (_block(block, before, tuple(hidden)) if before else None), head, hidden[0]


def _block(block: Block, ops: Sequence[Op], outputs: tuple[str, ...]) -> Block:
    """Some ops of a block; what others made are inputs."""
    block_writes = {name for op in ops for name in op.outputs}
    used = dict.fromkeys(name for op in ops for name in (*op.inputs, *op.outputs))
    inputs = tuple(name for name in used if name not in block_writes and block.tensor(name).is_activation)
    tensors = tuple(tensor for tensor in block.tensors if tensor.name in used)
    return replace(block, inputs=inputs, outputs=outputs, tensors=tensors, ops=tuple(ops))


def _reading(call: Call, block: Block, **others: str) -> Call:
    """The call of a part of its block. others: where it reads what is not among its inputs."""
    bound = dict(call.inputs) | others
    names = {tensor.name for tensor in block.tensors}
    params = tuple((own, full) for own, full in call.params if own in names)
    return replace(call, inputs=tuple((name, bound[name]) for name in block.inputs), params=params)


def _renamed(call: Call, source: str, name: str) -> Call:
    return replace(
        call, inputs=tuple((own, name if source_name == source else source_name) for own, source_name in call.inputs)
    )
