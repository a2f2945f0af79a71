"""Real text as bytes: a folder of files, by default the sources of Python's standard library, which every machine has.

`Text.read(folder)` splits text into training and validation; `batch(step)` is a pure function of (seed, step),
whatever the number of workers: each takes its rows of the same batch. A token is a byte; byte 0 stands between files.
Left out: tokenizers, and texts larger than memory.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.errors import InputError

VOCAB_SIZE = 256
"""Bytes; 0 is the end of a file."""
SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".json", ".toml", ".html", ".tex")
"""What counts as text in a folder."""
HELD_OUT = 20
"""One file in so many, chosen by its name, is for validation; where that leaves a side empty, the last so-manieth of
the text."""
TRAINING, VALIDATION = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """Bytes to train on, and bytes held out."""

    training: NDArray[np.uint8]
    """Files one after the other, each ended by byte 0."""
    validation: NDArray[np.uint8]
    """The same of what is held out."""
    where: str = "the given files"
    """The folder, for messages."""

    @staticmethod
    def read(folder: Path | None = None, *, limit_bytes: int = 64 << 20) -> Text:
        """All text below `folder`, or the standard library. InputError when there is no folder or no text in it, or
        something that may not be read.

        limit_bytes: read no more files once so much is read. Files are read in the order of their names.
        """
        root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
        if not root.is_dir():
            what = "is not a folder" if root.exists() else "does not exist"
            raise InputError(f"{str(root)!r} {what}; name a folder with text in it (--data)")
        files: list[tuple[str, bytes]] = []
        total = 0
        for path in _files(root):
            try:
                content = path.read_bytes().replace(b"\0", b"")
            except OSError as error:
                raise _unreadable(error) from error
            files.append((path.relative_to(root).as_posix(), content))
            total += len(content)
            if total >= limit_bytes:
                break
        return Text.of(files, str(root))

    @staticmethod
    def of(files: Sequence[tuple[str, bytes]], where: str = "the given files") -> Text:
        """From (name, content) of each file. A file's side depends on its name alone, unless all fall to one side."""
        if not any(content for _, content in files):
            raise InputError(f"{where}: no text in it; files that count end in {', '.join(SUFFIXES)}")
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for name, content in files:
            held_out = int.from_bytes(sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0
            sides[held_out].extend((content, b"\0"))
        training, validation = (np.frombuffer(b"".join(side), np.uint8) for side in sides)
        if not len(training) or not len(validation):
            whole = np.concatenate((training, validation))
            training, validation = np.split(whole, [len(whole) - max(1, len(whole) // HELD_OUT)])
        return Text(training=training, validation=validation, where=where)

    def check(self, seq_len: int) -> None:
        """InputError unless both sides hold a sequence."""
        for what, side in (("to train on", self.training), ("held out", self.validation)):
            if len(side) <= seq_len:
                raise InputError(
                    f"{self.where}: a sequence takes {seq_len + 1} bytes, but there are {len(side)} {what}; give more "
                    f"text, or less seq_len"
                )

    def batch(self, step: int, *, seed: int, sequences: int, seq_len: int) -> Tensor:
        """(sequences, seq_len + 1) token ids of a step: the last column is only predicted. `check` says whether the
        text is long enough."""
        return _draw(self.training, (seed, TRAINING, step), sequences, seq_len)

    def validation_batch(self, index: int, *, sequences: int, seq_len: int) -> Tensor:
        """The same of held-out text; batch `index` is the same in every run."""
        return _draw(self.validation, (0, VALIDATION, index), sequences, seq_len)


def _files(root: Path) -> Iterable[Path]:
    """Files of text below a folder, by name. InputError for a folder that may not be read."""

    def refuse(error: OSError) -> None:
        raise _unreadable(error)

    found = []
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if name not in ("site-packages", "__pycache__")]
        found += [Path(folder, name) for name in names if name.endswith(SUFFIXES)]
    return sorted(path for path in found if path.is_file())


def _unreadable(error: OSError) -> InputError:
    return InputError(f"cannot read {error.filename!r}: {error.strerror}; make it readable, or give another folder")


def _draw(text: NDArray[np.uint8], seed: tuple[int, int, int], sequences: int, seq_len: int) -> Tensor:
    starts = np.random.default_rng(seed).integers(0, len(text) - seq_len, sequences)
    return torch.from_numpy(text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64))
