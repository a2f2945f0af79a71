"""What an op asks of a device, and what turns its rules into numbers: `Work`, `Setting`, and `GradOp` of a backward.

A matmul of m×k by k×n is 2·m·k·n FLOPs. `matmul_flops` are those of the mathematics, as model FLOPs and MFU
count them; `extra_matmul_flops` are what the chosen kernel does beyond (flash attention's QKᵀ again, masked-out scores
of an unfused kernel). `vector_flops` are rough (a few an element): they matter only where bytes do not, so no total of
FLOPs includes them. Bytes: each distinct tensor read or written once. Leaves out caches, tiles, time (room `prices`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import numpy as np

from gnomon.tensors.dims import Dtypes, Number, Sizes, numel
from gnomon.tensors.tensor import Tensor

CausalFlops: TypeAlias = Literal["full", "half"]
"""How causal attention counts: full, as if nothing were masked (Megatron's formula), or half (as flash kernels do)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an op asks of a device. Adds up and scales like a number."""

    matmul_flops: Number = 0
    """FLOPs of matmuls and convolutions that the mathematics needs."""
    extra_matmul_flops: Number = 0
    """Further matrix FLOPs that the kernel executes; can be negative where a kernel skips masked work that counts."""
    vector_flops: Number = 0
    """Elementwise and reduction FLOPs, rough."""
    read_bytes: Number = 0
    """Bytes read from device memory."""
    write_bytes: Number = 0
    """Bytes written to device memory."""

    def __add__(self, other: Work) -> Work:
        return Work(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, times: int) -> Work:
        return Work(**{f.name: getattr(self, f.name) * times for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What turns rules into numbers."""

    sizes: Sizes
    """Sizes of symbolic dims, and local sizes that replace a dim's own."""
    dtypes: Dtypes
    """What `compute` and `param` are."""
    causal_flops: CausalFlops
    """The convention for causal attention; windows count what they let through under `half` only."""


def nbytes(tensor: Tensor, sizes: Sizes, dtypes: Dtypes) -> Number:
    """Bytes of one tensor; 4-bit elements are packed and the last byte filled up."""
    bits = numel(tensor.dims, sizes) * dtypes.bits(tensor.dtype)
    if isinstance(bits, int):
        return -(-bits // 8)
    return np.asarray(np.ceil(bits / 8), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradOp:
    """One step of a derived backward."""

    phase: Literal["input_grad", "weight_grad", "accumulate"]
    """accumulate: add up the gradients that several readers of one tensor send back."""
    path: str
    """Path of the forward op; of an accumulate, the tensor's name."""
    reads: tuple[str, ...]
    """Saved tensors and parameters read, besides the gradients of `grads_in`."""
    grads_in: tuple[str, ...]
    """Tensors whose gradients are read."""
    grads_out: tuple[str, ...]
    """Tensors whose gradients are written."""
