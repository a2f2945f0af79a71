"""What is stored is what was meant: widening gives back each code, and forms agree with what others read."""

from __future__ import annotations

import numpy as np
import pytest

from gnomon.errors import InputError
from gnomon.storage.integers import Integers
from gnomon.storage.names import storage_of
from gnomon.storage.ordered import Ordered
from gnomon.storage.shifted import Shifted
from gnomon.storage.sparse import Sparse

NAMES = (
    "fp32", "fp16", "bf16", "int8", "int8-g32", "int4-g32", "int4-g64", "int4-g128-zeros", "int2-g64", "int3-g64",
    "int3-g96-zeros", "ternary", "ternary-g64", "nf4", "mxfp4", "fp8", "fp8-row", "fp8-128x128", "fp8-16x32", "q4_0",
    "q8_0", "2:4", "4:16", "1:3", "0.9", "csr:0.5", "block:16x16:0.9", "block:4x8:0.5", "2:4-bf16", "4:16-int8",
    "1:3-int8", "0.9-int8", "csr:0.5-bf16", "0.9-bf16", "block:16x16:0.9-int8", "block:4x8:0.5-bf16",
)  # fmt: skip
SHAPES = ((48, 384), (16, 768))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_was_stored_is_stored_again_as_it_was(name: str, shape: tuple[int, int]) -> None:
    """The sizes are those that are said, and a matrix of stored numbers loses nothing."""
    storage = storage_of(name)
    assert storage.refused(shape) == ""
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    weight[3], weight[5, 7] = 0, 40
    stored = storage.narrow(weight)
    said = storage.arrays(shape)
    assert {k: (v.dtype.name, v.shape) for k, v in stored.items()} == {k: (v.dtype, v.shape) for k, v in said.items()}
    assert storage.bytes(shape) == sum(one.nbytes for one in stored.values())
    wide = storage.widen(stored, shape)
    assert wide.dtype == np.float32 and wide.shape == shape
    if isinstance(storage, Integers):  # a mean size, or a range that begins at a code, is another one the second time
        zeros = stored.get("zeros")
        again = storage.coded(wide, stored["scales"], None if zeros is None else zeros.astype(np.uint8))
        assert all(np.array_equal(again[k], stored[k]) for k in stored)
    np.testing.assert_array_equal(
        storage.widen(again if isinstance(storage, Integers) else storage.narrow(wide), shape), wide
    )
    if isinstance(storage, Sparse):
        kept, by = wide != 0, np.abs(weight).max(1, keepdims=True)
        near = {"fp32": np.zeros_like(by), "bf16": by / 256, "int8": by / 250}[storage.value]
        assert np.all(np.abs(wide - weight)[kept] <= np.broadcast_to(near, shape)[kept])
        of_zeros, mask = storage.of_zeros(wide)
        np.testing.assert_array_equal(of_zeros.widen(of_zeros.of_mask(wide, mask), shape), wide)
    elif "ternary" not in name and "int2" not in name:
        assert np.abs(wide - weight).max() <= 40 / 5


@pytest.mark.parametrize("name", ["int4-g32-offsets", "int4-offsets"])
def test_codes_with_offsets(name: str) -> None:
    """Widened number by number, codes as they were, and no number further off than half a step."""
    storage, shape, chance = storage_of(name), (5, 96), np.random.default_rng(0)
    assert isinstance(storage, Shifted) and storage.name == name and storage.refused(shape) == ""
    group = storage.group or shape[1]
    codes = chance.integers(0, 16, shape).astype(np.uint8)
    scales, offsets = (chance.standard_normal((5, shape[1] // group)).astype(np.float32) for _ in range(2))
    arrays = storage.of_codes(codes, scales, offsets)
    assert {k: (v.dtype.name, v.shape) for k, v in arrays.items()} == {
        k: (v.dtype, v.shape) for k, v in storage.arrays(shape).items()
    }
    wide = storage.widen(arrays, shape)
    for n in range(5):
        for k in range(96):
            g = k // group
            assert wide[n, k] == np.float32(int(codes[n, k]) - 8) * scales[n, g] + offsets[n, g]
    weight = chance.standard_normal(shape).astype(np.float32)
    near = storage.narrow(weight)
    apart = np.abs(storage.widen(near, shape) - weight).reshape(5, -1, group).max(-1)
    assert np.all(apart <= near["scales"] * 0.5001)


@pytest.mark.parametrize("name", ["int4-g32-ordered", "int3-g16-ordered"])
def test_groups_of_columns_anywhere(name: str) -> None:
    """Widened number by number; codes of the nearest matrix are no further off than half a step of their group."""
    storage, shape = storage_of(name), (5, 96)
    assert isinstance(storage, Ordered) and storage.name == name and "share a scale" in storage.refused((8, 100))
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.linspace(
        0.1, 9, 96, dtype="float32"
    )
    arrays = storage.narrow(weight)
    assert {k: (v.dtype.name, v.shape) for k, v in arrays.items()} == {
        k: (v.dtype, v.shape) for k, v in storage.arrays(shape).items()
    }
    wide, order, scales = storage.widen(arrays, shape), arrays["order"], arrays["scales"].astype(np.float32)
    assert (np.bincount(order) == storage.group).all() and (order[:8] > order[-8:].max()).all()
    assert np.all(np.abs(wide - weight) <= scales[:, order] * 0.51)
    plain = Integers(bits=storage.bits, group=storage.group, zeros=True)
    codes = plain.codes_of(arrays, shape)
    for n in range(5):
        for k in range(96):
            assert wide[n, k] == np.float32(int(codes[n, k]) - int(arrays["zeros"][n, order[k]])) * scales[n, order[k]]


def test_names_are_read_back_and_others_refused() -> None:
    for name in NAMES:
        assert storage_of(name).name == name
    for name in ("int5-g64", "int4-g0", "4:2", "2:32", "q4_9", "1.5", "2:4-int4", "0.9-fp32", ""):
        with pytest.raises(InputError):
            storage_of(name)


def test_what_does_not_fit_is_refused_before_anything_is_made() -> None:
    int4 = storage_of("int4-g64")
    assert int4.refused((8, 256), (2, 4)) == ""
    assert "64 that share a scale" in int4.refused((8, 256), (1, 8))
    assert "do not divide into 3 shards" in int4.refused((8, 256), (3, 1))
    assert "blocks of 16 x 16" in storage_of("block:16x16:0.9").refused((8, 256))
    assert "blocks of 256" in storage_of("q4_k").refused((8, 128))


def test_bits_of_a_weight_are_those_of_the_field() -> None:
    shape = (4096, 4096)
    bits = {
        name: storage_of(name).bits_a_weight(shape)
        for name in ("int4-g64", "int4-g128-zeros", "q4_0", "q4_k", "q6_k", "mxfp4")
    }
    assert bits == {
        "int4-g64": 4.25,
        "int4-g128-zeros": 4.1875,
        "q4_0": 4.5,
        "q4_k": 4.5,
        "q6_k": 6.5625,
        "mxfp4": 4.25,
    }


def test_eight_bit_floats_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    from gnomon.storage.float8 import e4m3, to_e4m3

    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3(), theirs)
    x = np.concatenate([np.linspace(-450, 450, 4001), np.geomspace(1e-5, 448, 4001), [np.nan]]).astype(np.float32)
    x = np.clip(x, -448, 448)
    mine = e4m3()[to_e4m3(x)]
    np.testing.assert_array_equal(mine, torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy())


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-zeros", "ternary", "q4_0", "q8_0", "2:4-int8"])
def test_a_scale_beyond_its_dtype_is_an_error(name: str) -> None:
    """And the largest that fits is stored."""
    storage = storage_of(name)
    weight = np.random.default_rng(0).uniform(-1, 1, (32, 64)).astype(np.float32)
    weight[3] = 4e7
    with pytest.raises(InputError, match="too large to be stored so: a scale of [0-9,]+ is beyond float16's 65,504"):
        storage.narrow(weight)
    weight[3] = 6e4
    assert np.isfinite(storage.widen(storage.narrow(weight), weight.shape)).all()
