"""Data files of the package itself: read as any TOML, and their plain values kept where Python keeps compiled code.

`plain_values(path)` returns them. What is kept begins with the whole text that it was made from, so that another text
is never taken for it; it is JSON, which runs nothing, and lies in the package's own `__pycache__` (or where
PYTHONPYCACHEPREFIX says), which is trusted as far as the code beside it is. Leaves out files of users.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from gnomon.schema.toml import parse_toml

END = b"\0"
"""Between the text and its values: no TOML has it."""


def plain_values(path: Path) -> dict[str, Any]:
    """Plain values of a TOML file of the package. FormatError if it is not one."""
    text = path.read_bytes()
    cache_file = Path(cache_from_source(str(path))).with_suffix(".json")
    with suppress(OSError, ValueError):
        known, end, values = cache_file.read_bytes().partition(END)
        if known == text and end:
            read: dict[str, Any] = json.loads(values)
            return read
    parsed = parse_toml(text, path.name)
    if not sys.dont_write_bytecode:
        with suppress(OSError):  # a package that only its owner may write to
            cache_file.parent.mkdir(exist_ok=True, parents=True)
            part = cache_file.with_suffix(f".{os.getpid()}")
            part.write_bytes(text + END + json.dumps(parsed, separators=(",", ":")).encode())
            part.replace(cache_file)
    return parsed
