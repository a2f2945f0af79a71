"""Codes of four bits that a table gives numbers to, with a scale for each block: NF4 and MXFP4.

NF4's blocks of 64 run through the whole tensor, row after row, and their scales may be in eight bits with a scale for
256 of them (double quantisation); MXFP4's blocks of 32 lie within rows and have a power of two.
Source: Dettmers et al. 2023 (NF4, as bitsandbytes stores it); OCP Microscaling Formats 1.0 (MXFP4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.storage.form import Array, Arrays, Shape, Storage

NF4_CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NF4: what four bits stand for, times the largest of a block."""
E2M1_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""fp4 of two exponent bits: the sign in the highest bit."""
NF4_BLOCK, NF4_GROUP = 64, 256
"""Weights in NF4 that have one scale, and such scales that have one scale (Dettmers et al. 2023)."""
MX_BLOCK, MX_BIAS = 32, 127


def nf4_bytes(elements: int) -> int:
    """Bytes of a weight in NF4: four bits each, an eight-bit scale for 64 of them, an fp32 scale for 256 of these, and
    their mean (Dettmers et al. 2023, double quantization); a multiple of four, as fp32 has to lie."""
    blocks = -(-elements // NF4_BLOCK)
    return -(-(-(-elements // 2) + blocks + 4 * -(-blocks // NF4_GROUP) + 4) // 4) * 4


def _nearest(x: NDArray[np.float32], codes: tuple[float, ...]) -> NDArray[np.uint8]:
    table = np.asarray(codes, np.float32)
    # E2M1's codes do not ascend (negative ones follow the positive ones), so midpoints are taken in ascending order and
    # the place found is mapped back. 0 and -0 are neighbours: what is below 0 by less than a midpoint may become
    # either.
    order = np.argsort(table, kind="stable")
    edges = (table[order][:-1] + table[order][1:]) / 2
    return order[np.searchsorted(edges, x)].astype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class NF4(Storage):
    """Normal floats of 4 bits with scales in fp32; with scales in eight bits the runtime reads it (`runtime.nf4`), and
    `nf4_bytes` counts it."""

    @property
    def name(self) -> str:
        return "nf4"

    def arrays(self, shape: Shape) -> dict[str, Array]:
        elements = shape[0] * shape[1]
        return {
            "codes": Array(dtype="uint8", shape=(-(-elements // 2),)),
            "scales": Array(dtype="float32", shape=(-(-elements // NF4_BLOCK),)),
        }

    def unfit(self, shape: Shape) -> str:
        return ""

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        flat = np.asarray(weight, np.float32).ravel()
        rows = np.pad(flat, (0, -flat.size % NF4_BLOCK)).reshape(-1, NF4_BLOCK)
        scales = np.abs(rows).max(1)
        # 1e-38 stands for the scale of a block of zeros, whose numbers are 0 whatever they are divided by.
        codes = _nearest(rows / np.maximum(scales, np.float32(1e-38))[:, None], NF4_CODES).ravel()[: flat.size]
        codes = np.pad(codes, (0, flat.size % 2))
        return {"codes": codes[::2] << np.uint8(4) | codes[1::2], "scales": scales}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        elements, packed = shape[0] * shape[1], arrays["codes"].view(np.uint8)
        codes = np.stack([packed >> np.uint8(4), packed & np.uint8(15)], -1).ravel()[:elements]
        scales = np.repeat(arrays["scales"].astype(np.float32), NF4_BLOCK)[:elements]
        return (np.asarray(NF4_CODES, np.float32)[codes] * scales).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4(Storage):
    """Codes two in a byte, the first in its lower half; scales as exponents of two, 127 for 1."""

    @property
    def name(self) -> str:
        return "mxfp4"

    def arrays(self, shape: Shape) -> dict[str, Array]:
        rows, columns = shape
        return {
            "codes": Array(dtype="uint8", shape=(rows, columns // 2)),
            "scales": Array(dtype="uint8", shape=(rows, columns // MX_BLOCK)),
        }

    def unfit(self, shape: Shape) -> str:
        return f"{shape[1]:,} columns are no multiple of blocks of {MX_BLOCK}" if shape[1] % MX_BLOCK else ""

    def narrow(self, weight: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        rows = np.asarray(weight, np.float32).reshape(weight.shape[0], -1, MX_BLOCK)
        top = np.abs(rows).max(-1)
        # The largest code is 6 = 1.5 * 2**2, so the block's power is that of its largest number less 2 (OCP MX 1.0);
        # numbers of 6 … 8 times the scale are rounded to 6.
        exponents = np.where(top > 0, np.floor(np.log2(np.maximum(top, np.float32(1e-38)))) - 2, -MX_BIAS)
        # 255 is NaN in E8M0.
        scales = np.clip(exponents + MX_BIAS, 0, 254).astype(np.uint8)
        codes = _nearest(rows / _powers(scales)[..., None], E2M1_CODES).reshape(weight.shape)
        return {"codes": codes[:, ::2] | codes[:, 1::2] << np.uint8(4), "scales": scales}

    def widen(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        packed = arrays["codes"].view(np.uint8)
        codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(shape)
        scales = np.repeat(_powers(arrays["scales"].view(np.uint8)), MX_BLOCK, 1)
        return np.asarray(E2M1_CODES, np.float32)[codes] * scales


def _powers(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - MX_BIAS).astype(np.float32)
