"""YAML text to plain values, with limits: the part of PyYAML that is safe, and what it leaves open closed; and back.

`read_yaml(text, source)` returns the mapping that a file holds. Refused, with the line: duplicate keys, objects of
other languages, NaN and infinity, nesting over 64 levels, over 200,000 values counting what aliases repeat. PyYAML is
optional (`pip install gnomon[formats]`). `emit_yaml(values)` writes nested mappings of scalars. Leaves out: several
documents in one file, comments, merge keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from gnomon.errors import FormatError, GnomonError, InputError
from gnomon.units import MAX_INTEGER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_DEPTH = 64
"""Levels of nesting."""

MAX_VALUES = 200_000
"""Values in a file, each alias counted as what it repeats; a billion laughs has 10⁹."""

TAGS = frozenset("map seq str int float bool null timestamp merge value".split())
"""Types of plain YAML, after `tag:yaml.org,2002:`."""

INSTALL = (
    "reading YAML needs PyYAML, which is not installed; run `pip install 'gnomon[formats]'` or `pip install pyyaml`"
)


_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_WORDS = frozenset("y n yes no on off true false null".split())


def emit_yaml(values: Mapping[str, object], indent: str = "") -> str:
    """YAML text of nested mappings of text, numbers, booleans and None; `read_yaml(emit_yaml(v), …) == v`."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{_scalar(key)}:\n{emit_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{_scalar(key)}: {'{}' if isinstance(value, Mapping) else _scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    """Writes one value; text in quotes where YAML would take it for something else."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{"".join(plain)}"'
    text = json.dumps(value, allow_nan=False)
    # YAML 1.1 takes 1e-05 for text: a float needs its point.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text


def read_yaml(text: str, source: str, twice: list[str] | None = None) -> Mapping[str, object]:
    """The mapping in `text`. `source` names it in errors. twice: takes the keys that are given more than once, of which
    the last counts, as for programs that read by PyYAML; without it they are refused.

    Raises InputError without PyYAML or when the text is no mapping or over the limits, FormatError (with the line) for
    text that is not YAML.
    """
    try:
        import yaml
    except ImportError:
        raise InputError(INSTALL) from None
    try:
        return _read(yaml, text, source, twice)
    except GnomonError:
        refuse_template(text, source)
        raise


def _read(yaml: Any, text: str, source: str, twice: list[str] | None) -> Mapping[str, object]:
    """Reads YAML as `read_yaml` does, by PyYAML."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        events = yaml.parse(text, Loader=loader)
        _check_events(events, source)
        node = yaml.compose(text, Loader=loader)
        if node is None:
            raise InputError(f"{source} is empty; a job file is a mapping", "$")
        _check_size(node, source)
        value = _construct(node, source, "$", yaml.SafeLoader(""), twice)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise FormatError(f"not YAML: {error.problem or error.context}", place) from None
    except yaml.YAMLError as error:
        raise FormatError(f"not YAML: {str(error).splitlines()[0]}", source) from None
    if not isinstance(value, dict):
        raise InputError(f"{source} holds a {type(value).__name__}; a job file is a mapping", "$")
    return value


def refuse_template(text: str, source: str) -> None:
    """FormatError, with the line, for text that another program fills in before it is read: `{{ name }}`, `{% if %}`,
    of Jinja, Helm and the like. For text that cannot be read: a chat template in quotes is a value."""
    for at, line in enumerate(text.splitlines(), 1):
        hole = re.search(r"\{\{-?\s*([\w.]+[^{}]*?)-?\}\}|\{%-?\s*(\w+)[^{}]*%\}", line.partition(" #")[0])
        if hole is not None and not line.lstrip().startswith("#"):
            raise FormatError(
                f"a template: {hole[0]} is filled in before its program reads it; render it, or write the value there",
                f"{source}:{at}",
            )


def said_twice(twice: list[str]) -> list[str]:
    """A sentence on each key that was given more than once."""
    return [f"{key} is given more than once: the last one counts, as PyYAML reads it" for key in dict.fromkeys(twice)]


def _check_events(events: Iterator[Any], source: str) -> None:
    """Depth and number of values, before anything is built. The parser is iterative; building would recurse."""
    depth = count = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        count += kind in ("ScalarEvent", "AliasEvent")
        if depth > MAX_DEPTH or count > MAX_VALUES:
            what = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_VALUES} values"
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise InputError(f"{source} has over {what}; that is no job file", f"{source}:{line}")


def _check_size(root: Any, source: str) -> None:
    """Refuse what aliases make large or endless."""
    sizes: dict[Any, int] = {}
    """Of each node; an alias is the same node again."""

    def size(node: Any) -> int:
        if node in sizes:
            if sizes[node] < 0:
                raise InputError(f"{source} has an alias within what it repeats; write it out", "$")
            return sizes[node]
        # Being counted: met again, it is within itself.
        sizes[node] = -1
        if node.id == "mapping":
            total = 1 + sum(size(k) + size(v) for k, v in node.value)
        else:
            total = 1 + sum(map(size, node.value)) if node.id == "sequence" else 1
        if total > MAX_VALUES:
            raise InputError(f"{source} has over {MAX_VALUES} values once its aliases are written out", "$")
        sizes[node] = total
        return total

    size(root)


def _construct(node: Any, source: str, path: str, loader: Any, twice: list[str] | None) -> object:
    """The plain value of a node. twice: as of `read_yaml`."""

    def fail(message: str) -> NoReturn:
        raise InputError(f"{source}:{node.start_mark.line + 1}: {message}", path)

    if node.tag.removeprefix("tag:yaml.org,2002:") not in TAGS:
        fail(f"a value of type {node.tag!r}, which is not read; write a plain value")
    if node.id == "mapping":
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value if key_node.id == "scalar" else fail("a key that is not a word")
            if key == "<<":
                fail("merge keys (<<) are not read; write the keys out")
            if key in mapping:
                if twice is None:
                    fail(
                        f"{key!r} is given twice in one mapping, which its program refuses or does not define; keep one"
                    )
                twice.append(f"{path}.{key}".removeprefix("$."))
            mapping[key] = _construct(value_node, source, f"{path}.{key}", loader, twice)
        return mapping
    if node.id == "sequence":
        return [_construct(item, source, f"{path}[{i}]", loader, twice) for i, item in enumerate(node.value)]
    try:
        value = loader.construct_object(node)
    except ValueError:
        fail(f"{str(node.value)[:40]!r} is no {node.tag.rpartition(':')[2]}")
    if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
        fail(f"{str(node.value)[:40]!r} is over the limit of whole numbers, {MAX_INTEGER}")
    if isinstance(value, float) and not math.isfinite(value):
        fail(f"{node.value!r}: numbers must be finite")
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(node.value)
