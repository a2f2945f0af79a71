"""A matrix rounded and laid for its kernel in one pass: `rounded(parts, storage, side, padded)` gives (codes, scales).

Bit for bit what `Integers.narrow` rounds to and `stored.repack` lays, which take ten times as long: a server rounds
every matrix each time that it starts. None where there is no kernel for it: groups with zeros of their own, ternary
weights, activations that are not of eight bits, processors without AVX-512.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.build import ASKS, CPP, has_compiler, kernel_of
from gnomon.compiler.kernels.large_pages import LargePages
from gnomon.compiler.machine import has_features
from gnomon.storage.integers import Integers

FORMULA = CPP / "rounded.cpp"
NEEDS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c"})
BESIDE = 4
"""Codes of an output that lie beside each other."""
PARALLEL = 1 << 20
"""Numbers from which on threads share the work."""
_NUMBERS = "rows columns x_row wide first bits group padded half side threads".split()


class _Rounded(ctypes.Structure):
    """The struct `Rounded` of cpp/rounded.cpp."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in _NUMBERS],
        *[(name, ctypes.c_void_p) for name in ("x", "codes", "scales")],
    ]


@cache
def kernel() -> Callable[[Any], int] | None:
    """Compiles the kernel; None where this machine cannot run it or has no compiler."""
    text = f"{ASKS}-mf16c\n{FORMULA.read_text(encoding='utf-8')}"
    return kernel_of(text, ctypes.c_void_p) if has_features(NEEDS) and has_compiler() else None


def rounded(
    parts: Sequence[Tensor], storage: Integers, side: int, padded: int, memory: LargePages | None = None
) -> tuple[Tensor, Tensor] | None:
    """(codes uint8 (panels, steps, 4 side), scales (panels, groups, side)) of matrices (outputs, inputs) one below the
    other, whose numbers are finite. side: outputs of a panel. padded: inputs with what fills the last group or step.
    memory: where codes are laid; None: they have their own."""
    run = kernel()
    if run is None or storage.zeros or storage.ternary or storage.bits not in (4, 8):
        return None
    rows, columns = sum(map(len, parts)), parts[0].shape[1]
    panels, layers = -(-rows // side), 8 // storage.bits
    groups = columns // storage.group if storage.group else 1
    laid = panels, padded // (BESIDE * layers), BESIDE * side
    codes = torch.zeros(laid, dtype=torch.uint8) if memory is None else memory.empty(laid, torch.uint8)
    scales = torch.zeros((panels, groups, side), dtype=getattr(torch, storage.scale))
    first = 0
    for part in parts:
        x = part.detach()
        x = (x if x.dtype in (torch.float32, torch.bfloat16) else x.float()).contiguous()
        call = _Rounded(
            rows=len(x), columns=columns, x_row=columns, wide=x.dtype == torch.float32, first=first,
            bits=storage.bits, group=storage.group, padded=padded, half=storage.scale == "float16", side=side,
            threads=torch.get_num_threads() if x.numel() >= PARALLEL else 1,
            x=x.data_ptr(), codes=codes.data_ptr(), scales=scales.data_ptr(),
        )  # fmt: skip
        run(ctypes.addressof(call))
        first += len(x)
    return codes, scales
