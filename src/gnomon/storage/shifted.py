"""Four bits with a scale and an offset for each group of a row's numbers, as tinygemm's kernels multiply them.

A number is (code - 8) * scale + offset in float32: unlike the zeros of `integers`, an offset is a number of its own, no
code. Codes lie in rows, two in a byte, the first in its lower half.
Source: torchao 0.18 (`Int4Tensor`, `Int4TilePackedTo4dTensor`, `_dequantize_affine_tinygemm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape, Storage, bits_packed, bits_unpacked, in_groups, spread

MIDDLE, TOP, TINY = 8, 15, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifted(Storage):
    group: int
    """Numbers of a row that share a scale and an offset; 0: the whole row."""

    @property
    def name(self) -> str:
        return f"int4{f'-g{self.group}' if self.group else ''}-offsets"

    def _groups(self, shape: Shape) -> int:
        return shape[1] // self.group if self.group else 1

    def arrays(self, shape: Shape) -> dict[str, Array]:
        numbers = Array(dtype="float32", shape=(shape[0], self._groups(shape)))
        codes = Array(dtype="uint8", shape=(shape[0], -(-shape[1] // 2)))
        return {"codes": codes, "scales": numbers, "offsets": numbers}

    def unfit(self, shape: Shape) -> str:
        if self.group and shape[1] % self.group:
            return f"{shape[1]:,} columns are no multiple of the {self.group} that share a scale"
        return ""

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        rows = in_groups(np.asarray(weight, np.float32), self.group)
        low, high = rows.min(-1), rows.max(-1)
        # A row of equal numbers has no range; the floor keeps the division defined, and all its codes are 0.
        scales = np.maximum((high - low) / np.float32(TOP), np.float32(TINY))
        codes = np.clip(np.rint((rows - low[..., None]) / scales[..., None]), 0, TOP).astype(np.uint8)
        # The offset is what code 8 stands for, not code 0: `widen` counts from the middle.
        return self.of_codes(codes.reshape(weight.shape), scales, low + np.float32(MIDDLE) * scales)

    def of_codes(
        self, codes: NDArray[np.uint8], scales: NDArray[Any], offsets: NDArray[Any]
    ) -> dict[str, NDArray[Any]]:
        """codes: (rows, columns), a byte each; scales and offsets: (rows, groups)."""
        numbers = {"scales": scales.astype(np.float32), "offsets": offsets.astype(np.float32)}
        return {"codes": bits_packed(codes, 4), **numbers}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        codes = bits_unpacked(arrays["codes"].view(np.uint8), 4, shape[1]).astype(np.float32) - np.float32(MIDDLE)
        by, offsets = (spread(np.asarray(arrays[name], np.float32), shape[1]) for name in ("scales", "offsets"))
        return codes * by + offsets
