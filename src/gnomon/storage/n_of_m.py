"""N:M sparsity (2:4, 4:16): of every m neighbours in a row, n numbers are kept.

A kept number's place among its m takes four bits, two to a byte, the first in the low half; so m is 16 at most.
`narrow` keeps the largest of every m. Source: nmSPARSE (Lin et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.storage.form import Array, Arrays, Shape
from gnomon.storage.sparse import Sparse


@dataclass(frozen=True, slots=True, kw_only=True)
class NM(Sparse):
    """n of every m numbers of a row. Arrays: places (rows, ceil(kept of a row / 2)) in nibbles; values (rows, kept)."""

    n: int
    """Numbers kept of every m."""
    m: int
    """Numbers of a group."""

    @property
    def pattern(self) -> str:
        return f"{self.n}:{self.m}"

    def places(self, shape: Shape) -> tuple[dict[str, Array], tuple[int, ...]]:
        rows, num_values = shape[0], shape[1] // self.m * self.n
        return {"places": Array(dtype="uint8", shape=(rows, -(-num_values // 2)))}, (rows, num_values)

    def unfit(self, shape: Shape) -> str:
        return f"{shape[1]:,} columns are no multiple of {self.m}" if shape[1] % self.m else ""

    def mask(self, score: NDArray[np.float32]) -> NDArray[np.bool_]:
        rows = score.reshape(score.shape[0], -1, self.m)
        # Stable: of equal scores the first is kept, so that every rank chooses the same.
        best = np.argsort(-rows, -1, kind="stable")[..., : self.n]
        out = np.zeros(rows.shape, np.bool_)
        np.put_along_axis(out, best, True, -1)
        return out.reshape(score.shape)

    def of_zeros(self, weight: NDArray[np.float32]) -> tuple[Sparse, NDArray[np.bool_]]:
        nonzero = (weight != 0).reshape(weight.shape[0], -1, self.m)
        places = np.argsort(~nonzero, -1, kind="stable")[..., : self.n]  # with zeros, where fewer are kept
        mask = np.zeros(nonzero.shape, np.bool_)
        np.put_along_axis(mask, places, True, -1)
        mask = mask.reshape(weight.shape)
        if np.any(nonzero.sum(-1) > self.n):
            raise InputError(
                f"more than {self.n} of {self.m} numbers side by side are not 0, so this is not {self.name}"
            )
        return self, mask

    def split(
        self, weight: NDArray[np.float32], mask: NDArray[np.bool_]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
        rows, nonzero = weight.shape[0], mask.reshape(weight.shape[0], -1, self.m)
        # False sorts before True, so the places of kept numbers come first, then those of zeros that fill a group up to
        # n.
        places = np.sort(np.argsort(~nonzero, -1, kind="stable")[..., : self.n], -1).astype(np.uint8)
        values = np.take_along_axis(np.where(mask, weight, 0).reshape(nonzero.shape), places.astype(np.int64), -1)
        flat = places.reshape(rows, -1)
        # Rows begin at a byte: an odd row leaves the upper half of its last byte unused.
        flat = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2)))
        packed = flat[:, ::2] | flat[:, 1::2] << np.uint8(4)
        return {"places": packed}, values.reshape(rows, -1).astype(np.float32)

    def rows(self, arrays: Arrays, shape: Shape) -> NDArray[np.int64]:
        return np.arange(shape[0])[:, None]

    def places_of(self, arrays: Arrays, shape: Shape) -> NDArray[np.uint8]:
        """(rows, columns / m, n): which of its m each kept number is, ascending."""
        packed, num_values = arrays["places"].view(np.uint8), shape[1] // self.m * self.n
        # Cut to `kept`, since the last nibble of an odd row holds nothing.
        flat = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(shape[0], -1)[:, :num_values]
        return flat.reshape(shape[0], -1, self.n)

    def spread(self, arrays: Arrays, values: NDArray[np.float32], shape: Shape) -> NDArray[np.float32]:
        places = self.places_of(arrays, shape).astype(np.int64)
        out = np.zeros((shape[0], shape[1] // self.m, self.m), np.float32)
        np.put_along_axis(out, places, values.reshape(places.shape), -1)
        return out.reshape(shape)
