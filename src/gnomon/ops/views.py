"""Kinds that lay elements out anew: views (`reshape`, `split`, `rename`) and copies (`concat`, `repeat`).

A view's output looks into the memory of its input. Leaves out views of captured models that hold ATen ops, whose kind
is `reshape` too, with `captured`.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.ops.curve import once
from gnomon.ops.divided import AXES
from gnomon.ops.op import Op, OpKind
from gnomon.ops.rules import no_work, passed_on, per_element, per_element_back
from gnomon.ops.strategy import Division, Strategy
from gnomon.tensors.names import HEAD_DIMS


def _renamed(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Divided where both tensors are, in the same place; else every rank has all of it."""
    given, made = setting.home(op.inputs[0]), setting.home(op.outputs[0])
    places = [
        {atom.name: place for place, dim in enumerate(setting.block.tensor(name).dims) for atom in dim.atoms}
        for name in (op.inputs[0], op.outputs[0])
    ]
    for axis in AXES:
        before, after = given.dim_of(axis), made.dim_of(axis)
        if before is None or after is None or places[0][before] != places[1][after]:
            given, made = given.without(axis), made.without(axis)
    return (Strategy(name="local", inputs=(given,), outputs=(made,), grad_partial=((),)),)


RESHAPE = OpKind(
    name="reshape",
    signature="x -> a view of x in other dims",
    contracts=False,
    dims="open",
    memory="view",
    saves="nothing",
    forward=no_work,
    backward=passed_on,
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price="free",
    grad_price="free",
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="passed on",
    strategies="plain",
    sums=False,
    together=(),
    does="computes",
    calls="none",
    documents=False,
    torch="views:reshape",
)

SPLIT = replace(
    RESHAPE,
    name="split",
    signature="x -> views of its parts along the last dim",
    memory="part",
    torch="views:split",
    calls="none",
)

RENAME = replace(
    RESHAPE,
    name="rename",
    signature="x -> x with other names for its dims",
    strategies=_renamed,
    together=(),
    torch="views:rename",
    calls="none",
)

CONCAT = replace(
    RESHAPE,
    name="concat",
    signature="a, b, … -> one after another along a dim",
    memory="own",
    forward=per_element(0),
    backward=per_element_back(0),
    steps="one kernel",
    fused_by="every stack",
    price=once(),
    grad_price=once(),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    does="computes",
    torch="views:concat",
    calls="none",
)

REPEAT = replace(
    RESHAPE,
    name="repeat",
    signature="x -> copies along a dim (kv_heads -> heads)",
    memory="own",
    forward=per_element(0),
    backward=per_element_back(0),
    steps="one kernel",
    fused_by="every stack",
    price=once(),
    grad_price=once("reduce"),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    does="computes",
    strategies="plain",
    together=HEAD_DIMS,
    torch="lowered",
    calls="none",
)

KINDS = (RESHAPE, SPLIT, RENAME, CONCAT, REPEAT)
