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

_SELECTOR = re.compile(r"([\w.*]+)(?:\[(\d*)(:?)(\d*)\])?")
_RANGE = re.compile(r"(\d+)(?::(\d+))?")

Layer = tuple[str, int]
"""(call, repetition)."""


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


def select(selectors: Sequence[str], layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers that any selector names, in graph order, each once. PlanError for a name or an index that no layer
    has.

    layers: every (call, repetition) of the graph in order.
    """
    repeats: dict[str, int] = {}
    for call, _ in layers:
        repeats[call] = repeats.get(call, 0) + 1
    chosen: set[Layer] = set()
    for text in selectors:
        pattern, start, stop = parse_selector(text)
        names = [call for call in repeats if fnmatchcase(call, pattern)]
        if not names:
            known = ", ".join(repeats)
            raise PlanError(f"selector {text!r} matches no call; the graph has {known}{nearest(pattern, repeats)}")
        for call in names:
            end = repeats[call] if stop is None else stop
            if end > repeats[call] or start >= repeats[call]:
                raise PlanError(f"selector {text!r} goes to layer {end - 1}, but {call} ends at {repeats[call] - 1}")
            chosen.update((call, i) for i in range(start, end))
    return tuple(layer for layer in layers if layer in chosen)


def format_layers(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Selectors for `layers`, shortest form: a call of one repetition by name alone only if that is its repetition
    0."""
    runs: list[tuple[str, int, int]] = []
    for call, index in layers:
        if runs and runs[-1][0] == call and runs[-1][2] == index:
            runs[-1] = (call, runs[-1][1], index + 1)
        else:
            runs.append((call, index, index + 1))
    return tuple(f"{call}[{start}:{stop}]" for call, start, stop in runs)


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
