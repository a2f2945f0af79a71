"""Models as a command line names them: what `request.model` reads, and code of the user's own (MODULE:FUNCTION).

`read_model(name)` returns the Graph and what is to be said of it. Code is imported only when it is named so; what was
captured of it is kept on disk (`request.cache`). Leaves out job files.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.late import load_late
from gnomon.request import cache
from gnomon.request import model as known
from gnomon.request.model import is_code
from gnomon.request.runnable import read_runnable_model


def read_model(
    name: str, *, settings: Mapping[str, str] | None = None, strict: bool = False
) -> tuple[Graph, tuple[str, ...]]:
    """(graph, notes), as `request.model.read_model`; of code too. InputError without torch."""
    if not is_code(name):
        return known.read_model(name, settings=settings, strict=strict)
    if (kept := cache.load(name)) is not None:
        return kept
    try:
        read = load_late("gnomon.frontend.named:read")
    except ImportError as error:
        if error.name != "torch":
            raise
        code = name.partition("(")[0]
        raise InputError(f"{code} is code, and capturing it needs torch: pip install gnomon[torch]") from None
    with cache.watched() as files:
        captured: tuple[Graph, tuple[str, ...]] = read(name)
    cache.store(name, captured, files)
    return captured


def read_model_to_run(name: str) -> tuple[Graph, tuple[str, ...]]:
    """(graph, notes) of a model that the runtime runs: as `request.runnable` reads it, or code of the user's own."""
    return read_model(name) if is_code(name) else read_runnable_model(name)
