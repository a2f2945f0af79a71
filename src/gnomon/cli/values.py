"""Values of options that are refused as soon as they are read: counts, rates, and files to be written.

Each function takes the text of an option and returns its value, or raises argparse.ArgumentTypeError, which ends the
command with status 2 before any work (`quantity` apart). Only the standard library and errors.
"""

from __future__ import annotations

import argparse
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gnomon.errors import InputError
from gnomon.late import load_late

T = TypeVar("T")

MOST_SEQUENCES = 10**6
"""Sequences of a step."""

MOST = 10**9
"""Largest count."""


Number = TypeVar("Number", int, float)


def _between(least: Number, most: Number, kind: Callable[[str], Number], called: str) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a {called}") from None
        if not least <= value <= most:
            shown = [f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (least, most)]
            raise argparse.ArgumentTypeError(f"{text[:40]} is not between {shown[0]} and {shown[1]}")
        return value

    return read


def at_most(limit: int, least: int = 1) -> Callable[[str], int]:
    """A reader of whole numbers from `least` to `limit`."""
    return _between(least, limit, int, "whole number")


def number_from(least: float, most: float = 1e12) -> Callable[[str], float]:
    """A reader of numbers from `least` to `most`."""
    return _between(float(least), float(most), float, "number")


count = at_most(MOST)
"""A whole number of at least 1."""


def tokens(text: str) -> int:
    """Tokens of a sequence, at least 1; `8k` is 8,192, as in the names of models."""
    number, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    try:
        return count(str(int(number) * factor))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number, as in 8192 or 8k") from None


def named_size(text: str) -> tuple[str, int]:
    """Reads a dim of a model and its size, as in `enc_seq=512`."""
    name, equals, size = text.partition("=")
    if not (equals and name.strip()):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not NAME=N, as in enc_seq=512")
    return name.strip(), tokens(size)


def some(text: str) -> str:
    """Text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def not_negative(text: str) -> float:
    """A number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is no number from 0")
    return value


def rate(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a finite number above 0")
    return value


def quantity(option: str, read: Callable[[str], T], text: str) -> T:
    """An option's value with a unit, read when it is needed (`parse_bytes`, `parse_seconds` …); InputError names the
    option."""
    try:
        return read(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def lengths(text: str) -> tuple[int, ...]:
    """Tokens of each sequence of a batch: `32k,4kx8,512x55` (tokens, and how many such), or a file of one a line."""
    path = Path(text)
    try:
        words = path.read_text().split() if path.is_file() else text.split(",")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text[:80]!r}: {reason(error)}") from None
    read_lengths: list[int] = []
    for word in words:
        size, times, many = word.strip().partition("x")
        read_lengths += [tokens(size)] * (count(many) if times else 1)
        if len(read_lengths) > MOST_SEQUENCES:
            raise argparse.ArgumentTypeError(f"more than {MOST_SEQUENCES:,} sequences; give those of one step")
    if not read_lengths:
        raise argparse.ArgumentTypeError("no lengths; write them as 32k,4kx8, or one a line in a file")
    return tuple(read_lengths)


def buckets(text: str) -> tuple[int, ...]:
    """Lengths that texts are padded to, rising: `64,128,512`."""
    sizes = tuple(tokens(word.strip()) for word in text.split(","))
    if list(sizes) != sorted(set(sizes)):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: lengths rise, each once, as in 64,128,512")
    return sizes


def new_file(text: str) -> str:
    """The path of a file that can be written. Nothing is left behind, and a file that is there stays as it is."""
    if problem := not_writable(Path(text)) if text else "the name is empty":
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {problem}; give another place")
    return text


def not_writable(path: Path) -> str:
    """Why a file cannot be written; empty if it can."""
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            return ""  # a pipe or a device: written as it is
        if not path.parent.exists():
            return f"there is no folder {str(path.parent)!r}"
        # A file is made beside it and taken away: whether the folder and its file system allow one is only known then.
        with load_late("tempfile:NamedTemporaryFile")(dir=path.parent, prefix=f".{path.name[:40]}."):
            return ""
    except (OSError, ValueError) as error:
        return reason(error)


def no_folder(path: Path) -> str:
    """Why files cannot be put in a folder, which need not exist yet; empty if they can."""
    try:
        # Ends at the latest at the root, or at the working folder.
        while not path.exists():
            path = path.parent
        if not path.is_dir():
            return f"{str(path)!r} is no folder"
        with load_late("tempfile:NamedTemporaryFile")(dir=path):
            return ""
    except (OSError, ValueError) as error:
        return reason(error)


def reason(error: Exception) -> str:
    """What an error of the system says, without its number and path."""
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
