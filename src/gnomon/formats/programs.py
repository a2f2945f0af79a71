"""Programs whose job files can be read or written: the folders beside this file, each with a `Format` named `FORMAT`.

The folders that declare one are the registry: `names` lists them, `find` loads one by name, `recognised` says whose
file a path is, and `written` lists the programs that a plan can be exported to. Leaves out models' own configs
(`huggingface`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from gnomon.errors import GnomonError, InputError, nearest
from gnomon.formats.format import Format as Format
from gnomon.formats.format import Sample as Sample
from gnomon.formats.job import read_source
from gnomon.formats.yaml_file import read_yaml, refuse_template
from gnomon.late import load_late
from gnomon.schema.toml import parse_toml

_DECLARES = re.compile(r"^FORMAT\b.*=", re.MULTILINE)
"""What the folder of a program says at its top; other folders hold models' configs, engines' options, recordings."""


def names() -> tuple[str, ...]:
    """Names of all programs, by the alphabet, nothing loaded."""
    folders = Path(__file__).parent.glob("*/__init__.py")
    # The text is searched, since importing every format to list names would load all of them.
    programs = (path.parent.name for path in folders if _DECLARES.search(path.read_text(encoding="utf-8")))
    return tuple(sorted(name.replace("_", "-") for name in programs))


def writable_programs() -> tuple[str, ...]:
    """Names of the programs whose files can be written."""
    return tuple(name for name in names() if find(name).write is not None)


def exported_to() -> tuple[str, ...]:
    """Names of the programs that `gnomon export` writes for."""
    return tuple(name for name in names() if find(name).write is not None or find(name).finetune_draft is not None)


def stacks() -> tuple[str, ...]:
    """Records of the programs that plans are exported to."""
    return tuple(program.stack for program in map(find, names()) if program.write is not None and program.stack)


def of_stack(stack: str) -> Format | None:
    """The format that plans for a stack are exported to; None where there is none."""
    formats = (find(name) for name in names())
    return next((program for program in formats if program.write is not None and program.stack == stack), None)


def find(name: str) -> Format:
    """The format of a program. InputError with the nearest for a name that there is not."""
    if name not in names():
        raise InputError(f"unknown format {name[:40]!r}{nearest(name[:40], names())}; known: {', '.join(names())}")
    program: Format = load_late(f"gnomon.formats.{name.replace('-', '_')}:FORMAT")
    assert program.name == name, f"formats/{name} holds the format {program.name}"
    return program


def sample(path: Path) -> Sample:
    """A file as `Format.looks` sees it."""
    text, _ = read_source(path)
    return Sample(path=path, text=text, values=_values(text, path))


def _values(text: str, path: Path) -> Mapping[str, object]:
    """What a JSON, TOML or YAML file holds; empty for other files, and for one that is none."""
    kind = path.suffix.lower()
    try:
        if kind == ".json":
            value = json.loads(text)
            return value if isinstance(value, dict) else {}
        if kind == ".toml":
            return parse_toml(text, str(path))
        if kind in (".yaml", ".yml"):
            return read_yaml(text, str(path), [])
    except (ValueError, RecursionError, GnomonError):
        pass
    return {}


def broken(path: Path) -> str:
    """Why a JSON, TOML or YAML file holds no settings, by the first mistake in it; empty for one that does."""
    text, _ = read_source(path)
    kind = path.suffix.lower()
    try:
        if kind == ".json":
            json.loads(text)
        elif kind == ".toml":
            parse_toml(text, str(path))
        elif kind in (".yaml", ".yml"):
            read_yaml(text, str(path))
    except json.JSONDecodeError as error:
        try:
            refuse_template(text, str(path))
        except GnomonError as template:
            return str(template)
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    except GnomonError as error:
        return str(error)
    except (ValueError, RecursionError):
        return ""
    return ""


def recognised(path: Path) -> Format | None:
    """The format of a file by what is in it; None where it is none of them. InputError for a file that is of several,
    or cannot be read."""
    seen = sample(path)
    matching = [program for program in map(find, names()) if program.looks(seen)]
    if len(matching) > 1:
        spelled = " or ".join(program.name for program in matching)
        raise InputError(f"{path} may be a job file of {spelled}; say which: --from {matching[0].name} {path}")
    return matching[0] if matching else None
