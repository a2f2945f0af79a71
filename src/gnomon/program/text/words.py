"""The words that a Program's text is made of, and `Line`, which reads them one by one and knows where it is.

Left out: which words a line may hold, which `header` and `rows` say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from gnomon.errors import FormatError, nearest
from gnomon.program.kinds import EFFECT_OPS

VERSION = 1
MAX_BYTES = 8_000_000
"""Longest text that is read unless the caller allows more; about a million rows."""
HEADER = "gnomon.program/"
WORD = r"[A-Za-z_][A-Za-z0-9_.\-]*"
"""Names of buffers, streams, communicators and pools."""
# No digit last: digits after a kind are the unit, as in `2F0`.
KIND = r"[A-Z](?:[A-Z0-9_]*[A-Z_])?"
NAME = r'[^\s"@:#!{}()/]'
"""One character of a price's name that needs no quotes."""
LARGEST = 2**31 - 1
_T = TypeVar("_T", bound=str)


def _row_pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?P<stage>\d*)(?P<kind>{KIND})(?P<unit>\d*)(?:>(?P<peer>\d+))?"
        rf'(?:/(?P<name>"(?:[^"\\]|\\.)*"|{name}+))?(?:@(?P<stream>{WORD}))?(?::(?P<comm>{WORD}))?'
        r"(?:#(?P<group>\d+))?(?P<inside>!)?(?:\{(?P<effects>[^{}]*)\})?",
        re.ASCII,
    )


ROW, MEMBER = _row_pattern(NAME), _row_pattern(NAME.replace("/", "/&"))
"""A row, and a row inside a composite, where `&` separates."""
# `#` right before a digit is a group's number (`#5`) and no comment.
COMMENT = re.compile(r"#(?=\s|$)")
PART = re.compile(rf"\s*({'|'.join(EFFECT_OPS)})\s+({WORD})([<>]?)\s*")
"""One effect of a kind."""
REF = re.compile(rf"\s*({'|'.join(EFFECT_OPS)})\s+({WORD})\s+(\d+)(?:\s+(\d+))?\s*", re.ASCII)
"""One effect of a row."""


def short(word: str) -> str:
    """A word for a message: quoted, and cut where it is long."""
    return repr(word if len(word) <= 40 else word[:37] + "...")


class Line:
    """One line being read, word by word; knows where it is."""

    def __init__(self, source: str, number: int, text: str) -> None:
        comment = COMMENT.search(text)
        self.text = text[: comment.start()] if comment else text
        self.source, self.number, self.at, self.start = source, number, 0, 0

    def fail(self, message: str, column: int | None = None) -> FormatError:
        """The error at a column (from 0), or at the word read last."""
        return FormatError(message, f"{self.source}:{self.number}:{(self.start if column is None else column) + 1}")

    def has_more(self) -> bool:
        """Whether another word follows; skips the blanks before it."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.at < len(self.text)

    def peek(self) -> str:
        """The next word, or ''."""
        match = re.compile(r"\S+").match(self.text, self.at) if self.has_more() else None
        self.start = self.at
        return match[0] if match else ""

    def word(self, expected: str) -> str:
        """Takes the next word of the line."""
        word = self.peek()
        if not word:
            raise self.fail(f"expected {expected}, but the line ends")
        self.at += len(word)
        return word

    def accept(self, text: str) -> bool:
        """Reads `text` if it is the next word."""
        if self.peek() != text:
            return False
        self.at += len(text)
        return True

    def expect(self, text: str) -> None:
        """Reads `text`, which must come next."""
        if not self.accept(text):
            raise self.fail(
                f"expected `{text}`, not {short(self.peek()) if self.has_more() else 'the end of the line'}"
            )

    def name(self, what: str) -> str:
        """Takes a name, which is an ASCII word."""
        word = self.word(f"a name of {what}")
        if not re.fullmatch(WORD, word):
            raise self.fail(f"expected a name of {what} (ASCII letters, digits and _ . -), not {short(word)}")
        return word

    def choice(self, options: Sequence[_T], what: str) -> _T:
        """Takes a word that is one of `options`."""
        word = self.word(f"{what}: one of {', '.join(options)}")
        for option in options:
            if option == word:
                return option
        raise self.fail(f"expected {what}: one of {', '.join(options)}, not {short(word)}{nearest(word[:40], options)}")

    def count(self, what: str, low: int, high: int = LARGEST) -> int:
        """An integer from low to high."""
        return self.integer(self.word(what), what, low, high, self.start)

    def integer(self, word: str, what: str, low: int, high: int, column: int) -> int:
        """The integer that a word at a column says."""
        if not re.fullmatch(r"-?(0|[1-9][0-9]*)", word):
            raise self.fail(f"expected {what}, an integer without leading zeros, not {short(word)}", column)
        # The length is looked at first, so that int() never reads a long word.
        if len(word) > 12 or not low <= int(word) <= high:
            raise self.fail(f"{what} {short(word)[1:-1]} is not in {low} to {high}", column)
        return int(word)

    def end(self) -> None:
        """Checks that nothing follows."""
        if self.has_more():
            raise self.fail(f"expected the end of the line, not {short(self.peek())}")


def known_name(line: Line, what: str, name: str, known: Sequence[str], column: int) -> None:
    """Refuses a name that is not declared, with the nearest that are."""
    if name not in known:
        raise line.fail(
            f"unknown {what} {short(name)}{nearest(name[:40], known)}; declare it before the first class", column
        )
