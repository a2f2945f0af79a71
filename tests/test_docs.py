"""The examples in README.md and docs/ are run: what they print is what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [str(page.relative_to(ROOT)) for page in FILES if ">>> " in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES)
def test_examples(page: str) -> None:
    found = doctest.testfile(str(ROOT / page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0


def test_there_are_pages_with_examples() -> None:
    assert {"README.md", "docs/types.md", "docs/schedules.md"} <= set(PAGES)
