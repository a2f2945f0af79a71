"""What a plan does to a mixture of experts: `under(graph, plan)` is the graph that it runs.

Where ranks divide experts (ep, etp), those that a captured model computes row by row become ops that tokens are sent to
(`graph.token_dispatch`); `whole_experts` says which op keeps others from it. Built-in models have such ops always.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from gnomon.errors import GraphError, PlanError
from gnomon.graph import Block, Graph, why_whole, with_dispatch
from gnomon.models.balance import LayerBalance, with_layer_balance
from gnomon.ops.op import attrs
from gnomon.plans.parts import Experts
from gnomon.plans.plan import Plan


def under(graph: Graph, plan: Plan) -> Graph:
    """The graph with experts that tokens are sent to, if the plan divides experts and it can have them, and with the
    losses that the plan balances them by. PlanError for a model that cannot have those."""
    meshes = (plan.stage_mesh(stage) for stage in range(plan.num_stages))
    made = with_dispatch(graph) if any(mesh.ep * mesh.etp > 1 for mesh in meshes) else graph
    if plan.experts.bias_rate and not router_biases(graph):
        raise PlanError(f"experts.bias_rate moves the biases of routers, and {graph.name} has none; leave it out")
    made = _with_threshold(made, plan.experts.threshold) if plan.experts.threshold < 1.0 else made
    return _balanced(made, plan.experts) if plan.experts.has_loss else made


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
    new = attrs(threshold=threshold)

    def marked(block: Block) -> Block:
        return replace(
            block,
            ops=tuple(
                replace(op, attrs=(*(pair for pair in op.attrs if pair[0] != "threshold"), *new))
                if op.does == "routes"
                else op
                for op in block.ops
            ),
        )

    return replace(graph, blocks=tuple(marked(block) for block in graph.blocks))


@lru_cache(maxsize=64)
def _balanced(graph: Graph, experts: Experts) -> Graph:
    if any(op.attr("layers", False) for block in graph.blocks for op in block.ops if op.does == "balances"):
        return graph  # it is under the plan already
    per: Literal["layer", "sequence"] = "sequence" if experts.balance == "sequence" else "layer"
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
    """Which op of a captured graph computes experts without a rule of how they divide, or takes single ones out of the
    weights of all, with its line."""
    if why := why_whole(graph):
        return f"ranks cannot have parts of the experts of {graph.name!r}: {why}"
    takes = ""
    for block in graph.blocks:
        held = {t.name for t in block.tensors if any("experts" in dim.name.split(".") for dim in t.atoms)}
        for op in block.ops:
            if op.captured is None or not held & set(op.inputs):
                continue
            if any(node.products for node in op.captured.nodes):
                return (
                    f"{op.path} ({op.captured.where}) computes the experts of {graph.name!r}, an op without a rule of "
                    f"how they divide: every rank computes all, and the other axes divide the rest"
                )
            takes = takes or (
                f"{op.path} ({op.captured.where}) takes single experts of {graph.name!r} out of the weights of all, "
                f"which no rule divides: every rank computes all, and the other axes divide the rest"
            )
    alone = next((name for name in graph.parameters() if ".experts." in f".{name}"), "")
    if alone and not takes:
        return (
            f"ranks cannot have parts of the experts of {graph.name!r}, which are modules of their own, as {alone} is"
        )
    return takes or f"graph {graph.name!r} has no experts"
