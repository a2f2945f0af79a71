"""Tilings that were measured (`tuner`), kept by kernel, threads and sizes, in the process and on disk.

`tiling_of` gives the tiling of a kernel at these sizes: a measured one where there is one, else the tile model's. Sums
are in the same order with any, so only kernels are tuned whose sums lie within a row. Leaves out measuring.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from gnomon.compiler.build import cache_folder, key_of
from gnomon.compiler.machine import this_machine
from gnomon.compiler.tiles.tiling import Nest, Tiling, tiling

log = logging.getLogger("gnomon.compiler")
Sizes = tuple[int, int]
"""Rows and points of the last axis."""
Choice = tuple[int, int]
"""Rows and points of a task."""

_lock = threading.Lock()


def tunable(nest: Nest) -> bool:
    """Whether no sum depends on how the work is divided."""
    return not {"column", "total"} & set(nest.stages.roles.values())


def tiling_of(source: str, nest: Nest, rows: int, points: int) -> Tiling:
    """Returns the tiling of a kernel at these sizes: the one remembered, or else the model's."""
    usual = tiling(nest, rows, points, this_machine())
    found = choices_of(source).get((rows, points)) if tunable(nest) else None
    return usual if found is None else with_choice(usual, nest, found)


def with_choice(usual: Tiling, nest: Nest, choice: Choice) -> Tiling:
    """The usual tiling with other tasks, as far as the kernel can have them: a row with sums is one task's."""
    chunk = max(1, min(choice[0], usual.rows))
    free = not nest.has_row and len(nest.inner) == 1
    tile = max(1, min(choice[1], usual.points)) if free else usual.tile
    many = -(-usual.rows // chunk) * -(-usual.points // tile) > 1
    one_task = usual.chunks * usual.tiles == 1  # which says nothing of whether several are worth their threads
    return replace(usual, chunk=chunk, tile=tile, parallel=many and (usual.parallel or one_task))


def choices_of(source: str) -> dict[Sizes, Choice]:
    """What was measured of a kernel on this machine with these threads."""
    return _read(_path(source, torch.get_num_threads()))


def keep(source: str, sizes: Sizes, choice: Choice) -> None:
    """Remembers the tiling chosen for a kernel at these sizes."""
    path = _path(source, torch.get_num_threads())
    with _lock:
        # The very dict that `_read` caches, so this process sees the change without reading again.
        every = _read(path)
        every[sizes] = choice
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            part.write_text(json.dumps([[*at, *of] for at, of in every.items()]), encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            log.debug("a tiling is not kept on disk: %s", error)


@cache
def _read(path: Path) -> dict[Sizes, Choice]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {(int(a), int(b)): (int(c), int(d)) for a, b, c, d in rows if min(a, b, c, d) > 0}
    except (OSError, ValueError, TypeError):
        return {}


def _path(source: str, threads: int) -> Path:
    return cache_folder() / f"{key_of(source)}-{threads}-tiles.json"
