"""Reruns the commands that the documentation quotes with their output, and says where what they print now is other.

    PYTHONPATH=src python tests/quoted.py [page.md …]

A quote is the indented lines behind `    $ gnomon …`, up to the next command or text. Lines of `…` alone stand for what
is left out there: what is quoted between them must be printed in this order, each part as it is. Left out are quotes
without output, and commands that read a file which is not in the repository, or that write one: their pages make it by
steps (`tests/test_docs.py` walks the tutorials). `quotes(page)` and `differences(quote, printed)` are for the tests.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = re.compile(r"[\w./-]+\.(toml|ya?ml|json|sh|csv|py|npz)(:\w+)?|[A-Z]+|local:\d+|-o|--to")
"""A word of a command that is a file of the reader's, this machine, or something to write."""
LEFT_OUT = "…"


@dataclass(frozen=True, slots=True)
class Quote:
    """A command and what a page says that it prints."""

    page: str
    line: int
    """Of the page, from 1."""
    command: str
    """Without `gnomon`."""
    shown: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """Whether everything that it reads is in the repository."""
        words = shlex.split(self.command)
        return all(FILE.fullmatch(word) is None or (ROOT / word).is_file() for word in words)


def quotes(page: Path) -> Iterator[Quote]:
    """The page's commands that are followed by output."""
    lines = page.read_text(encoding="utf-8").split("\n")
    i = 0
    while i < len(lines):
        at, line = i, lines[i]
        i += 1
        if not line.startswith("    $ gnomon "):
            continue
        command = line.removeprefix("    $ gnomon ")
        while command.endswith("\\"):
            command, i = f"{command[:-1]}{lines[i].strip()}", i + 1
        shown: list[str] = []
        while i < len(lines) and (lines[i].startswith("    ") or not lines[i]) and not lines[i].startswith("    $ "):
            shown.append(lines[i][4:])
            i += 1
        while shown and not shown[-1]:
            shown.pop()
        if shown:
            yield Quote(page.name, at + 1, command, tuple(shown))


def differences(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The first line of each part that is not printed where it should be; none where all parts are."""
    parts: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    missing, begin = [], 0
    for part in (p for p in parts if any(p)):
        while part and not part[0]:
            part.pop(0)
        while part and not part[-1]:
            part.pop()
        at = next((i for i in range(begin, len(printed)) if [*printed[i : i + len(part)]] == part), None)
        if at is not None:
            begin = at + len(part)
            continue
        left = [line for line in part if line not in printed]
        missing.append(left[0] if left else f"{part[0]} (other lines stand between those of this part)")
    return missing


def printed_by(command: str) -> list[str]:
    """Lines of output, errors among them, of a command that is run in this process."""
    from gnomon.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(shlex.split(command))
    return [line.rstrip() for line in out.getvalue().split("\n")]


def run(names: Sequence[str]) -> int:
    """1 if a page says what is not printed."""
    os.chdir(ROOT)
    wrong = 0
    for page in PAGES:
        for quote in quotes(page) if not names or page.name in names else ():
            where = f"{quote.page}:{quote.line}"
            if not quote.runs:
                print(f"not run    {where}  gnomon {quote.command[:70]}")
                continue
            start = time.process_time()
            lines = differences(quote.shown, printed_by(quote.command))
            took = time.process_time() - start
            wrong += bool(lines)
            print(f"{'DIFFERENT' if lines else 'same     '}  {where}  {took:.1f} s  gnomon {quote.command[:70]}")
            for line in lines:
                print(f"    not printed: {line}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
