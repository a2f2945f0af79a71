"""The text form of a Timeline: one fact a line, fields between tabs, in one fixed order.

`print_timeline` writes it and `parse_timeline` reads back exactly the same value; floats are written as Python's repr.
`to_mapping` gives the same content for JSON. The first line names the schema version. Sections follow in this order:
clock, makespan_s, period_s, repeats, assumes; the tables worker, stream, kind, path, buffer; `spans` with their number
and one `span` line each, `memory` likewise with its `resident` bytes. `-` is what is not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import FormatError, InputError, nearest
from gnomon.timeline.types import NONE, ROLES, Memory, Spans, Timeline, Worker

HEADER = "gnomon.timeline/1"

_SPAN = tuple(f.name for f in fields(Spans))
_CHANGE = ("worker", "buffer", "span", "time_s", "change_bytes")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_T = TypeVar("_T")


def print_timeline(timeline: Timeline) -> str:
    """Writes the text form; ends with a newline."""
    t = timeline
    lines = [HEADER, f"clock\t{t.clock}", f"makespan_s\t{float(t.makespan_s)!r}"]
    lines += [] if t.period_s is None else [f"period_s\t{float(t.period_s)!r}"]
    lines += ["repeats\tyes"] if t.repeats else []
    lines += [f"assumes\t{text}" for text in t.assumptions]
    lines += [f"worker\t{w.name}\t{w.count}" for w in t.workers]
    for what, names in (("stream", t.streams), ("kind", t.kinds), ("path", t.paths), ("buffer", t.buffers)):
        lines += [f"{what}\t{name}" for name in names]
    lines.append("\t".join(("spans", str(t.spans.size), *_SPAN)))
    lines += ["span\t" + "\t".join(row) for row in zip(*_span_columns(t), strict=True)]
    if t.memory is not None:
        lines.append("\t".join(("memory", str(len(t.memory.worker)), *_CHANGE)))
        columns = [[_number(v) for v in getattr(t.memory, name).tolist()] for name in _CHANGE]
        lines += ["change\t" + "\t".join(row) for row in zip(*columns, strict=True)]
        for (worker, buffer), amount in np.ndenumerate(t.memory.resident_bytes):
            lines += [f"resident\t{worker}\t{buffer}\t{float(amount)!r}"] if amount else []
    return "\n".join(lines) + "\n"


def _span_columns(timeline: Timeline) -> list[list[str]]:
    out = []
    for name in _SPAN:
        values = getattr(timeline.spans, name).tolist()
        if name in _NAMED:
            table = _NAMED[name](timeline)
            out.append([table[v] for v in values])
        else:
            out.append(["-" if v == NONE else _number(v) for v in values])
    return out


_NAMED: dict[str, Callable[[Timeline], tuple[str, ...]]] = {
    "stream": lambda t: t.streams,
    "kind": lambda t: t.kinds,
    "role": lambda t: ROLES,
}
"""Columns that are written by name; the others by number."""


def _number(value: float | int) -> str:
    return repr(value)


def to_mapping(timeline: Timeline) -> dict[str, Any]:
    """The content as plain dicts, lists, strings and numbers, for JSON; columns stay columns."""
    t, memory = timeline, timeline.memory
    out: dict[str, Any] = {
        "format": HEADER,
        "clock": t.clock,
        "makespan_s": t.makespan_s,
        "period_s": t.period_s,
        "repeats": t.repeats,
        "assumptions": list(t.assumptions),
        "workers": [{"name": w.name, "count": w.count} for w in t.workers],
        "streams": list(t.streams),
        "kinds": list(t.kinds),
        "roles": list(ROLES),
        "paths": list(t.paths),
        "buffers": list(t.buffers),
        "spans": {name: getattr(t.spans, name).tolist() for name in _SPAN},
        "memory": None,
    }
    if memory is not None:
        out["memory"] = {f.name: getattr(memory, f.name).tolist() for f in fields(memory)}
    return out


def parse_timeline(text: str, source: str = "timeline") -> Timeline:
    """The Timeline that `print_timeline` wrote. FormatError, with the line, for anything else.

    source: name of the file, for messages.
    """
    lines = _Lines(text, source)
    # The version is in the header, so a newer file is refused here and not at a field it lacks.
    if lines.rest[0] != HEADER:
        raise lines.error(f"expected {HEADER!r} in the first line, got {lines.rest[0][:40]!r}")
    lines.at = 1
    clock = lines.one("clock")
    makespan = lines.float_(lines.one("makespan_s"), "makespan_s")
    period = [lines.float_(f[0], "period_s") for f in lines.all("period_s", 1)]
    repeats = [f[0] for f in lines.all("repeats", 1)]
    assumptions = tuple(f[0] for f in lines.all("assumes", 1))
    workers = tuple(_checked(lines, _worker, f) for f in lines.all("worker", 2))
    streams, kinds, paths, buffers = (
        tuple(f[0] for f in lines.all(what, 1)) for what in ("stream", "kind", "path", "buffer")
    )
    if len(period) > 1 or repeats not in ([], ["yes"]):
        raise lines.error("period_s may be given once, and repeats only as `repeats\tyes`")
    tables = {"stream": streams, "kind": kinds, "role": ROLES}
    spans = _spans(lines, tables)
    memory = _memory(lines, (len(workers), len(buffers)))
    if lines.at < len(lines.rest):
        raise lines.error(f"unexpected {lines.rest[lines.at].split(chr(9))[0][:40]!r}; the order of lines is fixed")

    def whole(_: _Lines) -> Timeline:
        return Timeline(
            clock=cast(Literal["predicted", "measured"], clock),
            workers=workers,
            streams=streams,
            kinds=kinds,
            paths=paths,
            buffers=buffers,
            spans=spans(),
            makespan_s=makespan,
            period_s=period[0] if period else None,
            repeats=bool(repeats),
            memory=memory(),
            assumptions=assumptions,
        )

    return _checked(lines, whole, lines)


class _Lines:
    """The lines of a text, read from the first to the last."""

    def __init__(self, text: str, source: str) -> None:
        if not text:
            raise FormatError(
                "it is empty; `gnomon predict --timeline FILE` and `gnomon run --timeline FILE` write one", source
            )
        # A file that was cut at a line's end would otherwise read as a shorter timeline.
        if not text.endswith("\n"):
            raise FormatError("the text must end with a newline; it may have been cut off", source)
        self.rest = text[:-1].split("\n")
        self.source = source
        self.at = 0

    def error(self, message: str, line: int | None = None) -> FormatError:
        """A FormatError at the current line, or at the one given (from 0)."""
        return FormatError(message, f"{self.source}:{(self.at if line is None else line) + 1}")

    def all(self, what: str, count: int) -> Iterator[list[str]]:
        """Fields of all lines that now follow and start with `what`; each has `count` fields."""
        while self.at < len(self.rest):
            first, *cells = self.rest[self.at].split("\t")
            if first != what:
                return
            if len(cells) != count:
                raise self.error(f"`{what}` has {count} fields, got {len(cells)}")
            yield cells
            self.at += 1

    def one(self, what: str) -> str:
        """The field of the one line that must come now."""
        if self.at >= len(self.rest) or not self.rest[self.at].startswith(what + "\t"):
            raise self.error(f"expected a line `{what}`")
        cells = self.rest[self.at].split("\t")
        if len(cells) != 2:
            raise self.error(f"`{what}` has one field, got {len(cells) - 1}")
        self.at += 1
        return cells[1]

    def count(self, what: str, columns: Sequence[str]) -> int:
        """The number in a section's first line, which also names its columns."""
        cells = self.rest[self.at].split("\t")
        if tuple(cells[2:]) != tuple(columns):
            raise self.error(f"`{what}` must name its columns: {' '.join(columns)}")
        number = self.int_(cells[1], what)
        self.at += 1
        return number

    def int_(self, text: str, what: str, line: int | None = None) -> int:
        if not _INTEGER.fullmatch(text):
            raise self.error(f"{what} must be a whole number, got {text[:40]!r}", line)
        return int(text)

    def float_(self, text: str, what: str, line: int | None = None) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        # One spelling for each number: what is printed again is the same text.
        if not np.isfinite(value) or repr(value) != text:
            raise self.error(f"{what} must be a finite number as Python prints it, got {text[:40]!r}", line)
        return value


def _worker(cells: list[str]) -> Worker:
    if not _INTEGER.fullmatch(cells[1]):
        raise InputError(f"a worker's count must be a whole number, got {cells[1][:40]!r}")
    return Worker(name=cells[0], count=int(cells[1]))


def _checked(lines: _Lines, make: Callable[[Any], _T], value: object) -> _T:
    """Returns what `make` returns; its objections become FormatErrors."""
    try:
        return make(value)
    except FormatError:
        raise
    except InputError as error:
        raise lines.error(str(error)) from None


def _spans(lines: _Lines, tables: dict[str, tuple[str, ...]]) -> Callable[[], Spans]:
    if lines.at >= len(lines.rest) or not lines.rest[lines.at].startswith("spans\t"):
        raise lines.error("expected a line `spans`; the order of lines is fixed")
    count, begin = lines.count("spans", _SPAN), lines.at
    columns = _columns(lines, "span", count, _SPAN)
    values = {}
    for name, column in zip(_SPAN, columns, strict=True):
        if name in tables:
            values[name] = _by_name(lines, column, tables[name], name, begin)
        else:
            values[name] = _numbers(lines, column, name, begin)
    return lambda: Spans(**{name: _array(name, column) for name, column in values.items()})


def _memory(lines: _Lines, shape: tuple[int, int]) -> Callable[[], Memory | None]:
    if lines.at >= len(lines.rest) or not lines.rest[lines.at].startswith("memory\t"):
        return lambda: None
    count, begin = lines.count("memory", _CHANGE), lines.at
    columns = _columns(lines, "change", count, _CHANGE)
    values = {name: _numbers(lines, column, name, begin) for name, column in zip(_CHANGE, columns, strict=True)}
    resident = np.zeros(shape)
    for cells in lines.all("resident", 3):
        worker, buffer = (lines.int_(text, "resident") for text in cells[:2])
        if not (0 <= worker < shape[0] and 0 <= buffer < shape[1]) or resident[worker, buffer]:
            raise lines.error(f"resident bytes of worker {worker}, buffer {buffer}: not in the tables, or given twice")
        resident[worker, buffer] = lines.float_(cells[2], "resident")
    return lambda: Memory(resident_bytes=resident, **{name: _array(name, column) for name, column in values.items()})


def _columns(lines: _Lines, what: str, count: int, names: Sequence[str]) -> list[tuple[str, ...]]:
    rows = list(lines.all(what, len(names)))
    if len(rows) != count:
        raise lines.error(f"{count} lines `{what}` were announced, but there are {len(rows)}")
    return list(zip(*rows, strict=True)) if rows else [()] * len(names)


def _by_name(lines: _Lines, column: Sequence[str], table: tuple[str, ...], what: str, begin: int) -> list[int]:
    index = {name: i for i, name in enumerate(table)}
    out = []
    for i, name in enumerate(column):
        if name not in index:
            raise lines.error(f"unknown {what} {name[:40]!r}{nearest(name[:40], table)}", begin + i)
        out.append(index[name])
    return out


_FLOATS = frozenset({"start_s", "duration_s", "lag_s", "flops", "time_s", "change_bytes"})
_MAY_LACK = frozenset({"stage", "unit", "path", "nbytes", "flops", "cause"})


def _numbers(lines: _Lines, column: Sequence[str], name: str, begin: int) -> list[Any]:
    read = lines.float_ if name in _FLOATS else lines.int_
    # -1 in the file would be a number; a dash says that there is none.
    return [NONE if text == "-" and name in _MAY_LACK else read(text, name, begin + i) for i, text in enumerate(column)]


def _array(name: str, column: list[Any]) -> NDArray[Any]:
    if name in _FLOATS:
        return np.array(column, np.float64)
    # Bytes of a message pass 2^31; no timeline has as many spans.
    dtype = np.int64 if name == "nbytes" else np.int32
    if column and not -1 <= min(column) <= max(column) <= np.iinfo(dtype).max:
        raise InputError(f"{name} must be from 0 to {np.iinfo(dtype).max}, or - where there is none")
    return np.array(column, dtype)
