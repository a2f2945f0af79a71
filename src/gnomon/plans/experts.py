"""Why ranks cannot have parts of a graph's experts: `whole_experts(graph)` says which op computes them all.

Experts that tokens are sent to (`dispatch`) divide; those of a captured model are often one op, which does not say how.
"""

from __future__ import annotations

from gnomon.graph import Graph


def whole_experts(graph: Graph) -> str:
    """Which op of a captured graph computes experts without a rule of how they divide, or takes single ones out of the
    weights of all, with its line."""
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
    return takes or f"graph {graph.name!r} has no experts"
