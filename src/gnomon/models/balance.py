"""The loss that keeps a mixture's experts evenly loaded, as transformers adds it: `with_balance_loss`.

A graph transformation: each layer with a router adds what it did to a load that goes from layer to layer, and the head
has a second loss. Means are over all tokens and layers of a microbatch on one data-parallel rank. `with_layer_balance`
has the loss of each layer by itself in place of that, as Megatron-LM and DeepSeek add it, with a z-loss; losses of
layers go from layer to layer. Leaves out biases moved in place of a loss (DeepSeek-V3), which are no loss.
Sources: transformers 5.23, `load_balancing_loss_func`, which all classes with `router_aux_loss_coef` call; those of
`ops.balance`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from gnomon.errors import GraphError
from gnomon.graph import Block, Call, Dim, Graph, Tensor
from gnomon.ops.op import AttrValue, Op, attrs

LOAD, OWN, BEFORE, LOSS = "router_load", "router_load_own", "router_load_before", "balance"
CHOSEN = "router_chosen"
STEP = "router_step_load"
SUMS = Dim(name="load_sums", size=2)
"""Probabilities, and choices."""
LOSSES = Dim(name="router_losses", size=1)
"""Of each row, its part of the losses of layers."""
Attributes = tuple[tuple[str, AttrValue], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBalance:
    """The loss of each layer by itself."""

    per: Literal["layer", "sequence", "global"]
    """Whether its means are over a microbatch's tokens, or over those of each sequence; `global`: the shares of choices
    are those of all ranks and the step's microbatches so far."""
    coefficient: float
    """Factor of the loss."""
    z_loss: float
    """Coefficient of the mean of squared log-sum-exps of the router's logits; 0 for none."""


def with_balance_loss(graph: Graph, coefficient: float) -> Graph:
    """`graph` with the loss beside its own. GraphError for a model without routers, or whose last layer has no
    cross-entropy."""
    return _balanced(graph, coefficient, None)


def with_layer_balance(graph: Graph, balance: LayerBalance) -> Graph:
    """`graph` with the losses of its layers beside its own. GraphError as above, and for a model that has a loss of its
    config that balances experts."""
    if any(block.does("balances") for block in graph.blocks):
        raise GraphError(f"{graph.name} has the loss of its config that balances experts; leave one of the two out")
    return _balanced(graph, 0.0, balance)


def _balanced(graph: Graph, coefficient: float, each: LayerBalance | None) -> Graph:
    routed = {block.name for block in graph.blocks if block.does("routes")}
    head = graph.call(graph.outputs[0].partition(".")[0])
    if not routed or not graph.block(head.block).does("compares labels"):
        raise GraphError(f"{graph.name} has no routers, or no cross-entropy, beside which experts could be balanced")
    calls, load, topk = list[Call](), "", 0
    load_tensor: Tensor | None = None
    for call in graph.calls:
        if call.block in routed:
            new = _loaded(call, load)
            calls += new
            load = f"{new[-1].name}.{LOAD}"
            block = _with_load(graph.block(call.block), each, first=False)
            load_tensor, topk = block.tensor(LOAD), _topk(block)
        elif call is head:
            calls.append(replace(call, inputs=(*call.inputs, (LOAD, load))))
        else:
            calls.append(call)
    assert load_tensor is not None
    attributes = attrs(layers=True) if each is not None else attrs(coefficient=coefficient, topk=topk)
    blocks = list(_blocks(graph, routed, head, load_tensor, attributes, each))
    # Every block of a Graph must be called: of routed blocks the plain one, or that of a first layer, may be of no use.
    used = {call.block for call in calls}
    return replace(
        graph,
        blocks=tuple(block for block in blocks if block.name in used),
        calls=tuple(calls),
        outputs=(*graph.outputs, f"{head.name}.{LOSS}"),
    )


def _loaded(call: Call, load: str) -> tuple[Call, ...]:
    """A call that adds to the load; the first of all layers begins it, and is a call by itself."""
    chain = ((LOAD, BEFORE), *call.chain)
    if load:
        return (replace(call, inputs=(*call.inputs, (BEFORE, load)), chain=chain if call.repeat > 1 else ()),)
    first = replace(call, block=_first(call.block), repeat=1, chain=())
    if call.repeat == 1:
        return (first,)
    begun = replace(
        first, name=f"{call.name}_first", family=call.group, prefix=call.group if call.prefix is None else call.prefix
    )
    chained = {own: out for out, own in call.chain}
    inputs = [(own, f"{begun.name}.{chained[own]}" if own in chained else source) for own, source in call.inputs]
    assert call.first is not None
    # The first layer begins the load and reads none, so it is a call of its own. Of the others the first reads what
    # that one handed on, and a single one has nothing to chain.
    rest = replace(
        call, inputs=(*inputs, (BEFORE, f"{begun.name}.{LOAD}")), repeat=call.repeat - 1, first=call.first + 1,
        family=begun.family, prefix=begun.prefix, chain=chain if call.repeat > 2 else (),
    )  # fmt: skip
    return (begun, rest)


def _first(block: str) -> str:
    return f"{block}_first"


def _blocks(
    graph: Graph, routed: Iterable[str], head: Call, load: Tensor, attributes: Attributes, each: LayerBalance | None
) -> Iterable[Block]:
    for block in graph.blocks:
        if block.name in routed:
            yield _with_load(block, each, first=False)
            yield replace(_with_load(block, each, first=True), name=_first(block.name))
        elif block.name == head.block:
            yield _with_loss(block, load, attributes)
        else:
            yield block


def _topk(block: Block) -> int:
    router = next(op for op in block.ops if op.does == "routes")
    size = block.tensor(router.outputs[0]).dims[-1].size
    assert size is not None, "a router chooses a fixed number"
    return size


def _with_load(block: Block, each: LayerBalance | None, *, first: bool) -> Block:
    """The block with the load of its router, or its loss, added to that of the layers before."""
    routers = [op for op in block.ops if op.does == "routes"]
    if len(routers) != 1:
        raise GraphError(f"{block.name} has {len(routers)} routers: the balance of experts is that of one a layer")
    logits = block.tensor(routers[0].inputs[0])
    dims, topk = (logits.dims[0], SUMS, logits.dims[-1]), _topk(block)
    tensors = [Tensor(name=LOAD, dims=dims, dtype="fp32")]
    out = LOAD if first else OWN
    own = Op(kind="expert_load", path=OWN, inputs=(logits.name,), outputs=(out,), attrs=attrs(topk=topk))
    ops = [own]
    if each is not None:
        sums = replace(SUMS, size=3) if each.z_loss else SUMS
        tensors = [Tensor(name=LOAD, dims=(logits.dims[0], LOSSES), dtype="fp32")]
        chosen = Tensor(name=CHOSEN, dims=(logits.dims[0], sums, logits.dims[-1]), dtype="fp32")
        read = attrs(topk=topk, fn=str(routers[0].attr("fn", "softmax")), z_loss=bool(each.z_loss))
        counted = Op(kind="step_load", path=STEP, inputs=(CHOSEN,), outputs=(STEP,))
        is_global = each.per == "global"
        ops = [
            replace(own, path=CHOSEN, outputs=(CHOSEN,), attrs=read),
            *([counted] if is_global else []),
            Op(
                kind="layer_balance", path=OWN, inputs=(CHOSEN, STEP) if is_global else (CHOSEN,), outputs=(out,),
                attrs=attrs(per=each.per, coefficient=each.coefficient, z_loss=each.z_loss, topk=topk),
            ),
        ]  # fmt: skip
        if is_global:
            tensors.append(Tensor(name=STEP, dims=logits.dims[-1:], dtype="fp32"))
    if not first:
        tensors += [replace(tensors[0], name=OWN), replace(tensors[0], name=BEFORE)]
        ops.append(Op(kind="add", path=LOAD, inputs=(BEFORE, OWN), outputs=(LOAD,)))
    if each is not None:
        tensors.append(chosen)
    return replace(
        block,
        inputs=block.inputs if first else (*block.inputs, BEFORE),
        outputs=(*block.outputs, LOAD),
        tensors=(*block.tensors, *tensors),
        ops=(*block.ops, *ops),
    )


def _with_loss(block: Block, load: Tensor, attributes: Attributes) -> Block:
    """A head with the loss of the load."""
    labels = next(op for op in block.ops if op.does == "compares labels").inputs[1]
    op = Op(
        kind="balance_loss", path=LOSS, inputs=(LOAD, labels), outputs=(LOSS,), attrs=attributes,
    )  # fmt: skip
    return replace(
        block,
        inputs=(*block.inputs, LOAD),
        outputs=(*block.outputs, LOSS),
        tensors=(*block.tensors, load, Tensor(name=LOSS, dims=(), dtype="fp32")),
        ops=(*block.ops, op),
    )
