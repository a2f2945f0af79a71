"""The tensors of a checkpoint: a safetensors file for each rank, in whose header every tensor has a checksum.

`write_file(path, tensors)` writes one; `problems_of(path)` reads a whole checkpoint again and says what is damaged;
`Reader(path)` copies what a rank wants from whichever files have it. Nothing is unpickled. Leaves out which tensors
there are (`pieces`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gnomon.errors import InputError
from gnomon.formats.huggingface.safetensors import Entry, header_of, read_header
from gnomon.runtime.checkpoint.pieces import Piece
from gnomon.runtime.checkpoint.record import File, Record, read_record
from gnomon.runtime.parameters.weights import DTYPES, NAMES
from gnomon.trust import leads_out

BLOCK_BYTES = 64 << 20
"""Read at once while checksums are compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrittenTensor:
    """A tensor that is to be written."""

    whole: tuple[int, ...]
    value: Tensor
    """On the CPU, contiguous; nobody writes to it until it is in the file."""


def write_file(path: Path, tensors: Mapping[str, WrittenTensor]) -> File:
    """Writes a rank's file and forces it to disk. tensors: by `Piece.key`."""
    # Bytes, whatever the dtype: numpy has no bf16.
    raw = {key: tensor.value.reshape(-1).view(torch.uint8).numpy().data for key, tensor in tensors.items()}
    described = {key: [list(tensor.whole), sha256(raw[key]).hexdigest()] for key, tensor in tensors.items()}
    shapes = {key: (NAMES[tensor.value.dtype], tuple(tensor.value.shape)) for key, tensor in tensors.items()}
    first, header = header_of(shapes, {"pieces": json.dumps(described, separators=(",", ":"))})
    # Unbuffered: tensors go to the file from where they lie, without another copy.
    with path.open("wb", buffering=0) as out:
        _all(out.fileno(), memoryview(first))
        for key in header.entries:
            _all(out.fileno(), raw[key])
        os.fsync(out.fileno())
    return File(name=path.name, bytes=header.nbytes, header=sha256(first).hexdigest())


def _all(out: int, data: memoryview) -> None:
    """One write may take less than it is given."""
    while data.nbytes:
        # Linux writes at most 2 GiB less a page in one call.
        data = data[os.write(out, data[: 1 << 30]) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A piece as it lies in a file."""

    file: str
    entry: Entry
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    checksum: str


def stored(path: Path, file: File) -> dict[str, StoredPiece]:
    """Pieces of one file by key. InputError for a file that is not the one that was written."""
    at = path / file.name
    if (other := leads_out(at, path)) is not None:
        raise InputError(f"{at} is a link out of its checkpoint, to {other}: it is not read; put the file itself there")
    try:
        if (size := at.stat().st_size) != file.bytes:
            raise InputError(f"{at} has {size:,} bytes and was written with {file.bytes:,}")
        with at.open("rb") as opened:
            # safetensors: 8 bytes of length, little-endian, then a header of JSON, then the tensors.
            length = int.from_bytes(opened.read(8), "little")
            opened.seek(0)
            first = opened.read(min(8 + length, file.bytes))
    except OSError as error:
        raise InputError(f"{at} cannot be read: {error.strerror}") from error
    # The record in `gnomon.json` vouches for the header, and the header for every tensor.
    if sha256(first).hexdigest() != file.header:
        raise InputError(f"{at} is damaged: its header has another checksum")
    header = read_header(at)
    try:
        described = json.loads(header.metadata["pieces"])
        return {key: _stored(file.name, key, entry, *described[key]) for key, entry in header.entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{at} does not say of which tensors its parts are: {error}") from error


def _stored(file: str, key: str, entry: Entry, whole: Sequence[int], checksum: str) -> StoredPiece:
    """ValueError for a part that does not lie within its tensor, or of a dtype that no checkpoint has."""
    places = key.rpartition("@")[2]
    offset = tuple(int(place) for place in places.split(",")) if places else ()
    ends = zip(offset, entry.shape, whole, strict=True)
    # Checked before anything is allocated: a forged header must not make a reader go out of bounds.
    if entry.dtype not in DTYPES or not all(
        type(size) is int and 0 <= begin and begin + length <= size for begin, length, size in ends
    ):
        raise ValueError(f"{key} is {entry.dtype} of shape {entry.shape} at {offset} of {whole}")
    return StoredPiece(file=file, entry=entry, whole=tuple(whole), offset=offset, checksum=checksum)


def problems_of(path: Path, part: slice = slice(None)) -> list[str]:
    """What is damaged in a checkpoint, file by file; empty for a whole one. part: of its files."""
    try:
        record = read_record(path)
    except InputError as error:
        return [str(error)]
    problems: list[str] = []
    for file in record.files[part]:
        try:
            problems += _damaged(path / file.name, stored(path, file))
        except InputError as error:
            problems.append(str(error))
    return problems


def _damaged(path: Path, pieces: Mapping[str, StoredPiece]) -> Iterable[str]:
    with path.open("rb") as opened:
        for key, piece in pieces.items():
            opened.seek(piece.entry.begin)
            digest, remaining = sha256(), piece.entry.end - piece.entry.begin
            while remaining:
                block = opened.read(min(remaining, BLOCK_BYTES))
                if not block:
                    break
                digest.update(block)
                remaining -= len(block)
            if remaining or digest.hexdigest() != piece.checksum:
                yield f"{path} is damaged: {key} has another checksum"


class Reader:
    """A checkpoint's tensors, mapped."""

    def __init__(self, path: Path, record: Record) -> None:
        self.path, self.record = path, record
        self.maps: dict[str, Tensor] = {}
        self.by_name: dict[str, list[StoredPiece]] = {}
        for file in record.files:
            for key, piece in stored(path, file).items():
                self.by_name.setdefault(key.rpartition("@")[0], []).append(piece)
        for name, parts in self.by_name.items():
            _check_parts(path, name, parts)

    def tensor(self, piece: StoredPiece) -> Tensor:
        """A tensor as it lies in its file, read through a map of that file."""
        if piece.file not in self.maps:
            at = self.path / piece.file
            # Mapped privately: pages come when they are read, and nothing written to it reaches the file.
            self.maps[piece.file] = torch.from_file(str(at), shared=False, size=at.stat().st_size, dtype=torch.uint8)
        raw = self.maps[piece.file][piece.entry.begin : piece.entry.end]
        dtype = DTYPES[piece.entry.dtype]
        # A view of another dtype needs an aligned start, which files of other writers do not promise.
        if piece.entry.begin % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(piece.entry.shape)

    def fill(self, target_piece: Piece) -> None:
        """Copies a box of a tensor into place. InputError where the checkpoint has not all of it."""
        parts = self.by_name.get(target_piece.name, [])
        if not parts or parts[0].whole != target_piece.whole:
            raise InputError(
                f"the checkpoint {self.path} has no {target_piece.name} of shape {target_piece.whole}; it is "
                "of another model"
            )
        done = sum(self._copy(piece, target_piece) for piece in parts)
        if done != target_piece.value.numel():
            raise InputError(f"the checkpoint {self.path} has only a part of {target_piece.name}; it is not whole")

    def _copy(self, piece: StoredPiece, target_piece: Piece) -> int:
        """Elements that were copied."""
        shape = target_piece.value.shape
        # The intersection of two boxes.
        low = [max(a, b) for a, b in zip(piece.offset, target_piece.offset, strict=True)]
        ends = zip(piece.offset, piece.entry.shape, target_piece.offset, shape, strict=True)
        high = [min(a + m, b + n) for a, m, b, n in ends]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return 0
        target_piece.value[_within(low, high, target_piece.offset)] = self.tensor(piece)[
            _within(low, high, piece.offset)
        ]
        return prod(b - a for a, b in zip(low, high, strict=True))

    def whole(self, name: str) -> Tensor:
        """One tensor put together."""
        first = self.by_name[name][0]
        out = torch.empty(first.whole, dtype=DTYPES[first.entry.dtype])
        self.fill(Piece(name=name, whole=first.whole, offset=(0,) * len(first.whole), value=out))
        return out


def _check_parts(path: Path, name: str, parts: Sequence[StoredPiece]) -> None:
    """InputError unless parts make up one tensor, and none lies over another."""
    # Parts of no less volume than the whole, of which none lies over another, tile it.
    if len({(part.whole, part.entry.dtype) for part in parts}) > 1:
        raise InputError(f"the checkpoint {path} has {name} in parts of several shapes or dtypes")
    if sum(prod(part.entry.shape) for part in parts) < prod(parts[0].whole):
        raise InputError(f"the checkpoint {path} has only a part of {name}; it is not whole")
    ordered = sorted(parts, key=lambda part: part.offset)
    for i, part in enumerate(ordered):
        for other in ordered[i + 1 :]:
            # Parts are sorted by their first coordinate: none further on can overlap this one.
            if part.offset and other.offset[0] >= part.offset[0] + part.entry.shape[0]:
                break
            if all(
                max(a, b) < min(a + m, b + n)
                for a, m, b, n in zip(part.offset, part.entry.shape, other.offset, other.entry.shape, strict=True)
            ):
                raise InputError(f"the checkpoint {path} has some of {name} twice")


def _within(low: Sequence[int], high: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
