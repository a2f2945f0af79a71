"""Several linear layers behind each other as one kernel: what lies between two of them never goes to memory.

A block of rows goes through all layers before the next begins (cpp/linears.cpp), with the tile of one layer
(cpp/linear.h), pointwise work behind each product in registers and a layer norm before the first. All weights have to
stay in the second cache (`fit`): LoRA's two, an adapter's, a product of low rank, layers of few features. Float32 on a
CPU. Leaves out which layers (`chains`).
Source: Welder (OSDI 2023): tiles of operators are connected at the level of memory that holds them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.kernels.linear import MOST_OTHERS, PARALLEL, Ended, least_of, other_fields, tile_text
from gnomon.compiler.tiles.device import DeviceDescription
from gnomon.compiler.tiles.matmul_tile import MatmulTile, constructed

FORMULA = CPP / "linears.cpp"
MOST = 8
"""Layers of a kernel: with more its struct is larger than a step's may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersForm:
    """What a kernel is compiled for."""

    tile: MatmulTile
    widths: tuple[int, ...]
    """Vectors of a panel of each layer."""
    ended: tuple[Ended, ...]
    """What follows each product."""
    normed: bool = False
    least: int = 1
    """Rows of a block at least, as of `linear.LinearForm`."""


def form_of(
    sizes: Sequence[tuple[int, int, int]], ended: tuple[Ended, ...], normed: bool, device: DeviceDescription
) -> LayersForm:
    """The form of layers of sizes (m, n, k): the tile is that of the one that multiplies most."""
    m, n, k = max(sizes, key=lambda one: one[1] * one[2])
    tile = constructed(m, n, k, device)[0]
    widths = tuple(_width(n, tile, device) for _, n, _ in sizes)
    return LayersForm(tile=tile, widths=widths, ended=ended, normed=normed, least=least_of(m, tile))


def _width(n: int, tile: MatmulTile, device: DeviceDescription) -> int:
    # A narrow layer's panel has no vectors beyond its last output.
    return min(tile.vectors, -(-n // device.vectors.lanes))


def fit(sizes: Sequence[tuple[int, int, int]], device: DeviceDescription) -> bool:
    """Whether the weights of layers of sizes (m, n, k) stay in half of the second cache, in panels."""
    lanes = device.vectors.lanes
    return sum(4 * -(-n // lanes) * lanes * k for _, n, k in sizes) <= device.levels[1].size // 2


@cache
def source(form: LayersForm) -> str:
    """The C++ text of a form."""
    begin = [f"#define STAGES {len(form.widths)}", f"#define WIDTHS {', '.join(map(str, form.widths))}"]
    begin += [f"#define LEAST {form.least}"] if form.least > 1 else []
    return "\n".join([*tile_text(form.tile, form.normed, form.ended, begin), FORMULA.read_text(encoding="utf-8")])


@cache
def struct(layers: int) -> type[ctypes.Structure]:
    """The struct `Layers` of cpp/linears.cpp for so many layers, field by field; a layer's number ends its fields'
    names."""
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    fields: list[tuple[str, Any]] = [("m", number), ("threads", number), ("x", pointer), ("x_row", number)]
    fields += [("norm_gamma", pointer), ("norm_beta", pointer), ("norm_eps", ctypes.c_double), ("out", pointer)]
    for s in range(layers):
        fields += [(f"n_{s}", number), (f"k_{s}", number), (f"w_{s}", pointer)]
        fields += [(f"w_n_{s}", number), (f"w_k_{s}", number), (f"bias_{s}", pointer), *other_fields(f"_{s}")]
    return type("LayersCall", (ctypes.Structure,), {"_fields_": fields})


@cache
def kernel(form: LayersForm) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(source(form), ctypes.POINTER(struct(len(form.widths))))


def filled(x: Tensor, weights: Sequence[Tensor], rows: Sequence[Sequence[int]], eps: float) -> Any:
    """The struct without addresses. x (m, k), numbers of a row beside each other; weights (n, k), either way; rows: of
    each layer, from one row to the next of what its work reads beside the product, 0 where that is one row; eps: of
    the norm."""
    call = struct(len(weights))()
    call.m, call.x_row, call.norm_eps = x.shape[0], x.stride(0), eps
    work = sum(w.shape[0] * w.shape[1] for w in weights) * x.shape[0]
    call.threads = 0 if work >= PARALLEL else 1
    for s, (w, others) in enumerate(zip(weights, rows, strict=True)):
        assert len(others) <= MOST_OTHERS
        for name, value in (("n", w.shape[0]), ("k", w.shape[1]), ("w_n", w.stride(0)), ("w_k", w.stride(1))):
            setattr(call, f"{name}_{s}", value)
        for i, row in enumerate(others):
            setattr(call, f"other_row{i}_{s}", row)
    return call


def run(form: LayersForm, call: Any) -> bool:
    """Whether the kernel ran on a struct with its addresses."""
    function = kernel(form)
    if not call.threads:
        call.threads = torch.get_num_threads()
    return function is not None and not function(call)
