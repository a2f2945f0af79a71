"""Chromium, where there is one: `shown(page, folder)` is a page after its script has run, and what the browser said."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr"
)


def shown(page: str, folder: Path, *more: str, width: int = 1280) -> tuple[str, str]:
    """(the document, the log) of a page in a window of that width. more: further options of the browser."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    return visited(file.as_uri(), folder, *more, width=width)


def visited(address: str, folder: Path, *more: str, width: int = 1280) -> tuple[str, str]:
    """The same of an address. A page that asks its server has 10 s of its own clock for the answer."""
    assert CHROMIUM is not None
    if address.startswith("http"):
        more = (*more, "--virtual-time-budget=10000")
    own = [f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [CHROMIUM, *FLAGS.split(), *own, *more, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return done.stdout, done.stderr
