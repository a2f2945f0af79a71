"""A folder of weights written anew with some tensors exchanged: file by file, what stays copied byte by byte.

`exchanged(folder, file, target, new, dropped)` writes one file; `indexed(folder, target)` the index of all, where the
folder has one. Leaves out config.json, and which tensors are exchanged (`compress`, `forms`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.formats.huggingface.safetensors import DTYPE_BYTES, header_of
from gnomon.runtime.parameters.weights import INDEX, Folder

Tensors = Mapping[str, tuple[str, NDArray[Any]]]
"""Name in the file -> (its dtype there, numbers)."""


def exchanged(folder: Folder, file: str, target: Path, new: Tensors, dropped: frozenset[str]) -> None:
    """Writes `file` of a folder into `target`, without what is dropped and with what is new."""
    own = {name: entry for name, (of, entry) in folder.entries.items() if of == file}
    stay = {name: (entry.dtype, entry.shape) for name, entry in own.items() if name not in dropped}
    described = {name: (dtype, tuple(x.shape)) for name, (dtype, x) in new.items()}
    first, header = header_of({**stay, **described}, folder.metadata[file])
    with (folder.path / file).open("rb") as old, (target / file).open("wb") as out:
        out.write(first)
        for name, entry in header.entries.items():
            # The new header may have tensors in another order, and at other places, than the old file.
            out.seek(entry.begin)
            if name in new:
                out.write(np.ascontiguousarray(new[name][1]).tobytes())
            else:
                old.seek(own[name].begin)
                out.write(old.read(own[name].end - own[name].begin))


def indexed(folder: Folder, target: Path) -> None:
    """Writes the index of what lies in `target`, where the folder has one."""
    if (folder.path / INDEX).is_file():
        entries = Folder.of(target).entries
        total = sum(prod(entry.shape) * DTYPE_BYTES[entry.dtype] for _, entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: entries[name][0] for name in sorted(entries)}}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
