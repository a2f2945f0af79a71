"""What a plan does to a mixture of experts: `under(graph, plan)` is the graph that it runs.

Where ranks divide experts (ep, etp), those that a captured model computes row by row become ops that tokens are sent to
(`graph.token_dispatch`); `whole_experts` says which op keeps others from it. Built-in models have such ops always.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gnomon.errors import GraphError, PlanError
from gnomon.graph import Block, Dim, Graph, why_whole, with_dispatch
from gnomon.models.balance import LayerBalance, with_layer_balance
from gnomon.ops.op import AttrValue, Does, attrs
from gnomon.plans.parts import Experts
from gnomon.plans.plan import Plan
from gnomon.plans.replicas import on_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A layer that sends tokens to experts."""

    layer: str
    """Its label, as `layers[3]`."""
    experts: int
    """It chooses from."""
    topk: int
    """It chooses for a token."""


def routers(graph: Graph) -> tuple[Router, ...]:
    """Those of a model, in the order of its layers."""
    found = []
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        sizes = {dim.name: dim.size or 0 for tensor in block.tensors for dim in tensor.atoms}
        for op in block.ops:
            if op.does == "dispatches":
                topk = block.tensor(op.inputs[1]).dims[-1].size or 0
                found.append(Router(layer=layer.label, experts=sizes[str(op.attr("experts", ""))], topk=topk))
    return tuple(found)


def under(graph: Graph, plan: Plan) -> Graph:
    """The graph with experts that tokens are sent to, if the plan divides experts and it can have them, and with the
    losses that the plan balances them by. PlanError for a model that cannot have those."""
    meshes = (plan.stage_mesh(stage) for stage in range(plan.num_stages))
    dispatched = with_dispatch(graph) if any(mesh.ep * mesh.etp > 1 for mesh in meshes) else graph
    if plan.experts.bias_rate and not router_biases(graph):
        raise PlanError(f"experts.bias_rate moves the biases of routers, and {graph.name} has none; leave it out")
    dispatched = as_built(dispatched)
    if plan.experts.assignment != "top_k" or plan.experts.router_dtype != "model":
        dispatched = _with_routers(dispatched, plan.experts.assignment, plan.experts.router_dtype)
    dispatched = _with_threshold(dispatched, plan.experts.threshold) if plan.experts.threshold < 1.0 else dispatched
    dispatched = (
        _with_replicas(dispatched, plan.experts.replicas, shared_slots(plan)) if plan.experts.replicas else dispatched
    )
    return _balanced(dispatched, plan.experts) if plan.experts.has_loss else dispatched


@lru_cache(maxsize=64)
def _with_threshold(graph: Graph, threshold: float) -> Graph:
    """The graph whose routers say from where on a token goes to its first expert alone."""
    routers = [(block, op) for block in graph.blocks for op in block.ops if op.does == "routes"]
    for block, op in routers:
        chosen = block.tensor(op.outputs[0]).dims[-1].size
        if chosen != 2 or op.attr("fn", "softmax") != "softmax":
            raise PlanError(
                f"experts.threshold compares the first of two experts that a softmax chooses with the second, and "
                f"{graph.name} chooses {chosen} by {op.attr('fn', 'softmax')}; leave it out"
            )
    if not routers:
        raise PlanError(f"experts.threshold is for routers, and {graph.name} has none; leave it out")
    return _marked(graph, "routes", attrs(threshold=threshold))


@lru_cache(maxsize=64)
def _with_routers(graph: Graph, assignment: str, dtype: str) -> Graph:
    """The graph whose routers assign experts so, from logits computed in this dtype (`model`: their own)."""
    options = " and ".join(
        f"experts.{name} = {value!r}"
        for name, value, usual in (("assignment", assignment, "top_k"), ("router_dtype", dtype, "model"))
        if value != usual
    )
    if not any(block.does("routes") for block in graph.blocks):
        raise PlanError(f"{options} is about routers, and {graph.name} has none; leave it out")
    if assignment != "top_k":
        for block in graph.blocks:
            for op in (op for op in block.ops if op.does == "routes"):
                if len(op.inputs) > 1 or op.attr("groups", 1) != 1:
                    what = "biases of experts" if len(op.inputs) > 1 else "groups of experts"
                    raise PlanError(
                        f"experts.assignment = {assignment!r} chooses by the logits alone, and the routers of "
                        f"{graph.name} have {what}; leave it out"
                    )
        graph = _marked(graph, "routes", attrs(assignment=assignment))
    return graph if dtype == "model" else replace(graph, blocks=tuple(_widened(b, dtype, graph) for b in graph.blocks))


def _widened(block: Block, dtype: str, graph: Graph) -> Block:
    """The block whose routers' logits are computed in this dtype, and their weights with them."""
    routers = [op for op in block.ops if op.does == "routes"]
    if not routers:
        return block
    logits = {op.inputs[0] for op in routers}
    makes = {op.path for op in block.ops if logits & set(op.outputs)}
    for op in block.ops:
        if op.path in makes and (op.does != "multiplies" or op.rules.torch != "engine"):
            raise PlanError(
                f"experts.router_dtype is of the product that makes logits, and {op.path} of {graph.name} is none; "
                f"leave it out"
            )
    wide = logits | {op.outputs[0] for op in routers}
    ops = (replace(op, attrs=attrs(**dict(op.attrs), dtype=dtype)) if op.path in makes else op for op in block.ops)
    tensors = (replace(t, dtype=dtype) if t.name in wide and t.dtype == "compute" else t for t in block.tensors)
    return replace(block, ops=tuple(ops), tensors=tuple(tensors))


def _as_wide_as_activations(graph: Graph) -> Graph:
    """The reverse of what a plan's router_dtype does."""

    def narrowed(block: Block) -> Block:
        matmuls = {op.path: op for op in block.ops if op.does == "multiplies" and op.attr("dtype", "")}
        if not matmuls:
            return block
        logits = {op.outputs[0] for op in matmuls.values()}
        back = logits | {op.outputs[0] for op in block.ops if op.does == "routes" and op.inputs[0] in logits}
        ops = (
            replace(op, attrs=tuple(pair for pair in op.attrs if pair[0] != "dtype")) if op.path in matmuls else op
            for op in block.ops
        )
        tensors = (replace(t, dtype="compute") if t.name in back else t for t in block.tensors)
        return replace(block, ops=tuple(ops), tensors=tuple(tensors))

    return replace(graph, blocks=tuple(map(narrowed, graph.blocks)))


@lru_cache(maxsize=16)
def with_one_expert(graph: Graph) -> Graph:
    """The graph whose tokens visit one expert each."""

    def one(dim: Dim) -> Dim:
        if dim.factors:
            return replace(dim, factors=tuple(map(one, dim.factors)))
        return replace(dim, size=1) if dim.name.split(".")[-1] == "topk" else dim

    def one_expert(block: Block) -> Block:
        return replace(block, tensors=tuple(replace(t, dims=tuple(map(one, t.dims))) for t in block.tensors))

    return replace(graph, blocks=tuple(map(one_expert, graph.blocks)))


def shared_slots(plan: Plan) -> int:
    """Most slots of a rank whose expert another rank holds too, whose gradients are added up over both."""
    ep = max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
    most = 0
    for row in dict.fromkeys(plan.experts.placement):
        if len(row) % ep == 0:
            most = max(most, *(sum(row.count(expert) > 1 for expert in own) for own in on_ranks(row, ep)))
    return most


@lru_cache(maxsize=64)
def _with_replicas(graph: Graph, replicas: int, shared: int) -> Graph:
    """The graph whose dispatches say how many copies of experts there are beside the first of each, and how many a rank
    shares with others. They are slots of ranks, so that the experts' parameters stay those of the model."""
    return _marked(graph, "dispatches", attrs(replicas=replicas, shared=shared))


def as_built(graph: Graph) -> Graph:
    """The graph without what another plan said of its routers and of where experts lie."""
    routers = [op for block in graph.blocks for op in block.ops if op.does == "routes"]
    if any(op.attr("threshold", 1.0) != 1.0 or op.attr("assignment", "top_k") != "top_k" for op in routers):
        graph = _marked(graph, "routes", (), gone=("threshold", "assignment"))
    if any(op.does == "multiplies" and op.attr("dtype", "") for block in graph.blocks for op in block.ops):
        graph = _as_wide_as_activations(graph)
    placed = any(op.attr("replicas", 0) for block in graph.blocks for op in block.ops if op.does == "dispatches")
    return without_replicas(graph) if placed else graph


def without_replicas(graph: Graph) -> Graph:
    """The model that a graph is of, wherever its experts lie."""
    return _marked(graph, "dispatches", (), gone=("replicas", "shared"))


def _marked(graph: Graph, does: Does, new: tuple[tuple[str, AttrValue], ...], gone: tuple[str, ...] = ()) -> Graph:
    """The graph with these attributes on its ops that do so, and without those that are gone."""
    names = {name for name, _ in new} | set(gone)

    def marked(block: Block) -> Block:
        if not block.does(does):
            return block
        ops = (
            replace(op, attrs=attrs(**dict(pair for pair in op.attrs if pair[0] not in names), **dict(new)))
            if op.does == does
            else op
            for op in block.ops
        )
        return replace(block, ops=tuple(ops))

    return replace(graph, blocks=tuple(marked(block) for block in graph.blocks))


@lru_cache(maxsize=64)
def _balanced(graph: Graph, experts: Experts) -> Graph:
    if any(op.attr("layers", False) for block in graph.blocks for op in block.ops if op.does == "balances"):
        return graph  # it is under the plan already
    per: Literal["layer", "sequence", "global"] = "layer" if experts.balance == "none" else experts.balance
    try:
        balance = LayerBalance(per=per, coefficient=experts.coefficient, z_loss=experts.z_loss)
        return with_layer_balance(graph, balance)
    except GraphError as error:
        raise PlanError(str(error)) from None


def router_biases(graph: Graph) -> dict[str, str]:
    """Name of each router's bias, which nothing trains -> label of its layer."""
    found = {}
    for layer in graph.layers():
        for op in graph.block(layer.call.block).ops:
            if op.does == "routes" and len(op.inputs) > 1:
                found[layer.call.parameter_name(op.inputs[1], layer.index)] = layer.label
    return found


def whole_experts(graph: Graph) -> str:
    """Names the op of a captured graph that computes experts without a rule of how they divide, or takes single ones
    out of the weights of all, with its line."""
    if why := why_whole(graph):
        return f"ranks cannot have parts of the experts of {graph.name!r}: {why}"
    takes = ""
    for block in graph.blocks:
        expert_tensors = {t.name for t in block.tensors if any("experts" in dim.name.split(".") for dim in t.atoms)}
        for op in block.ops:
            if op.captured is None or not expert_tensors & set(op.inputs):
                continue
            if any(node.matmuls for node in op.captured.nodes):
                return (
                    f"{op.path} ({op.captured.where}) computes the experts of {graph.name!r}, an op without a rule of "
                    f"how they divide: every rank computes all, and the other axes divide the rest"
                )
            takes = takes or (
                f"{op.path} ({op.captured.where}) takes single experts of {graph.name!r} out of the weights of all, "
                f"which no rule divides: every rank computes all, and the other axes divide the rest"
            )
    weight = next((name for name in graph.parameters() if ".experts." in f".{name}"), "")
    if weight and not takes:
        return (
            f"ranks cannot have parts of the experts of {graph.name!r}, which are modules of their own, as {weight} is"
        )
    return takes or f"graph {graph.name!r} has no experts"
