"""ggml's blocks: Q4_0, Q8_0, Q4_K and Q6_K. Blocks run along rows; all of a block lies side by side in one array.

`widen` multiplies in the order of ggml's own dequantisation, in float32, so results are equal bit by bit.
Source: ggml, ggml-common.h and ggml-quants.c (block_q4_0, block_q8_0, block_q4_K, block_q6_K and `dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape, Storage, as_scales

Block = NDArray[np.uint8]
"""[blocks, bytes of a block]: a row for each block."""


def _half(block: Block, at: int) -> NDArray[np.float32]:
    """Reads the float16 that begins at byte `at` of each block; returns [blocks, 1], to be broadcast over a block."""
    return np.ascontiguousarray(block[:, at : at + 2]).view(np.float16).astype(np.float32)


def _as_half(x: NDArray[np.float32]) -> Block:
    """Returns the two bytes [blocks, 2] of each number [blocks] rounded to float16."""
    return as_scales(x, "float16")[:, None].view(np.uint8)


def _nibbles(codes: Block) -> NDArray[np.float32]:
    """Takes bytes [blocks, n] apart into [blocks, 2n] codes of 0 … 15: the lower four bits of all, then the upper."""
    return np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], 1).astype(np.float32)


def _wide_q4_0(block: Block) -> NDArray[np.float32]:
    """Reads blocks of 18 bytes, a float16 scale d and 16 bytes of codes, as 32 numbers: d · (code - 8)."""
    return (_nibbles(block[:, 2:]) - np.float32(8)) * _half(block, 0)


def _narrow_q4_0(rows: NDArray[np.float32]) -> Block:
    """Rounds [blocks, 32] to Q4_0. The number of largest magnitude becomes -8, which is the code of 0 … 15 less 8 that
    has no counterpart of the other sign."""
    top = np.take_along_axis(rows, np.abs(rows).argmax(1)[:, None], 1)[:, 0]
    scale = top / np.float32(-8)
    # Multiplied by the reciprocal of the scale, which is not rounded to float16 yet, as ggml does: a division rounds
    # differently in the last bit. The inner `where` spares numpy's warning of 1 / 0 in blocks of zeros.
    by = np.where(scale == 0, np.float32(0), np.float32(1) / np.where(scale == 0, np.float32(1), scale))
    # rows / scale lies in -8 … 8, so + 8.5 and truncation round half up to 0 … 16; the largest with the other sign
    # would be 16, which four bits do not hold.
    codes = np.minimum(np.trunc(rows * by[:, None] + np.float32(8.5)), 15).astype(np.uint8)
    # Byte i of a block holds number i in its lower half and number i + 16 in its upper half.
    return np.concatenate([_as_half(scale), codes[:, :16] | codes[:, 16:] << np.uint8(4)], 1)


def _wide_q8_0(block: Block) -> NDArray[np.float32]:
    """Reads blocks of 34 bytes, a float16 scale d and 32 signed codes, as 32 numbers: d · code."""
    return np.ascontiguousarray(block[:, 2:]).view(np.int8).astype(np.float32) * _half(block, 0)


def _narrow_q8_0(rows: NDArray[np.float32]) -> Block:
    """Rounds [blocks, 32] to Q8_0: codes from -127 to 127, of which the largest magnitude takes the end."""
    scale = np.abs(rows).max(1) / np.float32(127)
    by = np.where(scale == 0, np.float32(0), np.float32(1) / np.where(scale == 0, np.float32(1), scale))
    x = rows * by[:, None]
    # C's roundf: half away from zero, where numpy's rint goes to even. floor(|x| + 0.5) would make 1 of the largest
    # float32 below 0.5, whose sum with 0.5 rounds to 1; |x| - floor(|x|) and its double are exact.
    size = np.abs(x)
    whole = np.floor(size)
    codes = (np.sign(x) * (whole + np.floor(2 * (size - whole)))).astype(np.int8)
    return np.concatenate([_as_half(scale), codes.view(np.uint8)], 1)


def _sixes(block: Block) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unpacks bytes 4 … 15 of Q4_K blocks: (scales, minima) of 8 sub-blocks, [blocks, 8] each, of six bits each."""
    # Scales and minima 0 … 3 are the lower six bits of `low` and `mid`. Of 4 … 7, `high` has the lower four bits (scale
    # in the lower half, minimum in the upper one), and the two top bits of `low` and `mid` have the rest.
    low, mid, high = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], 1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], 1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _wide_q4_k(block: Block) -> NDArray[np.float32]:
    """Reads blocks of 144 bytes as 256 numbers in 8 sub-blocks of 32: d · scale · code - dmin · minimum.

    Bytes: float16 d, float16 dmin, 12 of scales and minima (`_sixes`), 128 of four-bit codes.
    """
    scales, minima = _sixes(block)
    each, least = _half(block, 0) * scales, _half(block, 2) * minima
    # (blocks, runs of 32 bytes, halves, 32): the lower halves of 32 bytes are one sub-block of 32 numbers, their upper
    # halves the next one.
    codes = block[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & np.uint8(15)
    return (each[..., None] * codes.reshape(-1, 8, 32).astype(np.float32) - least[..., None]).reshape(-1, 256)


def _wide_q6_k(block: Block) -> NDArray[np.float32]:
    """Reads blocks of 210 bytes as 256 numbers in 16 sub-blocks of 16: d · scale · (code - 32), codes of six bits.

    Bytes: 128 of the codes' lower four bits, 64 of their upper two, 16 signed scales, float16 d.
    """
    fours, twos = np.arange(0, 8, 4, dtype=np.uint8).reshape(1, 1, 2, 1), np.arange(0, 8, 2, dtype=np.uint8)
    # A block is two halves of 128 numbers. Of each, 64 bytes hold the lower four bits: 64 numbers in the lower halves,
    # 64 in the upper ones, which are four runs of 32.
    low = (block[:, :128].reshape(-1, 2, 1, 64) >> fours & np.uint8(15)).reshape(-1, 8, 32)
    # 32 bytes hold the two upper bits of the same four runs: bits 0, 1 of the first run, 2, 3 of the second …
    high = block[:, 128:192].reshape(-1, 2, 1, 32) >> twos.reshape(1, 1, 4, 1) & np.uint8(3)
    codes = (low | high.reshape(-1, 8, 32) << np.uint8(4)).astype(np.int8) - np.int8(32)
    # 16 signed scales, one for each 16 numbers, and after them the float16 that multiplies them all.
    scales = _half(block, 208) * np.ascontiguousarray(block[:, 192:208]).view(np.int8).astype(np.float32)
    return (scales[..., None] * codes.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One of ggml's block formats."""

    size: int
    """Numbers of a block."""
    bytes: int
    """Bytes of a block."""
    wide: Callable[[Block], NDArray[np.float32]]
    """[blocks, bytes] -> the numbers [blocks, size] that they stand for."""
    narrow: Callable[[NDArray[np.float32]], Block] | None = None
    """[blocks, size] -> [blocks, bytes], rounded as ggml does; None for formats that are only read."""


KINDS = {
    "q4_0": _Kind(size=32, bytes=18, wide=_wide_q4_0, narrow=_narrow_q4_0),
    "q8_0": _Kind(size=32, bytes=34, wide=_wide_q8_0, narrow=_narrow_q8_0),
    "q4_k": _Kind(size=256, bytes=144, wide=_wide_q4_k),
    "q6_k": _Kind(size=256, bytes=210, wide=_wide_q6_k),
}
"""Name of a format -> what its blocks are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ggml(Storage):
    """A matrix in blocks of one of `KINDS`, each along a row; rows are whole numbers of blocks."""

    kind: str
    """The name of its format in `KINDS`."""

    @property
    def name(self) -> str:
        return self.kind

    def arrays(self, shape: Shape) -> dict[str, Array]:
        """One array `blocks` of bytes [rows, columns / size x bytes]."""
        kind = KINDS[self.kind]
        return {"blocks": Array(dtype="uint8", shape=(shape[0], shape[1] // kind.size * kind.bytes))}

    def unfit(self, shape: Shape) -> str:
        """A sentence where columns are no whole number of blocks; else nothing."""
        size = KINDS[self.kind].size
        return f"{shape[1]:,} columns are no multiple of blocks of {size}" if shape[1] % size else ""

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Rounds [rows, columns] as ggml does. NotImplementedError for Q4_K and Q6_K, which are only read."""
        kind = KINDS[self.kind]
        if kind.narrow is None:
            raise NotImplementedError(f"{self.kind} is read, not written")
        return {"blocks": kind.narrow(np.asarray(weight, np.float32).reshape(-1, kind.size)).reshape(len(weight), -1)}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        """The numbers (rows, columns) that the blocks stand for, bit by bit as ggml dequantises them."""
        kind = KINDS[self.kind]
        return kind.wide(arrays["blocks"].view(np.uint8).reshape(-1, kind.bytes)).reshape(shape)
