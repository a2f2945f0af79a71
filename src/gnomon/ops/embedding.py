"""Lookups and features of numbers: `embedding`, `timestep`.

Ids are integers, tables are (rows, width). Leaves out positions that are no table (`attention`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.curve import once
from gnomon.ops.op import Op, Problem, RuledCall, Tensors
from gnomon.ops.rules import bytes_of, cannot_write, per_element, per_element_back
from gnomon.ops.work import Setting, Work
from gnomon.tensors.dims import numel


def _dims(op: Op, block: Tensors) -> Problem:
    ids, table, out = block.tensor(op.inputs[0]), block.tensor(op.inputs[1]), block.tensor(op.outputs[0])
    fits = not ids.is_float and out.dims == (*ids.dims, *table.dims[1:])
    return None if fits else cannot_write(op, block)


def _timestep_dims(op: Op, block: Tensors) -> Problem:
    times, out = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    return None if out[:-1] == times and len(out) > len(times) else cannot_write(op, block)


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


EMBEDDING = replace(
    MOVES_BYTES,
    name="embedding",
    signature="ids, table -> rows of the table",
    dims=_dims,
    saves=_saves,
    forward=_lookup_work,
    backward=per_element_back(0),
    weight_grad="apart",
    decay=(1,),
    price=once("gather"),
    grad_price="table",
    calibrated="rows written",
    weight_sum="in place",
    sums=True,
    does="looks up",
    served="apart",
    calls=(RuledCall(function="embedding", rule="embedding"),),
    zeros="of the table",
    torch="lookup:embedding",
)

TIMESTEP = replace(
    MOVES_BYTES,
    name="timestep",
    signature="times -> sinusoidal features of a diffusion time",
    dims=_timestep_dims,
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(0),
    price=once(kernels=5),
    grad_price=once(kernels=5),
    zeros="unknown",
    torch="image:timestep",
)

KINDS = (EMBEDDING, TIMESTEP)
