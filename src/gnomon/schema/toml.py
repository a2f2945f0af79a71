"""TOML text to plain values and back: the text half of `gnomon.schema`.

`parse_toml` returns dict, list, str, int, float, bool (and dates, which no annotation accepts); `emit_toml` writes such
values in the layout that people edit: top-level tables as sections, small rows on one line. Limits are checked before
the parser runs, so that no text makes it recurse or crawl. Left out: comments, and the layout a file had.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gnomon.errors import FormatError, InputError
from gnomon.late import load_late

MAX_TEXT_BYTES = 8_000_000
"""Largest file that is read."""

MAX_DEPTH = 32
"""Deepest nesting of tables and arrays that is read or written."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_LINE_WIDTH = 110


# Strings and comments are skipped whole. A string that is not closed is skipped to its end too (the parser refuses it
# there): trying again from its next quote would make this quadratic.
_TOKEN = re.compile(
    r'"""[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+(?:"{3,5})?'
    r"|'''[^']*+(?:'(?!'')[^']*+)*+(?:'{3,5})?"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+"
    r"|(?P<mark>[][{}.=,\n])",
    re.DOTALL,
)


def parse_toml(raw: str | bytes, source: str) -> dict[str, object]:
    """Plain values of TOML text (bytes: UTF-8). FormatError or InputError with `source:line:column`."""
    text = _decoded(raw, source)
    _guard(text, source)
    tomllib: Any = load_late("tomllib")  # not at the top: the package's own files are kept as JSON
    try:
        values: dict[str, object] = tomllib.loads(text + "\n")  # the newline gives errors at the end a line number
        return values
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        where = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        path = f"{source}:{where[1]}:{where[2]}" if where else source
        message = message[: where.start()] if where else message
        if "Cannot overwrite" in message or "Cannot declare" in message or "Duplicate" in message:
            line = text.split("\n")[int(where[1]) - 1] if where else ""
            message = f"Duplicate key {line.partition('=')[0].strip()[:64]!r}"
        else:
            last = where is None or int(where[1]) >= text.rstrip("\n").count("\n") + 1
            message = f"Not TOML: {message}{'; the file may have been cut off' if last and text.strip() else ''}"
        raise FormatError(message, path) from error
    except ValueError as error:  # an integer of thousands of digits
        raise FormatError(f"Not readable as TOML: {error}", source) from error


def _guard(text: str, source: str) -> None:
    """Refuse what would make the parser recurse or go quadratic: deep brackets and dotted keys of many parts."""
    depth = dots = 0
    for match in _TOKEN.finditer(text):
        mark = match["mark"]
        if mark == ".":
            dots += 1
        elif mark is not None:
            dots = 0
            depth += (mark in "[{") - (mark in "]}")
        if depth > MAX_DEPTH or dots > MAX_DEPTH:
            line = text.count("\n", 0, match.start()) + 1
            raise InputError(f"Nested deeper than {MAX_DEPTH} levels", f"{source}:{line}")


def _decoded(text: str | bytes, source: str) -> str:
    if len(text) > MAX_TEXT_BYTES:
        raise InputError(f"{source} is over the limit of {MAX_TEXT_BYTES // 10**6} MB; split it or write less into it")
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")  # some editors begin a file with a mark of the encoding
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise FormatError(
            f"Not UTF-8: byte 0x{text[error.start]:02x}; save it as text in UTF-8", f"{source}:{line}"
        ) from error


def check_depth(root: object, path: str) -> None:
    """Raises an error for a value nested deeper than `MAX_DEPTH`. Walks without recursion, so that any depth gets
    it."""
    level: list[object] = [root]
    for _ in range(MAX_DEPTH + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise InputError(f"Nested deeper than {MAX_DEPTH} levels", path)


def _children(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def emit_toml(mapping: Mapping[str, object]) -> str:
    """TOML text of plain values, no None among them; `parse_toml(emit_toml(m)) == m`."""
    lines: list[str] = []
    _emit_table(lines, (), mapping)
    return "\n".join(lines).strip("\n") + "\n"


def _emit_table(lines: list[str], keys: tuple[str, ...], table: Mapping[str, object]) -> None:
    """Append `table` (its header is already there): plain entries first, then sub-tables under headers of their own."""
    later: list[tuple[str, object]] = []
    for key, value in table.items():
        if _wants_header(key, value, top=not keys):
            later.append((key, value))
        else:
            lines.append(_entry(key, value))
    for key, value in later:
        inner = (*keys, key)
        name = ".".join(_key_text(k) for k in inner)
        rows: list[Any] = value if isinstance(value, list) else [value]
        for row in rows:
            lines.extend(["", f"[[{name}]]" if isinstance(value, list) else f"[{name}]"])
            _emit_table(lines, inner, row)


def _wants_header(key: str, value: object, top: bool) -> bool:
    """Top-level tables are sections; deeper ones, and rows of an array, stay on one line while they fit."""
    if isinstance(value, dict):
        return bool(value) and (top or len(_entry(key, value)) > _LINE_WIDTH)
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return any(len(inline(row)) > _LINE_WIDTH for row in value)
    return False


def _entry(key: str, value: object) -> str:
    line = f"{_key_text(key)} = {inline(value)}"
    rows = isinstance(value, list) and any(isinstance(row, dict) for row in value)
    if not isinstance(value, list) or not value or (len(line) <= _LINE_WIDTH and not rows):
        return line
    return f"{_key_text(key)} = [\n{_wrapped([inline(row) for row in value], one_per_line=rows)}\n]"


def _wrapped(items: list[str], one_per_line: bool) -> str:
    lines, width = [""], 0
    for item in items:
        if lines[-1] and (one_per_line or width + len(item) + 2 > _LINE_WIDTH):
            lines.append("")
            width = 0
        lines[-1] += f" {item}," if lines[-1] else f"    {item},"
        width = len(lines[-1])
    return "\n".join(lines)


def inline(value: object) -> str:
    """A plain value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key_text(key)} = {inline(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _key_text(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else quote(key)


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def quote(text: str) -> str:
    """A TOML string (and as good as JSON's for messages)."""
    return '"' + re.sub(r'[\\"\x00-\x1f\x7f]', lambda m: _ESCAPES.get(m[0], f"\\u{ord(m[0]):04x}"), text) + '"'


def join(path: str, key: str) -> str:
    """The path of an entry: `$.stages` and `size` give `$.stages.size`."""
    return f"{path}.{key}" if _BARE_KEY.fullmatch(key) else f"{path}[{quote(key)}]"
