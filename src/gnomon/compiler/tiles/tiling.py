"""From a body to a loop nest: axes ordered and merged, passes over a row, and the level at which each edge lives.

`Nest` is the tile graph: rows (outer axes), points (inner axes), for each pass the values computed in it, and
for each value used in a later pass whether it is computed again, kept in the row's scratch in cache, or read
back from an output. `tiling` constructs tile sizes from cache sizes and vector width (Roller): nothing is
searched. One traffic model counts bytes by level for all of it (Welder). Leaves out text (`nest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gnomon.compiler.machine import Machine
from gnomon.compiler.tiles.body import Body, Input, Tensor, UnfitError
from gnomon.compiler.tiles.sizes import Size, equal, hint, product
from gnomon.compiler.tiles.stages import COST, POST, Stages, classify, cost, live

RECOMPUTE = 6
"""Vector instructions up to which a value is computed again in a later pass; scratch costs as much."""

AN_INSTRUCTION_BYTES = 10
"""Bytes that move past the caches while a core does a vector instruction: 30 GB/s, 3.3 GHz, one each cycle."""
WALK_INSTRUCTIONS = 50
"""Instructions to find a row's places and to fill the core, before vectors follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    key: Any
    """The node that makes it, or (node, which result)."""
    value: int
    """The value of the body that is stored."""
    dtype: torch.dtype
    """As it lies in memory."""
    shape: tuple[Size, ...]
    """Sizes of its dims."""
    memory: tuple[Size, ...]
    """Strides by dim in elements, as the tensor is allocated."""
    strides: dict[int, Size]
    """Strides by axis in elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One walk along a row: what it computes, adds up and stores."""

    level: int
    """Its place among walks along the row, 0 the first: reductions of those before it are known."""
    values: tuple[int, ...]
    """Values that it computes."""
    reductions: tuple[int, ...]
    """Values that it adds up along the row."""
    stores: tuple[int, ...]
    """Indices into `Nest.outputs`."""
    read_back: dict[int, str]
    """Maps a value of an earlier pass to where it is read: `scratch` or `output N`."""
    scratch: tuple[int, ...]
    """Values that it puts in scratch for later passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    body: Body
    """What is computed at each point."""
    stages: Stages
    """At which level each value is known."""
    outputs: tuple[Output, ...]
    """What is stored."""
    outer: tuple[int, ...]
    """Axes in the order of loops, the slowest first; what was merged is gone from both lists."""
    inner: tuple[int, ...]
    """Axes along a row, the slowest first."""
    sizes: dict[int, Size]
    """Size of each axis that is left."""
    passes: tuple[Pass, ...]
    """Walks along a row, one after the other."""
    post: tuple[int, ...]
    """Values known after all rows."""
    scratch: tuple[int, ...]
    """Values that later passes read from the row's scratch."""

    @property
    def has_row(self) -> bool:
        return "row" in self.stages.roles.values()

    @property
    def has_column(self) -> bool:
        return "column" in self.stages.roles.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    rows: int
    """Rows in all."""
    points: int
    """Points of a row."""
    chunk: int
    """Rows of one task."""
    tile: int
    """Points of one task."""
    parallel: bool
    """Whether tasks are shared out among threads."""
    past: bool
    """Whether outputs are written past the caches: nothing of them would be there when somebody reads them."""

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk)

    @property
    def tiles(self) -> int:
        return -(-self.points // self.tile)


def output(body: Body, key: Any, tensor: Tensor, memory: Sequence[Size]) -> Output:
    strides: dict[int, Size] = {}
    for size, stride, dim in zip(tensor.sizes, memory, tensor.dims, strict=True):
        if not dim and not equal(size, 1):
            raise UnfitError("an output that is a broadcast")
        step = stride
        # A dim may be several axes, row-major: the last one has the dim's stride, those before it multiples of it.
        for axis in reversed(dim):
            strides[axis] = step
            step = product((step, body.axes[axis]))
    return Output(
        key=key,
        value=tensor.value,
        dtype=tensor.dtype,
        shape=tensor.sizes,
        memory=tuple(memory),
        strides=strides,
    )


def nest(body: Body, outputs: Sequence[Output], environment: Any) -> Nest:
    """The loop nest of a body whose outputs are known; raises `UnfitError` where there is none."""
    roots = [out.value for out in outputs]
    stages = classify(body, roots)
    stages = _widened(body, stages, outputs)
    values = live(body, roots)
    for out in outputs:
        _check_store(body, stages, out)
    outer, inner = _ordered(body, stages, outputs, values, environment)
    merged = _merge(body, outputs, values, outer, inner, free=not stages.roles)
    body, outputs, outer, inner, sizes = merged
    stages = replace(stages, inner=frozenset(inner), outer=frozenset(outer))
    passes, scratch = _passes(body, stages, outputs, values)
    post = tuple(i for i in values if stages.level[i] == POST)
    return Nest(
        body=body,
        stages=stages,
        outputs=tuple(outputs),
        outer=outer,
        inner=inner,
        sizes=sizes,
        passes=passes,
        post=post,
        scratch=scratch,
    )


def _widened(body: Body, stages: Stages, outputs: Sequence[Output]) -> Stages:
    """Adds axes along which outputs are stored though no value varies along them (a broadcast that is kept)."""
    stored = frozenset().union(*(frozenset(out.strides) for out in outputs)) if outputs else frozenset()
    extra_stages = stored - stages.inner - stages.outer
    if not extra_stages:
        return stages
    if stages.roles or not stages.inner and not stages.outer:
        if stages.roles:
            raise UnfitError("a reduction that is stored as a broadcast")
        # Something must be the inner loop: the axis along which memory is contiguous.
        fast = next((a for out in outputs for a, s in out.strides.items() if equal(s, 1)), max(extra_stages))
        return replace(stages, inner=frozenset({fast}), outer=frozenset(extra_stages - {fast}))
    return replace(stages, outer=stages.outer | extra_stages)


def _check_store(body: Body, stages: Stages, out: Output) -> None:
    along = frozenset(out.strides)
    level = stages.level[out.value]
    if level == POST or (not along and not body.code[out.value].axes):
        if along & stages.outer:
            raise UnfitError("a result of all rows stored for each")
        return
    # Rows are dealt to tasks: an output that several rows write would race.
    if along & stages.outer != stages.outer:
        raise UnfitError("an output that rows share")
    if along & stages.inner and along & stages.inner != stages.inner:
        raise UnfitError("an output along a part of the row")
    if body.code[out.value].axes - along:
        raise UnfitError("an output without an axis of its value")


def _ordered(
    body: Body, stages: Stages, outputs: Sequence[Output], values: Sequence[int], environment: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes from the slowest to the fastest of the memory that has most of them."""
    refs: list[dict[int, Size]] = [out.strides for out in outputs]
    refs += [body.inputs[body.code[i].attr].strides for i in values if body.code[i].op in ("load", "take")]
    whole = max(refs, key=lambda r: len(r), default={})
    # The largest stride first: the inner loop then walks contiguous memory.
    place = {axis: hint(stride, environment) for axis, stride in whole.items()}

    def key(axis: int) -> tuple[int, int]:
        return (-place.get(axis, -1), axis)

    return tuple(sorted(stages.outer, key=key)), tuple(sorted(stages.inner, key=key))


def _merge(
    body: Body,
    outputs: Sequence[Output],
    values: Sequence[int],
    outer: tuple[int, ...],
    inner: tuple[int, ...],
    free: bool,
) -> tuple[Body, list[Output], tuple[int, ...], tuple[int, ...], dict[int, Size]]:
    """Neighbouring axes that all memory walks as one become one; `free`: rows and points may become one too."""
    body = body.copy()
    # Merging changes strides and sizes; the caller's body is left as it was.
    outputs = list(outputs)
    sizes = dict(enumerate(body.axes))
    used = {body.code[i].attr for i in values if body.code[i].op in ("load", "take")}
    fixed = {body.code[i].attr for i in values if body.code[i].op in ("index", "is_at")}

    def walks_as_one(strides: dict[int, Size], a: int, b: int) -> bool:
        # Walked as one: stepping a by 1 is stepping b by its whole size, in every array that has either.
        if a not in strides and b not in strides:
            return True
        return a in strides and b in strides and equal(strides[a], product((strides[b], sizes[b])))

    def merge(axes: tuple[int, ...]) -> tuple[int, ...]:
        out = list(axes)
        # From the inside out, so that a merged axis can be merged again with the one before it.
        i = len(out) - 2
        while i >= 0:
            a, b = out[i], out[i + 1]
            refs = [body.inputs[s].strides for s in used] + [o.strides for o in outputs]
            # An axis whose index is read as a number must keep its meaning.
            if not {a, b} & fixed and all(walks_as_one(strides, a, b) for strides in refs):
                sizes[b] = product((sizes[a], sizes[b]))
                for s in used:
                    body.inputs[s] = replace(body.inputs[s], strides=_without(body.inputs[s].strides, a))
                outputs[:] = [replace(o, strides=_without(o.strides, a)) for o in outputs]
                del out[i]
            i -= 1
        return tuple(out)

    # Without reductions nothing distinguishes rows from points: all of it may be one long loop.
    if free:
        every = merge((*outer, *inner))
        return body, outputs, every[:-1], every[-1:], sizes
    return body, outputs, merge(outer), merge(inner), sizes


def _without(strides: dict[int, Size], axis: int) -> dict[int, Size]:
    return {a: s for a, s in strides.items() if a != axis}


def _passes(
    # One pass for each level of values: a reduction's result is known only after the whole row, so what reads it comes
    # in a later pass.
    body: Body,
    stages: Stages,
    outputs: Sequence[Output],
    values: Sequence[int],
) -> tuple[tuple[Pass, ...], tuple[int, ...]]:
    level = stages.level
    reductions = {i: level[body.code[i].args[0]] for i in stages.roles}
    stores = {
        n: level[out.value]
        for n, out in enumerate(outputs)
        if level[out.value] != POST and (frozenset(out.strides) & _inner_axes(outputs, stages, body))
    }
    checks = [i for i in values if body.code[i].op == "check" and level[i] != POST and _in_row(body, stages, i)]
    levels = sorted(
        {
            *(at for i, at in reductions.items() if _in_row(body, stages, body.code[i].args[0])),
            *stores.values(),
            *(level[i] for i in checks),
        }
    )
    passes: list[Pass] = []
    done: dict[int, int] = {}
    stored: dict[int, int] = {}
    scratch: dict[int, int] = {}
    for at in levels:
        summed = tuple(
            i for i, when in reductions.items() if when == at and _in_row(body, stages, body.code[i].args[0])
        )
        stored_here = tuple(n for n, when in stores.items() if when == at)
        roots = [body.code[i].args[0] for i in summed] + [outputs[n].value for n in stored_here]
        roots += [i for i in checks if level[i] == at]
        here, back = _needed(body, stages, roots, done, stored, len(passes))
        for value in back:
            if back[value] == "scratch":
                scratch[value] = done[value]
        passes.append(
            Pass(
                level=at, values=tuple(sorted(here)), reductions=summed, stores=stored_here, read_back=back, scratch=()
            )
        )
        for value in here:
            done.setdefault(value, len(passes) - 1)
        # A stored float32, float64 or int64 can be read back bit for bit; narrower outputs were rounded.
        for n in stored_here:
            if outputs[n].dtype in (torch.float32, torch.float64, torch.int64):
                stored[outputs[n].value] = n
    filled = [replace(p, scratch=tuple(v for v, where in scratch.items() if where == n)) for n, p in enumerate(passes)]
    return tuple(filled), tuple(sorted(scratch))


def _inner_axes(outputs: Sequence[Output], stages: Stages, body: Body) -> frozenset[int]:
    return stages.inner


def _in_row(body: Body, stages: Stages, value: int) -> bool:
    """Whether a value differs along the row."""
    return bool(body.code[value].axes & stages.inner)


def _needed(
    body: Body, stages: Stages, roots: Sequence[int], done: dict[int, int], stored: dict[int, int], now: int
) -> tuple[set[int], dict[int, str]]:
    """Values to compute in a pass, and those of earlier passes to read back."""
    here: set[int] = set()
    back: dict[int, str] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if value in here or value in back:
            continue
        if value not in roots or value not in stages.roles:
            if body.code[value].op != "check" and not _in_row(body, stages, value):
                continue  # the same for the whole row: computed between passes
        # Cheap values are computed again: scratch costs a store and a load, which is as much as RECOMPUTE instructions.
        if value in done and done[value] < now and cost(body, value) > RECOMPUTE:
            back[value] = f"output {stored[value]}" if value in stored else "scratch"
            continue
        here.add(value)
        waiting.extend(body.code[value].args)
    return here, back


def tiling(nest: Nest, rows: int, points: int, machine: Machine) -> Tiling:
    """Tiles from hardware units: whole vectors, half of the first cache, tasks of at least 16K elements. They depend on
    sizes alone, never on the number of threads, so that sums are the same with any."""
    lanes = machine.isa.lanes
    row_bytes = max(1, bytes_of_point(nest))
    # tile: as many points as half of L1 holds for all arrays, in multiples of four vectors, at least 32 vectors.
    tile = points
    if not nest.has_row and len(nest.inner) == 1:
        fits = max(machine.l1_bytes // (2 * row_bytes), 1) // (4 * lanes) * (4 * lanes)
        fits = max(fits, 8 * 4 * lanes)
        if points > 2 * fits:
            tile = fits
    tile = max(tile, 1)
    # chunk: rows of a task, so that a task has 16K elements; columns get at most 64 chunks, since each has partial sums
    # of its own.
    chunk = max(1, -(-16_384 // tile))
    if nest.has_column:
        chunk = max(64, -(-rows // 64))
    chunk = min(chunk, max(rows, 1))
    # Below 150,000 units of work a parallel region costs more than it saves.
    work = rows * points * (4 + sum(cost(nest.body, o.value) for o in nest.outputs) // 8)
    many = -(-rows // chunk) * -(-points // tile) > 1
    return Tiling(
        rows=rows,
        points=points,
        chunk=chunk,
        tile=tile,
        parallel=bool(many and work > 150_000),
        # Stores past the caches only where the outputs would not stay in them anyway.
        past=rows * points * row_bytes > machine.l3_bytes
        or (by_memory(nest, points, lanes) and rows * points * moved_of_point(nest) >= machine.l3_bytes // 2),
    )


def unroll(nest: Nest, step: Pass) -> int:
    """Vectors of a pass that are worked on at once: partial sums hide the latency of additions; expensive passes have
    enough to do."""
    if not any(nest.stages.roles[i] != "column" for i in step.reductions):
        return 1
    work = sum(cost(nest.body, nest.body.code[i].args[0]) for i in step.reductions)
    return 4 if work <= 12 else 2


def bytes_of_point(nest: Nest) -> int:
    """Bytes of memory that move for one point of the domain."""
    inner = set(nest.inner)
    total = 0
    for i in {i for p in nest.passes for i in p.values}:
        ins = nest.body.code[i]
        if ins.op in ("load", "take") and inner & set(nest.body.inputs[ins.attr].strides):
            total += nest.body.inputs[ins.attr].dtype.itemsize
    return total + sum(out.dtype.itemsize for out in nest.outputs if inner & set(out.strides))


def moved_of_point(nest: Nest) -> int:
    """Counts bytes of a point as `bytes_of_point`, without what rows share, which comes from memory once."""
    outer, along = set(nest.outer), set(nest.inner[-1:])
    refs = [(nest.body.inputs[slot].strides, nest.body.inputs[slot].dtype) for slot in _read(nest)]
    refs += [(out.strides, out.dtype) for out in nest.outputs]
    return sum(dtype.itemsize for strides, dtype in refs if along & set(strides) and outer <= set(strides))


def by_memory(nest: Nest, points: int, lanes: int) -> bool:
    """Whether the memory of a row takes longer than its instructions."""
    code = nest.body.code
    computed = sum(COST.get(code[i].op, 1) for p in nest.passes for i in p.values if code[i].op not in ("load", "take"))
    instructions = computed * -(-points // lanes) + WALK_INSTRUCTIONS * len(nest.passes)
    return AN_INSTRUCTION_BYTES * instructions <= points * moved_of_point(nest)


def _read(nest: Nest) -> set[int]:
    code = nest.body.code
    return {code[i].attr for p in nest.passes for i in p.values if code[i].op in ("load", "take")}


def memory_of(inp: Input) -> str:
    return f"{inp.node} {str(inp.dtype).removeprefix('torch.')}"
