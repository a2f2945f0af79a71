"""The safetensors format: a header of JSON that says where each tensor lies, then their bytes.

`read_header(path)` returns a `Header` without reading any tensor; `header_of(tensors)` is what a file with these begins
with, in the order and form in which the library of Hugging Face writes them, so that a file read and written again has
the same bytes. It is a format of two pages, and reading parts of tensors by their byte ranges needs its offsets, so it
is read here rather than by a dependency. Leaves out the tensors themselves (`gnomon.runtime.parameters.weights`).
Source: github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
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
    itself: what the library refuses (`Metadata::validate`: tensors lie one after another from the first byte to the
    last, none over another), and a name that is there twice, of which the library takes one."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise InputError(f"{path} is no safetensors file, or is cut short: {size} bytes, header of {length}")
            values = _parsed(file.read(length).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as safetensors: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} cannot be read as safetensors: its header is no JSON object")
    metadata = values.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise InputError(f"{path} cannot be read as safetensors: its __metadata__ is no object of texts")
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in values.items()}
    return Header(entries=entries, metadata=metadata or {}, nbytes=_end(path, entries, 8 + length, size))


def _end(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> int:
    """One past the last tensor. InputError unless they fill the file one after another."""
    at, before = start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            where = f"{before} and {name} overlap" if entry.begin < at else f"bytes before {name} belong to no tensor"
            raise InputError(f"{path} contradicts itself: {where}; fetch it again, or save it again")
        at, before = entry.end, name
    if at > size:
        raise InputError(f"{path} is cut short: {before} ends at byte {at:,} and the file has {size:,}; fetch it again")
    if at < size:
        raise InputError(
            f"{path} has {size - at:,} bytes after its last tensor, which no safetensors file has; fetch it again"
        )
    return at


def _parsed(text: str) -> Any:
    """JSON as serde_json takes it: no NaN, no half of a surrogate pair, no key twice, and -0 is no whole number.
    ValueError for other text."""
    parsed = json.loads(
        text,
        object_pairs_hook=_object,
        parse_int=lambda digits: -1 if digits == "-0" else int(digits),
        parse_constant=_no_constant,
    )
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    for one in (*unique, *(value for value in unique.values() if isinstance(value, str))):
        one.encode("utf-8")  # a lone surrogate is no text: UnicodeEncodeError, a ValueError
    return unique


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _entry(path: Path, name: str, entry_fields: Any, start: int) -> Entry:
    match entry_fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise InputError(f"{path}: {name} has no dtype, shape and data_offsets")
    if dtype not in DTYPE_BYTES:
        raise InputError(f"{path}: {name} is {dtype}, which is not read; known: {', '.join(DTYPE_BYTES)}")
    if not all(type(n) is int and 0 <= n < 1 << 64 for n in (*shape, begin, end)):
        raise InputError(f"{path}: {name} has the shape {shape} from byte {begin} to {end}")
    # The library multiplies one size after another in 64 bits, then by the bits of an element: a zero ends the growth
    # of what comes after it, not of what came before.
    if any(size >= 1 << 64 for size in (*accumulate(shape, mul, initial=1), prod(shape) * DTYPE_BYTES[dtype] * 8)):
        raise InputError(f"{path}: {name} has the shape {shape}, which is more than a file can hold")
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
    # Spaces to a multiple of 8, as the library writes them: tensors then begin at one, too.
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = {
        name: Entry(
            dtype=entry_fields["dtype"],
            shape=tuple(entry_fields["shape"]),
            begin=start + entry_fields["data_offsets"][0],
            end=start + entry_fields["data_offsets"][1],
        )
        for name, entry_fields in values.items()
        if name != "__metadata__"
    }
    return len(text).to_bytes(8, "little") + text, Header(entries=entries, metadata=metadata, nbytes=start + at)
