"""Tokens of a corpus on disk, made once: text is encoded document by document into Megatron's format.

`store(source, say)` returns the folder or files with the tokens of a `Source`, and makes them if they are not there;
nothing of the text is left out, and memory holds one piece of it at a time. What is made lies under a name that follows
from the files (name, size, time), the tokenizer and the options, and appears whole or not at all. Leaves out batches
(`corpus`).
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Literal
from zlib import crc32

import numpy as np

from gnomon.errors import InputError
from gnomon.formats.learnt import Learn
from gnomon.runtime.data.documents import Document, DocumentFiles, documents, find
from gnomon.runtime.data.encode import Encoded, Encoder
from gnomon.runtime.data.megatron import Writer, dtype_for, prefix_of

FORMAT = 1
"""Of the cached tokens; a cache of another version is rebuilt."""
HELD_OUT = 20
"""One document in so many, chosen by what is in it, is for validation."""
PATIENCE_S = 2.0
"""Nothing is said about what takes less."""
TOKENS, LEARN, SIDES, RECORD = "tokens", "learn", "sides.npy", "record.json"
Packing = Literal["", "stream", "documents", "padded"]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Text to train on, and how it becomes tokens."""

    path: Path | None = None
    """A folder or file of text, or PREFIX of a pair in Megatron's format; None: the standard library's own source."""
    tokenizer: Path | None = None
    """tokenizer.json or its folder; None: bytes."""
    chat_template: Path | None = None
    """Jinja file; None: the one beside the tokenizer."""
    column: str = ""
    """With the text, of records; empty: `text`, `messages` or `prompt`."""
    learn: Learn = "answers"
    """What is learnt of conversations and of prompts with completions."""
    packing: Packing = ""
    """`stream`: documents one after the other, cut into rows; `documents`: whole documents packed into rows, which do
    not see each other; `padded`: one document a row, and a microbatch as long as its longest. Empty: documents where a
    part of them is to be learnt, else stream."""
    cache: Path | None = None
    """Where tokens are kept; None: the user's cache folder."""

    @property
    def root(self) -> Path:
        """The path, or the standard library."""
        return Path(sysconfig.get_paths()["stdlib"]) if self.path is None else self.path

    @property
    def megatron(self) -> Path | None:
        """PREFIX of a pair of files that hold tokens already."""
        return None if self.path is None else prefix_of(self.path)

    def describe(self) -> str:
        """One line that names the text and its tokens."""
        where = "the Python standard library's source" if self.path is None else str(self.path)
        if self.megatron is not None:
            return f"{where}, tokens already"
        return f"{where}, {'bytes as tokens' if self.tokenizer is None else f'tokens of {self.tokenizer}'}"


def cache_folder() -> Path:
    """The user's own, or a new one of this process where that cannot be written."""
    folder = Path.home() / ".cache" / "gnomon" / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="gnomon-data-"))


def store(source: Source, say: Say = lambda line: None) -> Path:
    """A folder with `tokens.bin`, its index, and `record.json`. say: takes a line of progress now and then.

    InputError for text that cannot be read, with its file and line.
    """
    listing, encoder = (
        find(source.root),
        Encoder.open(source.tokenizer, chat_template=source.chat_template, learn=source.learn),
    )
    folder = (source.cache or cache_folder()) / _key(source, listing, encoder)
    if not (folder / RECORD).is_file():
        _make(source, listing, encoder, folder, say)
    return folder


def _key(source: Source, listing: DocumentFiles, encoder: Encoder) -> str:
    parts = [str(FORMAT), encoder.identity, source.column, listing.kind]
    parts += [source.learn] if source.learn != "answers" else []
    for path in listing.files:
        stat = path.stat()
        # Size and time stand for the contents: to hash those would be to read the whole corpus at every start.
        parts.append(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}")
    name = "".join(c if c.isalnum() else "-" for c in source.root.name)[:40]
    digest = sha256("\n".join(parts).encode()).hexdigest()[:20]
    return f"{name}-{digest}"


def _make(source: Source, listing: DocumentFiles, encoder: Encoder, folder: Path, say: Say) -> None:
    """Writes the folder beside its place, then renames it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place: a rename is atomic only within a file system.
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise InputError(f"cannot write tokens below {str(folder.parent)!r}: {error.strerror}") from error
    try:
        with ExitStack() as files:
            _write(source, listing, encoder, partial, say, files)
        if not (folder / RECORD).is_file():  # another process may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    except OSError as error:
        if not (folder / RECORD).is_file():
            raise InputError(f"cannot write tokens below {str(folder.parent)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(source: Source, listing: DocumentFiles, encoder: Encoder, folder: Path, say: Say, files: ExitStack) -> None:
    tokens = files.enter_context(Writer(folder / TOKENS, dtype_for(encoder.vocab_size)))
    learn: Writer | None = None
    sides: list[bool] = []
    digest = length = read = 0
    total, began, last_s = sum(path.stat().st_size for path in listing.files), monotonic(), monotonic()

    def watched() -> Iterator[Document]:
        nonlocal read, last_s
        for document in documents(listing, column=source.column):
            read += len(document.text) + sum(len(str(m.get("content", ""))) for m in document.messages)
            if (now := monotonic()) - began > PATIENCE_S and now - last_s > PATIENCE_S:
                last_s = now
                say(f"reading {source.root}: {read / 2**20:,.0f} of about {total / 2**20:,.0f} MiB")
            yield document

    for encoded in encoder.encode(watched()):
        if encoded.learn is not None and learn is None:
            learn = files.enter_context(Writer(folder / LEARN, np.dtype(np.uint8)))
            # Masks begin with the first document that has one; all ids before it are learnt, so their ones are written
            # now.
            learn.lengths = list(tokens.lengths)
            learn.out.write(b"\1" * (sum(tokens.lengths) + tokens.length))
            learn.length = tokens.length
        tokens.add(encoded.ids)
        if learn is not None:
            learn.add(_mask(encoded))
        # Over the ids of the document alone: it lies on the same side in whatever order or file it comes.
        digest, length = crc32(encoded.ids.tobytes(), digest), length + len(encoded.ids)
        if encoded.ends:
            # As `Writer.end`, which drops an empty document: sides and index must have the same rows.
            if length:
                sides.append(digest % HELD_OUT == 0)
            for writer in (tokens, learn):
                if writer is not None:
                    writer.end()
            digest = length = 0
    if not sides:
        raise InputError(f"{source.root}: no text in it; all its {len(listing.files)} files are empty")
    for writer in (tokens, learn):
        if writer is not None:
            writer.finish()
    np.save(folder / SIDES, np.asarray(sides, np.bool_))
    record = {
        "format": FORMAT,
        "source": str(source.root.resolve()),
        "tokenizer": encoder.name,
        "vocab_size": encoder.vocab_size,
        "documents": len(sides),
        "tokens": sum(tokens.lengths),
        "learn": learn is not None,
        "notes": [*listing.notes, *encoder.notes],
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1))


def _mask(encoded: Encoded) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ones(len(encoded.ids), np.uint8) if encoded.learn is None else encoded.learn.astype(np.uint8)
