"""Integers with a scale for each group of a row's numbers: int8, int4 and its kin, and ternary weights.

A number is (code - zero) * scale in float32. The zero is one for all (the middle) or one for each group. Codes lie in
rows, two of four or three bits in a byte, the first in its lowest bits.
Source: GPTQ (Frantar et al. 2023) and AWQ (Lin et al. 2024) for groups with zeros; BitNet b1.58 (Ma et al. 2024) for
ternary weights, whose scale is the mean size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape, Storage, as_scales, bits_packed, bits_unpacked, in_groups, spread

TINY = 1e-12
LEAST_GROUP = 8
"""Numbers that a scale is of at least, and groups of kernels are multiples of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers(Storage):
    bits: int
    """Of a code: 2, 3, 4 or 8."""
    group: int
    """Numbers of a row that share a scale; 0: the whole row."""
    zeros: bool = False
    """Whether each group has a zero of its own."""
    ternary: bool = False
    """Whether of the codes only 0, 1 and 2 are used, for -1, 0 and 1."""
    scale: str = "float16"
    """Dtype of scales."""

    @property
    def name(self) -> str:
        kind = "ternary" if self.ternary else f"int{self.bits}"
        return kind + (f"-g{self.group}" if self.group else "") + ("-zeros" if self.zeros else "")

    @property
    def zero(self) -> int:
        """What stands for 0 where groups have no zeros."""
        return 1 if self.ternary else 2 ** (self.bits - 1)

    def _groups(self, shape: Shape) -> int:
        return shape[1] // self.group if self.group else 1

    def arrays(self, shape: Shape) -> dict[str, Array]:
        rows, columns = shape
        out = {
            "codes": Array(dtype="uint8", shape=(rows, -(-columns // (8 // self.bits)))),
            "scales": Array(dtype=self.scale, shape=(rows, self._groups(shape))),
        }
        return {**out, "zeros": Array(dtype="uint8", shape=(rows, self._groups(shape)))} if self.zeros else out

    def unfit(self, shape: Shape) -> str:
        if self.group and shape[1] % self.group:
            return f"{shape[1]:,} columns are no multiple of the {self.group} that share a scale"
        return ""

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        rows = in_groups(np.asarray(weight, np.float32), self.group)
        top = 2**self.bits - 1
        if self.zeros:
            # The range includes 0, so that 0 has a code of its own.
            low, high = np.minimum(rows.min(-1), 0), np.maximum(rows.max(-1), 0)
            scales = as_scales(np.maximum((high - low) / top, TINY), self.scale)
            by = np.where(scales > 0, _wide(scales), np.float32(1))  # a group of zeros, and what float16 has as 0
            # The code that stands for 0, a whole number as GPTQ has it.
            zeros = np.clip(np.rint(-low / by), 0, top).astype(np.uint8)
            return self.coded(weight, scales, zeros)
        # BitNet b1.58's scale: the mean of sizes, so that rounding to -1, 0, 1 keeps the matrix's weight (Ma et al.
        # 2024).
        if self.ternary:
            return self.coded(weight, as_scales(np.maximum(np.abs(rows).mean(-1), TINY), self.scale))
        # Symmetric: the code 0 stands for -2^(bits-1) steps and is not used, so that both signs reach as far.
        return self.coded(weight, as_scales(np.maximum(np.abs(rows).max(-1) / (self.zero - 1), TINY), self.scale))

    def coded(
        self, weight: NDArray[np.float32], scales: NDArray[Any], zeros: NDArray[np.uint8] | None = None
    ) -> dict[str, NDArray[Any]]:
        """The arrays of a matrix with these scales and zeros, (rows, groups) each."""
        columns = weight.shape[1]
        by = spread(_wide(scales), columns)
        middle = np.float32(self.zero) if zeros is None else spread(zeros.astype(np.float32), columns)
        top = 2 if self.ternary else 2**self.bits - 1
        # float16 has a scale below 6e-8 as 0; such a group is all zeros, and not all NaN.
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(by == 0, np.float32(0), np.asarray(weight, np.float32) / by)
        codes = np.clip(np.rint(steps) + middle, 0, top).astype(np.uint8)
        return self.of_codes(codes, scales, zeros)

    def of_codes(
        self, codes: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[np.uint8] | None = None
    ) -> dict[str, NDArray[Any]]:
        """codes: (rows, columns), a byte each."""
        out: dict[str, NDArray[Any]] = {
            "codes": bits_packed(codes, self.bits),
            "scales": as_scales(scales, self.scale),
        }
        return out if zeros is None else {**out, "zeros": zeros}

    def codes_of(self, arrays: Arrays, shape: Shape) -> NDArray[np.uint8]:
        """(rows, columns), a byte each."""
        return bits_unpacked(arrays["codes"].view(np.uint8), self.bits, shape[1])

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        codes = self.codes_of(arrays, shape).astype(np.float32)
        if self.zeros:
            codes -= spread(arrays["zeros"].astype(np.float32), shape[1])
        else:
            codes -= np.float32(self.zero)
        return codes * spread(_wide(arrays["scales"]), shape[1])


def _wide(scales: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(scales).astype(np.float32)
