"""Convolutions of any window as the tile of a matrix product that reads windows where they lie (cpp/taps.cpp).

No window is written out: of images that lie channels last a line of a window is one run of memory, so a tile of ROWS
pixels by VECTORS vectors of outputs has its sums in registers along all runs, as a linear layer has along its inputs.
Bias, a sum and ReLU follow there. An image with a border is copied once, and may lie in any order before that. Weights
are packed once. Float32, one group. Leaves out which convolutions, and against what they are tried (`convolutions`).
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
from gnomon.compiler.kernels.linear import PARALLEL, Ended, ended_text
from gnomon.compiler.machine import this_machine

FORMULA = CPP / "taps.cpp"
ROWS = {16: 14, 8: 6, 4: 4}
"""Pixels of a tile of two vectors, by lanes: as `matmul_tile` constructs it from the registers."""


class TapsCall(ctypes.Structure):
    """The struct `Call` of cpp/taps.cpp, field by field."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "images high wide channels outputs pad_h pad_w out_high out_wide stride_h stride_w lines line_apart "
                "taps tap_apart run relu threads x_image x_line x_pixel x_channel"
            ).split()
        ],
        *[(name, ctypes.c_void_p) for name in "x weights bias added out refused".split()],
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TapsForm:
    """A convolution without its image: what a kernel is compiled for, and what its call says."""

    window: tuple[int, int]
    """Height and width."""
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    narrow: bool
    """Whether a line of the result is at most half of a tile of 32 registers: then a tile has half of the pixels and
    twice the outputs, as otherwise half of the registers would be empty."""
    ended: Ended = ()
    """Work behind it."""

    @property
    def name(self) -> str:
        return "taps"

    @property
    def vectors(self) -> int:
        """Vectors of outputs in a tile and in a panel of weights."""
        return 4 if self.narrow else 2

    def out_sizes(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Height and width of the result of an image of sizes (images, channels, height, width)."""
        return out_sizes(sizes, self.window, self.stride, self.padding, self.dilation)

    @property
    def text(self) -> str:
        """Writes its kernel in C++."""
        return _source(self.narrow, self.ended)

    def kernel(self) -> Callable[[Any], int] | None:
        """The compiled kernel, None where it does not compile."""
        return _kernel(self.text)

    def packed(self, weight: Tensor) -> Tensor:
        """(panels, numbers of a window, outputs of a panel) of weights (outputs, channels, height, width); 0 beyond the
        last output."""
        wide, outputs = self.vectors * this_machine().isa.lanes, weight.shape[0]
        flat = weight.permute(2, 3, 1, 0).reshape(-1, outputs)
        out = torch.zeros((flat.shape[0], -(-outputs // wide) * wide))
        out[:, :outputs] = flat
        return out.view(flat.shape[0], -1, wide).transpose(0, 1).contiguous()

    def filled(self, x: Tensor, outputs: int, relu: bool) -> TapsCall:
        """A call without its memory, of an image (images, channels, height, width) in any order."""
        images, channels, high, wide = x.shape
        out_high, out_wide = self.out_sizes(x.shape)
        tall, across = self.window
        whole = self.dilation[1] == 1 or across == 1  # a line of a window is one run
        products = images * out_high * out_wide * channels * outputs * tall * across
        # What is added up without a jump is a run: a line of a window (taps x channels), or one tap's channels where
        # taps are apart.
        return TapsCall(
            images=images, high=high, wide=wide, channels=channels, outputs=outputs, pad_h=self.padding[0],
            pad_w=self.padding[1], out_high=out_high, out_wide=out_wide, stride_h=self.stride[0],
            stride_w=self.stride[1], lines=tall, line_apart=self.dilation[0], taps=1 if whole else across,
            tap_apart=self.dilation[1], run=channels * (across if whole else 1), relu=relu,
            threads=0 if products >= PARALLEL else 1, x_image=x.stride(0), x_line=x.stride(2), x_pixel=x.stride(3),
            x_channel=x.stride(1),
        )  # fmt: skip


def out_sizes(
    sizes: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    """Height and width of a convolution's result."""
    high, wide = (
        (size + 2 * pad - apart * (length - 1) - 1) // step + 1
        for size, length, step, pad, apart in zip(sizes[2:], window, stride, padding, dilation, strict=True)
    )
    return high, wide


def form_of(
    sizes: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> TapsForm | None:
    """The form for an image of sizes (images, channels, height, width); None where the result is empty."""
    high, wide = out_sizes(sizes, window, stride, padding, dilation)
    if min(high, wide) < 1:
        return None
    given = [(int(one[0]), int(one[1])) for one in (window, stride, padding, dilation)]
    lanes = this_machine().isa.lanes
    narrow = lanes == 16 and wide <= ROWS[lanes] // 2
    return TapsForm(window=given[0], stride=given[1], padding=given[2], dilation=given[3], narrow=narrow)


@cache
def _source(narrow: bool, ended: Ended) -> str:
    rows, vectors = ROWS[this_machine().isa.lanes], 2
    said = {"TILE": rows // 2 if narrow else rows, "VECTORS": 2 * vectors if narrow else vectors}
    lines = [f"#define {name} {value}" for name, value in said.items()]
    return "\n".join([*lines, *ended_text(ended), FORMULA.read_text(encoding="utf-8")])


@cache
def _kernel(text: str) -> Callable[[Any], int] | None:
    # By its text, as to look a kernel up by the digest of its source takes 0.2 ms.
    return kernel_of(text, ctypes.POINTER(TapsCall))
