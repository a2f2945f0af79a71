"""Which values of a trace get a gradient: those that outputs depend on by differentiable ops.

`flow(trace)` corrects what was seen as the forward ran: a value from which only indices or masks follow gets none, and
memory gets one if what is written into it later has one. Leaves out parameters and inputs, which are as they were.
"""

from __future__ import annotations

from gnomon.frontend.convert import refs
from gnomon.frontend.records import AtenNode as Traced
from gnomon.frontend.records import ForwardTrace
from gnomon.tensors.captured import Node, mutates


def flow(trace: ForwardTrace) -> None:
    """Sets `grad` of each value that an op made."""
    nodes = [node for step in trace.steps for node in step.nodes]
    _written(trace, nodes)
    _asked_for(trace, nodes)


def _written(trace: ForwardTrace, nodes: list[Traced]) -> None:
    """What looks into memory that a value with a gradient was written into has one, and what is computed of it then."""
    values = trace.values
    late = set[int]()
    there: dict[int, list[int]] = {}
    for node in nodes:
        outs = [o for o in node.outs if o is not None and values[o].dtype.is_floating_point]
        if node.grad and "detach" not in node.target and any(index in late for index in refs(node)):
            late |= set(outs)
        for index in (*refs(node), *outs):
            there.setdefault(values[index].storage, []).append(index)
        if _mutates(node) and any(values[o].grad or o in late for o in outs):
            late |= {index for index in there[values[refs(node)[0]].storage] if values[index].origin == "op"}
    for index in late:
        values[index].grad = True


def _asked_for(trace: ForwardTrace, nodes: list[Traced]) -> None:
    """What no output with a gradient follows from has none."""
    values = trace.values
    reached = {index for index in trace.outputs if values[index].grad}
    memory = {values[index].storage for index in reached}
    for node in reversed(nodes):
        outs = [o for o in node.outs if o is not None and values[o].grad]
        into = _mutates(node) and values[refs(node)[0]].storage in memory
        if outs and (into or any(o in reached for o in outs)):
            read = [index for index in refs(node) if values[index].grad]
            reached |= {*read, *outs}
            memory |= {values[index].storage for index in (*read, *outs)}
    for index, value in enumerate(values):
        if value.origin == "op" and index not in reached and value.storage not in memory:
            value.grad = False


def _mutates(node: Traced) -> bool:
    return mutates(Node(target=node.target, args=()))
