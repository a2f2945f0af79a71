"""Changes of a plan in the terms of somebody's own file: the lines of YAML, TOML or JSON, or the flags, that make them.

`Terms` are a program's words for options of `search.fit.options`; an option without words is one that its files cannot
say, which is not proposed. Leaves out the words themselves (the folders of `formats`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from gnomon.plans import Plan, Workload
from gnomon.plans.check import batch
from gnomon.software import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A plan and what became of it."""

    before: Plan
    """The plan of the file."""
    after: Plan
    """The same with the changes of a rung."""
    workload: Workload
    """The batch of a step, before and after."""

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, after the change."""
        return batch(self.after, self.workload)[0]

    @property
    def micro(self) -> int:
        """Sequences of a microbatch on one data-parallel rank, after it."""
        return batch(self.after, self.workload)[1] // self.after.stage_mesh(0).data_ranks


class Gone(Enum):
    """The value of a setting that is taken out of a file, which its program's default then replaces."""

    REMOVED = "removed"


REMOVED = Gone.REMOVED
"""The only one."""

Setting: TypeAlias = tuple[str, object]
"""(key, value) as the program spells them; `REMOVED` for a key that is taken out."""
Words: TypeAlias = Callable[[Change], Sequence[Setting] | None]
"""What a change sets; None where the program cannot make this one. Empty: it needs no line beside those of others."""

Style = Literal["yaml", "toml", "json", "flags", "dashes", "hydra"]
"""How settings are written: `key: value`, `[table] key = value`, `"key": value`, `--key value`, `--key` for a switch,
`key=value`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One program's own words for changes of a job."""

    style: Style
    words: Mapping[str, Words]
    """Name of an option -> what sets it."""
    stack_changes: Mapping[str, Callable[[Stack], Stack]] = field(default_factory=dict)
    """Name of an option -> what its words change in the program besides, as Liger's switch does more than the loss."""
    plan_of: Callable[[Change], Plan] = lambda change: change.after
    """The plan that the words of a change make: what else they bring with them, or leave out."""
    in_part: frozenset[str] = frozenset()
    """Options that the program can take in part: a number of layers, a share."""

    def of(self, options: Sequence[str], change: Change) -> tuple[str, ...] | None:
        """Lines of these options together, each once; None where one of them cannot be said."""
        settings = self.settings(options, change)
        return None if settings is None else tuple(self._written(dict(settings)))

    def settings(self, options: Sequence[str], change: Change) -> tuple[Setting, ...] | None:
        """What these options set together, each key once; None where one of them cannot be said."""
        settings: dict[str, object] = {}
        for name in options:
            setting = self.words[name](change) if name in self.words else None
            if setting is None:
                return None
            settings |= dict(setting)
        return tuple(settings.items())

    def in_file(self, settings: Sequence[Setting]) -> tuple[Setting, ...]:
        """The same as a file has them: flags that take a word get `true` or `false`, JSON its values."""
        return tuple((key, self._value(value)) for key, value in settings)

    def _value(self, value: object) -> object:
        if self.style == "flags" and isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, Mapping):
            return json.dumps(value)  # on one line, as YAML and DeepSpeed's trainers take it
        return json.loads(value) if self.style == "json" and isinstance(value, str) and value[:1] == "{" else value

    def _written(self, settings: Mapping[str, object]) -> Iterator[str]:
        for key, value in settings.items():
            if isinstance(value, Mapping):
                value = _first(value)
            if not key:  # a sentence: what is done in code, or in another file
                yield str(value)
            elif value is REMOVED:
                yield f"without {'--' if self.style in ('flags', 'dashes') else ''}{key}"
            elif self.style == "toml":
                table, _, name = key.rpartition(".")
                yield f"[{table}] {name} = {_toml(value)}"
            elif self.style == "json":
                yield f'"{key}": {_json(value)}'
            elif self.style in ("flags", "dashes"):
                name = f"--{key}"
                if self.style == "dashes" and value is True:
                    yield name
                elif self.style == "dashes" and value is False:
                    yield f"without {name}"
                else:
                    yield f"{name} {shlex.quote(value) if isinstance(value, str) else value}"
            else:
                yield f"{key}{': ' if self.style == 'yaml' else '='}{_yaml(value)}"


def _first(table: Mapping[str, object]) -> str:
    """A table by its first key, which is what changes; the rest is in the file."""
    name, value = next(iter(table.items()))
    return f'{{"{name}": {json.dumps(value)}{", …" if len(table) > 1 else ""}}}'


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else _yaml(value)


def _json(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and not value.startswith("{") else _yaml(value)
