"""Folders whose linears another program has quantised, read as whole weights: `open_folder(path)`.

What stands in a config.json's `quantization_config` is `formats.huggingface.quantised`'s to say; here its tensors are
read. `PackedFolder.stored(name)` is a weight as it is stored, `read(name)` what it stands for, in float32, made anew
each time. Leaves out other programs' forms, and products that read codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.errors import InputError
from gnomon.formats.huggingface.quantised import CODED, Method, is_packed, layers_of, method_of, shape_of, stored
from gnomon.formats.huggingface.safetensors import Entry
from gnomon.formats.keys import read_json
from gnomon.runtime.parameters.weights import Folder, WeightReader
from gnomon.storage.form import Shape, Storage
from gnomon.storage.integers import Integers
from gnomon.storage.names import storage_of
from gnomon.storage.sparse import Sparse

NUMPY: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "uint16", "I64": "int64", "I32": "int32",
    "I8": "int8", "U8": "uint8", "F8_E4M3": "uint8",
}  # fmt: skip
"""Dtypes of a file -> numpy's, which has bfloat16 and eight-bit floats as their bits."""


CODED_FIRST = (*CODED, "weight")
"""Endings of a layer's codes."""


def raw(folder: Folder, tensor: str) -> NDArray[Any]:
    """A tensor as it lies in its file, copied. InputError for a dtype that is not read."""
    name, entry = folder.entries[tensor]
    if entry.dtype not in NUMPY:
        raise InputError(f"{folder.path / name}: {tensor} is {entry.dtype}, which is not read here")
    dtype = np.dtype(NUMPY[entry.dtype])
    count = (entry.end - entry.begin) // dtype.itemsize
    return np.fromfile(folder.path / name, dtype, count, offset=entry.begin).reshape(entry.shape)


def shape_said(files: Folder, file: str, weight: str) -> list[int]:
    """The shape that a file's metadata says of a packed weight, as torchao writes them; empty where it says none.
    InputError for what is no shape."""
    text = files.metadata.get(file, {}).get(weight)
    said = read_json(text, f"{files.path / file}: metadata of {weight}").get("_data") if text else None
    shape = said.get("shape", []) if isinstance(said, Mapping) else []
    if not isinstance(shape, list) or not all(isinstance(one, int) and one > 0 for one in shape):
        raise InputError(
            f"{files.path / file}: the metadata of {weight} says the shape {shape!r}; fetch the file again"
        )
    return shape


@dataclass(frozen=True, slots=True)
class PackedFolder(Folder):
    """A folder in which some weights are packed; its entries have them whole, in float32."""

    files: Folder | None = None
    """The folder as it lies there."""
    method: Method = field(default_factory=lambda: Method(program="compressed-tensors"))
    packed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Weights that are, and the tensors that stand for each by their endings."""

    def stored(self, tensor: str) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
        """(storage, its arrays, (outputs, inputs)) of a packed weight."""
        assert self.files is not None
        parts = {end: raw(self.files, name) for end, name in self.packed[tensor].items()}
        if said := shape_said(self.files, self.entries[tensor][0], tensor):
            parts["weight_shape"] = np.asarray(said)
        try:
            return stored(self.method, parts)
        except InputError as error:
            raise InputError(f"{self.path}: {tensor}: {error}") from error

    def read(self, tensor: str, *, as_bytes: bool = False) -> Tensor:
        if tensor not in self.packed:
            assert self.files is not None
            return self.files.read(tensor, as_bytes=as_bytes)
        storage, arrays, shape = self.stored(tensor)
        return torch.from_numpy(storage.widen(arrays, shape))

    def let_go(self) -> None:
        assert self.files is not None
        self.files.let_go()


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of a matrix that a folder has packed."""

    storage: Storage
    arrays: Mapping[str, NDArray[Any]]
    """(rows, …) each."""
    shape: Shape
    """(outputs, inputs)."""

    def widened(self) -> Tensor:
        """The weight in float32."""
        return torch.from_numpy(self.storage.widen(self.arrays, self.shape))


def codes_of(reader: WeightReader, parameter: str) -> list[Codes]:
    """A parameter as it is packed: rows one below the other, a part for each tensor of the folder (of experts, one for
    each). Nothing where it is not packed in integers, or lies otherwise than outputs by inputs."""
    folder, made = reader.folder, []
    if not isinstance(folder, PackedFolder):
        return []
    for piece in sorted(reader.layout.pieces.get(parameter, ()), key=lambda piece: piece.first):
        whole = all(picked == (0, size) for picked, size in zip(piece.pick[1:], piece.view[1:], strict=False))
        if piece.tensor not in folder.packed or piece.order or not whole or len(piece.shape) != 2:
            return []
        storage, arrays, shape = folder.stored(piece.tensor)
        if not isinstance(storage, Integers):
            return []
        begin, end = (at * prod(piece.view[1:]) // shape[1] for at in (piece.pick or ((0, piece.view[0]),))[0])
        rows = {name: array[begin:end] for name, array in arrays.items()}
        made.append(Codes(storage, rows, (end - begin, shape[1])))
    return made


def sparse_as(path: Path) -> Sparse | None:
    """How config.json says that a folder's linears are sparse (`sparsity_config`, as `gnomon compress` writes it); None
    where it says nothing. InputError for what is no sparse storage."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    said = read_json(config.read_text(encoding="utf-8"), str(config), infinite=True) if config.is_file() else {}
    given = said.get("sparsity_config")
    if not isinstance(given, Mapping) or "storage" not in given:
        return None
    storage = storage_of(str(given["storage"]))
    if not isinstance(storage, Sparse):
        raise InputError(f"{config}: sparsity_config.storage is {storage.name}, which is not sparse; as 4:16 or 0.9")
    return storage


def open_folder(path: Path) -> Folder:
    """The weights in `path`, packed ones made whole as they are read. InputError as `Folder.of`, and for packed tensors
    that are not all there."""
    files = Folder.of(path)
    config = files.path / "config.json"
    said = read_json(config.read_text(encoding="utf-8"), str(config), infinite=True) if config.is_file() else {}
    if not is_packed(said):
        return files
    method = method_of(said)
    assert method is not None
    entries = dict(files.entries)
    packed = layers_of(method, {name: entry.dtype for name, (_, entry) in entries.items()})
    for weight, parts in packed.items():
        file, entry = next(entries[parts[end]] for end in CODED_FIRST if end in parts)
        written = (
            raw(files, parts["weight_shape"]).tolist() if "weight_shape" in parts else shape_said(files, file, weight)
        )
        for part in parts.values():
            entries.pop(part)
        try:
            shape = shape_of(method, {end: files.entries[name][1].shape for end, name in parts.items()}, written)
        except InputError as error:
            raise InputError(f"{files.path}: {weight}: {error}") from error
        entries[weight] = file, Entry(dtype="F32", shape=shape, begin=entry.begin, end=entry.end)
    return PackedFolder(files.path, entries, files.metadata, files=files, method=method, packed=packed)
