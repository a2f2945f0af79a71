"""Options of inference engines as their own parsers know them: names, other names, what each takes; one file a program.

`known(program)` returns the list. A line is `--name,-x TYPE`: int, size (8k for 8000, 8K for 8192), size-auto (also
`auto` and -1), float, str, json, flag (also as `--no-name`), switch (not so), or choices joined by `|`. After it `+`
stands for several values, `*` for several or none, `?` for one or none. A release after the type is the last that is
known to have the option, which the list's own has not. Lists of vllm (its own parser's:
`benchmarks/serving/vllm_parser.py --write`) and sglang (read from the wheel) are whole; the others are partial and say
so. Leaves out what an option means to a prediction (`formats.engines`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from gnomon.errors import FormatError, InputError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of one release of a program."""

    release: str
    """As in `vllm 0.19.0`."""
    whole: bool
    """Whether there are no others."""
    flexible: bool
    """Whether names take `_` for `-`, `--name.key` is a key of the JSON that an option takes, and -O3 has its value
    behind it: as vLLM's parser has it."""
    takes: Mapping[str, str]
    """Name -> type, other names too."""
    names: Mapping[str, str]
    """Any name -> the one that it stands for."""
    removed: Mapping[str, str]
    """Name -> the last release that is known to have it, where this one has not."""

    def parted(self, word: str) -> tuple[str, str | None]:
        """A word's option and the value that stands in the same word; None where there is none."""
        if self.flexible and re.fullmatch(r"-O=?\w+", word):
            return "--optimization-level", word[2:].removeprefix("=")
        name, equals, value = word.partition("=")
        if self.flexible and name.startswith("--"):
            option, dot, key = name.partition(".")
            name = option.replace("_", "-") + dot + key
        return name, value if equals else None

    def resolved(self, word: str) -> str:
        """The option that a word stands for: its first name, or the only one that begins so, as argparse has it. A key
        after a dot stays."""
        if not self.whole:
            return word
        option, dot, key = self._keyed(word)
        if option in self.takes:
            return self.names[option] + dot + key
        if not option.startswith("--"):
            return word
        meanings = {first for name, first in self.names.items() if name.startswith(option) and name not in self.removed}
        if option.startswith("--no-"):
            off = {"--no-" + name[2:] for name, kind in self.takes.items() if kind == "flag" and name[:2] == "--"}
            if option in off:
                return word
            meanings |= {name for name in off if name.startswith(option)}
        return meanings.pop() + dot + key if len(meanings) == 1 else word

    def says(self, word: str) -> str | None:
        """What is wrong with an option's name; None if it is known, or could be."""
        option, _, _ = self._keyed(word)
        plain = "--" + option[5:] if option.startswith("--no-") and option not in self.takes else option
        if plain in self.removed:
            return f"{self.release} has no option {option} any more ({self.removed[plain]} had it)"
        if option in self.takes or not self.whole or self.takes.get(plain) == "flag":
            return None
        return f"{self.release} has no option {option[:60]}{nearest(option, self.takes)}"

    def check(self, word: str, value: str) -> None:
        """FormatError where a value is none that the option takes."""
        option, dot, _ = self._keyed(word)
        kind = "str" if dot else self.takes.get(option, "str").rstrip("?")
        several, kind = kind[-1] in "*+", kind.rstrip("*+")
        for one in value.split() if several else [value]:
            self._check(word, kind, one)

    def _check(self, word: str, kind: str, value: str) -> None:
        if kind in ("flag", "switch"):
            if value:
                raise FormatError(f"{word} takes no value, and is given {value[:40]!r}")
        elif kind in ("int", "float") and value:
            try:
                int(value) if kind == "int" else float(value)
            except ValueError:
                what = "whole number" if kind == "int" else "number"
                raise FormatError(f"{word} {value[:40]!r} is no {what}; {self.release} takes one") from None
        elif kind.startswith("size") and value:
            if not (kind == "size-auto" and value.lower() in AUTO):
                size_of(word, value)
        elif kind == "json":
            try:
                json.loads(value)
            except ValueError:
                raise FormatError(f"{word} {value[:40]!r} is no JSON, which {self.release} takes there") from None
        elif kind not in TYPES and value not in kind.split("|"):
            choices = kind.split("|")
            raise FormatError(
                f"{word} {value[:40]!r} is none of {', '.join(choices)}{nearest(value, choices)}, which {self.release} "
                f"takes"
            )

    def is_flag(self, word: str) -> bool:
        """Whether it takes no value."""
        return self.takes.get(word) in ("flag", "switch") or (word.startswith("--no-") and word not in self.takes)

    def has_value(self, word: str) -> bool:
        """Returns whether an option is known to take a value as its next word."""
        option, dot, _ = self._keyed(word)
        kind = self.takes.get(option)
        return self.whole and kind is not None and (bool(dot) or kind[-1] not in "*?") and not self.is_flag(word)

    def takes_several(self, word: str) -> bool:
        """Whether more than one value may stand after it."""
        return self.takes.get(word, "").endswith(("*", "+"))

    def _keyed(self, word: str) -> tuple[str, str, str]:
        """(option, dot, key) of `--option.key`; (word, '', '') of another."""
        return word.partition(".") if self.flexible and word.startswith("-") else (word, "", "")


TYPES = ("int", "size", "size-auto", "float", "str", "json", "flag", "switch")
"""What a line may have for a type; all else are choices, which may be one."""

AUTO = ("auto", "-1")
"""What vLLM takes for a length, for the longest that fits."""


def size_of(word: str, text: str) -> int:
    """A number that may end in k, m, g, t (thousands) or K, M, G, T (1024s), as vLLM and SGLang read it. FormatError
    for another text, also for a fraction of 1024s."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kKmMgGtT]?)\s*", text)
    if found is None:
        raise FormatError(f"{word} {text[:40]!r} is no number; write it as in 8192, 8k (8000) or 8K (8192)")
    number, suffix = found[1], found[2]
    power = "kmgt".find(suffix.lower()) + 1 if suffix else 0
    if "." in number and not suffix.islower():
        raise FormatError(f"{word} {text[:40]!r} is no whole number; only k, m, g and t take fractions")
    return int(float(number) * 1000**power) if suffix.islower() else int(number) * 1024**power


@cache
def options_of(program: str) -> EngineOptions:
    """The list of a program. InputError if there is none."""
    path = files("gnomon.software").joinpath("options", f"{program}.txt")
    if not path.is_file():
        raise InputError(f"no options of {program[:40]!r} are on record")
    head, whole, *rows = path.read_text(encoding="utf-8").splitlines()
    takes, names, gone = dict[str, str](), dict[str, str](), dict[str, str]()
    for row in rows:
        spelled, kind, *last = row.split(" ")
        first, *others = spelled.split(",")
        for name in (first, *others):
            takes[name], names[name] = kind, first
            if last:
                gone[name] = last[0]
    release = head.removeprefix("# ").partition(",")[0]
    extent, *how = whole.split(", ")
    return EngineOptions(
        release=release,
        whole=extent == "complete",
        flexible=how == ["flexible"],
        takes=takes,
        names=names,
        removed=gone,
    )
