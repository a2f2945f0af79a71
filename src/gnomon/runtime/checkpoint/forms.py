"""A folder of quantised weights in another program's form: GPTQ, AWQ, compressed-tensors, or whole numbers.

`convert(source, target, form)` writes a new folder, whole or not at all, and returns a `ConversionReport`. Every layer
that is written is read back and must mean, number by number, what the source means; what cannot is refused by name.
What is not quantised is copied. Leaves out rounding to another storage (`compress`) and GGUF, whose files have other
names.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.formats.huggingface import quantised
from gnomon.runtime.checkpoint.compress import check_places
from gnomon.runtime.checkpoint.pretrained import CONFIG, companion_files
from gnomon.runtime.checkpoint.rewrite import exchanged, indexed
from gnomon.runtime.parameters.packed import PackedFolder, open_folder
from gnomon.storage.dense import Dense
from gnomon.storage.form import Shape, Storage
from gnomon.storage.integers import Integers

Layer = dict[str, NDArray[Any]]
FORMS: Mapping[str, tuple[Callable[[Integers, Layer, Shape], Layer], Callable[..., dict[str, Any]]]] = {
    "gptq": (quantised.gptq, quantised.gptq_config),
    "awq": (quantised.awq, quantised.awq_config),
    "compressed-tensors": (quantised.packed, quantised.packed_config),
}
WHOLE: Mapping[str, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Whole numbers, and their dtype in a file."""
DTYPES: Mapping[str, str] = {
    "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32", "uint16": "BF16",
}  # fmt: skip
"""numpy's -> a file's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion wrote."""

    layers: int
    before: str
    """The program that the source is of."""
    storages: tuple[str, ...]
    """As `storage_of` reads them."""
    bytes_before: int
    """Of all files with weights."""
    bytes_after: int


def convert(source: Path, target: Path, form: str) -> ConversionReport:
    """Writes a quantised folder in another form. form: of FORMS or WHOLE. InputError for a folder that is not
    quantised, layers that cannot be held so, and places as `compress` has them; nothing is left behind then."""
    if form not in (*FORMS, *WHOLE):
        raise InputError(f"weights are converted to {', '.join((*FORMS, *WHOLE))}, not to {form!r}")
    check_places(source, target)
    folder = open_folder(source)
    if not isinstance(folder, PackedFolder) or folder.files is None or not folder.packed:
        raise InputError(
            f"{source} has no weights that gptq, awq, compressed-tensors, fp8, torchao or bitsandbytes quantised"
        )
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    if config["quantization_config"].get("quant_method") == form and form in FORMS:
        raise InputError(f"{source} is of {form} already; copy it")
    temporary = Path(tempfile.mkdtemp(dir=target.absolute().parent, prefix=f".{target.name}."))
    try:
        storages = _write(folder, temporary, form)
        config = _configured(config, folder, form, storages)
        for file in companion_files(source):
            shutil.copyfile(file, temporary / file.name)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        indexed(folder, temporary)
        after = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
        temporary.chmod(source.stat().st_mode & 0o777)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files = {file for file, _ in folder.entries.values()}
    return ConversionReport(
        layers=len(folder.packed),
        before=folder.method.program,
        storages=tuple(sorted({one.name for one in storages})),
        bytes_before=sum((folder.path / file).stat().st_size for file in files),
        bytes_after=after,
    )


def _write(folder: PackedFolder, folder_new: Path, form: str) -> set[Storage]:
    """Writes all files and returns the storages of their layers."""
    assert folder.files is not None
    stored_forms: set[Storage] = set()
    symmetric = form == "compressed-tensors" and all(
        _is_middle(*folder.stored(weight)[:2]) for weight in folder.packed
    )  # one word in the config says so of all
    for file in sorted({file for file, _ in folder.files.entries.values()}):
        new: dict[str, tuple[str, NDArray[Any]]] = {}
        dropped: set[str] = set()
        for weight, parts in folder.packed.items():
            if folder.entries[weight][0] != file:
                continue
            if {folder.files.entries[name][0] for name in parts.values()} != {file}:
                raise InputError(f"{folder.path}: the tensors of {weight} lie in several files; write it in one first")
            try:
                storage, tensors = _layer(folder, weight, form, symmetric)
            except InputError as error:
                raise InputError(f"{folder.path}: {weight}: {error}") from error
            stored_forms.add(_with_group(storage, folder) if isinstance(storage, Integers) else storage)
            dropped |= set(parts.values())
            new |= {f"{weight.removesuffix('weight')}{end}": one for end, one in tensors.items()}
        exchanged(folder.files, file, folder_new, new, frozenset(dropped))
    return stored_forms


def _is_middle(storage: Storage, arrays: Layer) -> bool:
    """Whether zeros are the middle, as without them."""
    return isinstance(storage, Integers) and (
        not storage.zeros or bool(np.all(arrays["zeros"] == replace(storage, zeros=False).zero))
    )


def _layer(
    folder: PackedFolder, weight: str, form: str, symmetric: bool
) -> tuple[Storage, dict[str, tuple[str, NDArray[Any]]]]:
    """(storage, tensors by their endings) of a layer, in another form."""
    storage, arrays, shape = folder.stored(weight)
    wide = storage.widen(arrays, shape)
    if form in WHOLE:
        numbers = Dense(dtype=form).narrow(wide)
        if not np.array_equal(Dense(dtype=form).widen(numbers, shape), wide):
            raise InputError(f"in {form} these would be other numbers; take fp32")
        return storage, {"weight": (WHOLE[form], numbers["values"])}
    if not isinstance(storage, Integers):
        raise InputError(f"{storage.name} has no integers in groups, which {form} stores; take {', '.join(WHOLE)}")
    if symmetric and storage.zeros:
        storage, arrays = replace(storage, zeros=False), {k: v for k, v in arrays.items() if k != "zeros"}
    elif form == "compressed-tensors" and not symmetric and not storage.zeros:
        # One config.json speaks of all layers: where some have zeros, those without get the middle as theirs.
        zeros = np.full(arrays["scales"].shape, storage.zero, np.uint8)
        storage, arrays = replace(storage, zeros=True), {**arrays, "zeros": zeros}
    tensors = FORMS[form][0](storage, arrays, shape)
    method = quantised.method_of({"quantization_config": FORMS[form][1](_with_group(storage, folder), ())})
    assert method is not None
    again, read, size = quantised.stored(method, tensors)
    if size != shape or not np.array_equal(again.widen(read, size), wide):
        raise InputError(f"{form} does not hold {storage.name} as it is")
    return storage, {end: (DTYPES[x.dtype.name], x) for end, x in tensors.items()}


def _with_group(storage: Integers, folder: PackedFolder) -> Integers:
    """A layer's storage with the group that its folder says of all: a layer of fewer columns has one group."""
    return replace(storage, group=folder.method.group or storage.group)


def _configured(config: Mapping[str, Any], folder: PackedFolder, form: str, storages: set[Storage]) -> dict[str, Any]:
    if form in WHOLE:
        return {name: value for name, value in config.items() if name != "quantization_config"}
    integers = {one for one in storages if isinstance(one, Integers)}
    distinct = {(one.bits, one.group, one.zeros) for one in integers}
    if len(distinct) != 1:
        raise InputError(f"{folder.path} has layers of several kinds, and a config.json says one: {sorted(distinct)}")
    unstored = {
        name.removesuffix(".weight")
        for name, (_, entry) in folder.entries.items()
        if name.endswith(".weight") and len(entry.shape) == 2 and name not in folder.packed and "embed" not in name
    }
    packed = FORMS[form][1](next(iter(integers)), sorted({*unstored, "lm_head"}))
    return {**config, "quantization_config": packed}
