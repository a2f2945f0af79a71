"""Folders whose linears another program has quantised, or whose weights are a GGUF file, read as whole weights:
`open_folder(path)`.

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
from gnomon.formats.gguf import Gguf, integers_of, read_gguf
from gnomon.formats.gguf import stored as stored_in_gguf
from gnomon.formats.gguf_model import heads_turned, name_here, name_there, row_order
from gnomon.formats.huggingface.quantised import CODED, Method, is_packed, layers_of, method_of, shape_of, stored
from gnomon.formats.huggingface.safetensors import Entry
from gnomon.formats.keys import read_json
from gnomon.runtime.parameters.weights import Folder, WeightReader
from gnomon.storage.dense import Dense
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
    metadata = read_json(text, f"{files.path / file}: metadata of {weight}").get("_data") if text else None
    shape = metadata.get("shape", []) if isinstance(metadata, Mapping) else []
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
        if shape_stated := shape_said(self.files, self.entries[tensor][0], tensor):
            parts["weight_shape"] = np.asarray(shape_stated)
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
    folder, codes = reader.folder, []
    if not isinstance(folder, PackedFolder):
        return []
    for piece in sorted(reader.layout.pieces.get(parameter, ()), key=lambda piece: piece.first):
        whole = all(picked == (0, size) for picked, size in zip(piece.pick[1:], piece.view[1:], strict=False))
        if piece.tensor not in folder.packed or piece.order or not whole or len(piece.shape) != 2:
            return []
        storage, arrays, shape = folder.stored(piece.tensor)
        if not isinstance(storage, Integers):
            return []
        # The picked range of the view's first dim, in rows of the matrix: the view may have taken rows apart (heads of
        # q, k and v).
        begin, end = (at * prod(piece.view[1:]) // shape[1] for at in (piece.pick or ((0, piece.view[0]),))[0])
        rows = {name: array[begin:end] for name, array in arrays.items()}
        codes.append(Codes(storage, rows, (end - begin, shape[1])))
    return codes


def sparse_as(path: Path) -> Sparse | None:
    """How config.json says that a folder's linears are sparse (`sparsity_config`, as `gnomon compress` writes it); None
    where it says nothing. InputError for what is no sparse storage."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    config_fields = (
        read_json(config.read_text(encoding="utf-8"), str(config), infinite=True) if config.is_file() else {}
    )
    sparsity = config_fields.get("sparsity_config")
    if not isinstance(sparsity, Mapping) or "storage" not in sparsity:
        return None
    storage = storage_of(str(sparsity["storage"]))
    if not isinstance(storage, Sparse):
        raise InputError(f"{config}: sparsity_config.storage is {storage.name}, which is not sparse; as 4:16 or 0.9")
    return storage


@dataclass(frozen=True, slots=True)
class GgufFolder(PackedFolder):
    """A folder with config.json whose weights are one GGUF file; its tensors under their names here, rows in our order.
    Q4_0 and Q8_0 are packed integers; other blocks are made whole as they are read."""

    gguf: Gguf | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(file: Path) -> GgufFolder:
        """InputError for a file that is none, or tensors without a name here."""
        gguf, path = read_gguf(file), file.parent
        config = read_json((path / "config.json").read_text(encoding="utf-8"), str(path / "config.json"), infinite=True)
        entries: dict[str, tuple[str, Entry]] = {}
        packed: dict[str, dict[str, str]] = {}
        for theirs, entry in gguf.entries.items():
            name = name_here(theirs)
            if name is None:
                raise InputError(
                    f"{gguf.path}: {theirs} is no tensor of a {config.get('model_type')} that is known here"
                )
            dtype = {"F16": "F16", "BF16": "BF16"}.get(entry.kind, "F32")
            # An empty range: dtype and shape are what is asked of it, and the numbers are read through `gguf`.
            entries[name] = file.name, Entry(dtype=dtype, shape=entry.shape, begin=entry.begin, end=entry.begin)
            if entry.kind in ("Q4_0", "Q8_0"):
                packed[name] = {"weight": theirs}
        return GgufFolder(path, entries, {}, packed=packed, gguf=gguf, config=config)

    def stored(self, tensor: str) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
        assert self.gguf is not None
        storage, arrays, shape = stored_in_gguf(self.gguf, str(name_there(tensor)))
        if (integers := integers_of(storage, arrays, shape)) is not None:
            storage, arrays = integers
        if heads := heads_turned(tensor, self.config):
            vector = len(self.entries[tensor][1].shape) == 1
            # The inverse of `row_order`: where each of our rows lies there. A vector's elements are columns of its one
            # row.
            order = np.argsort(row_order(shape[1] if vector else shape[0], heads))
            arrays = {name: x[:, order] if vector else x[order] for name, x in arrays.items()}
        return storage, arrays, shape

    def read(self, tensor: str, *, as_bytes: bool = False) -> Tensor:
        storage, arrays, _ = self.stored(tensor)
        shape = self.entries[tensor][1].shape
        if isinstance(storage, Dense) and storage.dtype != "fp32":
            values = torch.from_numpy(np.array(arrays["values"]).view(np.int16))
            return values.view(torch.bfloat16 if storage.dtype == "bf16" else torch.float16).view(shape)
        rows = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
        return torch.from_numpy(np.array(storage.widen(arrays, rows))).view(shape)

    def let_go(self) -> None:
        """Does nothing: no file is mapped here."""


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a folder has in place of safetensors."""
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise InputError(f"{path} has {len(found)} GGUF files, {found[0].name}, {found[1].name} …; give one of them")
    return found[0] if found else None


def open_folder(path: Path) -> Folder:
    """The weights in `path`, packed ones made whole as they are read. InputError as `Folder.of`, and for packed tensors
    that are not all there."""
    if (gguf := gguf_in(path)) is not None:
        return GgufFolder.of(gguf)
    files = Folder.of(path)
    config = files.path / "config.json"
    config_fields = (
        read_json(config.read_text(encoding="utf-8"), str(config), infinite=True) if config.is_file() else {}
    )
    if not is_packed(config_fields):
        return files
    method = method_of(config_fields)
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
