"""The documentation builds as a site: every page is in it, every link leads somewhere, and it asks no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gnomon

pytest.importorskip("mkdocs", reason="the site is built with the extra docs")
ROOT = Path(__file__).parents[1]


def test_the_site_is_built_from_every_page(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        built = site / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert built.is_file(), page
    api = (site / "api/index.html").read_text(encoding="utf-8")
    assert all(f".{name}" in api for name in gnomon.__all__)
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    loaded = [tag for text in pages for tag in re.findall(r"<(?:script|img|link)\b[^>]*>", text)]
    assert loaded and not [tag for tag in loaded if re.search(r"(?:src|href)=.?https?://", tag)]
