"""Hooks of mkdocs.yml: pages that lie outside of docs/ (results of benchmarks, logs) are part of the site too.

In the repository a page of docs/ links to `../benchmarks/results/x.md`; on the site those files are below its root.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("benchmarks", "evidence", "examples")
"""Folders of the repository to which pages link."""
WHOLE = ("benchmarks/results", "evidence")
"""Of these every page: they link to one another."""
LINK = re.compile(rf"\]\(\.\./(?=(?:{'|'.join(OUTSIDE)})/)")
UP = re.compile(r"\]\((?:\.\./)+(?:docs/)?(?=[\w/]+\.md)")
"""A link of a page outside of docs/ to one in it."""


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to, as it lies in the repository."""
    wanted = {str(page.relative_to(ROOT)) for name in WHOLE for page in (ROOT / name).glob("*.[ms][dv]*")}
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        wanted |= set(re.findall(rf"\]\(\.\./((?:{'|'.join(OUTSIDE)})/[^)#\s]*)", text))
    for name in sorted(wanted):
        path = ROOT / name
        if path.is_file():
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them."""
    if page.file.src_uri.startswith(OUTSIDE):
        depth = page.file.src_uri.count("/")
        return UP.sub("](" + "../" * depth, markdown)
    return LINK.sub("](", markdown)
