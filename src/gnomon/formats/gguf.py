"""GGUF files: what they say of themselves, and their matrices as values of `gnomon.storage`; and such files written.

`read_gguf(path)` reads the header alone; `stored(file, name)` one matrix, as (storage, arrays, shape), of types F32,
F16, BF16, Q4_0, Q8_0, Q4_K, Q6_K and MXFP4. Other types are refused by name. `integers_of` and `blocks_of` are a stored
matrix as `Integers` and as GGUF has it, number by number the same, and `write_gguf` writes a file. Pure: numpy. Leaves
out which tensor is which parameter (`gguf_model`), tokenizers (`gguf_tokenizer`), and files in parts.
Source: ggml, docs/gguf.md (versions 2 and 3), and ggml-common.h.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.storage.dense import Dense
from gnomon.storage.form import Arrays, Shape, Storage
from gnomon.storage.gguf import KINDS, Ggml
from gnomon.storage.integers import Integers
from gnomon.storage.tables import MX_BLOCK, MXFP4

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> struct's letter."""
TEXT, LIST = 8, 9
TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K", 30: "BF16", 39: "MXFP4"}
PLAIN = {"F32": ("fp32", "<f4"), "F16": ("fp16", "<f2"), "BF16": ("bf16", "<u2")}
MX_BYTES = 1 + MX_BLOCK // 2
BLOCK, ALIGN = 32, 32
"""Numbers that share a scale in Q4_0 and Q8_0; bytes to a multiple of which a tensor begins."""
MOST = 1 << 28
"""Characters or values that one entry may have: a damaged length asks for no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    kind: str
    """Of TYPES, or its number."""
    shape: tuple[int, ...]
    """Row-major: the last runs fastest."""
    begin: int
    """Its first byte in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]


def read_gguf(path: Path) -> Gguf:
    """InputError for a file that is none, is cut short, or is of another version."""
    try:
        with path.open("rb") as file:
            return _header(path, file)
    except (OSError, struct.error, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as GGUF: {error}") from error


def _header(path: Path, file: BinaryIO) -> Gguf:
    magic, version, tensors, values = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3):
        raise InputError(f"{path} is no GGUF file of version 2 or 3 ({magic!r}, {version})")
    metadata = {}
    for _ in range(values):
        key = _text(path, file)
        metadata[key] = _value(path, file, *struct.unpack("<I", file.read(4)))
    found = []
    for _ in range(tensors):
        name = _text(path, file)
        (many,) = struct.unpack("<I", file.read(4))
        if many > 4:
            raise InputError(f"{path}: {name} has {many} dims; GGUF has at most 4")
        # GGUF lists dims with the fastest first; shapes here are row-major.
        *dims, kind, offset = struct.unpack(f"<{many}QIQ", file.read(8 * many + 12))
        found.append((name, TYPES.get(kind, str(kind)), tuple(reversed(dims)), offset))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align <= 0:
        raise InputError(f"{path}: general.alignment is {align!r}")
    # Offsets count from the end of the header, rounded up to the alignment.
    begin = -(-file.tell() // align) * align
    entries = {name: Entry(kind=kind, shape=shape, begin=begin + at) for name, kind, shape, at in found}
    return Gguf(path=path, metadata=metadata, entries=entries)


def _text(path: Path, file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MOST:
        raise InputError(f"{path} has a text of {length:,} bytes: it is damaged")
    return file.read(length).decode("utf-8")


def _value(path: Path, file: BinaryIO, kind: int) -> Any:
    if kind == TEXT:
        return _text(path, file)
    if kind == LIST:
        inner, length = struct.unpack("<IQ", file.read(12))
        if length > MOST:
            raise InputError(f"{path} has a list of {length:,} values: it is damaged")
        if inner in NUMBERS:
            return list(
                struct.unpack(f"<{length}{NUMBERS[inner]}", file.read(length * struct.calcsize(NUMBERS[inner])))
            )
        return [_value(path, file, inner) for _ in range(length)]
    if kind not in NUMBERS:
        raise InputError(f"{path} has a value of type {kind}, which GGUF does not")
    letter = NUMBERS[kind]
    return struct.unpack(f"<{letter}", file.read(struct.calcsize(letter)))[0]


def stored(file: Gguf, name: str) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """(storage, its arrays, (rows, columns)) of a tensor; dims before the last are rows. InputError for a type that is
    not read, and for a file that ends before the tensor does."""
    if name not in file.entries:
        raise InputError(f"{file.path} has no tensor {name}")
    entry = file.entries[name]
    shape = (prod(entry.shape[:-1]), entry.shape[-1] if entry.shape else 1)
    storage: Storage
    if entry.kind in PLAIN:
        named, dtype = PLAIN[entry.kind]
        storage = Dense(dtype=named)
        values = _bytes(file, name, entry, prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
        return storage, {"values": values}, shape
    if entry.kind == "MXFP4":
        storage = MXFP4()
    elif entry.kind.lower() in KINDS:
        storage = Ggml(kind=entry.kind.lower())
    else:
        raise InputError(f"{file.path}: {name} is of type {entry.kind}; {', '.join(TYPES.values())} are read")
    if why := storage.refused(shape):
        raise InputError(f"{file.path}: {name}: {why}")
    if isinstance(storage, Ggml):
        size = storage.arrays(shape)["blocks"].shape
        return storage, {"blocks": _bytes(file, name, entry, prod(size)).reshape(size)}, shape
    blocks = _bytes(file, name, entry, prod(shape) // MX_BLOCK * MX_BYTES).reshape(-1, MX_BYTES)
    halves = np.concatenate([blocks[:, 1:] & np.uint8(15), blocks[:, 1:] >> np.uint8(4)], 1)  # 16 low, then 16 high
    # ggml has number i and i + 16 of a block in one byte, here neighbours share one.
    codes = (halves[:, ::2] | halves[:, 1::2] << np.uint8(4)).reshape(shape[0], -1)
    return storage, {"codes": codes, "scales": blocks[:, 0].reshape(shape[0], -1)}, shape


def integers_of(storage: Storage, arrays: Arrays, shape: Shape) -> tuple[Integers, dict[str, NDArray[Any]]] | None:
    """Blocks as integers in groups of 32 with scales in float16, which stand for the same numbers; None for others than
    Q4_0's and Q8_0's."""
    if not isinstance(storage, Ggml) or storage.kind not in ("q4_0", "q8_0"):
        return None
    bits = int(storage.kind[1])
    blocks = arrays["blocks"].reshape(-1, KINDS[storage.kind].bytes)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).reshape(shape[0], -1)
    raw = blocks[:, 2:]
    # Signed bytes become codes that count from -128: the top bit flips. Q4_0's nibbles are codes already, low half
    # first.
    codes = raw ^ np.uint8(128) if bits == 8 else np.concatenate([raw & np.uint8(15), raw >> np.uint8(4)], 1)
    integers = Integers(bits=bits, group=BLOCK)
    return integers, integers.of_codes(codes.reshape(shape), scales)


def blocks_of(storage: Storage, arrays: Arrays, shape: Shape) -> tuple[str, NDArray[np.uint8]]:
    """(type, bytes) of a matrix. InputError for a storage that no type of GGUF's holds as it is: integers are Q4_0 or
    Q8_0 where blocks of 32 numbers have one scale that float16 holds, and no zeros of their own."""
    if isinstance(storage, Dense):
        kind = next(kind for kind, (name, _) in PLAIN.items() if name == storage.dtype)
        return kind, np.ascontiguousarray(arrays["values"]).view(np.uint8).ravel()
    if isinstance(storage, Ggml):
        return storage.kind.upper(), np.ascontiguousarray(arrays["blocks"]).view(np.uint8).ravel()
    if not isinstance(storage, Integers) or storage.zeros or storage.bits not in (4, 8):
        raise InputError(f"{storage.name} is no type of GGUF; int4 and int8 without zeros are Q4_0 and Q8_0")
    if shape[1] % BLOCK or (storage.group or shape[1]) % BLOCK:
        raise InputError(
            f"{storage.name} of {shape[1]:,} columns: GGUF has a scale for each {BLOCK} numbers of a row; a group "
            f"that is a multiple of {BLOCK} can be written"
        )
    wide = np.asarray(arrays["scales"]).astype(np.float32)
    # Cast and compared: a file must stand for the same numbers, or it is refused.
    scales = wide.astype(np.float16)
    if not np.array_equal(scales.astype(np.float32), wide):
        raise InputError(
            f"{storage.name} has scales that float16 does not hold, as GGUF's are; compress a folder in fp16"
        )
    codes = storage.codes_of(arrays, shape).reshape(-1, BLOCK)
    each = np.repeat(scales, shape[1] // BLOCK // scales.shape[1], 1).reshape(-1, 1).view(np.uint8)
    if storage.bits == 8:
        return "Q8_0", np.concatenate([each, (codes ^ np.uint8(128))], 1).ravel()  # less 128, as a signed byte
    half = BLOCK // 2
    return "Q4_0", np.concatenate([each, codes[:, :half] | codes[:, half:] << np.uint8(4)], 1).ravel()


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]]
) -> None:
    """Writes a GGUF file. tensors: (type of TYPES, shape row-major, bytes) by name. metadata: texts, whether, whole
    numbers (as unsigned 32 bits), others (as float32), and lists of one kind of these."""
    numbers = {kind: number for number, kind in TYPES.items()}
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _packed(key) + _packed_value(value)
    at = 0
    # Offsets count from the first tensor, each rounded up to the alignment.
    for name, (kind, shape, raw) in tensors.items():
        head += _packed(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), numbers[kind], at)
        at += -(-raw.nbytes // ALIGN) * ALIGN
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGN))
        for _, _, raw in tensors.values():
            file.write(raw.tobytes() + bytes(-raw.nbytes % ALIGN))


def _packed(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _packed_value(value: str | bool | int | float | list[Any]) -> bytes:
    if isinstance(value, list):
        parts = [_packed_value(one) for one in value]
        # A list names its type once; an empty one is of texts, as any would do.
        kind = parts[0][:4] if parts else struct.pack("<I", TEXT)
        return struct.pack("<I", LIST) + kind + struct.pack("<Q", len(parts)) + b"".join(one[4:] for one in parts)
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _packed(value)
    # Before int, of which bool is a subclass.
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def _bytes(file: Gguf, name: str, entry: Entry, size: int) -> NDArray[np.uint8]:
    with file.path.open("rb") as raw:
        raw.seek(entry.begin)
        read = raw.read(size)
    if len(read) < size:
        raise InputError(
            f"{file.path} is cut short: {name} needs {size:,} bytes at byte {entry.begin:,}; fetch it again"
        )
    return np.frombuffer(read, np.uint8)
