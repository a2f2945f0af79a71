"""Programs whose job files can be read, one a file of this folder: each holds its `Format` under the name `FORMAT`.

The folder is the registry: `names` lists it, `find` loads one by name, `recognised` says whose file a path is. A file
here is small: what it reads becomes arguments of a reader beside this folder, or fields of a `Job` through `trainers`.
Leaves out writing (`formats.export`), and models' own configs (`formats.hf`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name

from gnomon.errors import GnomonError, InputError, nearest
from gnomon.formats.job import read_source
from gnomon.formats.programs.format import Format as Format
from gnomon.formats.programs.format import Sample as Sample
from gnomon.formats.yaml_file import read_yaml
from gnomon.schema.toml import parse_toml

_BESIDE = ("__init__", "format", "trainers")
"""Files of the folder that are no programs."""


def names() -> tuple[str, ...]:
    """Names of all programs, by the alphabet, nothing loaded."""
    found = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return tuple(sorted(name.replace("_", "-") for name in found if name not in _BESIDE))


def find(name: str) -> Format:
    """The format of a program. InputError with the nearest for a name that there is not."""
    if name not in names():
        raise InputError(f"unknown format {name[:40]!r}{nearest(name[:40], names())}; known: {', '.join(names())}")
    found: Format = resolve_name(f"gnomon.formats.programs.{name.replace('-', '_')}:FORMAT")
    assert found.name == name, f"programs/{name}.py holds the format {found.name}"
    return found


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
            return read_yaml(text, str(path))
    except (ValueError, RecursionError, GnomonError):
        pass
    return {}


def recognised(path: Path) -> Format | None:
    """The format of a file by what is in it; None where it is none of them. InputError for a file that is of several,
    or cannot be read."""
    seen = sample(path)
    found = [each for each in map(find, names()) if each.looks(seen)]
    if len(found) > 1:
        spelled = " or ".join(each.name for each in found)
        raise InputError(f"{path} may be a job file of {spelled}; say which: --from {found[0].name} {path}")
    return found[0] if found else None
