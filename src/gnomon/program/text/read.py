"""`parse_program(text)`: the Program that a text describes, or a FormatError with line and column.

Goes through the lines: version, header, classes with their rows.
"""

from __future__ import annotations

import re

from gnomon.errors import FormatError, nearest
from gnomon.program.program import Program
from gnomon.program.text.header import Header
from gnomon.program.text.rows import ReadRows
from gnomon.program.text.words import HEADER, MAX_BYTES, VERSION, Line, short


def parse_program(text: str, source: str = "program", *, max_bytes: int = MAX_BYTES) -> Program:
    """The Program that a text describes.

    source: what to call the text in errors (a file's name). max_bytes: longer texts are refused.
    Raises FormatError, with `source:line:column`, at the first thing that is not understood.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > max_bytes:
        raise FormatError(
            f"the text has {size:,} bytes, over the limit of {max_bytes:,}; allow more with max_bytes", f"{source}:1:1"
        )
    lines = [Line(source, i + 1, line) for i, line in enumerate(text.split("\n"))]
    used = [line for line in lines if line.has_more()]
    if not used:
        raise lines[0].fail(f"an empty text; expected `{HEADER}{VERSION}` in its first line")
    _check_version(used[0])
    header, body = Header(), None
    for line in used[1:]:
        word = line.peek()
        if body is None and word in Header.FORMS:
            header.read(line)
        elif word == "class":
            body = body or ReadRows(header.settled(line))
            body.open_class(line)
        elif body is None or word in Header.FORMS or re.fullmatch(r"[a-z]+", word):
            raise line.fail(_unexpected(word, body is not None))
        else:
            body.rows(line)
    body = body or ReadRows(header.settled(used[-1]))
    return body.program(source)


def _unexpected(word: str, in_class: bool) -> str:
    known = (*Header.FORMS, "class")
    if in_class:
        return f"{word!r} among rows; header lines come before the first class" if word in known else short(word)
    return f"expected one of {', '.join(known)} before any row, not {short(word)}{nearest(word[:40], known)}"


def _check_version(line: Line) -> None:
    word = line.word(f"`{HEADER}{VERSION}`")
    match = re.fullmatch(re.escape(HEADER) + r"(\d{1,9})", word)
    if not match:
        raise line.fail(f"expected the header `{HEADER}{VERSION}`, not {short(word)}")
    if int(match[1]) != VERSION:
        why = "it was written by a newer Gnomon" if int(match[1]) > VERSION else "there is no such version"
        raise line.fail(f"schema version {match[1]}, but this Gnomon reads version {VERSION}; {why}")
    line.end()
