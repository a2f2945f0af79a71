"""What a tiling of a loop nest costs on this machine, before it runs: bytes by level, instructions, starts of walks.

`cost` adds up, for one choice of tiles, unrolling and levels: vector instructions (a sum's chain of additions where it
is longer), starts of walks along a row, a second read of a row in later passes, running sums of columns and partial
results of tasks at the rate of the cache that holds them, and the bytes that must come from and go to memory, which
overlap with the rest. `rates` measures what that needs, once a process. Leaves out caches that others empty.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from gnomon.compiler.build import libraries
from gnomon.compiler.machine import Machine, this_machine
from gnomon.compiler.tiles import tiling as tiles
from gnomon.compiler.tiles.body import REDUCTIONS
from gnomon.compiler.tiles.stages import COST
from gnomon.compiler.tiles.tiling import Nest, Pass, Tiling

PROBE = """#include "vector.h"
#include "math.h"
extern "C" int gnomon_kernel(const int64_t* __restrict d, float* __restrict x) {
    const int64_t repeats = d[0], points = d[1], what = d[2];
    F a = splat(0), b = splat(0);
    if (what == 0)
        for (int64_t k = 0; k < repeats; k++)
            for (int64_t j = 0; j < points; j += VW) a = a + vexp(ld(x + j));
    else if (what == 1)
        for (int64_t k = 0; k < repeats; k++)
            for (int64_t j = 0; j < points; j += VW) st(x + j, ld(x + j) + 1.0f);
    else if (what == 2)
        for (int64_t k = 0; k < repeats; k++) {
            for (int64_t j = 0; j < points; j += VW) b = b + ld(x + j);
            b = splat(hsum(b) * 1e-30f);
        }
    else if (what == 4)
        for (int64_t k = 0; k < repeats; k++)
            for (int64_t j = 0; j < points; j += VW) b = peak(b, ld(x + j));
    else {
        const int64_t chunk = d[3], tiles = d[4], stride = d[5];
        for (int64_t task = 0; task < repeats / chunk; task++) {
            const int64_t c = task / tiles, lo = task % tiles * points, hi = lo + points < d[7] ? lo + points : d[7];
            for (int64_t row = c * chunk; row < c * chunk + chunk; row++) {
                float* const y = x + row % 64 * stride;
                const bool past = d[6] && (uintptr_t)(y + lo) % sizeof(F) == 0;
                int64_t j = lo;
                for (; j + VW <= hi; j += VW) {
                    if (past) st_past(y + j, ld(y + j) + 1.0f); else st(y + j, ld(y + j) + 1.0f);
                }
                if (j < hi) st(y + j, ld(y + j, (int)(hi - j)) + 1.0f, (int)(hi - j));
            }
        }
    }
    st(x, (a + b) * 1e-30f);
    return 0;
}
"""
PROBE_INSTRUCTIONS = 14
EXP, ADD, SUM, WALK, PEAK = range(5)
STORE, LOAD = 2.0, 0.5
"""Cost of a store and of a load in vector instructions: a core stores half as often as it computes, and loads twice as
often."""
BESIDE = 0.6
"""Share of the other units' work that the busiest one waits for."""
PLACE = 4
"""Instructions to find a row's place in one of its arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One core's, but for memory, which is that of torch's threads together."""

    memory_bytes_per_s: float
    """Bytes a second that reading one array that no cache holds and writing another moves."""
    l3_bytes_per_s: float
    """Bytes a second, read and written in place, in the last cache."""
    l2_bytes_per_s: float
    """Bytes a second, read and written in place, in the second cache."""
    instructions_per_s: float
    """Vector instructions a second, on a polynomial whose data lies in the first cache."""
    addition_s: float
    """Seconds from one addition of a running sum to the next."""
    peak_s: float
    """Seconds from one step of a running maximum to the next."""
    walk_s: float
    """Seconds to begin and end one walk along a row."""
    task_s: float
    """Seconds to begin a task, apart from its first row."""
    gather_s: float
    """Seconds from the last vector of a sum to its one number, which the next pass waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted seconds of a nest under a tiling."""

    memory_s: float
    """Seconds that memory moves what the nest reads and writes."""
    compute_s: float
    """Seconds of the busiest worker, with everything that is not memory."""

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s >= self.compute_s else "compute"


@cache
def rates() -> Rates:
    """Measures the rates once a process; without a compiler they are round figures."""
    return measure_rates(time.perf_counter)


def measure_rates(clock: Callable[[], float]) -> Rates:
    """Measures the rates by a clock: on a machine that others use, that of one's own CPU time."""
    machine = this_machine()
    a = torch.zeros(1 << 23)
    out = torch.zeros_like(a)
    # One array read and one written: 2 x 4 bytes an element.
    memory = 2 * a.numel() * 4 / best(lambda: torch.add(a, 1.0, out=out), clock=clock)
    [function] = libraries([PROBE])
    if function is None:
        return Rates(
            memory_bytes_per_s=memory,
            l3_bytes_per_s=max(memory, 2e10),
            l2_bytes_per_s=5e10,
            instructions_per_s=2e9,
            addition_s=1.3e-9,
            peak_s=1.3e-9,
            walk_s=3e-9,
            task_s=1e-8,
            gather_s=1e-8,
        )
    probed: Callable[..., int] = function

    def seconds(what: int, points: int, repeats: int, chunk: int = 1) -> float:
        x = a[: max(points, 64 * 64)]
        array = (ctypes.c_int64 * 8)(repeats, points, what, chunk, 1, points, 0, points)
        return best(lambda: probed(array, ctypes.c_void_p(x.data_ptr())), clock=clock)

    def moved(cache_bytes: int) -> float:
        # An eighth of the cache in floats, so that the array surely stays in it; enough repeats for 4M elements.
        points = min(cache_bytes // 8 // 64 * 64, a.numel())
        repeats = max(1, (1 << 22) // points)
        return 2 * 4 * points * repeats / seconds(ADD, points, repeats)

    lanes = machine.isa.lanes
    # 1,024 points in L1: instructions and latencies without any memory traffic.
    exp_s, sum_s = seconds(EXP, 1024, 400), seconds(SUM, 1024, 400)
    addition_s = sum_s / (400 * (1024 // lanes))
    repeats = 20_480
    walk_s = seconds(WALK, lanes, repeats, chunk=1024) / repeats
    return Rates(
        memory_bytes_per_s=memory,
        l3_bytes_per_s=moved(machine.l3_bytes),
        l2_bytes_per_s=moved(machine.l2_bytes),
        instructions_per_s=400 * (1024 // lanes) * PROBE_INSTRUCTIONS / exp_s,
        addition_s=addition_s,
        peak_s=seconds(PEAK, 1024, 400) / (400 * (1024 // lanes)),
        walk_s=walk_s,
        # One row a task against 1,024 rows a task: the difference is the task.
        task_s=max(seconds(WALK, lanes, repeats) / repeats - walk_s, 1e-10),
        gather_s=max(seconds(SUM, lanes, repeats) / repeats - addition_s, 1e-10),
    )


def best(call: Callable[[], object], times: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of some calls."""
    found = []
    for _ in range(times):
        began = clock()
        call()
        found.append(clock() - began)
    return min(found)


def cost(nest: Nest, tile: Tiling, walks: int, moved_bytes: int, workers: int, at: Rates, machine: Machine) -> Cost:
    """Prices a nest under a tiling. walks: along the last axis that one row takes, 1 unless a row has several axes.
    moved_bytes: that must come from and go to memory. workers: threads, of which a tiling in parallel uses all."""
    workers = workers if tile.parallel else 1
    lanes, tasks = machine.isa.lanes, tile.chunks * tile.tiles
    visits = tile.rows * tile.tiles
    # A tile that is not the whole row is filled up to whole vectors, each tile by itself.
    vectors = tile.tiles * -(-tile.tile // lanes) if tile.tiles > 1 else -(-tile.points // lanes)
    vector_s = sum(_vector_s(nest, step, at) for step in nest.passes)
    compute_s = tile.rows * walks * vectors * vector_s
    compute_s += tasks * at.task_s + visits * walks * sum(_walk_s(nest, step, at) for step in nest.passes)
    compute_s += _again_s(nest, tile, walks, at, machine)
    columns = sum(role == "column" for role in nest.stages.roles.values())
    if columns:
        running = tile.tile * walks * columns * 4
        compute_s += _beyond_l1_s(2 * 4.0 * tile.rows * tile.points * walks * columns, running, at, machine)
    # Tasks are whole: with few of them the busiest worker has more than its share.
    busiest = -(-tasks // workers) / tasks
    compute_s *= busiest
    if columns:
        # Partial results of columns are added up by one thread after all tasks.
        results = tile.chunks * tile.points * walks * columns  # added up one by one
        compute_s += results / at.instructions_per_s + 2 * 4 * results / _level(4 * results, at, machine)
    # Memory is overlapped with computing (prefetch, out of order): the longer of the two counts (`Cost.seconds`).
    return Cost(memory_s=moved_bytes / _level(moved_bytes, at, machine, workers), compute_s=compute_s)


def instructions(nest: Nest, step: Pass) -> float:
    """Vector instructions for the points of one vector in a pass, most of all of the busiest unit: a core computes,
    loads and stores beside each other."""
    loads = sum(nest.body.code[value].op in ("load", "take") for value in step.values)
    columns = sum(nest.stages.roles[i] == "column" for i in step.reductions)
    loads += len(step.read_back) + columns
    stores = len(step.stores) + len(step.scratch) + columns
    computed = sum(_own(nest, value) for value in step.values) + len(step.reductions)
    most = max(computed, LOAD * loads, STORE * stores)
    return most + BESIDE * (computed + LOAD * loads + STORE * stores - most)


def _walk_s(nest: Nest, step: Pass, at: Rates) -> float:
    """Seconds that one walk of a pass takes apart from its vectors."""
    arrays = sum(nest.body.code[i].op in ("load", "take") for i in step.values)
    arrays += len(step.stores) + len(step.read_back) + len(step.scratch) + len(step.reductions)
    gathered = _gathered(nest, step)
    gathered_sums = (tiles.unroll(nest, step) - 1) * len(gathered)  # sums that become one
    return at.walk_s + (PLACE * arrays + gathered_sums) / at.instructions_per_s + (at.gather_s if gathered else 0.0)


def _gathered(nest: Nest, step: Pass) -> list[int]:
    """Lists what a pass adds up along the row."""
    return [i for i in step.reductions if nest.stages.roles[i] != "column"]


def _own(nest: Nest, value: int) -> float:
    code = nest.body.code[value]
    return 0 if code.op in REDUCTIONS or code.op == "load" else COST.get(code.op, 1)


def _vector_s(nest: Nest, step: Pass, at: Rates) -> float:
    """Seconds of one vector of a pass: its instructions, or the next addition of its longest sum."""
    each = (at.peak_s if nest.body.code[i].op == "peak" else at.addition_s for i in _gathered(nest, step))
    return max(instructions(nest, step) / at.instructions_per_s, max(each, default=0.0) / tiles.unroll(nest, step))


def _again_s(nest: Nest, tile: Tiling, walks: int, at: Rates, machine: Machine) -> float:
    """Seconds for rows that do not stay in the first cache between passes."""
    per_point = 0
    # The first pass brings its rows in; later ones read them again, and scratch is written and read.
    for number, step in enumerate(nest.passes):
        loads = sum(nest.body.code[i].op in ("load", "take") for i in step.values)
        per_point += 4 * len(step.scratch) + 4 * ((loads if number else 0) + len(step.read_back))
    row = 4 * tile.tile * walks * _arrays(nest)
    return _beyond_l1_s(float(per_point) * tile.rows * tile.points * walks, row, at, machine)


def _arrays(nest: Nest) -> int:
    """Counts the arrays along a row that lie next to each other in the first cache while passes go over it."""
    code, inner = nest.body.code, set(nest.inner)
    read = {code[i].attr for step in nest.passes for i in step.values if code[i].op in ("load", "take")}
    loads = sum(bool(inner & set(nest.body.inputs[slot].strides)) for slot in read)
    columns = sum(role == "column" for role in nest.stages.roles.values())
    return loads + columns + len(nest.scratch) + sum(bool(inner & set(out.strides)) for out in nest.outputs)


def _beyond_l1_s(moved: float, room: int, at: Rates, machine: Machine) -> float:
    return 0.0 if room <= machine.l1_bytes else moved / _level(room, at, machine)


def _level(room: float, at: Rates, machine: Machine, workers: int = 1) -> float:
    """Bytes a second of the level that holds so many bytes: half of a cache, since others use it too."""
    if room <= machine.l2_bytes // 2:
        return at.l2_bytes_per_s * workers
    if room <= machine.l3_bytes // 2:
        return at.l3_bytes_per_s * workers
    return at.memory_bytes_per_s
