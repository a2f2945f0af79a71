"""Normalisation: `norm`, and the `row_stats` that an RMSNorm in steps has.

`fn` is rms, layer or group; statistics are fp32. Leaves out scales that no statistics belong to (`elementwise`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gnomon.errors import GraphError
from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.curve import once, passes
from gnomon.ops.divided import BOTH, own_collective, row_elements, with_inside
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import Op, Problem, RuledCall, Steps, Tensors
from gnomon.ops.rules import cannot_write, first_dims, per_element, per_element_back
from gnomon.ops.strategy import Division, Strategy
from gnomon.tensors.dims import Dim, size_of
from gnomon.tensors.tensor import Tensor

PARTS_OF_ROWS = "parts_of_rows"
"""Strategy of a norm whose rows tp divides: heads that are normed together (OLMo-2's queries and keys)."""


def _row_dims(op: Op, block: Tensors) -> Problem:
    """All dims but one."""
    x, out = block.tensor(op.inputs[0]).dims, block.tensor(op.outputs[0]).dims
    ways = [x[:at] + x[at + 1 :] for at in range(len(x))]
    return None if out in ways else cannot_write(op, block)


def _saves_norm(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Input, weight and statistics."""
    return (*op.inputs[:2], *op.outputs[1:])


def _saves_stats(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    return (op.inputs[0], op.outputs[0])


def _steps(op: Op, low: Steps, kernels: Kernels) -> None:
    fused = kernels.norm == "fused" or op.attr("fn", "") != "rms"
    x = low.block.tensor(op.inputs[0])
    over = str(op.attr("over", ""))
    if over not in [d.name for d in x.dims]:
        raise GraphError(f"{low.name}/{op.path}: norm over {over!r}, which is not a dim of {x}")
    outer_dims = tuple(d for d in x.dims if d.name != over)
    if op.attr("fn", "") == "group":  # statistics of a sample and group, over all positions
        groups = op.attr("groups", 0)
        assert isinstance(groups, int), "written by BlockBuilder.norm"
        outer_dims = (x.dims[0], Dim(name="norm_groups", size=groups))
    row = Tensor(name=f"{op.path}:rstd", dims=outer_dims, dtype="fp32")
    in_fp32 = op.attr("fp32", "") if kernels.norm == "unfused" else ""
    if in_fp32:
        _layer_norm_in_fp32(op, low, row, one_kernel=in_fp32 == "wide")
        return
    if fused:
        # RMS needs no mean, so nothing keeps one.
        mean = () if op.attr("fn", "") == "rms" else (replace(row, name=f"{op.path}:mean"),)
        low.emit(op, *mean, row)
        return
    wide = replace(x, name="wide", dtype="fp32", kind="activation")
    copy = low.step(op, "fp32", "cast", (x.name,), wide)
    # mean of squares and rsqrt: reads the fp32 copy, writes one number a row
    low.tensors.append(row)
    low.ops.append(Op(kind="row_stats", path=row.name, inputs=(copy,), outputs=(row.name,)))
    scaled = low.step(op, "scaled", "mul", (copy, row.name), wide)
    if len(op.inputs) == 1:
        low.ops.append(replace(op, kind="cast", inputs=(scaled,), attrs=()))
        return
    if op.attr("wide", False):  # the weight is multiplied in fp32, and what that makes is narrowed
        weighed = low.step(op, "weighed", "mul", (scaled, *op.inputs[1:]), wide)
        low.ops.append(replace(op, kind="cast", inputs=(weighed,), attrs=()))
        return
    normed = low.step(op, "normed", "cast", (scaled,), replace(x, kind="activation"))
    low.ops.append(replace(op, kind="mul", inputs=(normed, *op.inputs[1:]), attrs=()))


def _layer_norm_in_fp32(op: Op, low: Steps, row: Tensor, *, one_kernel: bool) -> None:
    """A LayerNorm over rows that are widened before and narrowed behind. one_kernel: torch's, which keeps the wide
    rows; else it subtracts the mean twice, and each difference is kept, for the squares and for the product."""
    x = low.block.tensor(op.inputs[0])
    wide = replace(x, name="wide", dtype="fp32", kind="activation")
    copy = low.step(op, "fp32", "cast", (x.name,), wide)
    if one_kernel:
        normed = Tensor(name=f"{op.path}:normed", dims=x.dims, dtype="fp32")
        low.tensors.append(normed)
        mean = replace(row, name=f"{op.path}:mean")
        low.emit(replace(op, inputs=(copy, *op.inputs[1:]), outputs=(normed.name,)), mean, row)
        low.ops.append(Op(kind="cast", path=f"{op.path}:narrow", inputs=(normed.name,), outputs=op.outputs))
        return
    centred, again = (low.step(op, name, "scale", (copy,), wide) for name in ("centred", "centred_again"))
    low.tensors.append(row)
    low.ops.append(Op(kind="row_stats", path=row.name, inputs=(centred,), outputs=(row.name,)))
    scaled = low.step(op, "scaled", "mul", (again, row.name), wide)
    weighed = low.step(op, "weighed", "mul", (scaled, *op.inputs[1:2]), wide) if len(op.inputs) > 1 else scaled
    low.ops.append(replace(op, kind="cast", inputs=(weighed,), attrs=()))


def _norm(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """A norm over a dim that tp divides adds up its fp32 statistics over the ranks: one a row (rms) or two, forward
    and backward. So does a group norm of an image that cp divides: two for each group of each image."""
    over = str(op.attr("over", ""))
    if op.attr("fn", "") == "group" and plain.inputs[0].dim_of("cp") is not None:
        groups = op.attr("groups", 32)
        assert isinstance(groups, int)
        images = size_of(setting.block.tensor(op.inputs[0]).dims[0], setting.scene.sizes)
        sums = tuple(
            own_collective(op, setting, "all_reduce", "cp", images * groups * 8, phase, op.inputs[0]) for phase in BOTH
        )
        return (with_inside(plain, "local", sums),)

    divided = plain.inputs[0].dim_of("tp")
    whole = next((dim for dim in setting.block.tensor(op.inputs[0]).dims if dim.name == over), None)
    if divided is None or whole is None or divided not in [over, *(atom.name for atom in whole.atoms)]:
        return (plain,)  # ranks have whole rows
    # fp32: a sum of squares a row, and for a layer norm the sum too.
    size = row_elements(op, setting, plain.inputs[0], over) * (4 if op.attr("fn", "") == "rms" else 8)
    inside = tuple(own_collective(op, setting, "all_reduce", "tp", size, phase, op.inputs[0]) for phase in BOTH)
    return (with_inside(plain, PARTS_OF_ROWS, inside),)


NORM = replace(
    MOVES_BYTES,
    name="norm",
    signature="x[, weight][, bias] -> x; fn: rms | layer | group; over, groups, eps; wide: the product in fp32; "
    "fp32: wide | steps",
    dims=first_dims,
    saves=_saves_norm,
    forward=per_element(6),
    backward=per_element_back(9),
    steps=_steps,
    fused_by="norm",
    price=once("reduce"),
    grad_price=once("reduce_grad", kernels=2),  # input gradient; column sums for weight and bias
    calibrated="rows read",
    begins="ones",
    strategies=_norm,
    does="normalises",
    calls=(RuledCall(function="layer_norm", rule="norm"), RuledCall(function="rms_norm", rule="norm")),
    zeros="of the weight",
    torch="norm:norm",
)

ROW_STATS = replace(
    MOVES_BYTES,
    name="row_stats",
    signature="x -> one number a row: mean of squares, then rsqrt",
    dims=_row_dims,
    saves=_saves_stats,
    forward=per_element(2),
    backward=per_element_back(2),
    price=passes(4, 3.0, "reduce"),  # square, mean, add epsilon, rsqrt
    grad_price=passes(4, 3.0),
    zeros="unknown",
    torch="lowered",
)

KINDS = (NORM, ROW_STATS)
