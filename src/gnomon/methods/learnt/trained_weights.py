"""What methods have in common that change a model's weights while it trains: which matrices, in which plans, when.

They see whole matrices on every rank and are a part of the step, so a plan has data parallelism alone and the update
on the device. `compressed(graph)` is what `gnomon compress` would store too: matrices of repeated layers, but for
routers. Leaves out what each of them does.
"""

from __future__ import annotations

import re
from math import prod

from gnomon.graph import Block, Graph
from gnomon.orders import DEFAULT
from gnomon.plans import Plan, Saved
from gnomon.plans.plan import effective_zero
from gnomon.sharding.matrices import is_looked_up, split_of

KEPT_WHOLE = re.compile(r"\.(gate|router|shared_expert_gate)(\.layer)?\.weight$")
"""Routers: small, and what they choose changes at once."""


def compressed(graph: Graph) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each matrix of a repeated layer, by its full name; matrices side by side (experts) one below
    the other. Routers, tables and the head are not among them."""
    sizes_of: dict[str, tuple[int, int]] = {}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        if layer.call.first is None:
            continue
        for tensor in block.parameters:
            if not is_compressed(block, tensor.name):
                continue
            _, first = split_of(block, tensor.name) or (0, 0)
            sizes = [dim.size or 0 for dim in tensor.atoms]
            sizes_of[layer.call.parameter_name(tensor.name, layer.index)] = prod(sizes[:first]), prod(sizes[first:])
    return sizes_of


def is_compressed(block: Block, name: str) -> bool:
    """Whether a parameter of a repeated layer's block is one of these matrices."""
    matrix = split_of(block, name) is not None and not is_looked_up(block, name)
    return matrix and not KEPT_WHOLE.search(f".{name}")


def divided_reason(plan: Plan) -> str | None:
    """Why ranks of a plan do not have the weights whole, with their update, and what to change; None where they do."""
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    for axis in ("tp", "cp", "ep", "etp"):
        if any(getattr(mesh, axis) > 1 for mesh in meshes):
            return f"it sees whole matrices, and {axis} divides them or what they are trained on; use {axis} = 1"
    if effective_zero(plan):
        return "it sees whole matrices, and ZeRO divides them at any place; use optimizer.zero = 0"
    if plan.optimizer.offload is not None or plan.optimizer.delay:
        return "it is a part of the update on the device; leave optimizer.offload out"
    if plan.schedule.vocabulary != "ends":
        return "it is not made for divided vocabularies; use schedule.vocabulary = 'ends'"
    if plan.placement:
        return "logical workers hand weights over between processes without what it keeps; leave placement out"
    return None


def staged_reason(plan: Plan) -> str | None:
    """Why a plan does not have a microbatch's whole forward and backward on one rank, kept as autograd has it."""
    if plan.num_stages > 1:
        return "it looks at the whole model's forward, of which a pipeline stage has a part; use pp = 1"
    if plan.saved != Saved():
        return "it looks at activations as forward makes them; leave saved out"
    if plan.schedule.name != DEFAULT:
        return f"forwards and backwards must follow each other; use schedule.name = {DEFAULT!r}"
    return None


def step_at(share: float, steps: int) -> int:
    """The step (from 1) after which a share of a run's steps is behind."""
    return round(share * steps)
