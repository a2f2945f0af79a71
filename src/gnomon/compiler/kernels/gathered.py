"""Products of rows that are found at run time: which rows there are, and whose weights they meet, is data of a call.

    out = gathered_matmul(x, w, bias, ends=ends, rows=rows, to=to)

A product may take its rows in any order (its spatial axes are permutation-invariant), so a kernel gathers them by their
places while it copies them for its tiles, multiplies dense tiles, and writes each result to its place: nothing is
sorted, padded or converted. `ends` divides rows into groups with a weight each (experts); `rows` says where they lie
(tokens that are there). Float32, and bfloat16 where the processor has its instructions. Leaves out when that is faster
than a whole product (`ragged`, `experts`), and axes that are summed over (`live`).
Source: Zheng et al., PIT (2023).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.machine import this_machine
from gnomon.compiler.tune.tried import text_of

FORMULA = CPP / "gathered.cpp"
PARALLEL = 1 << 20
"""Multiplications from which on threads share a product."""


class GatheredCall(ctypes.Structure):
    """The struct `Call` of cpp/gathered.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("groups", "rows", "n", "k", "relu", "threads")],
        ("ends", ctypes.c_void_p),
        ("from_", ctypes.c_void_p),
        ("x_rows", ctypes.c_int64),
        ("to", ctypes.c_void_p),
        ("spare", ctypes.c_void_p),
        ("spares", ctypes.c_int64),
        ("fill", ctypes.c_double),
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("w", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("w_group", "w_n", "w_k")],
        ("bias", ctypes.c_void_p),
        ("bias_group", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
    ]


def dtypes() -> tuple[torch.dtype, ...]:
    """Those that the kernel is made for on this processor."""
    paired = this_machine().isa.name == "avx512_bf16"
    return (torch.float32, torch.bfloat16) if paired else (torch.float32,)


def text(dtype: torch.dtype) -> str:
    """C++ of the kernel."""
    return text_of(FORMULA, dtype) if dtype == torch.float32 else "#define PAIRED\n" + text_of(FORMULA, dtype)


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """Compiles the kernel for a dtype; None where it does not compile."""
    return kernel_of(text(dtype), ctypes.c_void_p) if dtype in dtypes() else None


def gathered_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, ends: Tensor | None = None, rows: Tensor | None = None,
    to: Tensor | None = None, spare: Tensor | None = None, fill: float = 0.0, relu: bool = False,
    into: int | None = None,
) -> Tensor | None:  # fmt: skip
    """(rows, n), or (into, n) with `to`. x (any, k), w (n, k) or (groups, n, k), each group's either side beside each
    other; bias (n,) or (groups, n). ends: int32 (groups,), the last row of each plus one. rows: int64, the place in x
    of each row; None: as they lie. to: int64, the row of the result that each becomes; spare: those that none becomes,
    which are `fill` times small numbers. None where it does not run: no kernel, tensors that lie otherwise, a place in
    x or an end that is not there (`to` and `spare` are the caller's to know)."""
    function, paired = kernel(x.dtype), x.dtype == torch.bfloat16
    if function is None or x.dtype != w.dtype or (bias is not None and bias.dtype != x.dtype):
        return None
    n, k = w.shape[-2:]
    x = x if x.stride(-1) == 1 or k <= 1 else x.contiguous()
    ends, rows, to, spare = (None if one is None else one.contiguous() for one in (ends, rows, to, spare))
    steps = w.stride()[-2:]
    # Bfloat16 is read in pairs of 32 bits: k beside each other, an even number of them, and rows that begin at even
    # elements.
    if 1 not in steps or (paired and (steps[1] != 1 or k % 2 or x.stride(0) % 2 or steps[0] % 2 or w.stride(0) % 2)):
        return None
    count = len(x) if rows is None else len(rows)
    out = torch.empty((count if to is None else into or 0, n), dtype=x.dtype)
    if not n:
        return out
    call = GatheredCall(
        groups=1 if ends is None else len(ends), rows=count, n=n, k=k, relu=relu,
        threads=torch.get_num_threads() if count * n * k >= PARALLEL else 1,
        ends=_place(ends), from_=_place(rows), x_rows=len(x), to=_place(to), spare=_place(spare),
        spares=0 if spare is None else len(spare), fill=fill, x=x.data_ptr(), x_row=x.stride(0),
        w=w.data_ptr(), w_group=w.stride(0) if w.dim() == 3 else 0, w_n=steps[0], w_k=steps[1],
        bias=_place(bias), bias_group=n if bias is not None and bias.dim() == 2 else 0,
        out=out.data_ptr(), out_row=n,
    )  # fmt: skip
    return None if function(ctypes.addressof(call)) else out


def _place(one: Tensor | None) -> int | None:
    return None if one is None else one.data_ptr()
