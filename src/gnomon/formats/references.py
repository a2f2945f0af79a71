"""References between values of one YAML file, as OmegaConf and others write them: `${a.b}`, `${.b}`, `${NAME:default}`.

`resolved(values, env)` returns the values with references replaced. `${multiply:a, b}` and `${divide:a, b}` of
whole numbers are computed. Leaves out other resolvers, which stay as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gnomon.formats.given import setting_value

_REFERENCE = re.compile(r"\$\{(?:oc\.env:)?([\w./-]+)(?:[:,]([^${}]*))?\}")
_COMPUTED = re.compile(r"\$\{(multiply|divide):\s*(\d+)\s*,\s*(\d+)\s*\}")
MAX_STEPS = 32
"""References that lead to each other; more is a circle, which stays as text."""


def resolved(values: Mapping[str, object], env: Mapping[str, str] | None = None) -> dict[str, object]:
    """The same mapping, each reference replaced by what it names. A name with a default may be an environment variable
    of `env`; what names nothing stays as it is."""
    return {key: _value(value, values, (key,), env or {}, 0) for key, value in values.items()}


def _value(value: object, root: Mapping[str, object], at: tuple[str, ...], env: Mapping[str, str], depth: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _value(inner, root, (*at, str(key)), env, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_value(inner, root, at, env, depth) for inner in value]
    if not isinstance(value, str) or "${" not in value or depth > MAX_STEPS:
        return value
    if whole := _REFERENCE.fullmatch(value.strip()):
        target = _named(whole, root, at, env)
        return value if target is None else _value(target, root, at, env, depth + 1)

    def put(match: re.Match[str]) -> str:
        named = _named(match, root, at, env)
        return match[0] if named is None or isinstance(named, Mapping | list) else str(named)

    replaced = _COMPUTED.sub(evaluate, _REFERENCE.sub(put, value))
    if replaced != value and replaced.lstrip("-").isdigit():
        return int(replaced)
    return value if replaced == value else _value(replaced, root, at, env, depth + 1)


def evaluate(match: re.Match[str]) -> str:
    """A product or a quotient of whole numbers; what cannot be computed stays."""
    a, b = int(match[2]), int(match[3])
    if match[1] == "divide" and (b == 0 or a % b):
        return match[0]
    return str(a * b if match[1] == "multiply" else a // b)


def _named(match: re.Match[str], root: Mapping[str, object], at: tuple[str, ...], env: Mapping[str, str]) -> object:
    """What a reference names; None for nothing."""
    name, default = match[1], match[2]
    if name in ("multiply", "divide"):
        return None
    if name in env and (default is not None or match[0].startswith("${oc.env")):
        return setting_value(env[name])
    if name.startswith("."):
        up = len(name) - len(name.lstrip("."))
        path = (*at[: len(at) - up], *name.lstrip(".").split("."))
    else:
        path = tuple(name.split("."))
    node: object = root
    for part in path:
        node = node.get(part) if isinstance(node, Mapping) else None
    return setting_value(default) if node is None and default is not None else node
