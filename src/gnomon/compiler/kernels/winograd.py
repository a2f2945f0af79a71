"""Convolutions of 3 x 3, stride 1, by Winograd's minimal filtering: fewer products than a direct sum has.

A tile of OUT x OUT outputs takes (OUT + 2)^2 products a channel in place of 9 OUT^2: 2.25 times fewer for OUT = 2, 4
times fewer for OUT = 4, for sums in registers before and after (cpp/winograd.cpp has the algebra and the layouts).
Weights are transformed once, in double, and take 1.8 and 4 times their memory: where few tiles read many weights that
decides (`form_of`). A result is about 1e-6 of the largest one away from that in double (OUT = 4; a direct sum 6e-7 to
1e-6, OUT = 2 less), a tenth of what `gate` allows. Numbers that are not finite would spread over a tile, so the kernel
refuses and the caller computes directly. Float32, images that lie channels last. Leaves out which convolutions
(`convolutions`).
Source: Lavin and Gray (2015), arXiv 1509.09308; points by Barabasz et al. (2020), arXiv 1803.10986: 0, +-sqrt(1/2),
+-sqrt(2), infinity lose least for OUT = 4.
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

FORMULA = CPP / "winograd.cpp"
OUTS = (2, 4)
SIDE = 3
LEAST = 16
"""Channels and outputs from which on the transforms are little beside the products between them."""
VECTORS = 2
"""Of a panel of weights."""
ROWS = {16: 14, 8: 6, 4: 4}
"""Tiles whose sums stay in registers, by lanes: `matmul_tile` constructs the same."""
VECTORS_A_BYTE = 0.2
"""Vector products that a core does while a byte comes from memory: 3.7 GHz beside 20 GB/s."""
MOST_BYTES = 256 << 20
"""Of transformed weights: what is larger reads so long from memory that nothing is won."""


class WinogradCall(ctypes.Structure):
    """The struct `Call` of cpp/winograd.cpp, field by field."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "images high wide channels outputs pad_h pad_w out_high out_wide relu together threads "
                "x_image x_line x_pixel"
            ).split()
        ],
        *[(name, ctypes.c_void_p) for name in "x weights bias added out refused".split()],
    ]


@dataclass(frozen=True, slots=True)
class WinogradForm:
    """A convolution without its image: what a kernel is compiled for, and what its call says."""

    out: int
    """Outputs along a side of a tile."""
    padding: tuple[int, int]
    ended: Ended = ()
    """Work behind it."""

    @property
    def name(self) -> str:
        return f"Winograd {self.out} x {self.out}"

    @property
    def places(self) -> int:
        """Inputs of a tile, and as many matrix products."""
        return (self.out + SIDE - 1) ** 2

    def out_sizes(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Height and width of the result of an image of sizes (images, channels, height, width)."""
        return _out_sizes(sizes, self.padding)

    @property
    def text(self) -> str:
        """Writes its kernel in C++."""
        return _source(self.out, self.ended)

    def kernel(self) -> Callable[[Any], int] | None:
        """The compiled kernel, None where it does not compile."""
        return _kernel(self.text)

    def packed(self, weight: Tensor) -> Tensor:
        """(panels, places, channels, outputs of a panel) of weights (outputs, channels, 3, 3); 0 beyond the last
        output."""
        wide = VECTORS * this_machine().isa.lanes
        outputs, channels = weight.shape[:2]
        by = _of_weights(self.out)
        out = torch.zeros((-(-outputs // wide), self.places, channels, wide))
        for n in range(len(out)):  # a panel at a time: in double they are large
            # [a, b, c, o]: window row, window column, channel, output of the panel. Below U = G g G' of each channel
            # and output, with (i, j) the place within a tile.
            some = weight[n * wide : (n + 1) * wide].permute(2, 3, 1, 0).double()
            made = torch.einsum("ia,jb,abco->ijco", by, by, some)
            out[n, :, :, : some.shape[-1]] = made.flatten(0, 1)
        return out

    def filled(self, x: Tensor, outputs: int, relu: bool) -> WinogradCall:
        """A call without its memory, of an image (images, channels, height, width) in any order."""
        images, channels, high, wide = x.shape
        out_high, out_wide = self.out_sizes(x.shape)
        products = images * out_high * out_wide * channels * outputs * SIDE * SIDE
        # Tiles of a block stay in half of the second cache, so that every panel reads them from there; no fewer than
        # two tiles of registers, as weights are read once a block and may come from memory.
        each = 4 * self.places * (channels + 2 * 16)
        together = max(2 * ROWS[this_machine().isa.lanes], this_machine().l2_bytes // 2 // each)
        return WinogradCall(
            images=images, high=high, wide=wide, channels=channels, outputs=outputs, pad_h=self.padding[0],
            pad_w=self.padding[1], out_high=out_high, out_wide=out_wide, relu=relu, together=together,
            threads=0 if products >= PARALLEL else 1, x_image=x.stride(0), x_line=x.stride(2), x_pixel=x.stride(3),
        )  # fmt: skip


def _out_sizes(sizes: Sequence[int], padding: Sequence[int]) -> tuple[int, int]:
    return sizes[2] + 2 * padding[0] - SIDE + 1, sizes[3] + 2 * padding[1] - SIDE + 1


def form_of(sizes: Sequence[int], outputs: int, padding: Sequence[int]) -> WinogradForm | None:
    """The form for an image of sizes (images, channels, height, width), by products and by memory of weights, whichever
    takes longer; None where channels are too few or weights too many."""
    _, channels, _, _ = sizes
    high, wide = _out_sizes(sizes, padding)
    if min(channels, outputs) < LEAST or min(high, wide) < 1:
        return None

    def cost(form: WinogradForm) -> float:
        # Both in vector products of one core: those that the tiles take, and those that fit into the time in which
        # 4-byte weights come from memory. Weights are read once however many tiles there are, so few tiles favour the
        # smaller form.
        tiles = sizes[0] * -(-high // form.out) * -(-wide // form.out)
        numbers = form.places * channels * outputs
        return max(tiles * numbers / this_machine().isa.lanes, 4 * numbers * VECTORS_A_BYTE)

    forms = [WinogradForm(out, (padding[0], padding[1])) for out in OUTS]
    forms = [form for form in forms if 4 * form.places * channels * outputs <= MOST_BYTES]
    return min(forms, key=cost) if forms else None


@cache
def _source(out: int, ended: Ended) -> str:
    said = {"OUT": out, "TILE": ROWS[this_machine().isa.lanes], "VECTORS": VECTORS}
    lines = [f"#define {name} {value}" for name, value in said.items()]
    return "\n".join([*lines, *ended_text(ended), FORMULA.read_text(encoding="utf-8")])


@cache
def _of_weights(out: int) -> Tensor:
    """G of `G g G'`, (out + 2, 3) in double: a row (1, p, p^2) / product of (p - other points) of each point p, and
    (0, 0, 1) of infinity; of out = 2 with signs and factors moved to the other matrices, which then have only 1 and
    -1."""
    if out == 2:
        return torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=torch.float64)
    points = [0.0, 0.5**0.5, -(0.5**0.5), 2**0.5, -(2**0.5)]
    rows = []
    for p in points:
        by = 1.0
        # Lagrange's denominator: the product of (p - other) over all other points.
        for other in points:
            by *= p - other if other != p else 1.0
        rows.append([1 / by, p / by, p * p / by])
    return torch.tensor([*rows, [0, 0, 1]], dtype=torch.float64)


@cache
def _kernel(text: str) -> Callable[[Any], int] | None:
    # By its text, as to look a kernel up by the digest of its source takes 0.2 ms.
    return kernel_of(text, ctypes.POINTER(WinogradCall))
