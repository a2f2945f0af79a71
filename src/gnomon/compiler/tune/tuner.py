"""Tilings of a graph's kernels, measured: `torch.compile(model, backend="gnomon", options={"tune_s": 30})`.

`tune` takes candidates from the tile model (`tile_cost`), the most promising first, and gives the next measurement to
the kernel that takes most of the graph's time and has candidates left. A candidate is left after two calls where it is
far behind, and as soon as its two fastest calls agree. A kernel of which another size was measured begins with that
size's tasks (a family of shapes). Kernels whose sums go over rows are left alone: their order is that of the tasks.
Inputs are made, so what a model's rows look up is not seen.
Source: AdaTune (NeurIPS 2020), stopping by spread; DynaTune (ICLR 2021), time to what gains most; FamilySeer (ICPP
2022).
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gnomon.compiler.build import typed
from gnomon.compiler.machine import this_machine
from gnomon.compiler.tiles.sizes import product
from gnomon.compiler.tiles.tile_cost import cost, rates
from gnomon.compiler.tiles.tiling import Tiling, tiling
from gnomon.compiler.tune import tuned
from gnomon.compiler.tune.gate import made_like

MOST = 24
"""Candidates of a kernel."""
FAR, NEAR = 1.15, 1.03
"""A candidate is left where its fastest call takes more than `FAR` times the best; it is known once its two fastest
calls are within `NEAR`."""
CALLS = 7
"""Most timed calls of a candidate, after one that warms up."""
GAIN = 0.98
"""Share of the usual tiling's time that another takes at most to be chosen: a smaller gain is noise."""


@dataclass(slots=True)
class Subject:
    """One kernel at one size: how often the graph has it, what is to be measured, and the best so far."""

    source: str
    sizes: tuple[int, int]
    usual: Tiling
    run: Callable[[Tiling], Any]
    results: Callable[[], list[torch.Tensor]]
    candidates: list[Tiling]
    count: int = 1
    best: Tiling | None = None
    best_s: float = float("inf")
    usual_s: float = float("inf")
    num_measured: int = 0
    tried: list[Tiling] = field(default_factory=list)

    def next(self) -> None:
        """Measures one candidate more."""
        tile = self.candidates.pop(0)
        took = timed(lambda: self.run(tile), self.best_s)
        self.num_measured += 1
        self.tried.append(tile)
        if tile == self.usual:
            self.usual_s = took
        if took < self.best_s:
            self.best, self.best_s = tile, took


def timed(call: Callable[[], Any], best_s: float) -> float:
    """Seconds of the fastest of a few calls, as few as tell it from the best so far."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    took: list[float] = []
    for n in range(CALLS):
        start = clock()
        call()
        took.append(clock() - start)
        least = sorted(took)
        if n and (least[0] > FAR * best_s or least[1] <= NEAR * least[0]):
            break
    return min(took)


def tune(planned: Sequence[Any], seconds: float) -> list[Subject]:
    """Measures kernels of groups of fixed sizes until the time is over, and keeps what is faster than usual."""
    end = time.perf_counter() + seconds
    found: dict[tuple[str, tuple[int, int]], Subject] = {}
    for one in planned:
        subject = subject_of(one)
        if subject is not None:
            known = found.setdefault((subject.source, subject.sizes), subject)
            known.count += known is not subject
    untried = list(found.values())
    for subject in untried:
        # The usual tiling is each subject's first candidate, so that all have a time to be compared with.
        subject.next()
    while time.perf_counter() < end:
        open_ones = [one for one in untried if one.candidates]
        if not open_ones:
            break
        max(open_ones, key=lambda one: one.count * one.best_s).next()
    for subject in untried:
        settle(subject)
    return untried


def settle(subject: Subject) -> None:
    """Keeps the best where it is faster than usual and gives the same numbers."""
    best = subject.best
    if best is None or best == subject.usual or subject.best_s > GAIN * subject.usual_s:
        return
    subject.run(subject.usual)
    before = [one.clone() for one in subject.results()]
    for one in subject.results():
        # So that what the second run leaves unwritten is seen.
        one.zero_()
    subject.run(best)
    # To the bit: a tiling that adds in another order would make results depend on what was measured here.
    pairs = zip(subject.results(), before, strict=True)
    if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        tuned.keep(subject.source, subject.sizes, (best.chunk, best.tile))


def subject_of(planned: Any) -> Subject | None:
    """A group's kernel with made inputs; None where it cannot be tuned."""
    nest, kernel = planned.kernel.nest, planned.kernel
    values = {inp.node: inp.node.meta["val"] for slot in kernel.slots for inp in [nest.body.inputs[slot]]}
    sizes = [*(nest.sizes[a] for a in (*nest.outer, *nest.inner)), *kernel.sizes]
    fixed = all(isinstance(size, int) for size in sizes)
    if planned.function is None or planned.device.type != "cpu" or not fixed or not tuned.tunable(nest):
        return None
    if not all(isinstance(size, int) for value in values.values() for size in (*value.shape, *value.stride())):
        return None
    inputs = {node: made_like(value, n) for n, (node, value) in enumerate(values.items())}
    outputs = [
        torch.empty_strided(tuple(map(int, out.shape)), tuple(map(int, out.memory)), dtype=out.dtype)
        for out in nest.outputs
    ]
    rows = int(product(nest.sizes[a] for a in nest.outer))
    points = int(nest.sizes[nest.inner[-1]]) if nest.inner else 1
    places = [
        inputs[inp.node].data_ptr() + int(inp.offset) * inp.dtype.itemsize
        for inp in (nest.body.inputs[slot] for slot in kernel.slots)
    ]
    places += [one.data_ptr() for one in outputs]
    function = typed(planned.function, *[ctypes.c_void_p] * (1 + len(places)))
    rest = [int(size) for size in kernel.sizes]

    def run(tile: Tiling, compiled_graph: Any = (inputs, outputs)) -> None:
        every = (tile.chunk, tile.chunks, tile.tile, tile.tiles, int(tile.parallel), int(tile.past), *rest)
        function((ctypes.c_int64 * len(every))(*every), *places)

    usual = tiling(nest, rows, points, this_machine())
    near = nearest(tuned.choices_of(kernel.source), (rows, points))
    ahead = [usual] if near is None else [usual, tuned.with_choice(usual, nest, near)]
    every = list(dict.fromkeys([*ahead, *candidates(planned, usual)]))
    # Where another size was measured, the usual tiling and that size's are enough.
    every = every[: 2 if near is not None else MOST]
    return Subject(
        source=kernel.source, sizes=(rows, points), usual=usual, run=run, results=lambda: outputs, candidates=every
    )  # fmt: skip


def nearest(known: dict[tuple[int, int], tuple[int, int]], sizes: tuple[int, int]) -> tuple[int, int] | None:
    """The choice of the size that is nearest to these, in factors."""

    def apart(other: tuple[int, int]) -> float:
        return sum(max(a, b) / min(a, b) for a, b in zip(other, sizes, strict=True))

    return known[min(known, key=apart)] if known else None


def candidates(planned: Any, usual: Tiling) -> list[Tiling]:
    """Other tasks, the least predicted time first."""
    nest = planned.kernel.nest
    return sorted(set(_others(nest, usual)), key=lambda tile: predicted_s(nest, tile))


def predicted_s(nest: Any, tile: Tiling) -> float:
    """Predicts seconds by the tile model; bytes of memory are the same for all tiles, so they do not count."""
    # A millionth of the seconds of computing breaks ties between tiles that one level of memory bounds alike.
    walks = int(product(nest.sizes[a] for a in nest.inner)) // max(tile.points, 1)
    foretold = cost(nest, tile, walks, 0, torch.get_num_threads(), rates(), this_machine())
    return foretold.seconds + 1e-6 * foretold.compute_s


def _others(nest: Any, usual: Tiling) -> Iterator[Tiling]:
    lanes = this_machine().isa.lanes
    chunks = {max(1, usual.rows >> k) for k in range(12)}
    tiles = {usual.points >> k for k in range(12) if usual.points >> k >= lanes} or {usual.points}
    for choice in itertools.product(chunks, tiles):
        tile = tuned.with_choice(usual, nest, choice)
        if tile != usual:
            yield tile
