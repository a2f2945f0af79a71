"""A linear layer of few rows, or a convolution that gives few positions, by a kernel that reads the weights once.

A library's convolution of a few positions takes longer to begin than to multiply, and a product of few rows is as fast
as its weights come from memory. This kernel (cpp/thin.cpp) reads weights once, as they lie. It is tried beside ATen
(`products`). Float32 on a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.build import CPP, kernel_of

FORMULA = CPP / "thin.cpp"
MOST = 16
"""Rows or positions: with more, weights are better turned in cache (`linear`)."""
PARALLEL = 1 << 18
"""Weights from which on threads share them."""
FEWEST = 16
"""Weights that are worth a kernel of their own."""
CALL_S = 12e-6
"""What Python takes to fill the struct and call the kernel, beside ATen's own call."""


class ThinCall(ctypes.Structure):
    """The struct `Call` of cpp/thin.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "relu", "parallel")],
        ("x", ctypes.c_void_p),
        *[
            (name, ctypes.c_int64)
            for name in (
                "x_row gathered channels high wide tall across step_h step_w pad_h pad_w apart_h apart_w out_h out_w "
                "x_b x_c x_h x_w"
            ).split()
        ],
        ("w", ctypes.c_void_p),
        ("w_n", ctypes.c_int64),
        ("w_k", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("block", "out_block", "out_n", "out_p")],
    ]


@cache
def source() -> str:
    return FORMULA.read_text(encoding="utf-8")


@cache
def kernel() -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(source(), ctypes.POINTER(ThinCall))


def of_rows(x: Tensor, w: Tensor, relu: bool) -> ThinCall | None:
    """A linear layer's sizes: x (m, k), w (n, k), which may lie turned. None where it is not thin, or numbers do not
    lie beside each other."""
    (m, k), n = x.shape, w.shape[0]
    if not 0 < m <= MOST or n * k < FEWEST or (k > 1 and x.stride(1) != 1) or 1 not in w.stride():
        return None
    # One of the two strides is 1: a row of a weight, or, where it lies turned, a column.
    w_n, w_k = (1, w.stride(1)) if w.stride(1) != 1 and k > 1 else (w.stride(0), 1)
    if w_k != 1 and w.stride(0) != 1 and n > 1:
        return None
    return ThinCall(
        m=m, n=n, k=k, relu=relu, parallel=n * k >= PARALLEL, x_row=x.stride(0), w_n=w_n, w_k=w_k, block=m, out_n=1,
        out_p=n,
    )  # fmt: skip


def of_positions(
    x: Tensor, w: Tensor, steps: Sequence[int], pads: Sequence[int], apart: Sequence[int], relu: bool
) -> ThinCall | None:
    """A convolution's sizes: x (images, channels, ...), w (n, channels, ...) along one dim or two, in one group, as
    `aten.convolution` takes its stride, padding and dilation. None where it is not thin."""
    if x.dim() == 3:  # as of one row
        x, w = x.unsqueeze(2), w.unsqueeze(2)
        steps, pads, apart = (1, *steps), (0, *pads), (1, *apart)
    (images, channels, high, wide), (n, of, tall, across) = x.shape, w.shape
    # From the first to the last tap of a window, both counted.
    reach = [(size - 1) * by + 1 for size, by in zip((tall, across), apart, strict=True)]
    out_h, out_w = (
        (size + 2 * pad - far) // step + 1
        for size, pad, far, step in zip((high, wide), pads, reach, steps, strict=True)
    )
    m, k = images * out_h * out_w, channels * tall * across
    if of != channels or not w.is_contiguous() or not 0 < m <= MOST or n * k < FEWEST or min(out_h, out_w) < 1:
        return None
    x_b, x_c, x_h, x_w = x.stride()
    return ThinCall(
        m=m, n=n, k=k, relu=relu, parallel=n * k >= PARALLEL, gathered=1, channels=channels, high=high, wide=wide,
        tall=tall, across=across, step_h=steps[0], step_w=steps[1], pad_h=pads[0], pad_w=pads[1], apart_h=apart[0],
        apart_w=apart[1],
        out_h=out_h, out_w=out_w, x_b=x_b, x_c=x_c, x_h=x_h, x_w=x_w, w_n=k, w_k=1, block=out_h * out_w,
        out_block=n * out_h * out_w, out_n=out_h * out_w, out_p=1,
    )  # fmt: skip


def run(call: ThinCall | None, x: Tensor, w: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """The result, of that shape; None where the kernel does not run."""
    function = kernel()
    if call is None or function is None or (bias is not None and not bias.is_contiguous()):
        return None
    out = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    call.x, call.w, call.out = x.data_ptr(), w.data_ptr(), out.data_ptr()
    call.bias = None if bias is None else bias.data_ptr()
    return None if function(call) else out


def shape_of(call: ThinCall, images: int, dims: int) -> tuple[int, ...]:
    """Returns the shape of a convolution's result."""
    return (images, call.n, *((call.out_h, call.out_w) if dims == 4 else (call.out_w,)))
