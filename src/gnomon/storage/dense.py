"""Numbers as they are: float32, float16, and bfloat16 as the upper halves of float32.

numpy has no bfloat16: `bfloat16_of` and `wide_bfloat16` are the two directions. Leaves out complex numbers and double.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(Storage):
    dtype: str
    """fp32, fp16 or bf16."""

    @property
    def name(self) -> str:
        return self.dtype

    def arrays(self, shape: Shape) -> dict[str, Array]:
        return {
            "values": Array(dtype={"fp32": "float32", "fp16": "float16", "bf16": "uint16"}[self.dtype], shape=shape)
        }

    def unfit(self, shape: Shape) -> str:
        return ""

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        weight = np.ascontiguousarray(weight, np.float32)
        if self.dtype == "bf16":
            return {"values": bfloat16_of(weight)}
        return {"values": weight.astype(np.float16 if self.dtype == "fp16" else np.float32)}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        values = arrays["values"]
        return wide_bfloat16(values.view(np.uint16)) if self.dtype == "bf16" else values.astype(np.float32)


def bfloat16_of(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    # Half of the last kept place less one, plus that place's bit: halves go to the even neighbour. In 64 bits, since
    # all-ones patterns would wrap to zero.
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # The sum would carry some NaNs to infinity or zero; one quiet NaN stands for all.
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def wide_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
