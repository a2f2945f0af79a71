"""Linear layers of whose weights a part is kept: packed for a kernel of the generator of `stored`, and multiplied.

`text_of(form)` writes the C++ around one text (cpp/stored_sparse.cpp). A kind says how what is kept is laid: `n of m`
(permutations of a register of x), `listed` (any mask: places by lane), `rowwise` (any mask in float32: rows
of x beside each other) and `blocks`. Activations are of the dtype of what is kept: float32, bfloat16, or
eight bits with a scale for each row. A number of x that is none or infinite counts where a weight is kept; with zeros
that are not kept it may or may not be multiplied. `kinds_of` says which kinds can hold a storage, `repack` lays one
out. Leaves out which kind is fastest (`stored_choice`) and products themselves (`stored.linear`).
Source: nmSPARSE (Lin et al. 2023) for n of m.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.compiler.build import ASKS, CPP, has_compiler, kernel_of
from gnomon.compiler.machine import has_features
from gnomon.storage.blocks import Blocks
from gnomon.storage.form import Arrays, Shape
from gnomon.storage.n_of_m import NM
from gnomon.storage.sparse import Sparse

FORMULA = CPP / "stored_sparse.cpp"
NEEDS = frozenset(
    {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512vbmi", "avx512_vbmi2", "f16c"}
)
FLAGS = "-mavx512vnni -mavx512bf16 -mavx512vbmi -mavx512vbmi2 -mf16c"
SIDE, TASK = 16, 64
"""Outputs of a panel; of a task of rows beside each other."""
FILLED = 8
"""Kept numbers of an output are filled up with zeros to so many, rows beside each other."""
IN_FIRST_CACHE = 4096
"""Numbers of float32 that stay there while kept ones stream by."""
Kind = Literal["n of m", "listed", "rowwise", "blocks"]
Taken: TypeAlias = Kind | Literal["dense"]
"""Or the kernel of the whole matrix."""
NUMBERS: dict[Kind, int] = {"n of m": 0, "listed": 1, "rowwise": 2, "blocks": 3}
"""As cpp/stored_sparse.cpp has them."""
BITS = {"int8": 8, "bf16": 16, "fp32": 32}


class StoredMatmul(ctypes.Structure):
    """The struct `Product` of cpp/stored.h, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "padded", "threads", "wide", "wide_out")],
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "bias")],
        ("factor", ctypes.c_float),
        ("added", ctypes.c_void_p),
        ("added_row", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("room", "starts", "places", "sums")],
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseForm:
    """What a kernel is made for."""

    kind: Kind
    value: str
    """fp32, bf16 or int8: of what is kept, and of activations."""
    n: int = 0
    m: int = 0
    wide: int = 0
    """Columns of a block, or that are gone through at a time (rowwise)."""

    @property
    def per(self) -> int:
        """Kept numbers of a lane in a step."""
        return 32 // BITS[self.value]

    @property
    def block(self) -> int:
        """Columns of a register of x."""
        return 512 // BITS[self.value]

    @property
    def turn(self) -> tuple[int, int, int]:
        """Returns, for n of m, the blocks of columns that a turn of the loop has, its registers of places, and the bits
        of a place."""
        # A place within a group of m: 1, 2 and up to 4 bits. A block of 512 / BITS columns keeps n / m of them, and a
        # step takes 32 / BITS of these a lane: 16 n / m steps for any dtype. A register of places has BITS / bits of
        # them a number; where that is more than the steps of a block, blocks are taken together.
        bits = 1 if self.m == 2 else 2 if self.m == 4 else 4
        fields, steps = BITS[self.value] // bits, 16 * self.n // self.m
        side_by_side = fields // steps if fields > steps else 1
        return side_by_side, -(-steps * side_by_side // fields), bits

    def padded(self, columns: int) -> int:
        by = {
            "n of m": self.block * self.turn[0] if self.m else 0, "listed": 2 * self.block, "rowwise": 1, "blocks": 16,
        }[self.kind]  # fmt: skip
        return -(-columns // by) * by

    def room(self, rows: int, columns: int) -> int:
        """Bytes that a kernel takes for x as it reads it."""
        lanes = -(-rows // 32) * 32 if self.kind == "rowwise" and rows > 1 else rows
        return lanes * self.padded(columns) * BITS[self.value] // 8 + 64 + 4 * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What multiplies by a weight, for products of so many rows."""

    form: Taken
    rows: int
    predicted: Mapping[Taken, float]
    """Seconds."""
    seconds: Mapping[Taken, float]
    """Seconds, of those that were tried."""

    @property
    def why(self) -> str:
        """Says in a line why this form was taken."""

        def times(of: Mapping[Taken, float]) -> str:
            return ", ".join(f"{kind} {1e3 * of[kind]:.3f}" for kind in sorted(of, key=lambda kind: of[kind]))

        tried = f"; measured {times(self.seconds)}" if self.seconds else ""
        return f"{self.form} for {self.rows} rows: predicted ms {times(self.predicted)}{tried}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSparse:
    """A weight as a kernel reads it."""

    shape: Shape
    """(outputs, inputs)."""
    storage: Sparse
    form: SparseForm
    codes: Tensor
    """uint8: kept numbers, with their places where the kind has them side by side."""
    starts: Tensor | None
    """int64."""
    places: Tensor | None
    scales: Tensor | None
    """(outputs,), float32, of int8."""
    sums: Tensor | None
    """(outputs,), int32: the codes of a row added up, of int8."""
    num_weights: int
    """Numbers."""
    choice: KernelChoice | None = None
    """Why this kind was taken."""

    @property
    def by(self) -> str:
        return "kernel"

    @property
    def bytes(self) -> int:
        parts = (self.codes, self.starts, self.places, self.scales, self.sums)
        return sum(one.numel() * one.itemsize for one in parts if one is not None)


def kinds_of(storage: Sparse, shape: Shape) -> tuple[Kind, ...]:
    """The kinds of kernels for a matrix of this storage: one made for its pattern, or those for any mask."""
    if isinstance(storage, NM) and storage.m in (2, 4, 8, 16):
        return ("n of m",)
    if isinstance(storage, Blocks) and not storage.size[0] % SIDE and not storage.size[1] % (32 // BITS[storage.value]):
        return ("blocks",)
    return ("listed", "rowwise") if storage.value == "fp32" else ("listed",)


def form_of(storage: Sparse, kind: Kind, rows: int = 1) -> SparseForm:
    """Returns the form of a storage's kernel. rows: those of the matmuls, which decide how many columns are gone
    through at a time."""
    if kind == "n of m":
        assert isinstance(storage, NM)
        return SparseForm(kind=kind, value=storage.value, n=storage.n, m=storage.m)
    if kind == "blocks":
        assert isinstance(storage, Blocks)
        return SparseForm(kind=kind, value=storage.value, wide=storage.size[1])
    if kind == "rowwise":
        return SparseForm(kind=kind, value=storage.value, wide=IN_FIRST_CACHE if rows == 1 else IN_FIRST_CACHE // 4)
    return SparseForm(kind=kind, value=storage.value)


@cache
def text_of(form: SparseForm) -> str:
    """C++ of a kernel."""
    macros = {
        "KIND": NUMBERS[form.kind], "ACTS": BITS[form.value], "N": form.n, "M": form.m, "WIDE": form.wide,
    }  # fmt: skip
    lines = [f"{ASKS}{FLAGS}", *(f"#define {name} {value}" for name, value in macros.items())]
    return "\n".join(lines) + "\n" + FORMULA.read_text(encoding="utf-8")


@cache
def kernel(form: SparseForm) -> Callable[[Any], int] | None:
    """Compiles the kernel of a form; None where this machine cannot run it or has no compiler."""
    return kernel_of(text_of(form), ctypes.c_void_p) if has_features(NEEDS) and has_compiler() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """What a stored matrix keeps, whatever its form."""

    mask: NDArray[np.bool_]
    """(outputs, inputs)."""
    codes: NDArray[Any]
    """(outputs, inputs) float32, bfloat16 as uint16, or int8; 0 where nothing is kept."""


def kept_of(arrays: Arrays, storage: Sparse, shape: Shape) -> StoredMatrix:
    values = np.asarray(arrays["values"])
    ones = np.ones(values.shape, np.float32)
    mask = storage.spread(arrays, ones, shape) != 0
    codes = storage.spread(arrays, values.astype(np.float32), shape)  # codes of 16 bits are exact in float32
    return StoredMatrix(mask=mask, codes=codes.astype(values.dtype))


def repack(arrays: Arrays, storage: Sparse, shape: Shape, kind: Kind, rows: int = 1) -> PackedSparse:
    """What a file holds of a weight, laid for this machine; no number changes."""
    form = form_of(storage, kind, rows)
    if kind == "n of m":
        assert isinstance(storage, NM)
        values = np.asarray(arrays["values"])
        codes, starts, places = _n_of_m(values, storage.places_of(arrays, shape), form, shape[1]), None, None
        # The kernel has 128 added to x's codes of eight bits: by these sums it is taken off the result again.
        sums = values.astype(np.int32).sum(1, dtype=np.int32) if storage.value == "int8" else None
        nonzeros = values.size
    else:
        one = kept_of(arrays, storage, shape)
        packer = {"listed": _listed, "rowwise": _rowwise, "blocks": _blocks}[kind]
        codes, starts, places = packer(one, form)
        sums = one.codes.astype(np.int32).sum(1, dtype=np.int32) if storage.value == "int8" else None
        nonzeros = int(one.mask.sum())
    scales = np.asarray(arrays["scales"]).astype(np.float32) if storage.value == "int8" else None
    return PackedSparse(
        shape=shape,
        storage=storage,
        form=form,
        codes=torch.from_numpy(np.ascontiguousarray(codes).view(np.uint8).reshape(-1)),
        starts=_tensor(starts),
        places=_tensor(places),
        scales=_tensor(scales),
        sums=_tensor(sums),
        num_weights=nonzeros,
    )


def _tensor(x: NDArray[Any] | None) -> Tensor | None:
    if x is None:
        return None
    x = np.ascontiguousarray(x)
    return torch.from_numpy(x.view(np.int16) if x.dtype == np.uint16 else x)


def _panels(x: NDArray[Any]) -> NDArray[Any]:
    """Arranges outputs as (panels, 16, ...), filled up with zeros."""
    rows = -(-x.shape[0] // SIDE) * SIDE
    return np.pad(x, ((0, rows - x.shape[0]), *((0, 0) for _ in x.shape[1:]))).reshape(-1, SIDE, *x.shape[1:])


def _n_of_m(values: NDArray[Any], places: NDArray[np.uint8], form: SparseForm, columns: int) -> NDArray[np.uint8]:
    """(panels, turns, registers of places and then of numbers, 64)."""
    side_by_side, registers, bits = form.turn
    # Kept numbers of a row, not columns of the matrix.
    padded_columns, steps = form.padded(columns) // form.m * form.n, 16 * form.n // form.m * side_by_side

    def turned(x: NDArray[Any]) -> NDArray[Any]:
        """(panels, turns, steps, 16, per)."""
        filled = np.pad(x, ((0, 0), (0, padded_columns - x.shape[1])))
        return (
            _panels(filled)
            .reshape(-1, SIDE, padded_columns // (steps * form.per), steps, form.per)
            .transpose(0, 2, 3, 1, 4)
        )

    numbers = np.ascontiguousarray(turned(values))
    at = turned(places.reshape(len(places), -1)).astype(f"uint{BITS[form.value]}")
    fields = BITS[form.value] // bits
    words = np.zeros((*at.shape[:2], registers, *at.shape[3:]), at.dtype)
    for step in range(steps):
        # The place that belongs to a step: field `step % fields` of register `step // fields`.
        words[:, :, step // fields] |= at[:, :, step] << at.dtype.type(step % fields * bits)
    sides = [x.view(np.uint8).reshape(*x.shape[:3], 64) for x in (words, numbers)]
    return np.concatenate(sides, 2)


Laid = tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]
"""(codes, starts, places)."""


def _listed(one: StoredMatrix, form: SparseForm) -> Laid:
    """Places of a byte beside numbers, step after step; steps of (panels, twice a register of columns)."""
    rows, columns = one.mask.shape
    # A cell is one output's part of one stretch of `wide` columns. A place within it fits a byte.
    wide, many = 2 * form.block, form.padded(columns) // (2 * form.block)
    row, column = one.mask.nonzero()
    cell = row * many + column // wide
    counts = np.bincount(cell, minlength=rows * many)
    # `nonzero` goes row by row, so cells come in order: the rank within a cell is the position less that of the cell's
    # first.
    rank = np.arange(row.size) - (np.cumsum(counts) - counts)[cell]
    # [panels, stretches]. The 16 outputs of a panel are lanes of one register and walk the same steps, as many as the
    # fullest of them needs; the others' lanes stay 0 there.
    fullest = _panels(counts.reshape(rows, many)).max(1)
    steps = -(-fullest // form.per)
    first = (np.cumsum(steps) - steps.ravel()).reshape(steps.shape)
    step = first[row // SIDE, column // wide] + rank // form.per
    lane = row % SIDE * form.per + rank % form.per
    lanes = SIDE * form.per
    at = np.zeros((int(steps.sum()), lanes), np.uint8)
    numbers = np.zeros((int(steps.sum()), lanes), one.codes.dtype)
    at[step, lane], numbers[step, lane] = column % wide, one.codes[row, column]
    codes = np.concatenate([at, numbers.view(np.uint8).reshape(len(at), 64)], 1)
    # Bytes from the beginning to each panel's first step, and to the end.
    starts = np.concatenate([first[:, 0], [len(at)]]) * codes.shape[1]
    return codes, starts.astype(np.int64), steps.astype(np.uint8)


def _rowwise(one: StoredMatrix, form: SparseForm) -> Laid:
    """Kept numbers by TASK outputs, by `wide` columns, by output, by column."""
    rows, columns = one.mask.shape
    turns = -(-columns // form.wide)
    row, column = one.mask.nonzero()
    # The order in which the kernel reads: task, stretch of columns, output. A stable sort leaves columns ascending
    # within.
    cell = (row // TASK * turns + column // form.wide) * TASK + row % TASK
    order = np.argsort(cell, kind="stable")
    counts = np.bincount(cell, minlength=-(-rows // TASK) * turns * TASK)
    starts = _starts(-(-counts // FILLED) * FILLED)
    # The position in sorted order, moved by what the cells before were filled up with.
    to = np.arange(row.size) + np.repeat(starts[:-1] - (np.cumsum(counts) - counts), counts)
    numbers, places = np.zeros(starts[-1], one.codes.dtype), np.zeros(starts[-1], np.uint16)
    numbers[to], places[to] = one.codes[row[order], column[order]], column[order] % form.wide
    return numbers, starts, places


def _blocks(one: StoredMatrix, form: SparseForm) -> Laid:
    rows, columns = one.mask.shape
    tiles = one.codes.reshape(rows // SIDE, SIDE, columns // form.wide, form.wide).swapaxes(1, 2)
    nonzero_tiles = np.asarray(one.mask.reshape(rows // SIDE, SIDE, columns // form.wide, form.wide).any(axis=(1, 3)))
    numbers = tiles[nonzero_tiles].reshape(-1, SIDE, form.wide // form.per, form.per).swapaxes(1, 2)
    return (
        np.ascontiguousarray(numbers),
        _starts(nonzero_tiles.sum(1)),
        (nonzero_tiles.nonzero()[1] * form.wide).astype(np.int32),
    )


def _starts(counts: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def sparse_matmul(packed: PackedSparse, bias: Tensor | None) -> StoredMatmul:
    """What a kernel is told of a weight, as `stored.stored_matmul`."""
    n, k = packed.shape
    return StoredMatmul(
        n=n, k=k, padded=packed.form.padded(k), codes=_place(packed.codes), starts=_place(packed.starts),
        places=_place(packed.places), scales=_place(packed.scales), sums=_place(packed.sums), bias=_place(bias),
        factor=1.0,
    )  # fmt: skip


def _place(one: Tensor | None) -> int | None:
    return None if one is None else one.data_ptr()
