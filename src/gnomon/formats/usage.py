"""The arguments that a launch script is started with, where its own comment or the README beside it writes them down.

`written_arguments(text, path)` returns them with where they stand, for a script that takes positional arguments and is
given none. Words that only name a place for a value (`<size>`, `$MODEL`, `[gpus]`, PATH_TO_DATA) are no arguments, and
a line with one counts for none. Leaves out scripts that are started by others.
"""

from __future__ import annotations

import re
from pathlib import Path

from gnomon.errors import InputError
from gnomon.formats.job import read_source

POSITIONAL = re.compile(r"\$\{?[1-9@]")
"""A script with one takes arguments."""

PLACE = re.compile(r"[<>\[\]{}$…]|\.\.\.|^[A-Z][A-Z_]{2,}$|/?path/?to|^(arg|your)")
"""A word that stands for a value."""

READMES = ("README.md", "Readme.md", "readme.md", "README.rst", "README.txt", "README")


def written_arguments(text: str, path: Path | None) -> tuple[str, str] | None:
    """(arguments, where they stand); None where a script takes none, or nobody writes any down."""
    if path is None or POSITIONAL.search(text) is None:
        return None
    comments = [(at, line.lstrip("# \t")) for at, line in enumerate(text.splitlines(), 1) if line.lstrip()[:1] == "#"]
    found = _started(path.name, comments)
    if found is not None:
        return found[1], f"its comment on line {found[0]}"
    for folder in (path.resolve().parent, *path.resolve().parents[1:3]):
        for name in READMES:
            if (folder / name).is_file():
                try:
                    page = read_source(folder / name)[0]
                except InputError:
                    continue
                found = _started(path.name, list(enumerate(page.splitlines(), 1)))
                if found is not None:
                    return found[1], f"{name}, line {found[0]}"
    return None


def _started(script: str, lines: list[tuple[int, str]]) -> tuple[int, str] | None:
    """(line, words) of the first line that starts a script with values."""
    starts = re.compile(rf"(?:^|[\s`$(])(?:(?:bash|sh|sbatch|source)\s+)?[\w./-]*\b{re.escape(script)}\s+([^`#;|&>]+)")
    for at, line in lines:
        match = starts.search(line)
        words = match[1].split() if match else []
        if words and not any(PLACE.search(word) for word in words) and _values(words):
            return at, " ".join(words)
    return None


def _values(words: list[str]) -> bool:
    """Whether words may be arguments, and are no sentence: one of them is a number, a size or a path."""
    return len(words) <= 24 and any(re.search(r"\d|/", word) for word in words)
