"""Documents of text, from what people keep text in: `documents(path)` streams them, with where each one stands.

Read are folders of text files, single ones, JSONL (plain or gzipped), Parquet, and folders that the package `datasets`
saved. A record has a text, a prompt and its completion, or the messages of a conversation. What is damaged is an
InputError that names the file and the line, or the row; nothing is skipped. Leaves out tokens (`megatron`, `encode`).
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gnomon.errors import InputError

SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".json", ".toml", ".html", ".tex")
"""What counts as text in a folder."""
JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PIECE_BYTES = 16 << 20
"""Text files are read in pieces of about so much, cut at the ends of lines, so that none must fit in memory."""
Kind = Literal["text", "jsonl", "parquet", "datasets"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document, or a piece of a long one."""

    where: str
    """`corpus.jsonl:17`, for messages."""
    text: bytes = b""
    """UTF-8, where it is checked (`encode`); of a file of bytes whatever is in it."""
    completion: bytes | None = None
    """What is to be learnt after `text`, of a record with a prompt; None where all of the text is."""
    messages: tuple[Message, ...] = ()
    """Of a conversation, in place of text."""
    ends: bool = True
    """Whether the document is complete."""
    line: int = 1
    """Line of the file at which this piece begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFiles:
    """Files that hold the documents."""

    kind: Kind
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    """Files that are there and not read."""


def find(root: Path) -> DocumentFiles:
    """What is to be read of a file or folder. InputError for nothing, or for what may not be read."""
    if not root.exists():
        raise InputError(f"{str(root)!r} does not exist; name a folder or file with text in it (--data)")
    if root.is_file():
        return DocumentFiles(kind=_kind(root) or "text", files=(root,))
    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        return _datasets(root)
    by_kind: dict[Kind, list[Path]] = {}
    for path in _walk(root):
        if own := _kind(path):
            by_kind.setdefault(own, []).append(path)
    order: tuple[Kind, ...] = ("parquet", "jsonl", "text")
    for kind in order:
        if files := by_kind.pop(kind, None):
            rest = [f"{len(paths):,} {other} files in {root} are not read beside the {kind} files" for other, paths
                    in by_kind.items()]  # fmt: skip
            return DocumentFiles(kind=kind, files=tuple(files), notes=tuple(rest))
    raise InputError(
        f"{root}: no text in it; files that count end in {', '.join(SUFFIXES)}, {', '.join(JSONL)} or .parquet"
    )


def _kind(path: Path) -> Literal["text", "jsonl", "parquet"] | None:
    if path.name.endswith(JSONL):
        return "jsonl"
    if path.suffix == ".parquet":
        return "parquet"
    return "text" if path.suffix in SUFFIXES else None


def _walk(root: Path) -> Iterator[Path]:
    """Files below a folder, by name. InputError for a folder that may not be read."""

    def refuse(error: OSError) -> None:
        raise unreadable(error)

    paths = []
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if name not in ("site-packages", "__pycache__")]
        paths += [Path(folder, name) for name in names]
    yield from sorted(path for path in paths if path.is_file())


def unreadable(error: OSError) -> InputError:
    """What to say of a file that the system does not give."""
    return InputError(f"cannot read {error.filename!r}: {error.strerror}; make it readable, or give another folder")


def _datasets(root: Path) -> DocumentFiles:
    """A folder of `Dataset.save_to_disk`, or the training split of one of `DatasetDict`."""
    notes: tuple[str, ...] = ()
    if (root / "dataset_dict.json").is_file():
        splits = _json(root / "dataset_dict.json").get("splits") or []
        if not splits or not all(isinstance(name, str) and Path(name).name == name for name in splits):
            raise InputError(f"{root / 'dataset_dict.json'} names no splits")
        split = "train" if "train" in splits else splits[0]
        rest = [name for name in splits if name != split]
        notes = (f"split {split!r} of {root} is read, not {', '.join(rest)}",) if rest else ()
        root = root / split
    entries = _json(root / "state.json").get("_data_files") or []
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    files = [root / name for name in names if isinstance(name, str) and Path(name).name == name]
    if not files or len(files) != len(names):
        raise InputError(f"{root / 'state.json'} names no data files; save the set again with `save_to_disk`")
    return DocumentFiles(kind="datasets", files=tuple(files), notes=notes)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise unreadable(error) from error
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: no object in it")
    return value


def documents(listing: DocumentFiles, *, column: str = "") -> Iterator[Document]:
    """Every document, in the order of the files' names. column: the one with the text; empty for `text`, `messages`,
    or `prompt` and `completion`, whichever the first record has."""
    for path in listing.files:
        try:
            match listing.kind:
                case "text":
                    yield from _text(path)
                case "jsonl":
                    yield from (_record(row, f"{path}:{line}", column) for line, row in _lines(path))
                case kind:
                    rows = _parquet(path, column) if kind == "parquet" else _arrow(path, column)
                    yield from (_record(row, f"{path} row {number}", column) for number, row in enumerate(rows))
        except OSError as error:
            if error.filename is None:
                raise InputError(f"{path} is damaged: {error}") from error
            raise unreadable(error) from error
        except EOFError as error:  # of gzip
            raise InputError(f"{path} is damaged: it ends too early") from error
        except zlib.error as error:
            raise InputError(f"{path} is damaged: {error}") from error


def _text(path: Path) -> Iterator[Document]:
    line = 1
    with path.open("rb") as file:
        block = file.read(PIECE_BYTES)
        while block:
            # Up to the end of the line that the piece cuts; a shorter piece is the last one.
            block += file.readline() if len(block) == PIECE_BYTES else b""
            after = file.read(PIECE_BYTES)
            # Read ahead by a piece, so that the last one says that the document ends. Byte 0 is the end of a text in
            # the vocabulary of bytes.
            yield Document(where=str(path), text=block.replace(b"\0", b""), ends=not after, line=line)
            line += block.count(b"\n")
            block = after


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise InputError(f"{path}:{number}: byte {error.object[error.start]:#04x} is no UTF-8") from error
            except (ValueError, RecursionError) as error:
                reason = str(error) or "nested too deeply"
                raise InputError(f"{path}:{number}: no JSON: {reason}") from error
            if not isinstance(row, dict):
                raise InputError(f"{path}:{number}: a record is an object with a text, not {type(row).__name__}")
            yield number, row


def _record(row: Mapping[str, Any], where: str, column: str) -> Document:
    """A record's text, or its conversation."""
    names = [column] if column else [name for name in ("messages", "text", "prompt") if name in row]
    if not names or names[0] not in row:
        expected = repr(column) if column else "'text', 'messages', or 'prompt' and 'completion'"
        raise InputError(f"{where}: no {expected} in it, but {', '.join(map(repr, row)) or 'nothing'}; see --column")
    value = row[names[0]]
    if isinstance(value, list):
        return Document(where=where, messages=tuple(_messages(value, where)))
    texts = [value, row.get("completion")] if names[0] == "prompt" else [value]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{where}: {names[0]!r} is {type(text).__name__}, and text is wanted")
    try:
        first, *rest = (text.encode() for text in texts)
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: {names[0]!r} has half of a surrogate pair, which is no text") from error
    return Document(where=where, text=first, completion=rest[0] if rest else None)


def _messages(value: Sequence[Any], where: str) -> Iterable[Message]:
    if not value:
        raise InputError(f"{where}: a conversation without messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{where}: message {number} has no role")
        yield message


def _columns(schema: Sequence[str], column: str, path: Path) -> list[str]:
    candidates = [column] if column else ["text", "messages", "prompt", "completion"]
    present = [name for name in candidates if name in schema]
    if not present:
        raise InputError(
            f"{path} has the columns {', '.join(schema)}, and none is {' or '.join(candidates)}; see --column"
        )
    return present


def _parquet(path: Path, column: str) -> Iterator[Mapping[str, Any]]:
    arrow, parquet = _pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024, columns=_columns(file.schema_arrow.names, column, path)):
                yield from batch.to_pylist()
    except arrow.ArrowException as error:
        raise InputError(f"{path} is damaged: {str(error)[:200]}") from error


def _arrow(path: Path, column: str) -> Iterator[Mapping[str, Any]]:
    arrow, _ = _pyarrow()
    try:
        with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as reader:
            names = _columns(reader.schema.names, column, path)
            for batch in reader:
                yield from batch.select(names).to_pylist()
    except arrow.ArrowException as error:
        raise InputError(f"{path} is damaged: {str(error)[:200]}") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("Parquet and `datasets` need pyarrow, which is not installed: pip install gnomon[parquet]") \
            from error  # fmt: skip
    return pyarrow, pyarrow.parquet
