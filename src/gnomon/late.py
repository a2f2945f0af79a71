"""Late: what is loaded when it is first used, by its name, and never before.

`load_late("gnomon.runtime.launch.run:run")` is the one way in which Gnomon imports by a string: commands, which must
not load torch or numpy before they are chosen, and folders whose files are found by name (`orders`, `formats`).
`tests/test_rooms.py` holds its callers to the order of the rooms and finds what each of them names. Leaves out files
from elsewhere (`orders.add`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """While much is made that stays, nothing looks for garbage: to go through all modules again and again as they are
    loaded took a tenth of the time in which a server starts."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_late(name: str) -> Any:
    """The object of `module:object`. ModuleNotFoundError where an optional package (torch) is not installed."""
    with without_collection():
        return resolve_name(name)


def load_user(module: str, function: str) -> object:
    """What a user named as code of their own, `my_project.model` and `build`. Errors are those of its import."""
    return resolve_name(f"{module}:{function}")
