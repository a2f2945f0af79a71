"""Triton's functions from their text: `module_of(source)`; whether it is installed: `has_triton()`.

Apart from what launches them, so that products with stored weights need none of what generates code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import sys
from functools import cache
from types import ModuleType


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def module_of(source: str) -> ModuleType:
    """Triton reads a function's text back by the name of its file: `linecache` has it, and no file is needed, which
    somebody else might write."""
    name = f"gnomon_triton_{hashlib.sha256(source.encode()).hexdigest()[:32]}"
    module, file = ModuleType(name), f"<{name}>"
    module.__file__ = file
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    sys.modules[name] = module
    exec(compile(source, file, "exec"), module.__dict__)
    return module
