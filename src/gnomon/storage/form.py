"""What it says of a tensor how it is stored: its arrays, their bytes, what they mean, and what cannot be stored so.

A `Storage` is a frozen value. `arrays(shape)` says what lies in memory for a matrix of (rows, columns), outputs before
inputs as in a linear layer; `widen` gives the numbers that the arrays stand for, exactly as float32 computes them;
`narrow` rounds a matrix to the nearest that can be stored; `refused` says in one line why a shape, or a shard of it,
cannot. Pure: numpy alone. Leaves out files (`formats`), how kernels lay the same numbers out (`compiler.stored`), and
prices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError

Shape = tuple[int, int]
"""(rows, columns): outputs, inputs."""
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array of a stored matrix: numpy's name of its dtype, and its shape."""

    dtype: str
    """numpy's name of it."""
    shape: tuple[int, ...]
    """Its sizes."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def as_scales(scales: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Rounds scales to their dtype. InputError where one is beyond it, which would be read back as infinities."""
    with np.errstate(over="ignore"):
        rounded = np.asarray(scales).astype(dtype)
    if np.isinf(rounded).any() and np.isfinite(scales).all():
        raise InputError(
            f"weights are too large to be stored so: a scale of {float(np.abs(scales).max()):,.0f} is beyond {dtype}'s "
            f"{float(np.finfo(dtype).max):,.0f}; keep this matrix in bf16 or fp32"
        )
    return rounded


class Storage(ABC):
    """How a matrix is stored."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that people write (`int4:64`, `2:4`); `storage_of` reads it back."""

    @abstractmethod
    def arrays(self, shape: Shape) -> dict[str, Array]:
        """What lies in memory; of a sparse form, where its share of numbers is kept."""

    @abstractmethod
    def unfit(self, shape: Shape) -> str:
        """Why a matrix of that shape cannot be stored so, or nothing."""

    @abstractmethod
    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """The arrays of the nearest matrix that can be stored."""

    @abstractmethod
    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        """Returns (rows, columns): what the arrays stand for."""

    def bytes(self, shape: Shape) -> int:
        return sum(array.bytes for array in self.arrays(shape).values())

    def refused(self, shape: Shape, shards: Shape = (1, 1)) -> str:
        """Why the shards of a matrix (so many of its rows, of its columns) cannot be stored so, or nothing."""
        rows, columns = shape
        for what, size, parts in (("rows", rows, shards[0]), ("columns", columns, shards[1])):
            if size % parts:
                return f"{size:,} {what} do not divide into {parts} shards"
        why = self.unfit((rows // shards[0], columns // shards[1]))
        of = f" (a shard of {rows:,} x {columns:,})" if shards != (1, 1) else ""
        return f"{self.name}: {why}{of}" if why else ""

    def bits_a_weight(self, shape: Shape) -> float:
        """Stored bits for each weight of the shape: codes with their scales, zeros, indices and padding."""
        return 8 * self.bytes(shape) / prod(shape)


def bits_packed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """(rows, columns) codes of so many bits as bytes, the first of a byte in its lowest bits; rows end on a byte."""
    # Three bits: two codes a byte, two bits of it unused.
    each = 8 // bits
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // each) * each), np.uint8)
    padded[:, :columns] = codes
    parts = padded.reshape(rows, -1, each)
    out = np.zeros(parts.shape[:2], np.uint8)
    for i in range(each):
        out |= parts[:, :, i] << np.uint8(bits * i)
    return out


def bits_unpacked(packed: NDArray[np.uint8], bits: int, columns: int) -> NDArray[np.uint8]:
    """The inverse of `bits_packed`."""
    each, mask = 8 // bits, np.uint8(2**bits - 1)
    parts = np.stack([(packed >> np.uint8(bits * i)) & mask for i in range(each)], -1)
    return parts.reshape(packed.shape[0], -1)[:, :columns]


def in_groups(weight: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    """A view (rows, groups, group) of a weight (rows, columns); group 0 is one group a row."""
    return weight.reshape(weight.shape[0], -1, group or weight.shape[1])


def spread(scales: NDArray[np.float32], columns: int) -> NDArray[np.float32]:
    """(rows, groups) -> (rows, columns)."""
    return np.repeat(scales, columns // scales.shape[1], 1)
