"""Text tables: columns of fixed meaning, numbers to the right, no line wider than asked.

`table` returns lines, `wrapped` a paragraph; `number`, `percent` and `gib` write quantities with the digits that they
deserve. Lines are WIDTH columns unless `as_wide_as` says otherwise. Leaves out colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

WIDTH = 80
"""Columns of a terminal that everything must be readable in."""
WIDEST = 120
"""Longer lines are not read more easily."""

_width: ContextVar[int] = ContextVar("width", default=WIDTH)


@contextmanager
def as_wide_as(columns: int) -> Iterator[None]:
    """Lines written meanwhile have so many columns, from WIDTH to WIDEST."""
    before = _width.set(min(max(columns, WIDTH), WIDEST))
    try:
        yield
    finally:
        _width.reset(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table."""

    name: str
    """Heading, with the unit: `peak GiB`."""
    align: Literal["left", "right"] = "right"
    """Numbers go right, words left."""


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int | None = None, gap: int = 2
) -> tuple[str, ...]:
    """Lines of a table: a heading and one line a row, `gap` blanks between columns.

    width: in columns; None is the usual. Lines over it are made to fit by shortening the widest left-aligned column
    (with `…`); numbers are never cut.
    """
    sizes = [max(len(column.name), *(len(row[i]) for row in rows), 0) for i, column in enumerate(columns)]
    words = [i for i, column in enumerate(columns) if column.align == "left"]
    excess = sum(sizes) + gap * (len(sizes) - 1) - (width or _width.get())
    if excess > 0 and words:
        widest = max(words, key=lambda i: sizes[i])
        # One column gives way, and not below 8 letters: a table of many numbers stays too wide rather than cut.
        sizes[widest] = max(8, sizes[widest] - excess)
    return tuple(_line(columns, cells, sizes, gap) for cells in ([column.name for column in columns], *rows))


def table_of_plans(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A table whose first column is not cut: words of it that do not fit follow under their line."""
    # What all other columns take: with empty cells the first is as wide as its heading.
    rest = max(len(line) for line in table(columns, [("", *row[1:]) for row in rows])) - len(columns[0].name)
    room = max(_width.get() - rest, len(columns[0].name))
    names = [textwrap.wrap(row[0], room, break_on_hyphens=False) or [""] for row in rows]
    first, *lines = table(columns, [(name[0], *row[1:]) for name, row in zip(names, rows, strict=True)])
    below = [wrapped(row[0][len(name[0]) :].strip()) for name, row in zip(names, rows, strict=True)]
    return (first, *(line for top, below_line in zip(lines, below, strict=True) for line in (top, *below_line)))


def _line(columns: Sequence[Column], cells: Sequence[str], sizes: Sequence[int], gap: int) -> str:
    parts = []
    for column, cell, size in zip(columns, cells, sizes, strict=True):
        text = cell if len(cell) <= size else cell[: size - 1] + "…"
        parts.append(text.ljust(size) if column.align == "left" else text.rjust(size))
    return (" " * gap).join(parts).rstrip()


def wrapped(text: str, *, indent: str = "  ", bullet: str = "", width: int | None = None) -> tuple[str, ...]:
    """A paragraph as lines: the first begins with indent and bullet, the others stand under its text. A per cent sign
    stays with its number."""
    lines = textwrap.wrap(
        # textwrap breaks at blanks, and \0 is none; it becomes one again below.
        text.replace(" %", "\0%"),
        width=width or _width.get(),
        initial_indent=indent + bullet,
        subsequent_indent=indent + " " * len(bullet),
        break_on_hyphens=False,
    )
    return tuple(line.replace("\0", " ") for line in lines)


def signed(value: float) -> str:
    """Formats as `number` does, with its sign where it is more than 0."""
    return number(value) if value <= 0 else f"+{number(value)}"


def number(value: float, digits: int = 3) -> str:
    """`digits` significant ones, without exponent between 1e-4 and 1e9, thousands set apart."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits}g}"
    # The exponent of the value once rounded: 9.996 is 1.00e+01, so "10.0".
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as per cent, without the sign; `-` where there is none."""
    return "-" if value is None else f"{value * 100:.{digits}f}"


def gib(size: float) -> str:
    """Bytes in GiB, with one decimal."""
    return f"{size / 2**30:.1f}"


def dollars(value: float) -> str:
    """An amount of money, as in `$0.0269` or `$1,234`: three significant digits, whole dollars from 100 on."""
    return f"${value:,.0f}" if value >= 100 else f"${number(value, 3)}"


def memory_unit(size: float) -> tuple[str, int]:
    """(unit, bytes) in which a size reads well: a model for a laptop would be all zeros in GiB."""
    return ("GiB", 2**30) if size >= 2**30 else ("MiB", 2**20)


def ranges(values: Sequence[int]) -> str:
    """Whole numbers as ranges, `0-3,8`; after three of them `…`."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    texts = [f"{a}-{b}" if b > a else f"{a}" for a, b in parts[:3]]
    return ",".join(texts) + (",…" if len(parts) > 3 else "")
