"""Matrices of which a part is kept: what all such forms are, and the numbers that they keep.

A form keeps where a mask is true: n of every m (`n_of_m`), any, by a bitmap or by row and column (`unstructured`),
whole blocks (`blocks`). Kept numbers are float32 as they are, bfloat16, or int8 with a scale for each row (the largest
that is kept there over 127, in float16). Zeros take no room but where a form says (n of m keeps n whatever they are).
`narrow` keeps the largest.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.dense import bfloat16_of, wide_bfloat16
from gnomon.storage.form import Array, Arrays, Shape, Storage, as_scales

VALUES = {"fp32": "float32", "bf16": "uint16", "int8": "int8"}
"""How kept numbers may be stored, and numpy's dtype of them."""
TOP, TINY = 127, 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse(Storage):
    """A form that keeps where a mask is true."""

    value: str = "fp32"
    """How what is kept is stored: fp32, bf16 or int8."""

    @property
    @abstractmethod
    def pattern(self) -> str:
        """What is kept, as people write it."""

    @property
    def name(self) -> str:
        return self.pattern + ("" if self.value == "fp32" else f"-{self.value}")

    @abstractmethod
    def places(self, shape: Shape) -> tuple[dict[str, Array], tuple[int, ...]]:
        """(the arrays that say what is kept, the shape of the numbers)."""

    @abstractmethod
    def mask(self, score: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Returns (rows, columns): what of the highest scores may be kept together."""

    @abstractmethod
    def of_zeros(self, weight: NDArray[np.float32]) -> tuple[Sparse, NDArray[np.bool_]]:
        """The form of this kind that keeps just what is not 0 of a matrix, and its mask. InputError where the pattern
        does not hold."""

    @abstractmethod
    def split(
        self, weight: NDArray[np.float32], mask: NDArray[np.bool_]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
        """(the arrays that say what a mask of this form keeps, the numbers in float32)."""

    @abstractmethod
    def spread(self, arrays: Arrays, values: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
        """(rows, columns), of kept numbers."""

    @abstractmethod
    def rows(self, arrays: Arrays, shape: Shape) -> NDArray[np.int64]:
        """The row of each kept number, as broadcasts over the numbers."""

    def arrays(self, shape: Shape) -> dict[str, Array]:
        places, values_shape = self.places(shape)
        out = {**places, "values": Array(dtype=VALUES[self.value], shape=values_shape)}
        return {**out, "scales": Array(dtype="float16", shape=(shape[0],))} if self.value == "int8" else out

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        weight = np.asarray(weight, np.float32)
        return self.of_mask(weight, self.mask(np.abs(weight)))

    def of_mask(self, weight: NDArray[np.float32], mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        """The arrays of what a mask of this form keeps of a matrix."""
        weight = np.asarray(weight, np.float32)
        shape = (weight.shape[0], weight.shape[1])
        places, values = self.split(weight, mask)
        if self.value == "fp32":
            return {**places, "values": values}
        if self.value == "bf16":
            return {**places, "values": bfloat16_of(values)}
        # A scale a row, of what is kept alone: what was pruned must not widen the steps.
        top = np.abs(np.where(mask, weight, np.float32(0))).max(1, initial=0)
        scales = as_scales(np.maximum(top / np.float32(TOP), np.float32(TINY)), "float16")
        by = scales.astype(np.float32)[self.rows(places, shape)]
        codes = np.clip(np.rint(values / by), -TOP, TOP).astype(np.int8)
        return {**places, "values": codes, "scales": scales}

    def numbers(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        """Kept numbers in float32, in the order that they are stored in."""
        values = np.asarray(arrays["values"])
        if self.value == "bf16":
            return wide_bfloat16(values.view(np.uint16))
        if self.value == "int8":
            by = np.asarray(arrays["scales"]).astype(np.float32)[self.rows(arrays, shape)]
            return np.asarray(values.view(np.int8).astype(np.float32) * by)
        return values.astype(np.float32)

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        return self.spread(arrays, self.numbers(arrays, shape), shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptShare(Sparse):
    """A form that keeps a share, wherever it lies."""

    kept: float
    """Share of the numbers (of blocks) that are kept."""

    def count(self, of: int) -> int:
        return round(self.kept * of)

    def unfit(self, shape: Shape) -> str:
        return ""

    def mask(self, score: NDArray[np.float32]) -> NDArray[np.bool_]:
        flat = score.ravel()
        out = np.zeros(flat.size, np.bool_)
        # Stable, so that equal scores are kept from the left and a matrix is always stored the same.
        out[np.argsort(-flat, kind="stable")[: self.count(flat.size)]] = True
        return out.reshape(score.shape)
