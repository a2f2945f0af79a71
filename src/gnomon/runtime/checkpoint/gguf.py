"""A folder of weights as one GGUF file under llama.cpp's names: `to_gguf(source, target)`.

Integers in groups become Q4_0 or Q8_0, other matrices stay in their dtype, vectors are F32; every tensor is read back
and must mean, number by number, what the folder means. Models of type llama, mistral, qwen2 and qwen3. Of the first two
llama.cpp has the rows of q and k in another order, halves of a head in turns. Leaves out tokenizers: the file says that
it has no vocabulary, so that llama.cpp takes token ids alone. The way back is `gguf_folder`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.formats.gguf import blocks_of, read_gguf, stored, write_gguf
from gnomon.formats.gguf_model import heads_turned, name_there, row_order
from gnomon.formats.huggingface.known import TYPES
from gnomon.runtime.checkpoint.pretrained import CONFIG
from gnomon.runtime.parameters.packed import PackedFolder, open_folder, raw
from gnomon.runtime.parameters.weights import Folder
from gnomon.storage.dense import Dense
from gnomon.storage.form import Arrays, Shape, Storage

DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
Matrix = tuple[Storage, Arrays, Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenGguf:
    """What a GGUF file was written with."""

    kinds: Mapping[str, int]
    """Type -> tensors of it."""
    bytes_before: int
    """Of the weights that were read."""
    bytes_after: int
    """Of the file."""


def to_gguf(source: Path, target: Path) -> WrittenGguf:
    """InputError for a model or weights that the file cannot hold as they are; nothing is left behind then."""
    if target.suffix != ".gguf":
        raise InputError(f"--to gguf writes one file; name it {target.name}.gguf (-o)")
    if target.exists():
        raise InputError(f"{target} exists already; give another file to write to, or remove it")
    if not target.absolute().parent.is_dir():
        raise InputError(f"there is no folder {str(target.absolute().parent)!r} to write {target.name} into")
    if not (source / CONFIG).is_file():
        raise InputError(f"{source} has no {CONFIG}; give a folder with it and *.safetensors")
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    metadata = _metadata(config, source)
    folder = open_folder(source)
    tensors: dict[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]] = {}
    wide: dict[str, NDArray[np.float32]] = {}
    for name in sorted(folder.entries):
        theirs, vector = _name(name, source), len(folder.entries[name][1].shape) == 1
        storage, arrays, shape = _turned(_matrix(folder, name), name, config)
        try:
            if vector:
                # llama.cpp has norms and biases in float32, whatever the matrices are.
                storage, arrays = Dense(dtype="fp32"), {"values": storage.widen(arrays, shape)}
            kind, blocks = blocks_of(storage, arrays, shape)
        except InputError as error:
            raise InputError(f"{source}: {name}: {error}") from error
        tensors[theirs] = kind, (shape[1],) if vector else shape, blocks
        wide[theirs] = storage.widen(arrays, shape)
    _write(target, metadata, tensors, wide)
    kinds = [kind for kind, _, _ in tensors.values()]
    files = {file for file, _ in folder.entries.values()}
    return WrittenGguf(
        kinds={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        bytes_before=sum((source / file).stat().st_size for file in files),
        bytes_after=target.stat().st_size,
    )


def _write(
    target: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]],
    wide: Mapping[str, NDArray[np.float32]],
) -> None:
    """Written beside, read back, and then put in place."""
    number, temporary = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
    os.close(number)
    try:
        write_gguf(Path(temporary), metadata, tensors)
        file = read_gguf(Path(temporary))
        for name, values in wide.items():
            storage, arrays, shape = stored(file, name)
            if not np.array_equal(storage.widen(arrays, shape), values):
                raise InputError(f"{name} is not the same in GGUF's {file.entries[name].kind}")
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _matrix(folder: Folder | PackedFolder, name: str) -> Matrix:
    """A tensor of the folder as it is stored; a vector as one row."""
    if isinstance(folder, PackedFolder) and name in folder.packed:
        return folder.stored(name)
    files = folder.files if isinstance(folder, PackedFolder) and folder.files is not None else folder
    entry = files.entries[name][1]
    if entry.dtype not in DTYPES:
        raise InputError(f"{folder.path}: {name} is {entry.dtype}; {', '.join(DTYPES)} and packed integers are written")
    values = raw(files, name)
    shape = (1, values.shape[0]) if values.ndim == 1 else (values.shape[0], values.shape[1])
    return Dense(dtype=DTYPES[entry.dtype]), {"values": values.reshape(shape)}, shape


def _turned(matrix: Matrix, name: str, config: Mapping[str, Any]) -> Matrix:
    """Rows of q and k in llama.cpp's order."""
    storage, arrays, shape = matrix
    if not (heads := heads_turned(name, config)):
        return matrix
    if shape[0] == 1:  # a bias
        return storage, {"values": arrays["values"][:, row_order(shape[1], heads)]}, shape
    order = row_order(shape[0], heads)
    return storage, {key: x[order] for key, x in arrays.items()}, shape


def _name(name: str, source: Path) -> str:
    known = name_there(name)
    if known is None:
        raise InputError(f"{source}: {name} has no name in llama.cpp that is known here")
    return known


def _metadata(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """What llama.cpp asks of a model. InputError for one of another kind."""
    kind = config.get("model_type")
    known = TYPES.get(str(kind))
    if known is None or not known.gguf:
        able = ", ".join(name for name, one in TYPES.items() if one.gguf)
        raise InputError(f"{source} is of type {kind!r}; {able} are written as GGUF")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise InputError(f"{source} scales its rotary embeddings ({rope}), whose factors are not written as GGUF here")
    heads, hidden, own = int(config["num_attention_heads"]), int(config["hidden_size"]), known.gguf
    width = int(config.get("head_dim") or hidden // heads)
    return {
        "general.architecture": own,
        "general.name": source.resolve().name,
        f"{own}.block_count": int(config["num_hidden_layers"]),
        f"{own}.context_length": int(config["max_position_embeddings"]),
        f"{own}.embedding_length": hidden,
        f"{own}.feed_forward_length": int(config["intermediate_size"]),
        f"{own}.attention.head_count": heads,
        f"{own}.attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        f"{own}.attention.key_length": width,
        f"{own}.attention.value_length": width,
        f"{own}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{own}.rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        f"{own}.rope.dimension_count": width,
        f"{own}.vocab_size": int(config["vocab_size"]),
        "tokenizer.ggml.model": "no_vocab",
    }
