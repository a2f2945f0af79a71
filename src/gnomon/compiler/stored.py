"""Linear layers whose weights are stored in few bits: packed once for the machine, multiplied by kernels of one
generator.

    packed = pack(weight, storage_of("int4-g64"))       # or repack(arrays, storage, shape), of what a file holds
    y = linear(x, packed, bias)

`text_of` writes the C++ of a kernel for any (bits, group, zeros, table) and activations in eight bits or bfloat16
around one loop (cpp/stored.cpp). Activations in eight bits have a scale for each row and group, as llama.cpp and
OpenVINO have them, and the product is then exact but for float32's sums; in bfloat16 weights are exact too (but for
NF4's, whose numbers are rounded to it). Which of both is said by `activations`. Where the machine lacks the
instructions (AVX-512 with VNNI and BF16) or has no compiler the weight is widened in each call, which is slow and the
same product; `Packed.by` says so. On a CPU, without gradients. Leaves out sparse forms, and float32 activations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.compiler.build import ASKS, has_compiler, kernel_of
from gnomon.compiler.machine import has_features
from gnomon.errors import InputError
from gnomon.storage.dense import Dense, bfloat16_of
from gnomon.storage.form import Storage
from gnomon.storage.integers import Integers
from gnomon.storage.tables import NF4, NF4_BLOCK, NF4_CODES

FORMULA = Path(__file__).with_name("cpp") / "stored.cpp"
NEEDS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "f16c"})
FLAGS = "-mavx512vnni -mavx512bf16 -mf16c"
SIDE = 16
"""Outputs of a panel."""
PARALLEL = 1 << 20
"""Multiplications from which on threads share a product."""
Activations = Literal["int8", "bf16"]
Arrays = Mapping[str, NDArray[np.generic]]


class _Call(ctypes.Structure):
    """`Call` of cpp/stored.cpp."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "padded", "threads", "wide")],
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "bias", "out", "room")],
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a kernel is made for."""

    bits: int
    """Of a code: 2, 4, 8; 16 for bfloat16 numbers."""
    group: int
    """Columns that share a scale; 0: all."""
    activations: Activations
    half: bool
    """Scales in float16, else float32."""
    zeros: bool = False
    zero: int = 0
    table: tuple[float, ...] = ()
    """What codes stand for, with activations in bfloat16."""

    @property
    def step(self) -> int:
        """Columns of 64 bytes of a panel."""
        return 4 * (8 // self.bits) if self.activations == "int8" else 2 * (16 // self.bits)

    def padded(self, columns: int) -> int:
        by = self.group or self.step
        return -(-columns // by) * by


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A weight as a kernel reads it."""

    shape: tuple[int, int]
    """(outputs, inputs)."""
    storage: Storage
    form: Form
    codes: Tensor
    """uint8 (panels, steps, 64)."""
    scales: Tensor | None
    """(panels, groups, 16)."""
    zeros: Tensor | None
    arrays: Arrays | None = field(default=None, repr=False)
    """What it was packed from, where it is widened in each call."""

    @property
    def by(self) -> str:
        """`kernel`, or `widened`: this machine has no instructions for it, or no compiler."""
        return "kernel" if self.arrays is None else "widened"

    @property
    def bytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros)
        return sum(one.numel() * one.itemsize for one in parts if one is not None)


def form_of(storage: Storage, activations: Activations = "int8") -> Form:
    """The kernel for a storage. InputError where none is written."""
    if isinstance(storage, Dense) and storage.dtype == "bf16":
        return Form(bits=16, group=0, activations="bf16", half=False)
    if isinstance(storage, NF4):
        return Form(bits=4, group=NF4_BLOCK, activations="bf16", half=False, table=NF4_CODES)
    if isinstance(storage, Integers) and not (activations == "bf16" and storage.bits == 8):
        form = Form(
            bits=storage.bits, group=storage.group, activations=activations, half=storage.scale == "float16",
            zeros=storage.zeros, zero=storage.zero,
            table=() if activations == "int8" else tuple(
                float(code - (0 if storage.zeros else storage.zero)) for code in range(2**storage.bits)
            ),
        )  # fmt: skip
        if storage.group % form.step == 0:
            return form
        raise InputError(
            f"{storage.name} is multiplied in steps of {form.step} columns; take a group of a multiple of it"
        )
    raise InputError(
        f"no kernel multiplies by {storage.name} with activations in {activations}; there are those for int8, int4, "
        f"int2 and ternary weights (int8) and int4, int2, ternary, nf4 and bf16 (bf16): convert it, or widen it"
    )


@cache
def text_of(form: Form) -> str:
    """C++ of a kernel."""
    table = [int(one) for one in bfloat16_of(np.asarray(form.table, np.float32))] if form.table else []
    said = {
        "BITS": form.bits, "GROUP": form.group, "ACTS": 8 if form.activations == "int8" else 16, "HALF": int(form.half),
        "ZEROS": int(form.zeros), "ZERO": form.zero, "TABLE": ", ".join(map(str, [*table, *[0] * (32 - len(table))])),
    }  # fmt: skip
    lines = [f"{ASKS}{FLAGS}", *(f"#define {name} {value}" for name, value in said.items())]
    return "\n".join(lines) + "\n" + FORMULA.read_text(encoding="utf-8")


@cache
def kernel(form: Form) -> Callable[[Any], int] | None:
    """Compiled; None where this machine cannot run it or has no compiler."""
    return kernel_of(text_of(form), ctypes.POINTER(_Call)) if has_features(NEEDS) and has_compiler() else None


def pack(weight: Tensor, storage: Storage, activations: Activations = "int8") -> Packed:
    """A weight (outputs, inputs), rounded to the nearest that can be stored so. InputError where it cannot."""
    shape = (weight.shape[0], weight.shape[1])
    if why := storage.refused(shape):
        raise InputError(why)
    return repack(storage.narrow(weight.detach().float().numpy()), storage, shape, activations)


def repack(arrays: Arrays, storage: Storage, shape: tuple[int, int], activations: Activations = "int8") -> Packed:
    """What a file holds of a weight, laid for this machine; no number changes."""
    if why := storage.refused(shape):
        raise InputError(why)
    form = form_of(storage, activations)
    if isinstance(storage, NF4) and shape[1] % NF4_BLOCK:
        raise InputError(
            f"nf4: blocks of {NF4_BLOCK} run across rows of {shape[1]:,} columns; no kernel multiplies by it"
        )
    runs = kernel(form) is not None
    if isinstance(storage, Dense):
        words = np.asarray(arrays["values"]).view(np.uint16)
        codes, scales, zeros = _laid(words, form), None, None
    elif isinstance(storage, NF4):
        packed = np.asarray(arrays["codes"]).view(np.uint8)
        both = np.stack([packed >> np.uint8(4), packed & np.uint8(15)], -1).reshape(shape)
        codes = _laid(both.astype(np.uint16), form)
        scales, zeros = _laid_scales(np.asarray(arrays["scales"], np.float32).reshape(shape[0], -1)), None
    else:
        assert isinstance(storage, Integers)
        plain = storage.codes_of(arrays, shape)
        codes = _laid(plain if form.activations == "int8" else plain.astype(np.uint16), form)
        scales = _laid_scales(np.asarray(arrays["scales"]))
        zeros = _laid_scales(np.asarray(arrays["zeros"]).astype(np.float32)) if storage.zeros else None
    return Packed(
        shape=shape,
        storage=storage,
        form=form,
        codes=codes,
        scales=scales,
        zeros=zeros,
        arrays=None if runs else arrays,
    )


def _panels(codes: NDArray[Any], form: Form) -> NDArray[Any]:
    """(panels, steps, layers, 16, codes side by side): outputs and inputs filled up with zeros."""
    rows, columns = codes.shape
    padded = np.zeros((-(-rows // SIDE) * SIDE, form.padded(columns)), codes.dtype)
    padded[:rows, :columns] = codes
    beside = 4 if form.activations == "int8" else 2
    return padded.reshape(-1, SIDE, padded.shape[1] // form.step, form.step // beside, beside).transpose(0, 2, 3, 1, 4)


def _laid(codes: NDArray[Any], form: Form) -> Tensor:
    """(panels, steps, 64): codes of bytes or of words."""
    parts = _panels(codes, form)
    out = np.zeros((*parts.shape[:2], *parts.shape[3:]), codes.dtype)
    for layer in range(parts.shape[2]):
        out |= parts[:, :, layer] << codes.dtype.type(form.bits * layer % (8 * codes.itemsize))
    return torch.from_numpy(np.ascontiguousarray(out).view(np.uint8).reshape(*parts.shape[:2], 64))


def _laid_scales(scales: NDArray[Any]) -> Tensor:
    """(rows, groups) -> (panels, groups, 16)."""
    rows, many = scales.shape
    padded = np.zeros((-(-rows // SIDE) * SIDE, many), scales.dtype)
    padded[:rows] = scales
    return torch.from_numpy(np.ascontiguousarray(padded.reshape(-1, SIDE, many).transpose(0, 2, 1)))


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """x (..., inputs) in float32 or bfloat16 -> (..., outputs) of its dtype. A row with a NaN or an infinity is NaN
    where activations have eight bits."""
    n, k = packed.shape
    if x.shape[-1] != k or x.dtype not in (torch.float32, torch.bfloat16):
        raise InputError(
            f"a weight of {n} x {k} multiplies rows of {k} in float32 or bfloat16, not {tuple(x.shape)} {x.dtype}"
        )
    if packed.arrays is not None:
        weight = torch.from_numpy(packed.storage.widen(packed.arrays, packed.shape))
        return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)
    rows = x.reshape(-1, k)
    if rows.stride(-1) != 1 and k > 1:
        rows = rows.contiguous()
    m, form = rows.shape[0], packed.form
    out = torch.empty((m, n), dtype=x.dtype)
    if m and n:
        padded = form.padded(k)
        groups = padded // form.group if form.group else 1
        room = torch.empty(
            m * padded * (1 if form.activations == "int8" else 2) + 64 + 8 * m * groups, dtype=torch.uint8
        )
        wide_bias = None if bias is None else bias.float().contiguous()
        call = _Call(
            m=m, n=n, k=k, padded=padded, threads=torch.get_num_threads() if m * n * k >= PARALLEL else 1,
            wide=x.dtype == torch.float32, x=rows.data_ptr(), x_row=rows.stride(0) if m > 1 else k,
            codes=packed.codes.data_ptr(), scales=_place(packed.scales), zeros=_place(packed.zeros),
            bias=_place(wide_bias), out=out.data_ptr(), room=room.data_ptr(),
        )  # fmt: skip
        run = kernel(form)
        assert run is not None
        run(call)
    return out.view(*x.shape[:-1], n)


def _place(one: Tensor | None) -> int | None:
    return None if one is None else one.data_ptr()
