"""What several tests ask for is made once, also where tests run in several processes (`pytest -n`).

`once(name, make)` returns the value of the first process that asks, by a file; the others wait for it. The name must
say all that the value depends on. `tests/conftest.py` says where the files of a run lie.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FOLDER = "GNOMON_TESTS_ONCE"
"""Environment variable: the folder of this run of the tests."""


def once(name: str, make: Callable[[], T]) -> T:
    """The value of `make()`, which can be pickled. Without a folder it is made here."""
    if FOLDER not in os.environ:
        return make()
    path = Path(os.environ[FOLDER], f"{name}.pickle")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            document: T = pickle.loads(path.read_bytes())
            return document
        made = make()
        path.write_bytes(pickle.dumps(made))
        return made
