"""torchtitan's `config_registry.py`: functions that return a config, read by `ast` and never run.

`registry_fields(text, file, wanted)` returns one function's config as the fields of torchtitan's TOML files; torchtitan
imports no module of the project for it. Written from pytorch/torchtitan at commit b5bcd76 (2026-08):
torchtitan/models/*/config_registry.py, torchtitan/config/. Leaves out data, and models that are no text decoders.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from gnomon.errors import InputError, nearest
from gnomon.formats.job import flatten
from gnomon.formats.python_values import ARGUMENTS, CALL, function_values, module_of

SECTIONS = ("training", "parallelism", "compile", "optimizer", "activation_checkpoint", "comm", "debug")
MODES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
CONVERTERS = {"Float8LinearConverter": "quantize.linear.float8", "MXFP8LinearConverter": "quantize.linear.mx"}
"""Class of a converter -> its name in model.converters."""


def is_registry(text: str) -> bool:
    """Whether a file is such a registry."""
    return "Trainer.Config(" in text and re.search(r"^def \w+\(\) -> Trainer\.Config:", text, re.MULTILINE) is not None


def registry_fields(text: str, file: str, registry_name: str | None, family: str) -> dict[str, object]:
    """Fields of the config that the function `wanted` returns. InputError, with the names, where it is not said which,
    or there is none of the name."""
    module = module_of(text, file)
    names = [name for name, node in module.functions.items() if _is_config(node)]
    if registry_name is None and len(names) > 1:
        plain = next((name for name in names if "debug" not in name), names[0])
        listed = ", ".join(names[:24])
        raise InputError(f"{file} has {len(names)} configs: {listed}; say which: --set config={plain}", "--set")
    if registry_name is not None and registry_name not in names:
        raise InputError(
            f"{file} has no config {registry_name!r}{nearest(registry_name, names)}; it has {', '.join(names)}", "--set"
        )
    config = function_values(registry_name or names[0], module)
    if not isinstance(config, Mapping):
        raise InputError(
            f"{file}: {registry_name or names[0]} builds its config in a way that is not followed", "--set"
        )
    return dict(_fields(config, family))


def _is_config(node: ast.FunctionDef) -> bool:
    returns = node.returns
    return isinstance(returns, ast.Attribute) and returns.attr == "Config" and not node.args.args


def _fields(config: Mapping[str, object], family: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    spec = config.get("model_spec")
    if isinstance(spec, Mapping):
        arguments = spec.get(ARGUMENTS)
        fields["model.name"] = family
        fields["model.flavor"] = spec.get("flavor") or (
            arguments[0] if isinstance(arguments, list) and arguments else ""
        )
        fields |= _converters(spec.get("converters"))
    for section in SECTIONS:
        value = config.get(section)
        if isinstance(value, Mapping):
            settings = {key: inner for key, inner in flatten(value).items() if not key.endswith((CALL, ARGUMENTS))}
            fields |= {f"{section}.{key}": inner for key, inner in settings.items() if inner is not None}
    checkpointing = config.get("activation_checkpoint", "absent")
    if isinstance(checkpointing, Mapping):
        kind = str(checkpointing.get(CALL)).partition(".")[0]
        fields["activation_checkpoint.mode"] = MODES.get(kind, "selective")
    elif checkpointing is None:
        fields["activation_checkpoint.mode"] = "none"
    return {key: value for key, value in fields.items() if key not in ("optimizer.lr", "optimizer.param_groups")}


def _converters(value: object) -> dict[str, object]:
    fields: dict[str, object] = {}
    named: list[str] = []
    for one in value if isinstance(value, list) else ():
        kind = str(one.get(CALL)).partition(".")[0] if isinstance(one, Mapping) else ""
        section = CONVERTERS.get(kind, kind)
        named.append(section)
        for key in ("recipe_name", "enable_fsdp_float8_all_gather", "filter_fqns"):
            if isinstance(one, Mapping) and one.get(key) is not None and section in CONVERTERS.values():
                fields[f"{section}.{key}"] = one[key]
    return {"model.converters": named, **fields} if named else {}
