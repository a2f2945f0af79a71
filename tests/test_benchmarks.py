"""Benchmarks name what the package has: they run by hand, and break unseen when a name goes."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "evidence/fits")
OURS = ("gnomon", "evidence")


def names(path: Path) -> list[tuple[str, str]]:
    """(module, name) of what a file takes from the package, but for the rooms that need torch."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.ImportFrom)]
    ours = [n for n in nodes if (n.module or "").split(".")[0] in OURS]
    ours = [n for n in ours if not {"runtime", "frontend"} & set((n.module or "").split("."))]
    return [(node.module or "", alias.name) for node in ours for alias in node.names]


def test_names_from_the_package_exist() -> None:
    asked = [
        (path.name, *name)
        for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
        for name in names(path)
    ]
    missing = [
        (file, module, name)
        for file, module, name in asked
        if not hasattr(import_module(module), name) and find_spec(f"{module}.{name}") is None
    ]
    assert len(asked) > 100 and not missing
