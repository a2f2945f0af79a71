"""Numbers that are kept wherever they lie: by a bit for each number (`0.9`), or by row and column (`csr:0.9`).

`narrow` keeps the largest of all. Source: SpInfer (Fan et al. 2025) for bitmaps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape
from gnomon.storage.sparse import KeptShare, Sparse


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstructured(KeptShare):
    """Kept numbers row after row."""

    def of_zeros(self, weight: NDArray[np.float32]) -> tuple[Sparse, NDArray[np.bool_]]:
        mask = weight != 0
        return replace(self, kept=float(mask.mean()) if mask.size else 0.0), mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmap(Unstructured):
    """A bit for each number of a row, the first of a byte in its lowest bit, and those that are kept, in order."""

    @property
    def pattern(self) -> str:
        return f"{1 - self.kept:g}"

    def places(self, shape: Shape) -> tuple[dict[str, Array], tuple[int, ...]]:
        bits = Array(dtype="uint8", shape=(shape[0], -(-shape[1] // 8)))
        return {"bits": bits}, (self.count(shape[0] * shape[1]),)

    def split(
        self, weight: NDArray[np.float32], mask: NDArray[np.bool_]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
        return {"bits": np.packbits(mask, axis=1, bitorder="little")}, weight[mask]

    def kept_of(self, arrays: Arrays, shape: Shape) -> NDArray[np.bool_]:
        """A mask (rows, columns) of the weights that are stored."""
        bits = np.unpackbits(arrays["bits"].view(np.uint8), axis=1, count=shape[1], bitorder="little")
        return bits.astype(np.bool_)

    def rows(self, arrays: Arrays, shape: Shape) -> NDArray[np.int64]:
        return self.kept_of(arrays, shape).nonzero()[0]

    def spread(self, arrays: Arrays, values: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
        out = np.zeros(shape, np.float32)
        out[self.kept_of(arrays, shape)] = values
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class CSR(Unstructured):
    """The numbers of each row with their columns, and where each row begins."""

    @property
    def pattern(self) -> str:
        return f"csr:{1 - self.kept:g}"

    def places(self, shape: Shape) -> tuple[dict[str, Array], tuple[int, ...]]:
        num_values = self.count(shape[0] * shape[1])
        starts = Array(dtype="int32", shape=(shape[0] + 1,))
        return {"starts": starts, "columns": Array(dtype="int32", shape=(num_values,))}, (num_values,)

    def split(
        self, weight: NDArray[np.float32], mask: NDArray[np.bool_]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
        starts = np.concatenate([[0], mask.sum(1).cumsum()]).astype(np.int32)
        return {"starts": starts, "columns": mask.nonzero()[1].astype(np.int32)}, weight[mask]

    def rows(self, arrays: Arrays, shape: Shape) -> NDArray[np.int64]:
        return np.repeat(np.arange(shape[0]), np.diff(np.asarray(arrays["starts"])).astype(np.int64))

    def spread(self, arrays: Arrays, values: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
        out = np.zeros(shape, np.float32)
        out[self.rows(arrays, shape), arrays["columns"]] = values
        return out
