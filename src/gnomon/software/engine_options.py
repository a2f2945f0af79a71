"""Options of inference engines as their own parsers know them: names, other names, what each takes; one file a program.

`known(program)` returns the list. A line is `--name,-x TYPE`: int, float, str, flag, or choices joined by `|`; `*` for
several. Lists of vllm and sglang are whole, read from their wheels; the others are partial and say so. Leaves out what
an option means to a prediction (`formats.engines`).
"""

from __future__ import annotations

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
    takes: Mapping[str, str]
    """Name -> type, other names too."""
    names: Mapping[str, str]
    """Any name -> the one that it stands for."""

    def resolved(self, word: str) -> str:
        """The option that a word stands for: itself, or the only one that begins so, as argparse has it."""
        if word in self.takes or not self.whole or not word.startswith("--"):
            return word
        meant = {first for name, first in self.names.items() if name.startswith(word)}
        return meant.pop() if len(meant) == 1 else word

    def says(self, word: str) -> str | None:
        """What is wrong with an option's name; None if it is known, or could be."""
        if word in self.takes or not self.whole:
            return None
        if word.startswith("--no-") and self.takes.get("--" + word[5:]) == "flag":
            return None
        return f"{self.release} has no option {word[:60]}{nearest(word, self.takes)}"

    def check(self, word: str, given: str) -> None:
        """FormatError where a value is none that the option takes."""
        kind = self.takes.get(word, "str").rstrip("*?")
        if kind in ("int", "float") and given:
            try:
                int(given.rstrip("kKmMgG").replace(".", "")) if kind == "int" else float(given)
            except ValueError:
                raise FormatError(f"{word} {given[:40]!r} is no number; {self.release} takes one") from None
        elif "|" in kind and given not in kind.split("|"):
            choices = kind.split("|")
            raise FormatError(f"{word} {given[:40]!r} is none of {', '.join(choices)}{nearest(given, choices)}")

    def is_flag(self, word: str) -> bool:
        """Whether it takes no value."""
        return self.takes.get(word) == "flag" or (word.startswith("--no-") and word not in self.takes)


@cache
def known(program: str) -> EngineOptions:
    """The list of a program. InputError if there is none."""
    path = files("gnomon.software").joinpath("options", f"{program}.txt")
    if not path.is_file():
        raise InputError(f"no options of {program[:40]!r} are on record")
    head, whole, *rows = path.read_text(encoding="utf-8").splitlines()
    takes, names = dict[str, str](), dict[str, str]()
    for row in rows:
        spelled, kind = row.split(" ", 1)
        first, *others = spelled.split(",")
        for name in (first, *others):
            takes[name], names[name] = kind, first
    release = head.removeprefix("# ").partition(",")[0]
    return EngineOptions(release=release, whole=whole == "complete", takes=takes, names=names)
