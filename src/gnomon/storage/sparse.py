"""Matrices of which a part is kept: n of every m, whole blocks, any by a bitmap, any by row and column (CSR).

What is kept is exact; zeros take no room but where a form says (n of m keeps n whatever they are). `narrow` keeps the
largest: of every m numbers of a row, of all blocks by their sum of squares, of all numbers.
Source: nmSPARSE (Lin et al. 2023) for n of m, SpInfer (Fan et al. 2025) for bitmaps.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape, Storage


class Sparse(Storage):
    """A form that keeps where a mask is true."""

    __slots__ = ()

    @abstractmethod
    def mask(self, score: NDArray[np.float32]) -> NDArray[np.bool_]:
        """(rows, columns): what of the highest scores may be kept together."""

    @abstractmethod
    def of_mask(self, weight: NDArray[np.float32], mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        """The arrays of what a mask of this form keeps of a matrix."""

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        weight = np.asarray(weight, np.float32)
        return self.of_mask(weight, self.mask(np.abs(weight)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NM(Sparse):
    """Of every m numbers side by side in a row n are kept, with their places in four bits."""

    n: int
    m: int

    @property
    def name(self) -> str:
        return f"{self.n}:{self.m}"

    def arrays(self, shape: Shape) -> dict[str, Array]:
        rows, kept = shape[0], shape[1] // self.m * self.n
        return {
            "values": Array(dtype="float32", shape=(rows, kept)),
            "places": Array(dtype="uint8", shape=(rows, -(-kept // 2))),
        }

    def unfit(self, shape: Shape) -> str:
        return f"{shape[1]:,} columns are no multiple of {self.m}" if shape[1] % self.m else ""

    def mask(self, score: NDArray[np.float32]) -> NDArray[np.bool_]:
        rows = score.reshape(score.shape[0], -1, self.m)
        best = np.argsort(-rows, -1, kind="stable")[..., : self.n]
        out = np.zeros(rows.shape, np.bool_)
        np.put_along_axis(out, best, True, -1)
        return out.reshape(score.shape)

    def of_mask(self, weight: NDArray[np.float32], mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        rows, kept = weight.shape[0], mask.reshape(weight.shape[0], -1, self.m)
        places = np.sort(np.argsort(~kept, -1, kind="stable")[..., : self.n], -1).astype(np.uint8)
        values = np.take_along_axis(np.where(mask, weight, 0).reshape(kept.shape), places.astype(np.int64), -1)
        flat = np.pad(places.reshape(rows, -1), ((0, 0), (0, places[0].size % 2)))
        packed = flat[:, ::2] | flat[:, 1::2] << np.uint8(4)
        return {"values": values.reshape(rows, -1).astype(np.float32), "places": packed}

    def places_of(self, arrays: Arrays, shape: Shape) -> NDArray[np.uint8]:
        """(rows, columns / m, n): which of its m each kept number is, ascending."""
        packed, kept = arrays["places"].view(np.uint8), shape[1] // self.m * self.n
        flat = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(shape[0], -1)[:, :kept]
        return flat.reshape(shape[0], -1, self.n)

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        places = self.places_of(arrays, shape).astype(np.int64)
        out = np.zeros((shape[0], shape[1] // self.m, self.m), np.float32)
        np.put_along_axis(out, places, arrays["values"].astype(np.float32).reshape(places.shape), -1)
        return out.reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share(Sparse):
    kept: float
    """Share of the numbers (of blocks) that are kept."""

    def _count(self, of: int) -> int:
        return round(self.kept * of)

    def unfit(self, shape: Shape) -> str:
        return ""

    def mask(self, score: NDArray[np.float32]) -> NDArray[np.bool_]:
        flat = score.ravel()
        out = np.zeros(flat.size, np.bool_)
        out[np.argsort(-flat, kind="stable")[: self._count(flat.size)]] = True
        return out.reshape(score.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmap(_Share):
    """A bit for each number of a row, the first of a byte in its lowest bit, and those that are kept, in order."""

    @property
    def name(self) -> str:
        return f"{1 - self.kept:g}"

    def arrays(self, shape: Shape) -> dict[str, Array]:
        return {
            "bits": Array(dtype="uint8", shape=(shape[0], -(-shape[1] // 8))),
            "values": Array(dtype="float32", shape=(self._count(shape[0] * shape[1]),)),
        }

    def of_mask(self, weight: NDArray[np.float32], mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        return {"bits": np.packbits(mask, axis=1, bitorder="little"), "values": weight[mask].astype(np.float32)}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        mask = np.unpackbits(arrays["bits"].view(np.uint8), axis=1, count=shape[1], bitorder="little").astype(np.bool_)
        out = np.zeros(shape, np.float32)
        out[mask] = arrays["values"]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class CSR(_Share):
    """The numbers of each row with their columns, and where each row begins."""

    @property
    def name(self) -> str:
        return f"csr:{1 - self.kept:g}"

    def arrays(self, shape: Shape) -> dict[str, Array]:
        kept = self._count(shape[0] * shape[1])
        return {
            "starts": Array(dtype="int32", shape=(shape[0] + 1,)),
            "columns": Array(dtype="int32", shape=(kept,)),
            "values": Array(dtype="float32", shape=(kept,)),
        }

    def of_mask(self, weight: NDArray[np.float32], mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        starts = np.concatenate([[0], mask.sum(1).cumsum()]).astype(np.int32)
        columns = mask.nonzero()[1].astype(np.int32)
        return {"starts": starts, "columns": columns, "values": weight[mask].astype(np.float32)}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        out, starts = np.zeros(shape, np.float32), np.asarray(arrays["starts"], np.int64)
        rows = np.repeat(np.arange(shape[0]), np.diff(starts))
        out[rows, arrays["columns"]] = arrays["values"]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(_Share):
    """Whole blocks, row of blocks after row of blocks, with their columns of blocks."""

    size: Shape = (16, 16)

    @property
    def name(self) -> str:
        return f"block:{self.size[0]}x{self.size[1]}:{1 - self.kept:g}"

    def arrays(self, shape: Shape) -> dict[str, Array]:
        across = shape[0] // self.size[0]
        kept = self._count(across * (shape[1] // self.size[1]))
        return {
            "starts": Array(dtype="int32", shape=(across + 1,)),
            "columns": Array(dtype="int32", shape=(kept,)),
            "values": Array(dtype="float32", shape=(kept, *self.size)),
        }

    def unfit(self, shape: Shape) -> str:
        if shape[0] % self.size[0] or shape[1] % self.size[1]:
            return f"{shape[0]:,} x {shape[1]:,} does not divide into blocks of {self.size[0]} x {self.size[1]}"
        return ""

    def _tiles(self, x: NDArray[Any]) -> NDArray[Any]:
        """(rows of blocks, columns of blocks, rows, columns)."""
        (rows, columns), (high, wide) = x.shape, self.size
        return x.reshape(rows // high, high, columns // wide, wide).swapaxes(1, 2)

    def mask(self, score: NDArray[np.float32]) -> NDArray[np.bool_]:
        sums = (self._tiles(score).astype(np.float64) ** 2).sum((2, 3))
        kept = _Share.mask(self, sums.astype(np.float32))
        return np.kron(kept, np.ones(self.size, np.bool_)).astype(np.bool_)

    def of_mask(self, weight: NDArray[np.float32], mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        kept = np.asarray(self._tiles(mask).any(axis=(2, 3)))
        starts = np.concatenate([[0], kept.sum(1).cumsum()]).astype(np.int32)
        values = np.ascontiguousarray(self._tiles(np.where(mask, weight, 0))[kept], np.float32)
        return {"starts": starts, "columns": kept.nonzero()[1].astype(np.int32), "values": values}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        (high, wide), starts = self.size, arrays["starts"].astype(np.int64)
        out = np.zeros((shape[0] // high, shape[1] // wide, high, wide), np.float32)
        out[np.repeat(np.arange(starts.size - 1), np.diff(starts)), arrays["columns"]] = arrays["values"]
        return out.swapaxes(1, 2).reshape(shape)
