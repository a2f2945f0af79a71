"""Convolutions of each channel by itself, of images that lie channels last (cpp/depthwise.cpp).

A vector is channels of one pixel, so no number is moved between lanes; a tile of LINES x PIXELS outputs has its sums in
registers, and reads a line of the image once for all of them. Bias, a sum, ReLU and pointwise work follow there, and a
ReLU in front is taken as a line is read. Nothing is copied: what a window has beyond the border is left out. Weights
are turned once. Float32. Leaves out groups of several channels, several outputs of a channel, and which convolutions
(`convolutions`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.kernels.linear import PARALLEL, Ended, ended_text
from gnomon.compiler.kernels.taps import out_sizes
from gnomon.compiler.machine import this_machine

FORMULA = CPP / "depthwise.cpp"
REGISTERS = {16: 32, 8: 16, 4: 16}
"""By lanes."""
PIXELS = 7
"""Of a line of a tile: of 7 x 2, 14 x 1 and 10 x 2 the fastest, or as fast, of MobileNetV2's and NASNet's sizes."""
FEWEST_PIXELS = 4
WIDEST = 15
"""Window: its lines are unrolled."""


POOLS = {"average": "AVERAGES 1", "whole average": "AVERAGES 2", "maximum": "MAXIMUM"}
"""What a pooling's text defines: of averages 2 counts what is beyond the border too."""


class DepthwiseCall(ctypes.Structure):
    """The struct `Call` of cpp/depthwise.cpp, field by field."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "images high wide channels pad_h pad_w out_high out_wide relu threads x_image x_line x_pixel"
            ).split()
        ],
        *[(name, ctypes.c_void_p) for name in "x weights bias added out refused".split()],
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseForm:
    """A convolution without its image: what a kernel is compiled for, and what its call says."""

    window: tuple[int, int]
    """Height and width."""
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    lines: int
    """Of a tile."""
    relus: bool = False
    """Whether a ReLU is in front."""
    ended: Ended = ()
    """Work behind it."""
    pool: str = ""
    """Of a pooling in place of a convolution: a key of POOLS."""

    @property
    def name(self) -> str:
        return "each channel"

    @property
    def pixels(self) -> int:
        """Of a line of a tile: a window's line of weights and one of the image stay in registers beside its sums."""
        room = REGISTERS[this_machine().isa.lanes] - 1 - self.lines * self.window[1]
        return min(PIXELS, max(FEWEST_PIXELS, room // self.lines))

    def out_sizes(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Height and width of the result of an image of sizes (images, channels, height, width)."""
        return out_sizes(sizes, self.window, self.stride, self.padding, self.dilation)

    @property
    def text(self) -> str:
        """Writes its kernel in C++."""
        return _source(self)

    def kernel(self) -> Callable[[Any], int] | None:
        """The compiled kernel, None where it does not compile."""
        return _kernel(self.text)

    def packed(self, weight: Tensor) -> Tensor:
        """(numbers of a window, channels) of weights (channels, 1, height, width)."""
        return weight.flatten(1).t().contiguous()

    def filled(self, x: Tensor, outputs: int, relu: bool) -> DepthwiseCall:
        """A call without its memory, of an image (images, channels, height, width) that lies channels last."""
        images, _, high, wide = x.shape
        out_high, out_wide = self.out_sizes(x.shape)
        products = images * out_high * out_wide * outputs * self.window[0] * self.window[1]
        return DepthwiseCall(
            images=images, high=high, wide=wide, channels=outputs, pad_h=self.padding[0], pad_w=self.padding[1],
            out_high=out_high, out_wide=out_wide, relu=relu, threads=0 if products >= PARALLEL else 1,
            x_image=x.stride(0), x_line=x.stride(2), x_pixel=x.stride(3),
        )  # fmt: skip


def form_of(
    sizes: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> DepthwiseForm | None:
    """The form for an image of sizes (images, channels, height, width); None where the result is empty or the window
    wide."""
    high, wide = out_sizes(sizes, window, stride, padding, dilation)
    if min(high, wide) < 1 or window[1] > WIDEST:
        return None
    given = [(int(one[0]), int(one[1])) for one in (window, stride, padding, dilation)]
    # Two lines of weights and of sums: what a line of the image holds is then read for both.
    two = high > 1 and 2 * (window[1] + PIXELS) < REGISTERS[this_machine().isa.lanes]
    return DepthwiseForm(window=given[0], stride=given[1], padding=given[2], dilation=given[3], lines=2 if two else 1)


@cache
def _source(form: DepthwiseForm) -> str:
    named = zip("KH KW SH SW DH DW".split(), (*form.window, *form.stride, *form.dilation), strict=True)
    lines = [f"#define {name} {value}" for name, value in named]
    lines += [f"#define PIXELS {form.pixels}", f"#define LINES {form.lines}"]
    lines += ["#define RELUS"] * form.relus
    lines += [f"#define {POOLS[form.pool]}"] if form.pool else []
    return "\n".join([*lines, *ended_text(form.ended), FORMULA.read_text(encoding="utf-8")])


@cache
def _kernel(text: str) -> Callable[[Any], int] | None:
    # By its text, as to look a kernel up by the digest of its source takes 0.2 ms.
    return kernel_of(text, ctypes.POINTER(DepthwiseCall))
