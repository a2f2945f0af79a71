"""ggml's blocks are widened and rounded bit by bit as the gguf package does.

The digests are of `gguf.quants.dequantize` of the bytes below and of `gguf.quants.quantize`: gguf 0.19.0 gave them."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from gnomon.storage.gguf import KINDS
from gnomon.storage.names import storage_of

WIDENED = {
    "q4_0": "daa2328c7717a236",
    "q8_0": "0ecb296b2149d4db",
    "q4_k": "7012b3f634e0ee86",
    "q6_k": "73269bbe1d12579e",
}
ROUNDED = {"q4_0": "d328e68d5425df9c", "q8_0": "dbb67a2153a4fd73"}
HALVES = {"q4_0": (0,), "q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}
"""Where a block's float16 numbers lie, which are made finite."""


@pytest.mark.parametrize("name", WIDENED)
def test_blocks_mean_what_ggml_reads(name: str) -> None:
    kind = KINDS[name]
    chance = np.random.default_rng(1)
    blocks = chance.integers(0, 256, (64, kind.bytes), dtype=np.uint8)
    for at in HALVES[name]:
        blocks[:, at + 1] &= 0x3B
    wide = kind.wide(blocks)
    assert sha256(wide.tobytes()).hexdigest()[:16] == WIDENED[name]
    if name in ROUNDED:
        weight = chance.standard_normal((32, 256)).astype(np.float32)
        stored = storage_of(name).narrow(weight)["blocks"]
        assert sha256(stored.tobytes()).hexdigest()[:16] == ROUNDED[name]


def test_halves_and_what_is_just_below_them_round_as_in_c() -> None:
    """Beside 127 the scale is 1, so that codes are the numbers, rounded half away from zero."""
    row = np.zeros((1, 32), np.float32)
    row[0, :7] = 127, np.nextafter(np.float32(0.5), np.float32(0)), 0.5, -0.5, 1.5, -2.5, 126.49999
    assert storage_of("q8_0").narrow(row)["blocks"][0, 2:9].view(np.int8).tolist() == [127, 0, 1, -1, 2, -3, 126]
