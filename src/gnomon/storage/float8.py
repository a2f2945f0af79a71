"""Eight-bit floats (e4m3) with a scale for the tensor, for each row, or for each block of rows and columns.

Source: OCP 8-bit Floating Point 1.0 (no infinities, 448 the largest); DeepSeek-V3 for blocks of 128 x 128, whose last
may be smaller, and which multiply by their scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape, Storage

LARGEST = np.float32(448)


@cache
def e4m3() -> NDArray[np.float32]:
    """The value (256) that each byte of float8 e4m3 stands for, NaN included."""
    # 1 sign, 4 exponent (bias 7) and 3 mantissa bits; exponent 0 is subnormal, 2**-6 / 8 a step.
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, (byte & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    # e4m3 has no infinities: all ones is NaN, so the largest is 1.75 * 2**8 = 448.
    size[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -size, size).astype(np.float32)


def to_e4m3(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rounded to nearest, ties to even, beyond the largest the largest; NaN stays."""
    # Positive codes ascend with their value, so a search among them finds both neighbours. In fp64, where a midpoint is
    # exact.
    table = e4m3()[:127].astype(np.float64)
    size = np.minimum(np.abs(x.astype(np.float64)), 448)
    above = np.minimum(np.searchsorted(table, size), 126)
    below = np.maximum(above - 1, 0)
    far, near = table[above] - size, size - table[below]
    # A tie goes to the code whose last mantissa bit is 0.
    code = np.where((near < far) | (near == far) & (below % 2 == 0), below, above).astype(np.uint8)
    code = np.where(np.isnan(x), np.uint8(127), code)
    return code | (np.signbit(x).astype(np.uint8) << np.uint8(7))


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8(Storage):
    block: Shape | None = None
    """(rows, columns) that share a scale; 0 for all of them. None: the tensor."""

    @property
    def name(self) -> str:
        if self.block is None:
            return "fp8"
        return "fp8-row" if self.block == (1, 0) else f"fp8-{self.block[0]}x{self.block[1]}"

    def _grid(self, shape: Shape) -> Shape:
        """Rows and columns that share a scale."""
        high, wide = self.block or (0, 0)
        return high or max(1, shape[0]), wide or max(1, shape[1])

    def _scales(self, shape: Shape) -> Shape:
        high, wide = self._grid(shape)
        return -(-shape[0] // high), -(-shape[1] // wide)

    def arrays(self, shape: Shape) -> dict[str, Array]:
        return {"codes": Array(dtype="uint8", shape=shape), "scales": Array(dtype="float32", shape=self._scales(shape))}

    def unfit(self, shape: Shape) -> str:
        return ""

    def _spread(self, scales: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
        high, wide = self._grid(shape)
        return np.repeat(np.repeat(scales, high, 0)[: shape[0]], wide, 1)[:, : shape[1]]

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        weight = np.asarray(weight, np.float32)
        (high, wide), (down, across) = self._grid(weight.shape), self._scales(weight.shape)
        # Blocks at the lower and right edge are filled up with zeros, which never are a block's largest.
        padded = np.zeros((down * high, across * wide), np.float32)
        padded[: weight.shape[0], : weight.shape[1]] = np.abs(weight)
        top = padded.reshape(down, high, across, wide).max((1, 3))
        # A block of zeros has scale 1: its codes are 0, and nothing is divided by 0.
        scales = np.where(top > 0, top / LARGEST, np.float32(1)).astype(np.float32)
        return {"codes": to_e4m3(weight / self._spread(scales, weight.shape)), "scales": scales}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        return e4m3()[arrays["codes"].view(np.uint8)] * self._spread(arrays["scales"].astype(np.float32), shape)
