"""Models that are code of the user's own (MODULE:FUNCTION): captured when they are named so, kept until it changes.

`read_code(name)` returns the Graph and what is to be said of it. What was captured is kept on disk (`request.cache`).
Leaves out names of other kinds (`cli.models`).
"""

from __future__ import annotations

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.late import load_late
from gnomon.request import cache


def read_code(name: str) -> tuple[Graph, tuple[str, ...]]:
    """(graph, notes) of MODULE:FUNCTION, its inputs in brackets. InputError without torch."""
    if (cached := cache.load(name)) is not None:
        return cached
    try:
        read = load_late("gnomon.frontend.named:graph_of")
    except ImportError as error:
        if error.name != "torch":
            raise
        code = name.partition("(")[0]
        raise InputError(f"{code} is code, and capturing it needs torch: pip install gnomon[torch]") from None
    # What is kept holds as long as the files that were read for it are the same.
    with cache.watched() as files:
        captured: tuple[Graph, tuple[str, ...]] = read(name)
    cache.store(name, captured, files)
    return captured
