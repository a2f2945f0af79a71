"""Every fitted constant says where it is from: data, date, error and range, in every file of constants."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gnomon

ROOT = Path(gnomon.__file__).parent
FILES = [
    *sorted((ROOT / "prices").rglob("*.toml")),
    *sorted((ROOT / "prediction").rglob("*.toml")),
    Path(__file__).parents[2] / "evidence/folds.toml",
]
WANTED = ("data", "date", "error", "range")


def unproven(table: dict[str, Any], path: str, proven: bool) -> Iterator[str]:
    """Paths of numbers that no table around them gives a provenance."""
    proven = proven or "provenance" in table
    for key, value in table.items():
        if key == "provenance":
            continue
        here = f"{path}.{key}"
        if isinstance(value, dict):
            yield from unproven(value, here, proven)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, dict):
                    yield from unproven(item, f"{here}[{i}]", proven)
                elif isinstance(item, (int, float)) and not proven:
                    yield f"{here}[{i}]"
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and not proven:
            yield here


def provenances(value: Any) -> Iterator[dict[str, Any]]:
    """Every provenance in a file."""
    if isinstance(value, list):
        for item in value:
            yield from provenances(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "provenance":
                yield item
            else:
                yield from provenances(item)


def test_the_files_of_constants_are_found() -> None:
    names = {path.name for path in FILES}
    assert {"fitted.toml", "collectives.toml", "band.toml", "hopper.toml", "generic-gpu.toml"} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_constant_has_a_provenance(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert list(unproven(table, path.name, proven=False)) == []
    actual = list(provenances(table))
    assert actual
    for message in actual:
        assert set(message) == set(WANTED) and all(message.values())
        assert re.fullmatch(r"202\d-\d\d-\d\d", message["date"])


def test_the_walk_sees_what_is_missing() -> None:
    bare = {"rows": [{"speed": 0.5}, {"speed": 0.6, "provenance": {"data": "x"}}], "all": {"deep": {"number": 3}}}
    assert list(unproven(bare, "f", proven=False)) == ["f.rows[0].speed", "f.all.deep.number"]
