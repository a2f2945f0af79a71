"""Graphs of captured models, kept on disk until a file that they came from changes.

`load(name)` returns what `store` kept, if every source file that was imported then has the same content, and torch and
the packages around it the same versions: without importing any of them. The file is JSON that makes nothing but a
Graph (`graph.plain`): one that somebody else wrote runs no code. Leaves out capturing (`frontend`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gnomon.errors import FormatError, GnomonError
from gnomon.graph import Graph
from gnomon.graph.plain import from_plain, to_plain
from gnomon.trust import make_private

Kept = tuple[Graph, tuple[str, ...]]
"""(graph, notes)."""

VARIABLE = "GNOMON_CACHE"
"""Folder to keep them in; empty for none. The user's cache folder otherwise."""
FORMAT = "gnomon.captured/3"
PACKAGES = ("torch", "transformers", "diffusers", "timm", "torchvision", "gnomon")
"""Packages whose version is asked in place of the content of their files."""


def load(name: str) -> Kept | None:
    """What was kept of a model, if it would be captured to the same again."""
    path = _path(name)
    if path is None:
        return None
    try:
        cached = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # none, or cut short, or of another format
        return None
    if not (isinstance(cached, dict) and cached.get("format") == FORMAT and cached.get("here") == os.getcwd()):
        return None
    files, notes = cached.get("files"), cached.get("notes")
    if cached.get("versions") != _versions() or not isinstance(notes, list) or not isinstance(files, dict):
        return None
    if not all(isinstance(note, str) for note in notes):
        return None
    if not all(_digest(Path(file)) == digest for file, digest in files.items()):
        return None
    try:
        return from_plain(cached.get("graph")), tuple(notes)
    except (GnomonError, RecursionError):
        return None


def store(name: str, model: Kept, files: list[str]) -> None:
    """Stores a graph on disk; one that no file holds, and a folder that cannot be written to, are passed over."""
    path = _path(name)
    if path is None:
        return
    graph, notes = model
    try:
        plain = to_plain(graph)
    except FormatError:
        return
    entry = {
        "format": FORMAT,
        "versions": _versions(),
        "here": os.getcwd(),
        "files": {file: _digest(Path(file)) for file in files},
        "notes": list(notes),
        "graph": plain,
    }
    with suppress(OSError):
        make_private(path.parent)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(entry, separators=(",", ":")), encoding="utf-8")
        part.replace(path)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Files of the modules that are imported meanwhile, or were before, outside of installed packages."""
    files: list[str] = []
    yield files
    installed = ("site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}")
    ours = str(Path(__file__).parents[1])
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and not any(part in file for part in installed):
            if not file.startswith(ours):
                files.append(file)
    files.sort()


def _path(name: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    if folder == "":
        return None
    base = Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnomon"
    return base / "graphs" / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    versions["source"] = _digest_of_source()
    return versions


def _digest_of_source() -> str:
    """A digest of the code that makes Graphs, by size and time of its files: kept graphs of other code are not read."""
    digest = hashlib.sha256()
    for folder in ("frontend", "graph"):
        for path in sorted((Path(__file__).parents[1] / folder).glob("*.py")):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()
