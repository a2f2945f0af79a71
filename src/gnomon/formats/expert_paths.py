"""Files of what a server's routers chose, token by token: `gnomon serve --record-experts` writes one.

A compressed `.npz` of numpy arrays: `schema` (gnomon.expert-paths/1), `model` (its name), `layers` (their labels),
`experts` (of a layer), `begins` (first token of each iteration, and one past the last) and `chosen` (layers, tokens,
topk), the expert with the largest weight first. `--router` of predictions takes it as it takes `formats.router`'s, of
which it has the sums. Nothing in it is pickled. Leaves out who records (`serve.copies`).
"""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import numpy as np

from gnomon.errors import InputError
from gnomon.formats.router import MAX_BYTES, arrays_of, one_line, routers_of
from gnomon.graph import Graph
from gnomon.plans import RouterLoad
from gnomon.serving.foresight import PathRecord

SCHEMA = "gnomon.expert-paths/1"
DTYPES = {"schema": "U", "model": "U", "layers": "U", "experts": "i", "begins": "i", "chosen": "i"}
"""Name of an array -> kind of its dtype: text or signed whole numbers."""
AGAIN = "record it again with gnomon serve --record-experts"


def save_paths(record: PathRecord, path: Path) -> None:
    """Writes the file whole or not at all. InputError if it cannot be written."""
    packed = BytesIO()
    np.savez_compressed(
        packed,
        schema=np.array(SCHEMA),
        model=np.array(record.model),
        layers=np.array(record.layers),
        experts=np.array(record.experts),
        begins=np.array(record.begins, np.int64),
        chosen=record.chosen.astype(np.int16),
    )
    # In the same folder, since a file takes another's place at once only within a file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(packed.getvalue())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error


def is_paths(path: Path) -> bool:
    """Whether a file says that it is one. InputError for what is no `.npz`."""
    found = arrays_of(path, ("schema",), AGAIN)
    return "schema" in found and str(found["schema"]) == SCHEMA


def read_paths(path: Path) -> PathRecord:
    """InputError for what is no such file, or is damaged."""
    arrays = arrays_of(path, tuple(DTYPES), AGAIN)
    if missing := [name for name in DTYPES if name not in arrays]:
        raise InputError(f"{path} is no record of experts' paths: it has no array {missing[0]!r}; {AGAIN}")
    for name, kind in DTYPES.items():
        if arrays[name].dtype.kind != kind:
            raise InputError(f"{path} is damaged: {name} is {arrays[name].dtype}; {AGAIN}")
    if (said := str(arrays["schema"])) != SCHEMA:
        raise InputError(f"{path} has schema {said[:40]!r}, and this version of gnomon reads {SCHEMA!r}; {AGAIN}")
    chosen, begins, experts = arrays["chosen"], arrays["begins"], arrays["experts"]
    whole = (
        chosen.ndim == 3
        and chosen.size
        and arrays["layers"].shape == chosen.shape[:1]
        and begins.ndim == 1
        and len(begins) > 1
        and begins[0] == 0
        and begins[-1] == chosen.shape[1]
        and (np.diff(begins) > 0).all()
        and experts.ndim == 0
        and 0 < experts <= MAX_BYTES
        and chosen.min() >= 0
        and chosen.max() < experts
    )
    if not whole:
        raise InputError(f"{path} is damaged: its arrays do not belong together; {AGAIN}")
    return PathRecord(
        model=one_line(str(arrays["model"])),
        layers=tuple(one_line(label) for label in arrays["layers"].tolist()),
        experts=int(experts),
        begins=tuple(begins.tolist()),
        chosen=chosen.astype(np.int64),
    )


def paths_of(path: Path, graph: Graph) -> PathRecord:
    """The same of a model. InputError where it was recorded of another."""
    record, there = read_paths(path), routers_of(graph)
    if len(record.layers) != len(there) or record.experts != there[0].experts:
        raise InputError(
            f"{path} was recorded of {record.model}, which has {len(record.layers)} layers of {record.experts} "
            f"experts, and {graph.name} has {len(there)} of {there[0].experts}; record {graph.name} with gnomon serve "
            f"--record-experts"
        )
    return record


def load_of(record: PathRecord) -> RouterLoad:
    """How often each expert was chosen."""
    return RouterLoad(kind="recorded", layers=tuple(tuple(map(float, row)) for row in record.counts))
