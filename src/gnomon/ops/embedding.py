"""Lookups and features of numbers: `embedding`, `timestep`.

Ids are integers, tables are (rows, width). Leaves out positions that are no table (`attention`).
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.curve import once
from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import bytes_of, cannot_write, per_element, per_element_back
from gnomon.ops.work import Setting, Work
from gnomon.tensors.dims import numel


def _dims(op: Op, block: Tensors) -> Problem:
    ids, table, out = block.tensor(op.inputs[0]), block.tensor(op.inputs[1]), block.tensor(op.outputs[0])
    fits = not ids.is_float and out.dims == (*ids.dims, *table.dims[1:])
    return None if fits else cannot_write(op, block)


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """The ids, where the table is trained."""
    return op.inputs[:1] if op.inputs[1] in needs_grad else ()


def _lookup_work(op: Op, block: Tensors, setting: Setting) -> Work:
    """Only the chosen rows are read."""
    out, table = block.tensor(op.outputs[0]), block.tensor(op.inputs[1])
    rows = numel(out.dims, setting.sizes) * setting.dtypes.bits(table.dtype) // 8
    return Work(
        read_bytes=bytes_of(op.inputs[:1], block, setting) + rows, write_bytes=bytes_of(op.outputs, block, setting)
    )


EMBEDDING = OpKind(
    name="embedding",
    signature="ids, table -> rows of the table",
    contracts=False,
    dims=_dims,
    memory="own",
    saves=_saves,
    forward=_lookup_work,
    backward=per_element_back(0),
    steps="one kernel",
    fused_by="every stack",
    weight_grad="apart",
    ungraded=(),
    decay=(1,),
    price=once("gather"),
    grad_price="table",
    calibrated="rows written",
    begins="random",
    weight_sum="in place",
    gradient="computed",
    strategies="plain",
    sums=True,
    together=(),
    does="looks up",
    calls="rules of the frontend",
    documents=False,
    torch="lookup:embedding",
)

TIMESTEP = OpKind(
    name="timestep",
    signature="times -> sinusoidal features of a diffusion time",
    contracts=False,
    dims="open",
    memory="own",
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(0),
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price=once(kernels=5),
    grad_price=once(kernels=5),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    strategies="plain",
    sums=False,
    together=(),
    does="computes",
    calls="none",
    documents=False,
    torch="image:timestep",
)

KINDS = (EMBEDDING, TIMESTEP)
