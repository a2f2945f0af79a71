"""Lookups and features of numbers: `embedding`, `timestep`.

Ids are integers, tables are (rows, width). Leaves out positions that are no table (`attention`).
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.op import Op, OpKind, Problem, Tensors
from gnomon.ops.rules import cannot_write


def _dims(op: Op, block: Tensors) -> Problem:
    ids, table, out = block.tensor(op.inputs[0]), block.tensor(op.inputs[1]), block.tensor(op.outputs[0])
    fits = not ids.is_float and out.dims == (*ids.dims, *table.dims[1:])
    return None if fits else cannot_write(op, block)


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """The ids, where the table is trained."""
    return op.inputs[:1] if op.inputs[1] in needs_grad else ()


EMBEDDING = OpKind(
    name="embedding",
    signature="ids, table -> rows of the table",
    contracts=False,
    dims=_dims,
    memory="own",
    saves=_saves,
    weight_grad="apart",
    ungraded=(),
    decay=(1,),
    runs="function",
)

TIMESTEP = OpKind(
    name="timestep",
    signature="times -> sinusoidal features of a diffusion time",
    contracts=False,
    dims="open",
    memory="own",
    saves="nothing",
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="function",
)

KINDS = (EMBEDDING, TIMESTEP)
