"""Kinds that lay elements out anew: views (`reshape`, `split`, `rename`) and copies (`concat`, `repeat`).

A view's output looks into the memory of its input. Leaves out views of captured models that hold ATen ops, whose kind
is `reshape` too, with `captured`.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.ops.curve import once
from gnomon.ops.op import OpKind
from gnomon.ops.rules import no_work, passed_on, per_element, per_element_back

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
    does="computes",
    runs="function",
)

SPLIT = replace(RESHAPE, name="split", signature="x -> views of its parts along the last dim", memory="part")

RENAME = replace(RESHAPE, name="rename", signature="x -> x with other names for its dims")

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
)

REPEAT = replace(
    RESHAPE,
    name="repeat",
    signature="x -> copies along a dim (kv_heads -> heads)",
    memory="own",
    runs="lowered",
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
)

KINDS = (RESHAPE, SPLIT, RENAME, CONCAT, REPEAT)
