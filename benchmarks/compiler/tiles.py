"""Does the cost of tiles order them as measuring does, and is the tile that the compiler takes near the best?

    python benchmarks/compiler/tiles.py [--threads 1] [--rounds 15] [--only softmax]

For each family of kernels all combinations of rows a task, points a task, vectors beside each other (unrolling) and the
cost up to which a value is computed again instead of kept, at least 50, are run in turn, and the fastest of the rounds
is put beside `tile_cost.cost`. Prints a row a family: Spearman's rank correlation, the same of the even rounds with the
odd ones (what measuring agrees with itself: no model can be expected to do better), what the first choice of the model
and the compiler's own tile cost over the best, and how much the slowest costs, which says what there is to choose.
Within a family the bytes from memory are the same: tilings that memory bounds are ordered by what they compute.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from gnomon.compiler.build import libraries
from gnomon.compiler.explain import moved_bytes
from gnomon.compiler.machine import this_machine
from gnomon.compiler.program import PlannedGroup, program
from gnomon.compiler.tiles import tiling as tiles
from gnomon.compiler.tiles.sizes import product
from gnomon.compiler.tiles.tile_cost import cost, rates
from gnomon.compiler.tiles.tiling import Tiling, tiling

AGAIN = (0, 6, 100)
UNROLL = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A function that becomes one kernel, and its inputs."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]


def families() -> list[Family]:
    torch.manual_seed(0)
    rows, points = 512, 1024
    x, y, w, b = (torch.randn(size) for size in ((rows, points), (rows, points), (points,), (points,)))
    short = torch.randn(8192, 64)
    mean, rstd = torch.randn(rows, 1), torch.rand(rows, 1)

    def norm_backward(grad: torch.Tensor, a: torch.Tensor, m: torch.Tensor, r: torch.Tensor, p: torch.Tensor) -> Any:
        every = [True, True, True]
        return torch.ops.aten.native_layer_norm_backward.default(grad, a, [points], m, r, p, p, every)

    def rms_norm(a: torch.Tensor, c: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        both = a + c
        return both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-5) * p

    made = [
        ("softmax", lambda a: torch.softmax(a, -1), (x,)),
        ("softmax, short rows", lambda a: torch.softmax(a, -1), (short,)),
        ("log-softmax", lambda a: torch.log_softmax(a, -1), (x,)),
        ("layer norm", lambda a, p, q: F.layer_norm(a, (points,), p, q), (x, w, b)),
        ("add, RMS norm", rms_norm, (x, y, w)),
        ("layer norm, backward", norm_backward, (x, y, mean, rstd, w)),
        ("bias, GELU", lambda a, p: F.gelu(a + p), (x, b)),
        ("column sums", lambda a, c: (a * c).sum(0), (x, y)),
    ]
    return [Family(name=name, call=call, inputs=inputs) for name, call, inputs in made]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One choice, ready to run."""

    words: str
    own: bool
    """Whether the compiler takes it."""
    predicted_s: float
    run: Callable[[], object]


def planned_of(family: Family) -> PlannedGroup:
    graph = make_fx(family.call, tracing_mode="fake")(*family.inputs).graph
    made = program(graph, None)
    (only,) = made.groups
    return only


def choices(family: Family) -> Iterator[Tile]:
    """Kernels that differ in unrolling and levels; of each, tasks of other rows and points."""
    own_unroll, own_again, seen = tiles.unroll, tiles.RECOMPUTE, set[str]()
    for again, beside in itertools.product((own_again, *AGAIN), (None, *UNROLL)):

        def unroll(nest: Any, step: Any, beside: int | None = beside) -> int:
            usual = own_unroll(nest, step)
            return usual if beside is None or usual == 1 else beside

        with patch.object(tiles, "RECOMPUTE", again), patch.object(tiles, "unroll", unroll):
            planned = planned_of(family)
            if planned.kernel.source in seen:
                continue
            seen.add(planned.kernel.source)
            [function] = libraries([planned.kernel.source])
            for tile, own in tilings(planned):
                if again != own_again or beside is not None:
                    own = False
                words = f"again {again}, unroll {beside or 'usual'}, {tile.chunk} x {tile.tile}"
                yield runnable(family, planned, function, tile, words, own)


def tilings(planned: PlannedGroup) -> Iterator[tuple[Tiling, bool]]:
    """The compiler's own first."""
    nest = planned.kernel.nest
    rows = int(product(nest.sizes[a] for a in nest.outer))
    last = int(nest.sizes[nest.inner[-1]])
    usual = tiling(nest, rows, last, this_machine())
    yield usual, True
    lanes = this_machine().isa.lanes
    free = not nest.has_row and len(nest.inner) == 1
    chunks = sorted({max(1, rows >> k) for k in range(0, 15, 1 if free else 2)})
    points = [last >> k for k in range(0, 14) if last >> k >= lanes] if free else [last]
    for chunk, tile in itertools.product(chunks, points):
        if (chunk, tile) != (usual.chunk, usual.tile):
            many = -(-rows // chunk) * -(-last // tile) > 1
            yield replace(usual, chunk=chunk, tile=tile, parallel=many and torch.get_num_threads() > 1), False


@cache
def memory_for(number: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """One for all tiles, which so find the same caches."""
    return torch.empty_strided(shape, strides, dtype=dtype)


def runnable(family: Family, planned: PlannedGroup, function: Any, tile: Tiling, words: str, own: bool) -> Tile:
    nest, kernel = planned.kernel.nest, planned.kernel
    placeholders = [n for n in planned.inputs[0].graph.nodes if n.op == "placeholder"]
    given = {node.name: tensor for node, tensor in zip(placeholders, family.inputs, strict=True)}
    memory = [given[str(nest.body.inputs[slot].node)] for slot in kernel.slots]
    outputs = [
        memory_for(number, tuple(int(s) for s in out.shape), tuple(int(s) for s in out.memory), out.dtype)
        for number, out in enumerate(nest.outputs)
    ]
    every = (tile.chunk, tile.chunks, tile.tile, tile.tiles, int(tile.parallel), int(tile.past))
    sizes = [int(size) for size in kernel.sizes]
    array = (ctypes.c_int64 * (len(every) + len(sizes)))(*every, *sizes)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*memory, *outputs)]
    moved = sum(moved_bytes(planned, None).values())
    points = int(product(nest.sizes[a] for a in nest.inner))
    foretold = cost(nest, tile, points // tile.points, moved, torch.get_num_threads(), rates(), this_machine())
    keep = (memory, outputs)

    def run(keep: object = keep) -> object:
        return function(array, *pointers)

    tie = 1e-6 * foretold.compute_s
    return Tile(words=words, own=own, predicted_s=foretold.seconds + tie, run=run)


def measured(every: Sequence[Tile], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each, twice: the fastest of the even and of the odd rounds, each of which runs all in a new order."""
    best = [float("inf")] * len(every), [float("inf")] * len(every)
    order = list(range(len(every)))
    for turn in range(rounds):
        random.shuffle(order)
        half = best[turn % 2]
        for number in order:
            began = time.perf_counter()
            every[number].run()
            half[number] = min(half[number], time.perf_counter() - began)
    return best


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> Any:
        x = np.asarray(values)
        _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--all", action="store_true", help="print each tile too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(rates())
    print(
        "| family | tiles | Spearman | of measuring with itself | model's / best | compiler's / best | slowest / best "
        "| best, predicted us |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for family in families():
        if options.only and options.only not in family.name:
            continue
        every = list(choices(family))
        halves = measured(every, options.rounds)
        took = [min(both) for both in zip(*halves, strict=True)]
        best = min(took)
        first = took[min(range(len(every)), key=lambda n: every[n].predicted_s)]
        own = took[next(n for n, tile in enumerate(every) if tile.own)]
        rank = spearman([tile.predicted_s for tile in every], took)
        at_best = every[took.index(best)].predicted_s
        if options.all:
            for n in sorted(range(len(every)), key=took.__getitem__):
                print(f"    {every[n].words}: {took[n] * 1e6:.0f} us, predicted {every[n].predicted_s * 1e6:.0f}")
        print(
            f"| {family.name} | {len(every)} | {rank:.2f} | {spearman(*halves):.2f} "
            f"| {first / best:.2f} | {own / best:.2f} "
            f"| {max(took) / best:.2f} | {best * 1e6:.0f}, {at_best * 1e6:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
