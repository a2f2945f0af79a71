"""Strict access to a JSON object whose every key must be accounted for.

`read_json` parses text without surprises (duplicates, NaN, depth, size); `Keys` hands out values with their types
checked and, at the end, refuses keys that nobody asked for. Errors are InputError with the path to the value.
Leaves out: what keys mean (the reader of each format).
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import NoReturn, TypeVar

from gnomon.errors import InputError, nearest

MAX_CHARACTERS = 8 * 2**20
"""A configuration longer than this is a mistake or an attack; it is refused before parsing."""

T = TypeVar("T", int, float, str)


def read_json(text: str, source: str, *, infinite: bool = False) -> Mapping[str, object]:
    """The object that `text` holds. `source` names it in errors. infinite: take `Infinity`, which Python writes without
    being asked (time_step_limit of Mamba-2's configs); a number that `Keys` hands out is finite all the same.

    Raises InputError for over 8 Mi characters, bad syntax, NaN or infinity, a key given twice, or too much nesting.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{source} has {len(text)} characters; the limit is {MAX_CHARACTERS}", "$")

    def constant(name: str) -> float:
        if infinite and name == "Infinity":
            return math.inf
        raise InputError(f"{source} holds {name}; numbers must be finite", "$")

    def finite(digits: str) -> float:
        return float(digits) if math.isfinite(float(digits)) else constant(digits)

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        mapping = dict(items)
        if len(mapping) != len(items):
            names = [name for name, _ in items]
            twice = sorted({name for name in mapping if names.count(name) > 1})
            raise InputError(f"{source} gives {', '.join(map(repr, twice))} twice in one object", "$")
        return mapping

    try:
        value = json.loads(text, parse_constant=constant, parse_float=finite, object_pairs_hook=pairs)
    except RecursionError:
        raise InputError(f"{source} is nested too deeply", "$") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{source} is not JSON: {error.msg}", f"line {error.lineno}:{error.colno}") from None
    if not isinstance(value, dict):
        raise InputError(f"{source} holds a {type(value).__name__}; expected an object", "$")
    return value


_EXPONENT = re.compile(r"[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]{1,3}")
"""A number that is written with an exponent."""


class Keys:
    """A JSON object being read: remembers which keys were asked for."""

    def __init__(self, values: Mapping[str, object], source: str, at: str = "$") -> None:
        self._values = values
        self._source = source
        self._at = at
        self._keys_read: set[str] = set()
        self._inside: list[Keys] = []

    def fail(self, key: str, message: str) -> NoReturn:
        """Raise InputError about `key`."""
        raise InputError(f"{self._source}: {message}", f"{self._at}.{key}")

    @property
    def source(self) -> str:
        """What is read, as messages name it."""
        return self._source

    def inside(self, key: str) -> Keys:
        """The object under `key`, empty if absent or null; `finish` looks into it too."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            self.fail(key, f"expected an object, got {value!r}")
        keys = Keys(value or {}, self._source, f"{self._at}.{key}")
        self._inside.append(keys)
        return keys

    def has(self, key: str) -> bool:
        """Whether the key is given and not null; a null then counts as understood."""
        if (value := self._values.get(key)) is None:
            self._keys_read.add(key)
        return value is not None

    def is_given(self, key: str) -> bool:
        """Whether the key is given, be it null: null can mean something else than leaving it out."""
        return key in self._values

    def is_read(self, key: str) -> bool:
        """Whether the key counts as understood already."""
        return key in self._keys_read

    def raw(self, key: str) -> object:
        """The value as it is, None if absent; counts as understood."""
        self._keys_read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`; `default` if absent or null, an error without one."""
        value = self.raw(key)
        if value is None:
            value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(key, f"expected an integer of at least {least}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number of at least 0; `default` if absent or null, an error without one. `1e-4` is one, which YAML 1.1
        takes for text and programs read with float()."""
        value = self.raw(key)
        if value is None:
            value = self._default(key, default)
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
            self.fail(key, f"expected a number of at least 0, got {repr(value)[:40]}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Reads true or false; `default` if absent or null."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"expected true or false, got {value!r}")
        return value

    def choice(self, key: str, choices: Mapping[str, str], default: str | None = None) -> str:
        """One of the names in `choices`, mapped to our name; `default` if absent or null."""
        value = self.raw(key)
        if value is None:
            value = self._default(key, default)
        if not isinstance(value, str) or value not in choices:
            self.fail(key, f"{key} is {value!r}; understood are {', '.join(choices)}")
        return choices[value]

    def must_be(self, key: str, *allowed: object) -> None:
        """An error unless the key is absent, null or one of `allowed`: other values change the mathematics."""
        value = self.raw(key)
        # The types as well: in Python 0 equals False.
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            known = " or ".join(map(repr, allowed)) or "null"
            self.fail(key, f"{key}={value!r} changes the mathematics and is not supported; understood is {known}")

    def ignore(self, *keys: str) -> None:
        """Count these as understood: they change neither shapes nor work."""
        self._keys_read.update(keys)

    def finish(self, harmless: Collection[str]) -> None:
        """Raise InputError for the first key that was not asked for and is not in `harmless`."""
        for key in self._values:
            if key not in self._keys_read and key not in harmless:
                hint = nearest(key, self._keys_read)
                self.fail(key, f"unknown key {key!r}{hint}; it may change the mathematics, so it is not ignored")
        for part in self._inside:
            part.finish(harmless)

    def unread(self, harmless: Collection[str]) -> Iterator[tuple[str, object]]:
        """Keys, with the path from the top, that nobody asked for and that are not in `harmless`, and their values."""
        inner = self._at.removeprefix("$").removeprefix(".")
        for key, value in self._values.items():
            if key not in self._keys_read and key not in harmless:
                yield f"{inner}.{key}" if inner else key, value
        for part in self._inside:
            yield from part.unread(harmless)

    def _default(self, key: str, default: T | None) -> T:
        if default is None:
            self.fail(key, f"missing key {key!r}")
        return default
