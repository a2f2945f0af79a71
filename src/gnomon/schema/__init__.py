"""The one strict reader and writer between files (TOML text, JSON-like mappings) and frozen dataclasses.

A dataclass's annotations are its schema: nested dataclasses, `tuple[X, ...]`, fixed tuples, `Mapping[str, X]`, unions,
`Literal`, `Enum`, bool, int, float, str, names that something knows (`Known`), and quantities (`gnomon.units.Bytes`: an
int in memory, `"80 GiB"` in a file).
A class that is a file of its own declares `SCHEMA: ClassVar[str] = "gnomon.plan/1"`; the header is written and checked.
Whatever does not fit is an `InputError` or `UnitError` with the path to the value: nothing is ignored, guessed or
coerced (except an integer where a number is wanted). `load(cls, dump(value)) == value` exactly; values equal to their
default are not written. Left out: comments, key order and layout of a file are not kept; old versions are not migrated.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from gnomon.errors import InputError
from gnomon.schema.codec import Known, check_header, read_table, write_table
from gnomon.schema.packaged import plain_values
from gnomon.schema.toml import MAX_DEPTH, MAX_TEXT_BYTES, check_depth, emit_toml, parse_toml

__all__ = [
    "MAX_DEPTH",
    "MAX_TEXT_BYTES",
    "Known",
    "check_types",
    "dump",
    "from_mapping",
    "header_of",
    "load",
    "load_file",
    "read_file",
    "save_file",
    "save_text",
    "to_mapping",
    "typed",
]

T = TypeVar("T")


def load(cls: type[T], text: str | bytes, *, source: str = "<text>") -> T:
    """A value of dataclass `cls` from TOML text.

    text: str, or bytes in UTF-8; at most MAX_TEXT_BYTES, checked before parsing.
    source: the file's name, for messages.
    Raises FormatError (not TOML: with `source:line:column`), InputError or UnitError (with the path to the value).
    """
    return _of_file(cls, parse_toml(text, source), source)


def load_packaged(cls: type[T], path: Path) -> T:
    """A value of `cls` from a data file of the package, as `load`; fast from the second time on (`schema.packaged`)."""
    return _of_file(cls, plain_values(path), path.name)


def _of_file(cls: type[T], mapping: Mapping[str, object], source: str) -> T:
    try:
        if getattr(cls, "SCHEMA", None) and "schema" not in mapping:
            missing = "Missing header" if mapping else "It is empty"
            raise InputError(f'{missing}; the first line must be `schema = "{_header(cls)}"`', "$")
        return from_mapping(cls, mapping)
    except InputError as error:
        message = str(error).removesuffix(f" - at `{error.path}`")
        raise type(error)(f"{source}: {message}", error.path) from error


def load_file(cls: type[T], path: str | Path) -> T:
    """`load` of a file. InputError if it cannot be read or is over MAX_TEXT_BYTES."""
    return load(cls, read_file(path), source=str(path))


def read_file(path: str | Path) -> bytes:
    """What a file holds, up to one byte over MAX_TEXT_BYTES. InputError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error


def header_of(text: bytes, *, source: str = "<text>") -> str:
    """The `schema` that a TOML file says it follows, as in `gnomon.plan/1`; empty if it says none. FormatError if it is
    not TOML."""
    header = parse_toml(text, source).get("schema", "")
    return header if isinstance(header, str) else ""


def save_file(value: object, path: str | Path) -> None:
    """Writes `dump(value)`. Errors as `dump` and `save_text`."""
    save_text(dump(value), path)


def save_text(text: str, path: str | Path) -> None:
    """Writes a file whole or not at all: beside its place first, then renamed. What is there and no file, as
    `/dev/stdout`, is written to, and so is what a link leads to. InputError if it cannot be written."""
    target = Path(path)
    try:
        target = target.resolve() if target.is_symlink() else target
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_text(text, encoding="utf-8")
            return
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            mode = stat.S_IMODE(target.stat().st_mode) if target.is_file() else None
            if mode is not None and not mode & 0o222:
                raise InputError(f"cannot write {str(path)!r}: it is read-only; give another name")
            partial.write_text(text, encoding="utf-8")
            if mode is not None:  # a script stays one that can be run
                partial.chmod(mode)
            partial.replace(target)
        except BaseException:  # ^C too leaves nothing behind
            if partial.is_file():
                partial.unlink()
            raise
    except (OSError, ValueError) as error:  # ValueError: no name, or a NUL in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"cannot write {str(path)!r}: {reason}") from error


def dump(value: object) -> str:
    """TOML text of a dataclass, `load(type(value), dump(value)) == value`. InputError if a field is not legal."""
    return emit_toml(to_mapping(value))


def from_mapping(cls: type[T], mapping: Mapping[str, object], path: str = "$") -> T:
    """A value of dataclass `cls` from a mapping of plain values, as `json.loads` gives it.

    path: where the mapping stands in its file. A `schema` entry is checked if `cls` declares SCHEMA, and need not be
    there. Raises InputError or UnitError with the path to the value.
    """
    check_depth(mapping, path)
    if isinstance(mapping, Mapping) and getattr(cls, "SCHEMA", None) and "schema" in mapping:
        check_header(_header(cls), mapping["schema"], f"{path}.schema")
        mapping = {key: value for key, value in mapping.items() if key != "schema"}
    value: T = read_table(cls, mapping, path)
    return value


def to_mapping(value: object) -> dict[str, object]:
    """Plain values (dict, list, str, int, float, bool) of a dataclass, header first if its class declares SCHEMA.

    Ready for `json.dumps`, and the inverse of `from_mapping`. InputError if a field holds no legal value.
    """
    header: dict[str, object] = {"schema": _header(type(value))} if getattr(type(value), "SCHEMA", None) else {}
    mapping = header | write_table(type(value), value, "$")
    check_depth(mapping, "$")
    return mapping


def check_types(value: object, name: str) -> None:
    """InputError unless each field of a dataclass, and of those in it, holds what its annotation says; the path begins
    with `name`, as in `plan.mesh.tp`."""
    write_table(type(value), value, name)


def typed(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """A `__post_init__` that expects fields of the annotated types: where it stumbles over another type, the error is
    an InputError that names the field. Costs nothing where types are right."""

    @wraps(check)
    def checked(self: Any) -> None:
        try:
            check(self)
        except (AttributeError, TypeError):
            check_types(self, type(self).__name__)
            raise

    return checked


def _header(cls: type) -> str:
    return str(cls.SCHEMA)  # type: ignore[attr-defined]
