"""Megatron-Bridge's recipes, Python functions that return a ConfigContainer: read by `ast`, never run or imported.

`recipe_fields(name, module)` returns one recipe as `section.field` and the id of its network; `find_recipe` looks for a
recipe in a checkout around a script, or in an installed Megatron-Bridge. Written from NVIDIA-NeMo/Megatron-Bridge
at commit 067f987 (2026-08-22): src/megatron/bridge/recipes/, scripts/training/run_recipe.py. Leaves out what a recipe
computes by code of other modules than recipes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from gnomon.errors import GnomonError
from gnomon.formats.job import flatten, read_source
from gnomon.formats.python_values import ARGUMENTS, CALL, Module, function_values, module_of

BELOW = Path("megatron/bridge/recipes")
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""What a stage holds -> its letter in --pipeline-model-parallel-layout."""
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.half": "fp16"}


def is_recipe(text: str) -> bool:
    """Whether a file holds recipes."""
    return "ConfigContainer" in text and "megatron.bridge" in text and bool(names_in(text))


def names_in(text: str) -> list[str]:
    """Recipes of a file by name, in its order."""
    return re.findall(r"^def ([a-z]\w*)\([^)]*\)\s*->\s*ConfigContainer:", text, re.MULTILINE)


def sources(path: Path, folder: str | None) -> list[Path]:
    """Folders that hold `megatron/bridge/recipes`: one that is given, those around a file, Python's own."""
    around = [parent / "src" for parent in path.resolve().parents]
    placed = [Path(folder), *Path(folder).parents, Path(folder) / "src"] if folder else []
    return [place for place in (*placed, *around, *map(Path, sys.path)) if (place / BELOW).is_dir()]


def find_recipe(name: str, folders: list[Path]) -> Module | None:
    """The file that has a recipe, or another name of one."""
    definition = re.compile(rf"^def {re.escape(name)}\(|\bas {re.escape(name)}\b", re.MULTILINE)
    for folder in folders:
        for path in sorted((folder / BELOW).rglob("*.py")):
            try:
                text, file = read_source(path)
            except GnomonError:
                continue
            if definition.search(text):
                return module_of(text, file, (folder, path.parent))
    return None


def recipe_fields(name: str, module: Module) -> tuple[dict[str, object], str | None]:
    """(settings by `section.field`, id of the network on the hub)."""
    config = function_values(name, module)
    if not isinstance(config, Mapping):
        return {}, None
    model = config.get("model")
    named = model.get(ARGUMENTS) if isinstance(model, Mapping) else None
    hub = next((one for one in named if isinstance(one, str) and "/" in one), None) if isinstance(named, list) else None
    return dict(_fields(config)), hub


def _fields(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for section, value in config.items():
        if section in (CALL, ARGUMENTS, "env_vars"):
            continue
        # Without a rank: the default of Megatron Bridge's LoRA.
        if section == "peft" and value is not None:
            rank = value.get("dim") if isinstance(value, Mapping) else None
            yield "peft.dim", rank or 32
        elif section == "mixed_precision":
            yield from _precision(value)
        elif isinstance(value, Mapping):
            for key, inner in flatten(value).items():
                if inner is not None and not key.endswith((CALL, ARGUMENTS)) and not isinstance(inner, Mapping):
                    yield f"{section}.{key}", plain(inner)


def plain(value: object) -> object:
    """A value as Megatron-LM's arguments have it: dtypes by their short names, a layout of stages as its letters."""
    if isinstance(value, list) and value and all(isinstance(stage, list) for stage in value):
        return "|".join("".join(LETTERS.get(str(layer), "?") for layer in stage) for stage in value)
    return DTYPES.get(str(value), value)


def _precision(value: object) -> Iterator[tuple[str, object]]:
    """`bf16_mixed()`, `get_mixed_precision_config("bf16_mixed")` or the name, and what is set on it."""
    if isinstance(value, str):
        yield "mixed_precision", value
    elif isinstance(value, Mapping):
        named = [value.get(CALL), *(arguments if isinstance(arguments := value.get(ARGUMENTS), list) else ())]
        spelling = next((str(one) for one in reversed(named) if isinstance(one, str) and "mixed" in one), "bf16_mixed")
        yield "mixed_precision", spelling.replace("get_mixed_precision_config", "bf16_mixed")
        for key, inner in value.items():
            if key not in (CALL, ARGUMENTS) and inner is not None:
                yield f"mixed_precision.{key}", DTYPES.get(str(inner), inner)
