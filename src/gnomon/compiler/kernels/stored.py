"""Linear layers whose weights are stored in few bits: packed once for the machine, multiplied by kernels of one
generator.

    packed = pack(weight, storage_of("int4-g64"))       # or repack(arrays, storage, shape), of what a file holds
    y = linear(x, packed, bias)

`text_of` writes the C++ of a kernel for any (bits, group, zeros, table), activations in eight bits, bfloat16 or fp32,
and any instruction set of `lanes` around one loop (cpp/stored.cpp). Activations in eight bits have a scale for each row
and group, as llama.cpp and OpenVINO have them, and the product is then exact but for float32's sums; in bfloat16
weights are exact too (but for NF4's, whose numbers are rounded to it), and float32 is for weights in float32. Which of
them is said by `activations`. A weight is laid for the set that its shape fills best of those that the machine has
(`lanes_of`). Where there is no compiler it is widened in each call, which is slow and the same product; `by` of it
says so. Without gradients, on a CPU; on a GPU the same storages are printed as Triton (`stored_triton`). What is
sparse is laid as `stored_choice` says, by `stored_sparse` or whole.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.compiler.build import ASKS, CPP, has_compiler, kernel_of
from gnomon.compiler.kernels import stored_rounded, stored_sparse, stored_triton
from gnomon.compiler.kernels.lanes import Lanes, lanes_for, lanes_of
from gnomon.compiler.kernels.large_pages import LargePages
from gnomon.compiler.kernels.stored_choice import NEAR, predicted
from gnomon.compiler.kernels.stored_sparse import KernelChoice, PackedSparse, StoredMatmul, Taken
from gnomon.compiler.kernels.stored_triton import OnGpu
from gnomon.compiler.machine import has_features, this_machine
from gnomon.compiler.text.triton_module import has_triton
from gnomon.compiler.tiles.tile_cost import best, rates
from gnomon.errors import InputError
from gnomon.storage.dense import Dense, bfloat16_of
from gnomon.storage.form import Storage
from gnomon.storage.integers import Integers
from gnomon.storage.sparse import Sparse
from gnomon.storage.tables import NF4, NF4_BLOCK, NF4_CODES

FORMULA = CPP / "stored.cpp"
TRIES, TRIED_S = 4, 0.01
"""Rounds in which kernels are tried beside each other at least; seconds before which they are not over, since what else
a machine does takes as long as a few products of a tenth of a millisecond."""
PARALLEL = 1 << 20
"""Multiplications from which on threads share a product."""
Activations = Literal["int8", "bf16", "fp32"]
BITS: Mapping[Activations, int] = {"int8": 8, "bf16": 16, "fp32": 32}
VALUES: Mapping[str, Activations] = {"bf16": "bf16", "fp32": "fp32"}
Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """What a kernel is made for."""

    bits: int
    """Of a code: 2, 4, 8; 16 and 32 for numbers of bfloat16 and float32."""
    group: int
    """Columns that share a scale; 0: all."""
    activations: Activations
    half: bool
    """Scales in float16, else float32."""
    lanes: Lanes
    """The instruction set."""
    zeros: bool = False
    zero: int = 0
    table: tuple[float, ...] = ()
    """What codes stand for, with activations in bfloat16."""
    range: int = 0
    """Steps of activations from the least to the largest number of all rows, which then have one scale and one zero
    (`dynamic`); 0: a scale for each row and group."""

    @property
    def side(self) -> int:
        """Outputs of a panel."""
        return self.lanes.side

    @property
    def step(self) -> int:
        """Columns of a register of a panel."""
        return self.interleave * (BITS[self.activations] // self.bits)

    @property
    def interleave(self) -> int:
        """Columns that lie beside each other: four codes, two numbers of bfloat16, one of float32."""
        return 32 // BITS[self.activations]

    @property
    def needs(self) -> frozenset[str]:
        """Returns the processor's flags in /proc/cpuinfo that the kernel needs."""
        return self.lanes.needed(BITS[self.activations])

    def padded(self, columns: int) -> int:
        by = self.group or self.step
        return -(-columns // by) * by

    def room(self, rows: int, columns: int) -> int:
        """Bytes that a kernel takes for x as it reads it."""
        padded = self.padded(columns)
        groups = padded // self.group if self.group else 1
        each = self.lanes.pair_bytes // 2 if self.activations == "bf16" else BITS[self.activations] // 8
        # A float32 scale and an int32 sum of codes for each row and group.
        return rows * padded * each + 64 + 8 * rows * groups + 12  # the last of how all of x is rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStored:
    """A weight as a kernel reads it."""

    shape: tuple[int, int]
    """(outputs, inputs)."""
    storage: Storage
    form: StoredForm
    codes: Tensor
    """uint8 (panels, steps, bytes of a register)."""
    scales: Tensor | None
    """(panels, groups, outputs of a panel)."""
    zeros: Tensor | None
    arrays: Arrays | None = field(default=None, repr=False)
    """What it was packed from, where it is widened in each call."""
    choice: KernelChoice | None = None
    """Why a sparse weight is laid whole."""

    @property
    def by(self) -> str:
        """Says what computes it: `kernel`, or `widened`: this machine has no compiler."""
        return "kernel" if self.arrays is None else "widened"

    @property
    def num_weights(self) -> int:
        """Numbers that are multiplied by."""
        return self.shape[0] * self.shape[1]

    @property
    def bytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros)
        return sum(one.numel() * one.itemsize for one in parts if one is not None)


def form_of(storage: Storage, activations: Activations = "int8", lanes: Lanes | None = None) -> StoredForm:
    """The kernel for a storage. lanes: None for the widest that this machine has. InputError where none is written."""
    if isinstance(storage, Dense) and storage.dtype in VALUES:
        how = VALUES[storage.dtype]
        return StoredForm(bits=BITS[how], group=0, activations=how, half=False, lanes=lanes or lanes_for(BITS[how]))
    lanes = lanes or lanes_for(BITS[activations])
    if isinstance(storage, NF4):
        return StoredForm(bits=4, group=NF4_BLOCK, activations="bf16", half=False, table=NF4_CODES, lanes=lanes)
    if isinstance(storage, Integers) and not (activations == "bf16" and storage.bits == 8):
        bits = 4 if storage.bits == 3 else storage.bits  # each in the room of four
        form = StoredForm(
            bits=bits, group=storage.group, activations=activations, half=storage.scale == "float16",
            lanes=lanes, zeros=storage.zeros, zero=storage.zero,
            table=() if activations == "int8" else tuple(
                float(code - (0 if storage.zeros else storage.zero)) for code in range(2**bits)
            ),
        )  # fmt: skip
        if storage.group % form.step == 0:
            return form
        raise InputError(
            f"{storage.name} is multiplied in steps of {form.step} columns; take a group of a multiple of it"
        )
    raise InputError(
        f"no kernel multiplies by {storage.name} with activations in {activations}; there are those for int8, int4, "
        f"int2 and ternary weights (int8), int4, int2, ternary, nf4 and bf16 (bf16), and fp32: convert it, or widen it"
    )


@cache
def text_of(form: StoredForm) -> str:
    """C++ of a kernel."""
    table = [int(one) for one in bfloat16_of(np.asarray(form.table, np.float32))] if form.table else []
    macros = {
        "BITS": form.bits, "GROUP": form.group, "ACTS": BITS[form.activations], "HALF": int(form.half),
        "ZEROS": int(form.zeros), "ZERO": form.zero, "TABLE": ", ".join(map(str, (table * 32)[:32] or [0] * 32)),
        "LANES": f'"{form.lanes.header}"', "VNNI": int(form.lanes.vnni), "RANGE": form.range,
    }  # fmt: skip
    lines = [
        ASKS + (form.lanes.flags if form.activations == "int8" else ""),
        *(f"#define {name} {value}" for name, value in macros.items()),
    ]
    return "\n".join(lines) + "\n" + FORMULA.read_text(encoding="utf-8")


@cache
def kernel(form: StoredForm) -> Callable[[Any], int] | None:
    """Compiles the kernel of a form; None where this machine cannot run it or has no compiler."""
    return kernel_of(text_of(form), ctypes.c_void_p) if has_features(form.needs) and has_compiler() else None


AnyPacked: TypeAlias = PackedStored | PackedSparse


def pack(weight: Tensor, storage: Storage, activations: Activations = "int8", rows: int = 1) -> AnyPacked | OnGpu:
    """A weight (outputs, inputs), rounded to the nearest that can be stored so. InputError where it cannot.
    rows: that most products have, by which the kernel of a sparse weight is chosen; it multiplies any number. One on a
    GPU is multiplied there, by rows of any dtype (`stored_triton`)."""
    if weight.is_cuda:
        if not has_triton():
            raise InputError("a weight on a GPU is multiplied by Triton's kernels: pip install 'gnomon[triton]'")
        return stored_triton.pack(weight, storage)
    shape = (weight.shape[0], weight.shape[1])
    if why := storage.refused(shape):
        raise InputError(why)
    finite = not weight.numel() or all(bool(one.isfinite()) for one in weight.aminmax())
    if (
        isinstance(storage, Integers)
        and finite
        and (rounded := round_parts([weight], storage, activations)) is not None
    ):
        return rounded
    return repack(storage.narrow(weight.detach().float().numpy()), storage, shape, activations, rows)


def round_parts(
    parts: Sequence[Tensor], storage: Integers, activations: Activations = "int8", memory: LargePages | None = None
) -> PackedStored | None:
    """What `pack` makes of matrices one below the other, whose numbers are finite, in one pass; None where there is no
    kernel for it, or none that multiplies by it. InputError where they cannot be stored so. memory: as in `repack`."""
    shape = sum(map(len, parts)), parts[0].shape[1]
    form = form_of(storage, activations)
    form = replace(form, lanes=lanes_of(shape[0], BITS[activations]))
    if activations != "int8" or kernel(form) is None:
        return None
    rounded = stored_rounded.rounded(parts, storage, form.side, form.padded(shape[1]), memory)
    if rounded is None:
        return None
    return PackedStored(shape=shape, storage=storage, form=form, codes=rounded[0], scales=rounded[1], zeros=None)


TOGETHER = 1 << 18
"""Bytes of rows that are laid at a time, so that what is converted on the way stays in cache."""


def lay_parts(parts: Sequence[Tensor], numbers: Dense, memory: LargePages | None = None) -> PackedStored | None:
    """What `repack` makes of matrices one below the other as `numbers`, each read once, of any dtype; None where a
    panel would have rows of two of them, or columns are filled up, or no kernel multiplies by it. memory: as in
    `repack`."""
    shape = sum(map(len, parts)), parts[0].shape[1]
    form = form_of(numbers, VALUES[numbers.dtype])
    form = replace(form, lanes=lanes_of(shape[0], BITS[form.activations]))
    side, beside = form.side, form.interleave
    if any(len(part) % side for part in parts) or shape[1] % form.step or kernel(form) is None:
        return None
    dtype = torch.bfloat16 if numbers.dtype == "bf16" else torch.float32
    laid = shape[0] // side, shape[1] // beside, side
    codes = torch.empty(laid, dtype=torch.int32) if memory is None else memory.empty(laid, torch.int32)
    rows = side * max(1, TOGETHER // (side * shape[1] * dtype.itemsize))
    panel = 0
    for part in parts:
        for some in part.detach().split(rows):
            words = some.to(dtype).contiguous().view(torch.int32).view(-1, side, laid[1])
            codes[panel : panel + len(words)] = words.transpose(1, 2)
            panel += len(words)
    return PackedStored(shape=shape, storage=numbers, form=form, codes=codes.view(torch.uint8), scales=None, zeros=None)


def repack(
    arrays: Arrays,
    storage: Storage,
    shape: tuple[int, int],
    activations: Activations = "int8",
    rows: int = 1,
    memory: LargePages | None = None,
) -> AnyPacked:
    """What a file holds of a weight, laid for this machine; no number changes. rows: as `pack` has them. memory: where
    codes are laid; None: each weight has its own. A sparse weight is multiplied with activations of the dtype of what
    it keeps, and has its own memory."""
    if why := storage.refused(shape):
        raise InputError(why)
    if isinstance(storage, Sparse):
        return _chosen(arrays, storage, shape, rows)
    return _laid_whole(arrays, storage, shape, activations, memory)


def has_sparse() -> bool:
    """Whether this machine has kernels of sparse weights."""
    return stored_sparse.kernel(stored_sparse.SparseForm(kind="listed", value="bf16")) is not None


def _chosen(arrays: Arrays, storage: Sparse, shape: tuple[int, int], rows: int) -> AnyPacked:
    """Laid as is fastest for so many rows: by prediction, and by trial among those that are near the best."""
    if not has_sparse():
        return as_kind(arrays, storage, shape, "dense")
    predictions = predicted(storage, shape, rows, rates(), this_machine())
    near = sorted(
        (kind for kind in predictions if predictions[kind] <= NEAR * min(predictions.values())),
        key=lambda kind: predictions[kind],
    )
    packed_forms = {kind: as_kind(arrays, storage, shape, kind, rows) for kind in near}
    measured: dict[Taken, float] = {}
    if len(near) > 1:
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(0))
        # A thread's own time, where there is one thread: it does not count while others have the core.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        began, rounds = time.perf_counter(), 0
        while rounds < TRIES or time.perf_counter() - began < TRIED_S:
            rounds += 1
            for kind, packed in packed_forms.items():  # in turn, so that what else the machine does befalls all
                took = best(lambda packed=packed: linear(x, packed), 2, clock)  # type: ignore[misc]
                measured[kind] = min(took, measured.get(kind, took))
    fastest = min(measured, key=lambda kind: measured[kind]) if measured else near[0]
    return replace(
        packed_forms[fastest], choice=KernelChoice(form=fastest, rows=rows, predicted=predictions, seconds=measured)
    )


def as_kind(arrays: Arrays, storage: Sparse, shape: tuple[int, int], kind: Taken, rows: int = 1) -> AnyPacked:
    """A sparse weight for one kernel, whether or not it is the fastest."""
    if kind != "dense":
        return stored_sparse.repack(arrays, storage, shape, kind, rows)
    if storage.value == "int8":
        kept_values = stored_sparse.kept_of(arrays, storage, shape).codes
        # Integers of eight bits are stored with their zero, 128, added; in 16 bits, as the sum leaves those of int8.
        codes, scales = (kept_values.astype(np.int16) + 128).astype(np.uint8), np.asarray(arrays["scales"])[:, None]
        whole = Integers(bits=8, group=0)
        return _laid_whole(whole.of_codes(codes, scales), whole, shape, "int8")
    numbers, how = Dense(dtype=storage.value), VALUES[storage.value]
    return _laid_whole(numbers.narrow(storage.widen(arrays, shape)), numbers, shape, how)


def _laid_whole(
    arrays: Arrays,
    storage: Storage,
    shape: tuple[int, int],
    activations: Activations,
    memory: LargePages | None = None,
) -> PackedStored:
    form = form_of(storage, activations)
    form = replace(form, lanes=lanes_of(shape[0], BITS[form.activations]))
    if isinstance(storage, NF4) and shape[1] % NF4_BLOCK:
        raise InputError(
            f"nf4: blocks of {NF4_BLOCK} run across rows of {shape[1]:,} columns; no kernel multiplies by it"
        )
    runs = kernel(form) is not None
    if isinstance(storage, Dense):
        words = np.asarray(arrays["values"]).view(np.uint16 if storage.dtype == "bf16" else np.uint32)
        codes, scales, zeros = _laid(words, form, memory), None, None
    elif isinstance(storage, NF4):
        packed = np.asarray(arrays["codes"]).view(np.uint8)
        # The first of two codes is in the upper four bits.
        both = np.stack([packed >> np.uint8(4), packed & np.uint8(15)], -1).reshape(shape)
        codes = _laid(both.astype(np.uint16), form, memory)
        scales, zeros = _laid_scales(np.asarray(arrays["scales"], np.float32).reshape(shape[0], -1), form.side), None
    else:
        assert isinstance(storage, Integers)
        plain = storage.codes_of(arrays, shape)
        codes = _laid(plain if form.activations == "int8" else plain.astype(np.uint16), form, memory)
        scales = _laid_scales(np.asarray(arrays["scales"]), form.side)
        zeros = _laid_scales(np.asarray(arrays["zeros"]).astype(np.float32), form.side) if storage.zeros else None
    return PackedStored(
        shape=shape,
        storage=storage,
        form=form,
        codes=codes,
        scales=scales,
        zeros=zeros,
        arrays=None if runs else arrays,
    )


def _panels(codes: NDArray[Any], form: StoredForm) -> NDArray[Any]:
    """(panels, steps, layers, outputs, codes side by side): outputs and inputs filled up with zeros."""
    rows, columns = codes.shape
    padded = np.zeros((-(-rows // form.side) * form.side, form.padded(columns)), codes.dtype)
    padded[:rows, :columns] = codes
    # A row is (panel, output); a column is (step, layer, place beside each other).
    shape = (-1, form.side, padded.shape[1] // form.step, form.step // form.interleave, form.interleave)
    return padded.reshape(shape).transpose(0, 2, 3, 1, 4)


def _laid(codes: NDArray[Any], form: StoredForm, memory: LargePages | None) -> Tensor:
    """Lays codes out as the kernel reads them: (panels, steps, bytes of a register), of codes in bytes or in
    words."""
    if (
        form.step == form.interleave
        and codes.shape[0] % form.side == 0
        and codes.shape[1] == form.padded(codes.shape[1])
    ):
        whole = torch.from_numpy(
            np.ascontiguousarray(codes).view(np.int32).reshape(-1, form.side, codes.shape[1] // form.interleave)
        )
        turned = whole.transpose(1, 2)  # a step has one code a place: nothing lies over it
        return (turned.contiguous() if memory is None else memory.hold(turned)).view(torch.uint8)
    parts = _panels(codes, form)
    out = np.zeros((*parts.shape[:2], *parts.shape[3:]), codes.dtype)
    for layer in range(parts.shape[2]):
        # Layer l has the bits from l x bits on of every byte or word of a register.
        out |= parts[:, :, layer] << codes.dtype.type(form.bits * layer % (8 * codes.itemsize))
    laid = torch.from_numpy(np.ascontiguousarray(out).view(np.uint8).reshape(*parts.shape[:2], 4 * form.side))
    return laid if memory is None else memory.hold(laid)


def _laid_scales(scales: NDArray[Any], side: int) -> Tensor:
    """(rows, groups) -> (panels, groups, side)."""
    rows, many = scales.shape
    padded = np.zeros((-(-rows // side) * side, many), scales.dtype)
    padded[:rows] = scales
    return torch.from_numpy(np.ascontiguousarray(padded.reshape(-1, side, many).transpose(0, 2, 1)))


def linear(x: Tensor, packed: AnyPacked | OnGpu, bias: Tensor | None = None) -> Tensor:
    """x (..., inputs) in float32 or bfloat16 -> (..., outputs) of its dtype. A row with a NaN or an infinity is NaN
    where activations have eight bits."""
    if isinstance(packed, stored_triton.OnGpu):
        return stored_triton.linear(x, packed, bias)
    n, k = packed.shape
    if x.shape[-1] != k or x.dtype not in (torch.float32, torch.bfloat16):
        raise InputError(
            f"a weight of {n} x {k} multiplies rows of {k} in float32 or bfloat16, not {tuple(x.shape)} {x.dtype}"
        )
    if isinstance(packed, PackedStored) and packed.arrays is not None:
        weight = torch.from_numpy(packed.storage.widen(packed.arrays, packed.shape))
        return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)
    rows = x.reshape(-1, k)
    # The stride of a dim of one element says nothing; below, the same of one row.
    if rows.stride(-1) != 1 and k > 1:
        rows = rows.contiguous()
    m, form = rows.shape[0], packed.form
    out = torch.empty((m, n), dtype=x.dtype)
    if m and n:
        room = torch.empty(form.room(m, k), dtype=torch.uint8)
        wide_bias = None if bias is None else bias.float().contiguous()
        call = stored_matmul(packed, wide_bias)
        call.m, call.threads = m, torch.get_num_threads() if m * packed.num_weights >= PARALLEL else 1
        call.wide = call.wide_out = x.dtype == torch.float32
        call.x, call.x_row, call.out, call.out_row = rows.data_ptr(), rows.stride(0) if m > 1 else k, out.data_ptr(), n
        call.room = room.data_ptr()
        run = function_of(packed)
        assert run is not None
        run(ctypes.addressof(call))
    return out.view(*x.shape[:-1], n)


def function_of(packed: AnyPacked) -> Callable[[Any], int] | None:
    """The kernel that multiplies by it, which takes the address of `stored_matmul`; None where it is widened."""
    if isinstance(packed, PackedSparse):
        return stored_sparse.kernel(packed.form)
    return kernel(packed.form) if packed.arrays is None else None


def rows_of(packed: AnyPacked, ids: Tensor) -> Tensor:
    """(ids, inputs) of a weight, its numbers as they are or float32 of codes of eight bits: of a table of embeddings
    that is a head's matrix too."""
    n, k = packed.shape
    assert isinstance(packed, PackedStored) and packed.arrays is None, "a head is laid whole"
    assert packed.form.step == packed.form.interleave, "a step has one code a place"
    side = packed.form.side
    # [panels, steps, outputs of a panel, 4 bytes]: an output's bytes of all steps, one after another, are its row.
    at = packed.codes.view(-1, packed.codes.shape[1], side, 4)[ids // side, :, ids % side].flatten(1)
    if packed.scales is None:
        return at.view(torch.bfloat16 if packed.form.bits == 16 else torch.float32)[:, :k]
    assert packed.form.bits == 8 and not packed.form.group and packed.zeros is None
    scales = packed.scales[ids // side, 0, ids % side].float()
    return (at[:, :k].float() - packed.form.zero) * scales[:, None]


def stored_matmul(packed: AnyPacked, bias: Tensor | None) -> StoredMatmul:
    """What a kernel is told of a weight, whose tensors must outlive it; rows are the caller's to say. bias: float32."""
    if isinstance(packed, PackedSparse):
        return stored_sparse.sparse_matmul(packed, bias)
    n, k = packed.shape
    return StoredMatmul(
        n=n, k=k, padded=packed.form.padded(k), codes=packed.codes.data_ptr(), scales=_place(packed.scales),
        zeros=_place(packed.zeros), bias=_place(bias), factor=1.0,
    )  # fmt: skip


def _place(one: Tensor | None) -> int | None:
    return None if one is None else one.data_ptr()
