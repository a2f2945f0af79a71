"""Files of recorded routers: how many tokens each expert of each layer got in each step (`gnomon run --record-router`).

A compressed `.npz` of numpy arrays: `schema` (gnomon.router/1), `model` (its name), `layers` (their labels), `topk`
(experts of a token, by layer), `steps` (their numbers, from 1), `tokens` (routed in a layer, by step) and `counts`
(steps, layers, experts), of all ranks together and before a capacity drops any, so that a layer's counts of a step add
up to tokens x topk. Nothing in it is pickled. Leaves out who records (`runtime.step.routed`).
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.plans import RouterLoad
from gnomon.plans.experts import Router as Router
from gnomon.plans.experts import routers

SCHEMA = "gnomon.router/1"
SUFFIX = ".npz"
MAX_BYTES = 2**30
"""Of all arrays unpacked: 10,000 steps of 94 layers with 128 experts."""
DTYPES = {"schema": "U", "model": "U", "layers": "U", "topk": "i", "steps": "i", "tokens": "i", "counts": "i"}
"""Name of an array -> kind of its dtype: text or signed whole numbers."""
AGAIN = "record it again with gnomon run --record-router"


def routers_of(graph: Graph) -> tuple[Router, ...]:
    """Those of a model, in the order of its layers. InputError for one without, or with layers of unlike experts."""
    found = routers(graph)
    if len({router.layer for router in found}) < len(found):
        raise InputError(f"{graph.name} has several routers in a layer, and a router file has one in each")
    if not found:
        raise InputError(f"{graph.name} has no routers: no layer of it sends tokens to experts")
    if len(kinds := {router.experts for router in found}) > 1:
        raise InputError(
            f"{graph.name} has layers of {min(kinds)} to {max(kinds)} experts, and a router file has as many in each "
            f"layer"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRecord:
    """What routers did in some steps."""

    model: str
    """Name of the model."""
    routers: tuple[Router, ...]
    """Its layers with experts."""
    steps: tuple[int, ...]
    """Which they were, counted from 1."""
    counts: NDArray[np.int64]
    """(steps, layers, experts): tokens that each expert got."""

    @property
    def load(self) -> RouterLoad:
        """The sums over all steps, layer by layer."""
        return RouterLoad(kind="recorded", layers=tuple(tuple(map(float, row)) for row in self.counts.sum(axis=0)))

    def check(self, graph: Graph, name: str) -> None:
        """InputError where it was recorded of another model. name: of its file."""
        there = routers_of(graph)
        of = f"{name} was recorded of {self.model}"
        ask = f"record {graph.name} with gnomon run --record-router"
        for what, had, has in (
            ("layers with experts", len(self.routers), len(there)),
            ("experts in a layer", self.routers[0].experts, there[0].experts),
        ):
            if had != has:
                raise InputError(f"{of}, which has {had} {what}, and {graph.name} has {has}; {ask}")
        for mine, theirs in zip(self.routers, there, strict=True):
            if mine.layer != theirs.layer:
                raise InputError(f"{of}, which has experts in {mine.layer}, and {graph.name} in {theirs.layer}; {ask}")
            if mine.topk != theirs.topk:
                raise InputError(
                    f"{of}, which sends a token to {mine.topk} experts in {mine.layer}, and {graph.name} to "
                    f"{theirs.topk}; {ask}"
                )


def save_router(record: RouterRecord, path: Path) -> None:
    """Writes the file whole or not at all. InputError if it cannot be written."""
    topk = np.array([router.topk for router in record.routers], np.int64)
    packed = BytesIO()
    np.savez_compressed(
        packed,
        schema=np.array(SCHEMA),
        model=np.array(record.model),
        layers=np.array([router.layer for router in record.routers]),
        topk=topk,
        steps=np.array(record.steps, np.int64),
        # A token is counted once for each of its experts, and all layers have the same tokens.
        tokens=record.counts[:, 0].sum(axis=-1) // topk[0],
        counts=record.counts,
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(packed.getvalue())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error


def read_router(path: Path) -> RouterRecord:
    """InputError for what is no router file, or is damaged."""
    arrays = arrays_of(path, tuple(DTYPES), AGAIN)
    again = AGAIN
    if missing := [name for name in DTYPES if name not in arrays]:
        raise InputError(f"{path} is no router file: it has no array {missing[0]!r}; {again}")
    for name, kind in DTYPES.items():
        if arrays[name].dtype.kind != kind:
            words = "text" if kind == "U" else "whole numbers"
            raise InputError(f"{path} is no router file: {name} is {arrays[name].dtype}, not {words}; {again}")
    if (schema_name := str(arrays["schema"])) != SCHEMA:
        raise InputError(
            f"{path} has schema {schema_name[:40]!r}, and this version of gnomon reads {SCHEMA!r}; {again}"
        )
    counts = arrays["counts"]
    if counts.ndim != 3 or not counts.size:
        raise InputError(
            f"{path} records nothing: counts has shape {counts.shape}, not steps, layers, experts; {again}"
        )
    steps, layers, experts = counts.shape
    for name, shape in (("layers", (layers,)), ("topk", (layers,)), ("steps", (steps,)), ("tokens", (steps,))):
        if arrays[name].shape != shape:
            raise InputError(
                f"{path} is damaged: {name} has shape {arrays[name].shape}, and counts {counts.shape}; {again}"
            )
    tokens, topk = arrays["tokens"], arrays["topk"]
    if counts.min() < 0 or tokens.min() < 1 or topk.min() < 1 or (counts.sum(-1) != tokens[:, None] * topk).any():
        raise InputError(f"{path} is damaged: counts of a layer do not add up to tokens x topk; {again}")
    labels = [one_line(label) for label in arrays["layers"].tolist()]
    return RouterRecord(
        model=one_line(str(arrays["model"])),
        routers=tuple(Router(layer=label, experts=experts, topk=int(k)) for label, k in zip(labels, topk, strict=True)),
        steps=tuple(arrays["steps"].tolist()),
        counts=counts.astype(np.int64),
    )


def one_line(name: str) -> str:
    """A name from a file, as messages may have it."""
    return " ".join(name.split())[:80]


def arrays_of(path: Path, names: Sequence[str], again: str) -> Mapping[str, NDArray[Any]]:
    """Those arrays of an .npz file by name, read without unpickling. again: how to make one. InputError if it cannot be
    read."""
    try:
        # Before anything is unpacked: a small file can be far larger than memory once it is.
        with zipfile.ZipFile(path) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > MAX_BYTES:
            raise InputError(f"{path} holds {size:,} bytes, over the limit of {MAX_BYTES:,} for a router file")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names if name in file.files}
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, MemoryError, NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"{path} is no .npz file, or is cut off ({str(error) or type(error).__name__}); {again}"
        ) from None
    except ValueError as error:
        pickled = "allow_pickle" in str(error)
        why = "it holds pickled objects, which could run code" if pickled else str(error).splitlines()[0]
        raise InputError(f"{path} is not read: {why}; {again}") from None
