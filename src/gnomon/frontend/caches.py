"""Results that a module's code caches with `functools.lru_cache`, forgotten around a recording.

A table of positions that is cached while a module is recorded on the meta device would be handed out in its next real
forward; one that is cached before would be a constant without ops. Leaves out caches that are kept as attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import nn

CACHED = type(lru_cache(lambda: None))


def caches(module: nn.Module) -> list[Any]:
    """Cached functions and methods of the classes of a module's parts, and of the files that these are in."""
    classes = {kind for inner in module.modules() for kind in type(inner).__mro__ if issubclass(kind, nn.Module)}
    classes -= {nn.Module}
    files = {sys.modules[kind.__module__] for kind in classes if kind.__module__ in sys.modules}
    files = {file for file in files if file.__name__.partition(".")[0] != "torch"}
    found = dict[int, Any]()
    holders: tuple[Any, ...] = (*classes, *files)
    for holder in holders:
        for inner in [inner for value in list(vars(holder).values()) for inner in _within(value)]:
            if isinstance(inner, CACHED) and (isinstance(holder, type) or inner.__module__ == holder.__name__):
                found[id(inner)] = inner
    return list(found.values())


def _within(value: Any) -> Iterator[Any]:
    """The value, what a static method stands for, and what a decorator closed over."""
    value = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
    yield value
    for cell in getattr(value, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


@contextmanager
def forgotten(module: nn.Module) -> Iterator[None]:
    """Nothing is cached before, and what was cached meanwhile is dropped."""
    found = caches(module)
    for cache in found:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in found:
            cache.cache_clear()
