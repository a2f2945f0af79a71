"""What goes to the terminal: text and JSON on standard output, progress on standard error.

Colour only where a person looks: a terminal, without NO_COLOR. Progress only for what takes over two seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from shlex import quote
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, Literal, TextIO

PATIENCE_S = 2.0
"""Nothing is said about work that takes less."""

_COLOURS = {"fits:": "32", "may not fit:": "33;1", "does not fit:": "31;1"}


def print_lines(lines: Iterable[str], out: TextIO | None = None) -> None:
    """Prints lines, with verdicts in colour on a terminal."""
    out = sys.stdout if out is None else out
    colour = coloured(out)
    for line in lines:
        print(_paint(line) if colour else line, file=out)


def print_json(value: Any) -> None:
    """Print JSON, keys in the order given, without NaN; letters escaped where the output is not in UTF-8."""
    escaped = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    print(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=escaped))


def next_steps(path: str, then: Literal["", "run", "export"] = "") -> tuple[str, ...]:
    """Lines that say where a plan file was written and which command comes next: explain, then run or export."""
    name = quote(path)
    next_commands = {"": "", "run": f", gnomon run {name}", "export": f", gnomon export {name} --to PROGRAM"}[then]
    return (f"written to {path}", f"next: gnomon explain {name}{next_commands}")


def coloured(out: TextIO) -> bool:
    """Whether colour is wanted: a terminal that can, and no NO_COLOR (https://no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def broken(message: str, out: TextIO) -> str:
    """The message with lines broken between words on a terminal; where programs read, a line stays one."""
    if not out.isatty():
        return message
    width = max(40, get_terminal_size().columns)
    lines = (fill(line, width, break_long_words=False, break_on_hyphens=False) for line in message.splitlines())
    return "\n".join(lines)


def _paint(line: str) -> str:
    for start, code in _COLOURS.items():
        if line.startswith(start):
            return f"\x1b[{code}m{start}\x1b[0m{line[len(start) :]}"
    return line


class Progress:
    """A count on standard error, from PATIENCE_S on; on a terminal in one line that is wiped at the end."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.terminal = sys.stderr.isatty()
        self.began = self.printed_at = time.monotonic()
        self.shown = False

    def show(self, done: int, suffix: str = "") -> None:
        """Say how many are done, and more; see `say`."""
        text = f"{self.what} {done:,} of {self.total:,}{suffix}"
        # Filled up, so that a shorter text wipes a longer one before it.
        self.say(f"{text:76}" if self.terminal else text)

    def say(self, text: str) -> None:
        """Say what is done; at most five times a second on a terminal, every ten seconds elsewhere."""
        now = time.monotonic()
        if now - self.began < PATIENCE_S or now - self.printed_at < (0.2 if self.terminal else 10.0):
            return
        self.printed_at, self.shown = now, True
        print(f"\r{text}" if self.terminal else text, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Wipes the line of progress."""
        if self.shown and self.terminal:
            print(f"\r{' ' * 76}\r", end="", file=sys.stderr, flush=True)


class Trying:
    """Progress over cases of which it is not known how many there are."""

    def __init__(self) -> None:
        self._progress = Progress("", 0)

    def __call__(self, label: str) -> None:
        """This case is tried."""
        self._progress.say(f"{f'trying {label}'[:60]:60}")

    def end(self) -> None:
        """Wipes the line of progress."""
        self._progress.end()


def say_unread(columns: Sequence[str]) -> None:
    """Columns of a table that were passed over, on standard error."""
    if columns:
        print(f"gnomon: not read: columns {', '.join(repr(column[:40]) for column in columns)}", file=sys.stderr)
