"""Selectors: short text that names layers of a graph (`layers[0:8]`) or ranks (`0:8,12`).

A layer is one repetition of a call: `layers[0:8]` are the first eight of call `layers`, `layers` all of them, `*`
every layer of the graph; a name may hold `*`. Ranges are half-open and count from 0. Leaves out tensors and ops,
which are chosen by plain patterns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from gnomon.errors import PlanError, nearest
from gnomon.graph import Graph, Layer

_SELECTOR = re.compile(r"([\w.*]+)(?:\[(\d*)(:?)(\d*)\])?")
_RANGE = re.compile(r"(\d+)(?::(\d+))?")


def parse_selector(text: str) -> tuple[str, int, int | None]:
    """(pattern of the call's name, first repetition, one past the last or None for the end). PlanError if it does not
    parse."""
    match = _SELECTOR.fullmatch(text)
    if match is None:
        raise PlanError(
            f"selector {text!r} does not parse; write a call's name, as in 'layers', 'layers[3]' or 'layers[0:8]'"
        )
    name, first, colon, last = match.groups()
    if first is None:
        return name, 0, None
    if not colon:
        if not first:
            raise PlanError(
                f"selector {text!r} has empty brackets; write 'layers[3]' or 'layers[0:8]', or leave them out"
            )
        return name, int(first), int(first) + 1
    start, stop = int(first or 0), int(last) if last else None
    if stop is not None and stop <= start:
        raise PlanError(f"selector {text!r} is empty; the range is half-open, so its end must be above {start}")
    return name, start, stop


def place(layer: Layer) -> tuple[str, int]:
    """(name, index) that selectors go by: the family and the index in it, or the call and 0 when it is not indexed."""
    call = layer.call
    return (call.name, 0) if call.first is None else (call.group, call.first + layer.index)


def select(selectors: Sequence[str], graph: Graph) -> tuple[Layer, ...]:
    """The layers that any selector names, in graph order, each once. PlanError for a name or index that no layer
    has."""
    layers = {place(layer): layer for layer in graph.layers()}
    chosen: set[tuple[str, int]] = set()
    for text in selectors:
        pattern, start, stop = parse_selector(text)
        names = dict.fromkeys(name for name, _ in layers if fnmatchcase(name, pattern))
        if not names:
            known = dict.fromkeys(name for name, _ in layers)
            raise PlanError(
                f"selector {text!r} matches no layer; the graph has {', '.join(known)}{nearest(pattern, known)}"
            )
        for name in names:
            indices = [index for known, index in layers if known == name]
            end = max(indices) + 1 if stop is None else stop
            selected = [index for index in indices if start <= index < end]
            if not selected or (stop is not None and len(selected) < stop - start):
                raise PlanError(
                    f"selector {text!r} goes beyond {name}, whose layers are {min(indices)} to {max(indices)}"
                )
            chosen.update((name, index) for index in selected)
    return tuple(layer for where, layer in layers.items() if where in chosen)


def format_layers(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Writes selectors for `layers`: `embed`, or a range for a run of indexed layers."""
    runs: list[tuple[str, int, int, bool]] = []
    for layer in layers:
        name, index = place(layer)
        if runs and runs[-1][0] == name and runs[-1][2] == index:
            runs[-1] = (name, runs[-1][1], index + 1, True)
        else:
            runs.append((name, index, index + 1, layer.call.first is not None))
    return tuple(f"{name}[{start}:{stop}]" if indexed else name for name, start, stop, indexed in runs)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks of `0:8,12` in the order written. PlanError if it does not parse, is empty in part, or names a rank
    twice."""
    ranks: list[int] = []
    for part in text.split(",") if text.strip() else []:
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise PlanError(
                f"ranks {text!r} do not parse at {part.strip()!r}; write half-open ranges, as in '0:8' or '0:4,12'"
            )
        start = int(match[1])
        stop = int(match[2]) if match[2] else start + 1
        if stop <= start:
            raise PlanError(f"ranks {text!r}: range {part.strip()!r} is empty; its end must be above {start}")
        if stop > 1 << 24:
            raise PlanError(f"ranks {text!r} go beyond {1 << 24}, more than any cluster has")
        ranks.extend(range(start, stop))
    if len(set(ranks)) != len(ranks):
        raise PlanError(f"ranks {text!r} name a rank twice")
    return tuple(ranks)


def format_ranks(ranks: Sequence[int]) -> str:
    """The text that `parse_ranks` reads back as `ranks`, in runs."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank:
            runs[-1][1] = rank + 1
        else:
            runs.append([rank, rank + 1])
    return ",".join(f"{a}:{b}" if b - a > 1 else str(a) for a, b in runs)
