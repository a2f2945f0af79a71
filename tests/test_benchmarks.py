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
    ours = [n for n in ours if not {"runtime", "frontend", "serve"} & set((n.module or "").split("."))]
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


def test_the_house_counts_copies_namesakes_and_quoted_kinds(tmp_path: Path) -> None:
    twice = "def {0}({1}):\n    a = {1} + 1\n    b = a * 2\n    c = b - a\n    d = c + b\n    e = d * a\n    return e\n"
    for file, name in (("one", "first"), ("two", "second"), ("three", "third")):
        folder = tmp_path / file
        folder.mkdir()
        text = f"class Step:\n    '''softmax'''\n\n{twice.format(name, name[0])}\nASKED = op.kind == 'softmax'  # why\n"
        (folder / "__init__.py").write_text(text, encoding="utf-8")
    house = import_module("benchmarks.house")
    found = house.table(tmp_path)
    assert found["files of src"] == "3" and found["duplicate pairs of functions"] == "3"
    assert found["class names in 3 files and more"].startswith("1 (3")
    assert found["op kinds quoted outside ops/ and models/"] == "3"
    assert found["op kinds that code compares `.kind` with"] == "3"
    assert found["comment lines"] == f"{3 / 30:.1%}"
