"""Weights in Hugging Face's layout: each rank reads its own parts of a folder, and they are written back the same way.

`Folder.of(path)` knows where each tensor lies (one file or shards with an index); `WeightReader(folder, layout)` gives
what `apply` fills a stage with; `write_folder(…)` is the way back. Files are mapped into memory, so that of a tensor
only the pages of the wanted rows are read. Nothing is unpickled: a folder with only `pytorch_model.bin` is an error
that says how to convert it. Leaves out which tensors make a parameter (`formats.huggingface.weights`).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gnomon.errors import InputError
from gnomon.formats.huggingface.four_bits import GROUPS, MAP, NESTED_MAP, SCALES, STATE, state_of, with_blocks
from gnomon.formats.huggingface.pieces import TensorPiece
from gnomon.formats.huggingface.safetensors import DTYPE_BYTES, Entry, header_of, read_header
from gnomon.formats.huggingface.weights import Layout
from gnomon.runtime.parameters.nf4 import Nf4Blocks, code, dynamic
from gnomon.runtime.parameters.parameters import CPU, Slot

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Their names of dtypes -> torch's: those that weights are read from."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5_000_000_000
"""A new folder's files are no longer than that, as far as tensors are not."""
SHOWN = 5
"""Names in a message."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of safetensors files."""

    path: Path
    """The folder."""
    entries: Mapping[str, tuple[str, Entry]]
    """Tensor -> (file, where in it)."""
    metadata: Mapping[str, Mapping[str, str]]
    """File -> its metadata."""
    _maps: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(path: Path) -> Folder:
        """The folder at `path`, or that of one safetensors file. InputError for what is not there or not whole."""
        names = _files(path)
        folder = path if path.is_dir() else path.parent
        headers = {name: read_header(folder / name) for name in names}
        entries: dict[str, tuple[str, Entry]] = {}
        for name, header in headers.items():
            for tensor, entry in header.entries.items():
                if tensor in entries:
                    raise InputError(f"{folder}: {tensor} is in {entries[tensor][0]} and in {name}")
                entries[tensor] = name, entry
        if (index := folder / INDEX).is_file() and path.is_dir():
            _check_index(index, _weight_map(index), entries)
        return Folder(folder, entries, {name: header.metadata for name, header in headers.items()})

    def read(self, tensor: str, *, as_bytes: bool = False) -> Tensor:
        """A tensor as it lies in its file, mapped and not yet read. No one may write to it. as_bytes: also uint8."""
        name, entry = self.entries[tensor]
        if entry.dtype not in DTYPES and not (as_bytes and entry.dtype == "U8"):
            raise InputError(
                f"{self.path / name}: {tensor} is {entry.dtype}, and weights are read as {', '.join(DTYPES)}; "
                f"quantised weights are not read"
            )
        # One mapping a file: tensors are views of it.
        if name not in self._maps:
            path = self.path / name
            # Private mapping: ranks of one machine share the file's pages, and a write by mistake would not reach the
            # file.
            self._maps[name] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        raw = self._maps[name][entry.begin : entry.end]
        dtype = DTYPES.get(entry.dtype, torch.uint8)
        if entry.begin % dtype.itemsize:  # only files of other programs begin a tensor where its dtype cannot
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def let_go(self) -> None:
        """Pages of the files that were read take no memory any more; what is read again comes from the disk."""
        for mapped in self._maps.values():
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes), mmap.MADV_DONTNEED
            )

    def check(self, layout: Layout) -> None:
        """One InputError with all that is missing, misshapen or unknown."""
        layout_tensors = layout.tensors()
        missing = [name for name in layout_tensors if name not in self.entries]
        known = {*layout_tensors, *(layout.copies or {})}
        unknown = [name for name in self.entries if name not in known and not layout.is_ignored(name)]
        shapes = {name: self.entries[name][1].shape for name in layout_tensors if name in self.entries}
        misshapen = [
            f"{name} is {list(s)}, not {list(layout_tensors[name])}"
            for name, s in shapes.items()
            if s != layout_tensors[name]
        ]
        problems = [
            f"{len(names)} {what}: {', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''}"
            for names, what in (
                (missing, "missing"),
                (misshapen, "of another shape than the config says"),
                (unknown, "that the model does not have"),
            )
            if names
        ]
        if problems:
            raise InputError(
                f"the weights in {self.path} are not those of this config.json; tensors {'; '.join(problems)}; give "
                f"the config.json that they were saved with"
            )


def _files(path: Path) -> list[str]:
    """Names of the files with weights."""
    if path.is_file():
        return [path.name]
    if not path.is_dir():
        raise InputError(f"there is no folder of weights {str(path)!r}")
    if (index := path / INDEX).is_file():
        names = sorted(set(_weight_map(index).values()))
        for name in names:
            if not (path / name).is_file():
                raise InputError(f"{index} names {name}, which is not in the folder; fetch it too")
        return names
    if (path / SINGLE).is_file():
        return [SINGLE]
    if files := sorted(file.name for file in path.glob("*.safetensors")):
        return files
    pickled = sorted(file.name for file in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")))
    if pickled:
        raise InputError(
            f"{path} has its weights in {pickled[0]}, a pickle, which can run any program and is not read; convert it "
            f"with transformers' save_pretrained, which writes {SINGLE}"
        )
    raise InputError(f"{path} has no {SINGLE}, no {INDEX} and no other *.safetensors")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index} has no weight_map that can be read: {error}") from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    ):
        raise InputError(f"{index}: weight_map does not say tensor -> file of this folder")
    return weight_map


def _check_index(index: Path, weight_map: Mapping[str, str], entries: Mapping[str, tuple[str, Entry]]) -> None:
    wrong = [name for name, file in weight_map.items() if name not in entries or entries[name][0] != file]
    if wrong:
        raise InputError(f"{index} says that {wrong[0]} is in {weight_map[wrong[0]]}, which does not have it")


def settled(folder: Folder, layout: Layout) -> Layout:
    """The layout by the names that the folder has: some are saved without the first part (`h.0.…` of GPT-2), and tied
    weights may be there twice. InputError as `Folder.check`."""
    names = layout.tensors()
    for short in sorted({name.split(".", 1)[0] for name in names if "." in name}):
        own = [name for name in names if name.startswith(f"{short}.")]
        if all(name not in folder.entries and name.removeprefix(f"{short}.") in folder.entries for name in own):
            layout = _without(layout, f"{short}.")
    layout = with_blocks(layout, {name: entry.shape for name, (_, entry) in folder.entries.items()}, str(folder.path))
    folder.check(layout)
    return layout


def _without(layout: Layout, prefix: str) -> Layout:
    pieces = {
        name: tuple(
            TensorPiece(
                tensor=piece.tensor.removeprefix(prefix),
                shape=piece.shape,
                view=piece.view,
                pick=piece.pick,
                order=piece.order,
                first=piece.first,
            )
            for piece in pieces_
        )
        for name, pieces_ in layout.pieces.items()
    }
    copies = {name: of.removeprefix(prefix) for name, of in (layout.copies or {}).items()}
    ignored = tuple(pattern.replace(f"^{re.escape(prefix)}", "^") for pattern in layout.ignored)
    return Layout(pieces=pieces, ignored=ignored, copies=copies)


def _region(file: Tensor, piece: TensorPiece, slot: Slot) -> tuple[Tensor, tuple[slice, ...]] | None:
    """(this rank's part of a piece as a view of the file's tensor, where in the rank's parameter it is)."""
    part = file.view(piece.view)
    for dim, (begin, end) in enumerate(piece.pick):
        part = part.narrow(dim, begin, end - begin)
    if piece.order:
        gone = [dim for dim in range(part.dim()) if dim not in piece.order]
        part = part.permute(*piece.order, *gone).flatten(len(piece.order) - 1) if gone else part.permute(piece.order)
    own: list[slice] = []
    for dim, (offset, length) in enumerate(zip(slot.offset, slot.shape, strict=True)):
        first = piece.first if dim == 0 else 0
        begin, end = max(offset, first), min(offset + length, first + part.shape[dim])
        if begin >= end:
            return None
        # The overlap of this rank's range with the piece's, in coordinates of the piece.
        part = part.narrow(dim, begin - first, end - begin)
        own.append(slice(begin - offset, end - offset))
    return part, tuple(own)


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads a rank's part of a parameter."""

    folder: Folder
    layout: Layout
    """A settled one."""

    def __call__(self, slot: Slot) -> Tensor | None:
        """The part, in the dtype of the file; None for what the folder does not have."""
        if (pieces := self.layout.pieces.get(slot.name)) is None:
            return None
        assert slot.name not in self.layout.four_bits, "asked for as blocks"
        # Pieces cover all of a parameter (q, k and v of one matrix, say), so nothing of it stays unwritten.
        out = torch.empty(slot.shape, dtype=self.folder.read(pieces[0].tensor).dtype)
        for piece in pieces:
            if (region := _region(self.folder.read(piece.tensor), piece, slot)) is not None:
                out[region[1]] = region[0]
        return out

    def mapped(self, slot: Slot) -> Tensor | None:
        """The part where it lies in its file, mapped and not yet read; None for what the folder has in several pieces
        or not at all. No one may write to it, and a file that is cut short takes it away: for what is copied at
        once."""
        pieces = self.layout.pieces.get(slot.name, ())
        if len(pieces) != 1 or slot.name in self.layout.four_bits:
            return None
        region = _region(self.folder.read(pieces[0].tensor), pieces[0], slot)
        return region[0] if region is not None and region[0].shape == torch.Size(slot.shape) else None

    def blocks(self, name: str) -> Nf4Blocks | None:
        """A whole parameter that the folder has in four bits, mapped and not yet read; None for one that it has not.
        InputError for other codes than NF4's."""
        if name not in self.layout.four_bits:
            return None
        *_, codes = self.layout.pieces[name]
        tensor = codes.tensor
        found = {piece.tensor: self.folder.read(piece.tensor, as_bytes=True) for piece in self.layout.pieces[name]}
        state_text = bytes(found[f"{tensor}{STATE}"].tolist()).decode("utf-8", "replace")
        state = state_of(state_text, tensor, self.layout.four_bits[name])
        for what, known in ((MAP, code(CPU)), (NESTED_MAP, dynamic(CPU))):
            stored = found.get(f"{tensor}{what}")
            if stored is not None and not torch.allclose(stored.float(), known, rtol=0, atol=1e-6):
                raise InputError(f"{self.folder.path}: {tensor}{what} is not that of bitsandbytes' NF4")
        return Nf4Blocks(
            codes=found[tensor].flatten(),
            scales=found[f"{tensor}{SCALES}"],
            groups=found.get(f"{tensor}{GROUPS}"),
            mean=state.mean,
            dtype=getattr(torch, state.dtype) if state.dtype in FLOATS else torch.float32,
        )


FLOATS = ("float32", "bfloat16", "float16")
"""What bitsandbytes quantises."""


class FolderWriter:
    """A folder that is being written: its files have their full length, and ranks fill in their parts."""

    def __init__(self, folder: Path, entries: Mapping[str, tuple[str, Entry]], copies: Mapping[str, str]) -> None:
        self.folder, self.entries, self.copies = folder, entries, copies
        self.maps: dict[str, Tensor] = {}

    def _tensor(self, name: str) -> Tensor:
        file, entry = self.entries[name]
        if file not in self.maps:
            path = self.folder / file
            self.maps[file] = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        return self.maps[file][entry.begin : entry.end].view(DTYPES[entry.dtype]).view(entry.shape)

    def write_part(self, layout: Layout, slot: Slot, value: Tensor) -> None:
        """This rank's part of a parameter."""
        for piece in layout.pieces[slot.name]:
            for name in (
                piece.tensor,
                *(n for n, of in self.copies.items() if of == piece.tensor and n in self.entries),
            ):
                if (region := _region(self._tensor(name), piece, slot)) is not None:
                    region[0].copy_(value.view(slot.shape)[region[1]])


def start_folder(
    folder: Path,
    layout: Layout,
    dtype: torch.dtype,
    like: Folder | None = None,
    *,
    single: str = "",
    join: bool = False,
) -> FolderWriter:
    """Makes the files, of full length and with their headers. like: a folder whose tensors, dtypes and files the new
    one has too, so that what was not trained comes out with the same bytes; None: files of at most SHARD_BYTES.
    single: name of the only file. join: another rank has made them."""
    folder.mkdir(parents=True, exist_ok=True)
    if like is not None:
        tensors = {name: (file, entry.dtype, entry.shape) for name, (file, entry) in like.entries.items()}
        metadata = like.metadata
    else:
        tensors = _sharded({name: (NAMES[dtype], shape) for name, shape in layout.tensors().items()})
        if single:
            tensors = {name: (single, name_, shape) for name, (_, name_, shape) in tensors.items()}
        metadata = dict.fromkeys((file for file, _, _ in tensors.values()), {"format": "pt"})
    entries: dict[str, tuple[str, Entry]] = {}
    for file in sorted({file for file, _, _ in tensors.values()}):
        own = {name: (dtype_, shape) for name, (of, dtype_, shape) in tensors.items() if of == file}
        first, header = header_of(own, metadata[file])
        if not join:
            # Header now and full length by truncation: the file has a hole that ranks fill through shared mappings.
            with (folder / file).open("wb") as out:
                out.write(first)
                out.truncate(header.nbytes)
        entries |= {name: (file, entry) for name, entry in header.entries.items()}
    if not join and len({file for file, _ in entries.values()}) > 1:
        total = sum(entry.end - entry.begin for _, entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": {n: entries[n][0] for n in sorted(entries)}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return FolderWriter(folder, entries, layout.copies or {})


def _sharded(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Name -> (file, dtype, shape): files filled one after the other."""
    number, shard_bytes = 0, 0
    places: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * DTYPE_BYTES[dtype]
        # A tensor is never cut: one larger than the limit has a file to itself.
        if shard_bytes and shard_bytes + nbytes > SHARD_BYTES:
            number, shard_bytes = number + 1, 0
        places[name], shard_bytes = number, shard_bytes + nbytes
    names = [f"model-{i + 1:05}-of-{number + 1:05}.safetensors" for i in range(number + 1)] if number else [SINGLE]
    return {name: (names[places[name]], *tensors[name]) for name in tensors}


def copy_rest(folder: Path, like: Folder, written: Iterable[str]) -> None:
    """Tensors of `like` that no parameter fills (masks of old releases), as they are."""
    done = set(written)
    for name, (file, entry) in like.entries.items():
        if name in done:
            continue
        with (like.path / file).open("rb") as source, (folder / file).open("r+b") as target:
            source.seek(entry.begin)
            _, new = header_of(
                {n: (e.dtype, e.shape) for n, (f, e) in like.entries.items() if f == file}, like.metadata[file]
            )
            target.seek(new.entries[name].begin)
            target.write(source.read(entry.end - entry.begin))
