"""Token ids on disk in Megatron-LM's format: `PREFIX.bin` holds the ids, `PREFIX.idx` how long each sequence is.

`Tokens.open(prefix)` maps the ids into memory, whatever their size; `Writer(prefix, dtype)` writes them, document by
document. Every number of the index is checked against the size of the other file before one id is read. Leaves out
`.idx` modes of multimodal sets.
Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py` (layout of the header).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import FormatError, InputError

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the dtype, sequences, entries of the table of documents."""
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
"""Megatron's code -> integers of that width; 6 and 7 are floats, which no token is."""
CODES = {dtype: code for code, dtype in DTYPES.items()}


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype of token ids; as Megatron chooses, and one byte where tokens are bytes."""
    if vocab_size <= 256:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def prefix_of(path: Path) -> Path | None:
    """`corpus` of `corpus.bin`, `corpus.idx` or `corpus` where both files are there; None for anything else."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return prefix if all(_sibling(prefix, end).is_file() for end in (".bin", ".idx")) else None


def _sibling(prefix: Path, end: str) -> Path:
    return prefix.with_name(prefix.name + end)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """Documents of token ids."""

    ids: NDArray[Any]
    """All ids one after the other, mapped from the file."""
    starts: NDArray[np.int64]
    """First id of each document."""
    lengths: NDArray[np.int64]
    """Ids of each document."""

    @staticmethod
    def open(prefix: Path) -> Tokens:
        """InputError for files that cannot be read, FormatError for an index that is damaged or of another format."""
        index, data = _sibling(prefix, ".idx"), _sibling(prefix, ".bin")
        try:
            raw, num_bytes = index.read_bytes(), data.stat().st_size
        except OSError as error:
            raise InputError(f"cannot read {error.filename!r}: {error.strerror}") from error
        if len(raw) < HEADER.size or not raw.startswith(MAGIC):
            raise FormatError(f"{index} is no index of Megatron-LM: it does not begin with MMIDIDX")
        _, version, code, sequences, documents = HEADER.unpack_from(raw)
        if version != VERSION or code not in DTYPES:
            raise FormatError(f"{index} has version {version} and dtype {code}; version 1 with integers is read")
        dtype = DTYPES[code]
        # Of each sequence its length (int32) and its first byte (int64), of each document the number of its first
        # sequence (int64).
        need = HEADER.size + 12 * sequences + 8 * documents
        if len(raw) not in (need, need + sequences):  # one more byte a sequence is its mode in multimodal sets
            raise FormatError(f"{index} is damaged: it has {len(raw)} bytes, and its header asks for {need}")
        sizes = np.frombuffer(raw, "<i4", sequences, HEADER.size).astype(np.int64)
        pointers = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
        ends = np.frombuffer(raw, "<i8", documents, HEADER.size + 12 * sequences)
        _check(index, data, sizes, pointers, ends, dtype.itemsize, num_bytes)
        ids = np.memmap(data, dtype, "r") if num_bytes else np.zeros(0, dtype)
        # Documents are ranges of sequences, and these ranges of ids: total[s] is the first id of sequence s.
        total = np.concatenate(([0], np.cumsum(sizes)))
        starts = total[ends[:-1]] if documents else np.zeros(0, np.int64)
        lengths = np.diff(total[ends]) if documents else np.zeros(0, np.int64)
        return Tokens(ids=ids, starts=starts, lengths=lengths)


def _check(
    index: Path,
    data: Path,
    sizes: NDArray[np.int64],
    pointers: NDArray[np.int64],
    ends: NDArray[np.int64],
    width: int,
    num_bytes: int,
) -> None:
    """FormatError unless sequences follow one another, fill the other file, and documents are made of them."""
    if (sizes < 0).any():
        raise FormatError(f"{index} is damaged: sequence {int(np.argmax(sizes < 0))} has a negative length")
    follow = np.concatenate(([0], np.cumsum(sizes)))[:-1] * width
    if (pointers != follow).any():
        at = int(np.argmax(pointers != follow))
        raise FormatError(f"{index} is damaged: sequence {at} begins at byte {pointers[at]}, not {follow[at]}")
    if (expected_bytes := int(sizes.sum()) * width) != num_bytes:
        raise FormatError(
            f"{data} has {num_bytes} bytes, and {index.name} says {expected_bytes}: one of them is cut off or foreign"
        )
    if len(ends) and (ends[0] != 0 or ends[-1] != len(sizes) or (np.diff(ends) < 0).any()):
        raise FormatError(f"{index} is damaged: its table of documents does not go from 0 to {len(sizes)} sequences")


class Writer:
    """A writer of documents; without `finish` there is no index, so nobody takes the pair for whole."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.lengths: list[int] = []
        self.length = 0
        self.out: BinaryIO = _sibling(prefix, ".bin").open("wb")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.out.close()

    def add(self, ids: NDArray[Any] | Iterable[int]) -> None:
        """More ids of the document."""
        block = np.asarray(ids, self.dtype)
        self.out.write(block.tobytes())
        self.length += len(block)

    def end(self) -> None:
        """The document is complete; an empty one is none."""
        if self.length:
            self.lengths.append(self.length)
        self.length = 0

    def finish(self) -> None:
        """Writes the index, which makes the pair whole."""
        self.end()
        self.out.close()
        sizes = np.asarray(self.lengths, np.int32)
        pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * self.dtype.itemsize
        with _sibling(self.prefix, ".idx").open("wb") as out:
            out.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(sizes), len(sizes) + 1))
            for column in (sizes, pointers, np.arange(len(sizes) + 1, dtype=np.int64)):
                out.write(column.tobytes())
