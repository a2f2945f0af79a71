"""What is known about single published sources, as lines of data: `sources/<family>.toml`, and which hold for a row.

Each rule has `match` (columns -> pattern), `set` (what is known of the rows that match), `source` (where it was read)
and `date`. `first(row, name)` is what the first rule that sets `name` says of a row, in the order of the files;
`rules(name)` are all that set it. Columns are written as they are joined: `"model device"` is both with a blank
between, in lower case. `since` and `until` bound the release. Leaves out what a fact does to a run
(`evidence.published`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from evidence.published.row import Row
from gnomon.errors import FormatError

FOLDER = Path(__file__).parents[1] / "sources"
"""One file a family of published runs."""

LAST = "~"
"""After every release."""

SEPARATORS = r"([ |])"
"""Between the columns of a key, and so between their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fact about some rows of a source."""

    family: str
    """Name of the file: the rows that it is about."""
    match: Mapping[str, str]
    """Columns -> pattern that is found in their text."""
    set: Mapping[str, Any]
    """What is known of the rows that match."""
    source: str
    """Where it was read."""
    date: str
    """When, as YYYY-MM-DD."""
    since: str = ""
    """First release that it holds for."""
    until: str = LAST
    """Last one."""

    def holds(self, row: Row, release: str) -> bool:
        """Whether it is about a row, of a program of that release."""
        return self.since <= release <= self.until and all(
            re.search(pattern, text_of(row, key)) for key, pattern in self.match.items()
        )


def text_of(row: Row, key: str) -> str:
    """The values of the columns of a key, in lower case."""
    parts = re.split(SEPARATORS, key)
    values = (part if i % 2 else str(_value(row, part)) for i, part in enumerate(parts))
    return "".join(values).lower()


def _value(row: Row, column: str) -> object:
    value = getattr(row, column)
    return "" if value is None else value


@cache
def all_rules() -> tuple[Rule, ...]:
    """Of all files, by name and in their order. FormatError for one that is not as it must be."""
    return tuple(rule for path in sorted(FOLDER.glob("*.toml")) for rule in _read(path))


@cache
def rules(name: str) -> tuple[Rule, ...]:
    """Those that set `name`."""
    return tuple(rule for rule in all_rules() if name in rule.set)


def matching(row: Row, name: str, release: str = "") -> Iterator[Rule]:
    """Those that set `name` for a row."""
    return (rule for rule in rules(name) if rule.holds(row, release))


def first(row: Row, name: str, default: Any = None, *, release: str = "") -> Any:
    """What the first of them says, or `default`."""
    return next((rule.set[name] for rule in matching(row, name, release)), default)


def says(row: Row, name: str, *, release: str = "") -> bool:
    """Whether there is one."""
    return next(matching(row, name, release), None) is not None


def sources(name: str) -> str:
    """Where what sets `name` was read."""
    return "; ".join(dict.fromkeys(rule.source for rule in rules(name)))


def _read(path: Path) -> Iterator[Rule]:
    known = {field.name for field in fields(Rule)} - {"family"}
    columns = {field.name for field in fields(Row)}
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    if set(listed) != {"rules"}:
        raise FormatError(f"{path.name} holds {', '.join(sorted(listed))}; a file of sources holds [[rules]] alone")
    for number, given in enumerate(listed["rules"], 1):
        where = f"rule {number} of {path.name}"
        if unknown := set(given) - known:
            raise FormatError(f"{where} has {sorted(unknown)[0]!r}; a rule has {', '.join(sorted(known))}")
        if missing := {"match", "set", "source", "date"} - set(given):
            raise FormatError(f"{where} lacks {', '.join(sorted(missing))}")
        for key in given["match"]:
            if slips := set(re.split(SEPARATORS, key)[::2]) - columns:
                raise FormatError(f"{where} matches {sorted(slips)[0]!r}, which is no column")
        if not re.fullmatch(r"20\d\d-\d\d-\d\d", given["date"]):
            raise FormatError(f"{where} has date {given['date']!r}; write YYYY-MM-DD")
        yield Rule(family=path.stem, **given)
