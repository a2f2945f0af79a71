"""The safetensors format: a header of JSON that says where each tensor lies, then their bytes.

`read_header(path)` returns a `Header` without reading any tensor; `header_of(tensors)` is what a file with these begins
with, in the order and form in which the library of Hugging Face writes them, so that a file read and written again has
the same bytes. It is a format of two pages, and reading parts of tensors by their byte ranges needs its offsets, so it
is read here rather than by a dependency. Leaves out the tensors themselves (`gnomon.runtime.weights`).
Source: github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gnomon.errors import InputError

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Their names of dtypes -> bytes of an element, from the first to the last as the library orders them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """One of DTYPE_BYTES."""
    shape: tuple[int, ...]
    """Row-major."""
    begin: int
    """Its first byte, from the beginning of the file."""
    end: int
    """One past its last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file says before its tensors."""

    entries: Mapping[str, Entry]
    """By name, as they are listed."""
    metadata: Mapping[str, str]
    """Free text; `format` is `pt` for weights of PyTorch."""
    nbytes: int
    """Of the whole file."""


def read_header(path: Path) -> Header:
    """InputError, naming the file and the tensor, for one that is no safetensors file, is cut short, or contradicts
    itself."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise InputError(f"{path} is no safetensors file, or is cut short: {size} bytes, header of {length}")
            values = json.loads(file.read(length))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as safetensors: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} cannot be read as safetensors: its header is no JSON object")
    metadata = values.pop("__metadata__", None) or {}
    entries = {name: _entry(path, name, given, 8 + length) for name, given in values.items()}
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end > size:
        last = max(entries, key=lambda name: entries[name].end)
        raise InputError(f"{path} is cut short: {last} ends at byte {end:,} and the file has {size:,}; fetch it again")
    return Header(entries=entries, metadata=metadata, nbytes=end)


def _entry(path: Path, name: str, given: Any, start: int) -> Entry:
    match given:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise InputError(f"{path}: {name} has no dtype, shape and data_offsets")
    if dtype not in DTYPE_BYTES:
        raise InputError(f"{path}: {name} is {dtype}, which is not read; known: {', '.join(DTYPE_BYTES)}")
    if not all(isinstance(n, int) and n >= 0 for n in shape) or begin < 0:
        raise InputError(f"{path}: {name} has the shape {shape} from byte {begin}")
    if end - begin != prod(shape) * DTYPE_BYTES[dtype]:
        raise InputError(f"{path}: {name} is {dtype} of shape {shape} and has {end - begin} bytes, which does not fit")
    return Entry(dtype=dtype, shape=tuple(shape), begin=start + begin, end=start + end)


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """(first bytes of a file with these tensors, the same parsed). tensors: name -> (dtype, shape).

    Widest dtypes first, then by name, as the library has it: so every tensor begins at a multiple of its element.
    """
    width = list(DTYPE_BYTES)
    ordered = sorted(tensors, key=lambda name: (-width.index(tensors[name][0]), name))
    values: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in ordered:
        dtype, shape = tensors[name]
        end = at + prod(shape) * DTYPE_BYTES[dtype]
        values[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = {
        name: Entry(
            dtype=given["dtype"],
            shape=tuple(given["shape"]),
            begin=start + given["data_offsets"][0],
            end=start + given["data_offsets"][1],
        )
        for name, given in values.items()
        if name != "__metadata__"
    }
    return len(text).to_bytes(8, "little") + text, Header(entries=entries, metadata=metadata, nbytes=start + at)
