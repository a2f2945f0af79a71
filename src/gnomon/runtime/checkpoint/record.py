"""`gnomon.json`: what a checkpoint is of, and which files it has, with a checksum of each and of itself.

`Record` is what it says; `read_record(path)` checks it without reading a tensor. Identity is what a run goes on from: a
run with another seed, learning rate or data is refused, unless it names what may differ. Leaves out tensors (`files`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.plans import Plan, Workload
from gnomon.plans.experts import without_replicas

FORMAT = "gnomon.checkpoint/2"
RECORD = "gnomon.json"
STEP = re.compile(r"step-\d{6,}")
FIXED = ("model", "precision", "batch")
"""What no run can go on from when it differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """The record of one rank's file: its name, its bytes and the checksum of its header."""

    name: str
    """Its name in the checkpoint's folder."""
    bytes: int
    """Its whole length."""
    header: str
    """SHA-256 of what it begins with, in which every tensor has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a checkpoint says of itself."""

    step: int
    """Steps that were trained."""
    updates: int
    """Of the optimizer."""
    identity: Mapping[str, str]
    """What it goes on from: model, precision, batch, and what the run added (seed, settings, data)."""
    plan: str
    """That wrote it, for people."""
    files: tuple[File, ...]
    """One for each rank that wrote."""
    source: str | None
    """Folder or config.json that the model was read from; None where it was none (a preset, code, a Graph), or was not
    kept yet."""
    loss_scale: tuple[float, int] | None = None
    """(scale, good steps in a row) of fp16."""


def identity_of(graph: Graph, plan: Plan, work: Workload) -> dict[str, str]:
    """Model, precision and batch of a run."""
    return {
        "model": f"{graph.name} {sha256(repr(without_replicas(graph)).encode()).hexdigest()[:16]}",
        "precision": repr(plan.precision),
        "batch": f"{work.batch_size} sequences of {work.seq_len or 'several lengths'}",
    }


def write_record(folder: Path, record: Record) -> None:
    """Writes it, with a checksum of its own."""
    values = {"format": FORMAT, **asdict(record)}
    with (folder / RECORD).open("w") as out:
        json.dump({**values, "checksum": _checksum(values)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _checksum(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> Record:
    """Reads the record of the checkpoint `path`. InputError for one that is half-written, damaged, or of another
    program."""
    try:
        values = json.loads((path / RECORD).read_text("utf-8"))
        checksum = values.pop("checksum")
    except FileNotFoundError:
        other = "it was written by torch's own checkpoints, which are pickles" if (path / ".metadata").exists() else ""
        raise InputError(f"{path} has no {RECORD}: {other or 'it is half-written'}") from None
    except OSError as error:
        raise InputError(f"{path / RECORD} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path / RECORD} is damaged or cut off") from error
    if checksum != _checksum(values):
        raise InputError(f"{path / RECORD} is damaged: its checksum is of other contents")
    if values.pop("format", None) != FORMAT:
        raise InputError(f"{path} is of another version of Gnomon; {FORMAT} is read")
    try:
        files = tuple(File(**file) for file in values.pop("files"))
        if (scale := values.pop("loss_scale", None)) is not None:
            scale = float(scale[0]), int(scale[1])
        record = Record(**{"source": None, **values}, files=files, loss_scale=scale)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise InputError(f"{path / RECORD} does not say what a checkpoint is of: {error}") from error
    _check(path, record)
    return record


def _check(path: Path, record: Record) -> None:
    """InputError for what no Gnomon has written, checksum or not."""
    numbers = (record.step, record.updates, *(file.bytes for file in record.files))
    texts = (record.plan, *(text for file in record.files for text in (file.name, file.header)))
    if (
        not all(type(number) is int and number >= 0 for number in numbers)
        or not all(isinstance(text, str) for text in texts)
        or not isinstance(record.source, str | None)
        or not isinstance(record.identity, dict)
        or not all(isinstance(text, str) for pair in record.identity.items() for text in pair)
    ):
        raise InputError(f"{path / RECORD} has values of another kind than a checkpoint's")
    names = [file.name for file in record.files]
    if any(Path(name).name != name or name in ("", ".", "..") or "\0" in name for name in names):
        raise InputError(f"{path / RECORD} names files outside of its folder")
    if not names:
        raise InputError(f"{path / RECORD} names no file")
    if len(set(names)) < len(names):
        raise InputError(f"{path / RECORD} names a file twice")


def checkpoints(folder: Path) -> list[Path]:
    """Folders that are named as checkpoints, in order of steps, whole or not."""
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name.partition("-")[2]))


def newest(folder: Path) -> Path | None:
    """The last checkpoint whose files are all there and as long as its record says, or None."""
    for path in reversed(checkpoints(folder)):
        try:
            record = read_record(path)
            if all((path / file.name).stat().st_size == file.bytes for file in record.files):
                return path
        except (InputError, OSError):
            continue
    return None


def check_identity(path: Path, before: Mapping[str, str], now: Mapping[str, str], override: Iterable[str] = ()) -> None:
    """InputError unless a run may go on from the checkpoint. override: names of what may differ."""
    differs = {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}
    if fixed := [name for name in FIXED if name in differs]:
        what = "; ".join(f"{name}: {differs[name][0][:200]}, not {differs[name][1][:200]}" for name in fixed)
        raise InputError(
            f"{path} was written by another model, precision or batch ({what}); resume with those, or use a new folder"
        )
    if unexpected := [name for name in differs if name not in set(override)]:
        what = "; ".join(f"{name} was {differs[name][0]} and is {differs[name][1]}" for name in unexpected)
        raise InputError(
            f"{path} is of a run with other settings ({what}); resume with those, or go on with the new ones by "
            f"--override {','.join(unexpected)}"
        )
