"""What the folder of a program states: how its job files are recognised, read and written.

`Format` is that statement; `Sample` is a file before anybody has read it. Leaves out the programs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gnomon.formats.export import Draft, ExportRequest
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.formats.learnt import Learnt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A file that is to be recognised."""

    path: Path
    """Where it lies."""
    text: str
    """What is in it."""
    values: Mapping[str, object] = field(default_factory=dict)
    """The outermost table of JSON, TOML or YAML; empty otherwise."""

    def has(self, *keys: str) -> bool:
        """Whether the file has all of these keys outermost, `a.b` within a table."""
        return all(self.get(key) is not None for key in keys)

    def get(self, key: str) -> object:
        """The value of a key, `a.b` within a table; None where there is none."""
        value: object = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Job files of one program."""

    name: str
    """On the command line, after --from."""
    program: str
    """The program, with the version or commit that its reader was written from."""
    files: str
    """What its files are, in a few words."""
    looks: Callable[[Sample], bool]
    """Whether a file is one of these; at most one format says so of a file."""
    read: Callable[[Path, ReadContext], Job]
    """The job of a file. Raises InputError or FormatError with the fix."""
    write: Callable[[ExportRequest], Draft] | None = None
    """A plan as one of its files; None where it is read only."""
    finetune_draft: Callable[[ExportRequest], Draft] | None = None
    """The same of a program that fine-tunes around PyTorch: what its file says of adapters, loss and sharding. Changes
    of a job of its own are in its terms."""
    learnt: Callable[[Mapping[str, object]], Learnt] | None = None
    """What the program learns, by the fields of a file; None where it is not known."""
    stack: str = ""
    """Record of what the program does (`gnomon.software`), of one whose files can be written."""
