"""Words that files of trainers share: switches, and lists of names.

Leaves out what the switches mean (`trainers`, `trainer_optimizers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gnomon.formats.job import Fields


def flag(f: Fields, key: str, default: bool = False) -> bool:
    """A switch that files write as true, "true", "auto" or 1. InputError for a word that is neither on nor off."""
    value = f.raw(key)
    if value is None:
        return default
    if isinstance(value, str):
        if value.lower() not in (*ON, *OFF):
            f.fail(key, f"expected true or false, got {value!r}")
        return value.lower() in ON
    if not isinstance(value, bool) and value not in (0, 1):
        f.fail(key, f"expected true or false, got {value!r}")
    return bool(value)


ON = ("true", "auto", "1", "yes", "on", "full", "offload", "offload_disk", "unsloth", "legacy")
"""Words that switch something on, the last ones in a way of their own (axolotl)."""
OFF = ("false", "0", "no", "off", "none", "null", "")


def names_of(value: object) -> tuple[str, ...]:
    """A list of names, or names between commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(map(str, value)) if isinstance(value, Sequence) else ()


def switched(values: Mapping[str, object], key: str) -> bool:
    """Whether a field is switched on, of those that no reader accounts for."""
    return values.get(key) not in (None, False, "", 0, "false", "disabled", "auto")
