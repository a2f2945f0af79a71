"""Whole blocks that are kept, row of blocks after row of blocks, with their columns of blocks: `block:16x16:0.9`.

`narrow` keeps those with the largest sums of squares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape
from gnomon.storage.sparse import KeptShare, Sparse


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(KeptShare):
    size: Shape = (16, 16)

    @property
    def pattern(self) -> str:
        return f"block:{self.size[0]}x{self.size[1]}:{1 - self.kept:g}"

    def places(self, shape: Shape) -> tuple[dict[str, Array], tuple[int, ...]]:
        across = shape[0] // self.size[0]
        num_tiles = self.count(across * (shape[1] // self.size[1]))
        starts = Array(dtype="int32", shape=(across + 1,))
        return {"starts": starts, "columns": Array(dtype="int32", shape=(num_tiles,))}, (num_tiles, *self.size)

    def unfit(self, shape: Shape) -> str:
        if shape[0] % self.size[0] or shape[1] % self.size[1]:
            return f"{shape[0]:,} x {shape[1]:,} does not divide into blocks of {self.size[0]} x {self.size[1]}"
        return ""

    def tiles(self, x: NDArray[Any]) -> NDArray[Any]:
        """(rows of blocks, columns of blocks, rows, columns)."""
        (rows, columns), (high, wide) = x.shape, self.size
        return x.reshape(rows // high, high, columns // wide, wide).swapaxes(1, 2)

    def _every(self, tile_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.kron(tile_mask, np.ones(self.size, np.bool_)).astype(np.bool_)

    def mask(self, score: NDArray[np.float32]) -> NDArray[np.bool_]:
        # A block counts by the sum of squares of its scores: a few large ones outweigh many small ones.
        sums = (self.tiles(score).astype(np.float64) ** 2).sum((2, 3))
        return self._every(KeptShare.mask(self, sums.astype(np.float32)))

    def of_zeros(self, weight: NDArray[np.float32]) -> tuple[Sparse, NDArray[np.bool_]]:
        tile_mask = np.asarray((self.tiles(weight) != 0).any(axis=(2, 3)))
        # One number that is not zero keeps its whole block.
        return replace(self, kept=float(tile_mask.mean()) if tile_mask.size else 0.0), self._every(tile_mask)

    def split(
        self, weight: NDArray[np.float32], mask: NDArray[np.bool_]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
        tile_mask = np.asarray(self.tiles(mask).any(axis=(2, 3)))
        # Compressed rows of blocks: those of row i are starts[i] to starts[i + 1], as in scipy's BSR and torch's.
        starts = np.concatenate([[0], tile_mask.sum(1).cumsum()]).astype(np.int32)
        values = np.ascontiguousarray(self.tiles(np.where(mask, weight, 0))[tile_mask], np.float32)
        return {"starts": starts, "columns": tile_mask.nonzero()[1].astype(np.int32)}, values

    def block_rows(self, arrays: Arrays) -> NDArray[np.int64]:
        """Returns (kept,): the row of blocks of each."""
        starts = np.asarray(arrays["starts"], np.int64)
        return np.repeat(np.arange(starts.size - 1), np.diff(starts))

    def rows(self, arrays: Arrays, shape: Shape) -> NDArray[np.int64]:
        return (self.block_rows(arrays)[:, None] * self.size[0] + np.arange(self.size[0]))[..., None]

    def spread(self, arrays: Arrays, values: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
        high, wide = self.size
        out = np.zeros((shape[0] // high, shape[1] // wide, high, wide), np.float32)
        out[self.block_rows(arrays), arrays["columns"]] = values
        return out.swapaxes(1, 2).reshape(shape)
