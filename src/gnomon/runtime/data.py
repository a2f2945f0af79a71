"""Real text as bytes: a folder of files, by default the sources of Python's standard library, which every machine has.

`Text.read(folder)` splits files into training and validation; `batch(step)` is a pure function of (seed, step),
whatever the number of workers: each takes its rows of the same batch. A token is a byte; byte 0 stands between files.
Left out: tokenizers, and texts larger than memory.
"""

from __future__ import annotations

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
"""One file in so many, chosen by its name, is for validation."""
TRAINING, VALIDATION = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """Bytes to train on, and bytes held out."""

    training: NDArray[np.uint8]
    """Files one after the other, each ended by byte 0."""
    validation: NDArray[np.uint8]
    """The same of the files held out."""

    @staticmethod
    def read(folder: Path | None = None, *, limit_bytes: int = 64 << 20) -> Text:
        """All text below `folder`, or the standard library. InputError when there is no folder or too little text.

        limit_bytes: read no more files once so much is read. Files are read in the order of their names.
        """
        root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
        if not root.is_dir():
            raise InputError(f"{root} is not a folder; name one with text in it")
        files: list[tuple[str, bytes]] = []
        total = 0
        for path in _files(root):
            content = path.read_bytes().replace(b"\0", b"")
            files.append((path.relative_to(root).as_posix(), content))
            total += len(content)
            if total >= limit_bytes:
                break
        return Text.of(files, str(root))

    @staticmethod
    def of(files: Sequence[tuple[str, bytes]], where: str = "the given files") -> Text:
        """From (name, content) of each file. A file's side depends on its name alone."""
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for name, content in files:
            held_out = int.from_bytes(sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0
            sides[held_out].extend((content, b"\0"))
        training, validation = (np.frombuffer(b"".join(side), np.uint8) for side in sides)
        if len(training) < 2 or len(validation) < 2:
            raise InputError(
                f"{where}: {len(training)} bytes to train on and {len(validation)} held out; give more files"
            )
        return Text(training=training, validation=validation)

    def batch(self, step: int, *, seed: int, sequences: int, seq_len: int) -> Tensor:
        """(sequences, seq_len + 1) token ids of a step: the last column is only predicted."""
        return _draw(self.training, (seed, TRAINING, step), sequences, seq_len)

    def validation_batch(self, index: int, *, sequences: int, seq_len: int) -> Tensor:
        """The same of held-out text; batch `index` is the same in every run."""
        return _draw(self.validation, (0, VALIDATION, index), sequences, seq_len)


def _files(root: Path) -> Iterable[Path]:
    for path in sorted(root.rglob("*")):
        hidden = {"site-packages", "__pycache__"} & set(path.relative_to(root).parts)
        if path.suffix in SUFFIXES and not hidden and path.is_file():
            yield path


def _draw(text: NDArray[np.uint8], seed: tuple[int, int, int], sequences: int, seq_len: int) -> Tensor:
    if len(text) <= seq_len:
        raise InputError(
            f"a sequence takes {seq_len + 1} bytes, but there are {len(text)}; give more text, or less seq_len"
        )
    starts = np.random.default_rng(seed).integers(0, len(text) - seq_len, sequences)
    return torch.from_numpy(text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64))
