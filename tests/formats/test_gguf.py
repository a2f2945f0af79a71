"""A GGUF file as it is laid out byte by byte: metadata, matrices of several types, and what is damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from gnomon.errors import InputError
from gnomon.formats.gguf import read_gguf, stored
from gnomon.storage.names import storage_of


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def written(path: Path, tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    """type, shape row-major and bytes by name."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 3)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("llama.block_count") + struct.pack("<II", 4, 2)
    head += text("names") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("é")
    body = b""
    for name, (kind, shape, raw) in tensors.items():
        body += b"\0" * (-len(body) % 32)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(body))
        body += raw
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


def test_matrices_of_a_file_are_what_was_stored(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    four = storage_of("q4_0").narrow(weight)["blocks"]
    sixteen = np.arange(16, dtype=np.uint8)
    mx = np.concatenate([[130], sixteen | (15 - sixteen) << 4]).astype(
        np.uint8
    )  # 2^3; element i is code i, 16 + i is 15 - i
    file = read_gguf(
        written(tmp_path / "a.gguf", {
            "f": (0, (8, 64), weight.tobytes()), "h": (1, (2, 4, 64), weight.astype(np.float16).tobytes()),
            "q": (2, (8, 64), four.tobytes()), "m": (39, (1, 32), mx.tobytes()), "other": (10, (1, 256), bytes(84)),
        })
    )  # fmt: skip
    assert file.metadata == {"general.architecture": "llama", "llama.block_count": 2, "names": ["a", "é"]}
    wide = {}
    for name in "fhqm":
        storage, arrays, shape = stored(file, name)
        wide[name] = storage.widen(arrays, shape)
    np.testing.assert_array_equal(wide["f"], weight)
    np.testing.assert_array_equal(wide["h"], weight.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(wide["q"], storage_of("q4_0").widen({"blocks": four}, (8, 64)))
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.concatenate([e2m1, -e2m1])
    np.testing.assert_array_equal(wide["m"][0], 8 * np.concatenate([codes, codes[::-1]]))
    with pytest.raises(InputError, match="type 10"):
        stored(file, "other")


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    good = written(tmp_path / "a.gguf", {"f": (0, (4, 8), bytes(128))})
    raw = good.read_bytes()
    with pytest.raises(InputError, match="cut short"):
        good.write_bytes(raw[:-1])
        stored(read_gguf(good), "f")
    for damaged in (b"", b"GGML" + raw[4:], raw[:40], raw[:24] + b"\xff" * 8 + raw[32:]):
        good.write_bytes(damaged)
        with pytest.raises(InputError):
            read_gguf(good)
