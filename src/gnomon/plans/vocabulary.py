"""The embedding and the head divided by vocabulary over all pipeline ranks (`schedule.vocabulary`): which layers these
are, and which plans can have it.

`divided_layers` returns them, `vocabulary_errors` what keeps a plan from it. Leaves out the order of their parts in a
step (`orders.patterns.vocabulary`) and what they cost.
"""

from __future__ import annotations

from collections.abc import Iterator

from gnomon import orders
from gnomon.graph import Graph, Layer, Tensor
from gnomon.plans.plan import Plan
from gnomon.plans.stages import stage_layers


def divided_layers(plan: Plan, graph: Graph) -> tuple[Layer, ...]:
    """The embedding, if there is one, and the head, which every pipeline rank holds a part of; none under `ends`."""
    if plan.schedule.vocabulary == "ends":
        return ()
    return tuple(layer for layer in graph.layers() if _rows(graph, layer))


def has_vocab(tensor: Tensor) -> bool:
    """Whether one of its dims is the vocabulary: a table of words, or logits."""
    return any(dim.name.split(".")[-1] == "vocab" for dim in tensor.atoms)


def _rows(graph: Graph, layer: Layer) -> int:
    """Rows of the largest table over a vocabulary that a layer has; 0 without one."""
    block = graph.block(layer.call.block)
    dims = [dim for tensor in (*block.parameters, *block.frozen) for dim in tensor.atoms]
    return max((dim.size or 0 for dim in dims if dim.name.split(".")[-1] == "vocab"), default=0)


def vocabulary_errors(plan: Plan, graph: Graph) -> Iterator[tuple[str, str]]:
    """(name, message) of what keeps a plan from dividing the vocabulary over its pipeline."""
    schedule, ranks = plan.schedule, plan.num_pipeline_ranks
    how = schedule.vocabulary
    if how == "ends":
        return
    setting = f"schedule vocabulary = {how!r}"
    if ranks < 2:
        yield "vocabulary", f"{setting} divides the vocabulary over pipeline ranks, but pp = 1; use 'ends'"
    if how not in orders.find(schedule.name).vocabulary:
        known = " and ".join(order.name for order in orders.every() if how in order.vocabulary)
        yield "vocabulary", f"{setting} is known for {known}, not for {schedule.name}; choose one of them, or 'ends'"
    if schedule.passes:
        yield (
            "vocabulary",
            f"{setting} has no rows under pass {schedule.passes[0].name}; leave the pass out, or use 'ends'",
        )
    meshes = {plan.stage_mesh(stage) for stage in range(plan.num_stages)}
    if len(meshes) > 1 or any(stage.shares for stage in plan.stages):
        yield "vocabulary", f"{setting} needs stages with one mesh and equal shares; make them alike, or use 'ends'"
    elif (tp := next(iter(meshes)).tp) > 1:
        yield "vocabulary", f"{setting} together with tp = {tp} has no rows yet; use tp = 1, or 'ends'"
    optimizer = plan.optimizer
    if optimizer.zero > 1 or optimizer.offload is not None:
        what = "an offloaded optimizer" if optimizer.offload is not None else f"optimizer.zero = {optimizer.zero}"
        yield "vocabulary", f"{setting} under {what} has no rows; use optimizer.zero = 0 or 1 on the device, or 'ends'"
    if any(block.does("balances") for block in graph.blocks):
        yield "vocabulary", f"{setting} divides the head, and the loss that balances experts is whole there; use 'ends'"
    yield from _of_graph(plan, graph, setting)


def _of_graph(plan: Plan, graph: Graph, setting: str) -> Iterator[tuple[str, str]]:
    layers, divided = graph.layers(), divided_layers(plan, graph)
    heads = [layer for layer in divided if graph.block(layer.call.block).does("compares labels")]
    ends = [layer.label for layer in (layers[0], layers[-1])]
    if len(heads) != 1 or heads[0].label != ends[1] or any(layer.label not in ends for layer in divided):
        shown = ", ".join(layer.label for layer in divided) or "none"
        yield (
            "vocabulary",
            f"{setting} needs a graph that ends in its only head, with no table over the vocabulary but that and the "
            f"embedding that begins it; this one has {shown}; use 'ends'",
        )
        return
    for rows, layer in {_rows(graph, layer): layer for layer in divided}.items():
        if rows % plan.num_pipeline_ranks:
            nearest = -(-rows // plan.num_pipeline_ranks) * plan.num_pipeline_ranks
            yield (
                "vocabulary",
                f"{setting} cannot divide the {rows} rows of {layer.label} over {plan.num_pipeline_ranks} pipeline "
                f"ranks; pad the vocabulary to {nearest}",
            )
    labels = {layer.label for layer in divided}
    parts = stage_layers(plan, graph)
    if bare := [stage for stage, part in enumerate(parts) if all(layer.label in labels for layer in part)]:
        yield "vocabulary", f"{setting} leaves stage {bare[0]} without layers; give it one, or use 'ends'"
