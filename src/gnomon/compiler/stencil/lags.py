"""Which rows of a stencil's stages are alive when: stages follow each other by so many rows that each finds its
neighbours, and each keeps as many rows as the stages behind it still read.

`pipeline(stencil)` gives the rows' order, lags and rings. Whoever walks time t computes row t - lag of each stage in
order; a ring of `ring` rows is all that is kept of a stage. Inputs that are read beyond their edges are copied row by
row, with their edges. Leaves out tiles (`tile`) and text.
Source: sliding windows of Halide (PLDI 2013), along time those of wavefront tiling (Wolf, Lam, PLDI 1991).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from gnomon.compiler.stencil.stages import Read, Stage, Stencil

WAYS = 8
"""Rows that one stage reads at a time up to which they stay in the first cache together: rows of images begin at the
same place of a page, and a cache has so many lines for one."""
Place = tuple[int, int, int]
"""Along the three dims in which a printer walks: rows, what lies between, and points of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggedArray:
    """One array whose rows are computed in turn: a stage's, or a copy of an input's with its edges."""

    stage: Stage | None
    source: Any
    """The input's node of a copy, the stage's own node else."""
    outside: float | Literal["wrap"] | None
    lag: int
    ring: int
    """Rows that are kept; 0 where nobody reads it here."""
    output: bool
    ends: bool = False
    """Whether, of a copy, only the ends of rows need to be made: what lies between may be read where it is."""

    @property
    def copies(self) -> bool:
        return self.stage is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    stencil: Stencil
    rows: tuple[LaggedArray, ...]
    """Whoever walks time t computes rows t - lag and the block's others of each in order."""
    users: tuple[tuple[tuple[int, Place], ...], ...]
    """By row: who reads it, and at which shift."""
    block: int
    """Rows of each that are computed at a time, so that they share what they load."""

    def place(self, shift: tuple[int, ...]) -> Place:
        """A shift along the three dims."""
        spatial = shift[self.first :]
        if len(spatial) == 1:
            return (0, 0, spatial[0])
        return (spatial[0], 0, spatial[1]) if len(spatial) == 2 else (spatial[0], spatial[1], spatial[2])

    def sizes(self, sizes: tuple[int, ...]) -> Place:
        spatial = sizes[self.first :]
        if len(spatial) == 1:
            return (1, 1, spatial[0])
        return (spatial[0], 1, spatial[1]) if len(spatial) == 2 else (spatial[0], spatial[1], spatial[2])

    @property
    def first(self) -> int:
        """The first dim in which something is shifted."""
        return self.stencil.batch + (self.stencil.channel is not None)

    def row_of(self, read: Read) -> int | None:
        """The row that a read is of; None where it is memory."""
        for n, row in enumerate(self.rows):
            if row.source is read.field and (row.stage is not None or alike(row.outside, read.outside)):
                return n
        return None


def alike(a: object, b: object) -> bool:
    """Whether the same stands outside: a NaN is no other NaN, and -0 is not 0."""
    return repr(a) == repr(b)


def pipeline(stencil: Stencil, block: int = 1) -> Pipeline:
    """Rows in order, each as early as what it reads allows. block: rows of each that are computed at a time."""
    inner_fields = {one.node for one in stencil.stages}
    edges = {
        (read.field, repr(read.outside)): read.outside
        for one in stencil.stages
        for read in one.reads()
        if read.field not in inner_fields and read.outside is not None
    }
    rows = [
        LaggedArray(stage=None, source=field, outside=outside, lag=0, ring=1, output=False)
        for (field, _), outside in edges.items()
    ]
    for one in stencil.stages:
        outside = next(
            (r.outside for s in stencil.stages for r in s.reads() if r.field is one.node and r.outside is not None),
            None,
        )
        output = any(node is one.node for node in stencil.outputs)
        rows.append(LaggedArray(stage=one, source=one.node, outside=outside, lag=0, ring=0, output=output))
    found = Pipeline(stencil=stencil, rows=tuple(rows), users=(), block=block)
    users: list[list[tuple[int, Place]]] = [[] for _ in rows]
    lags = [0] * len(rows)
    for n, row in enumerate(rows):
        for read in row.stage.reads() if row.stage is not None else ():
            of = found.row_of(read)
            if of is not None:
                shift = found.place(read.shift)
                users[of].append((n, shift))
                # At time t this one is at row t - lag and reads row t - lag + shift, which the other has made if that
                # is at most t - its lag.
                lags[n] = max(lags[n], lags[of] + shift[0])
    made_rows = []
    for n, row in enumerate(rows):
        # From the oldest row that the user still reads, t - lag of the user + shift, to the newest, t - own lag, both
        # counted.
        rings = [lags[user] - lags[n] - shift[0] + 1 for user, shift in users[n]]
        ends = row.copies and _read_where_it_is(stencil, row, found, block)
        made_rows.append(replace(row, lag=lags[n], ring=max(rings) + block - 1 if rings else 0, ends=ends))
    return Pipeline(stencil=stencil, rows=tuple(made_rows), users=tuple(tuple(one) for one in users), block=block)


def _read_where_it_is(stencil: Stencil, row: LaggedArray, found: Pipeline, block: int) -> bool:
    """Whether who reads an input beyond its edges may read all but the ends of its rows from memory: where a copy has
    the same type, and few enough rows are read at a time."""
    if row.source.meta["val"].dtype not in (torch.float32, torch.float64):
        return False
    for one in stencil.stages:
        reads = one.reads()
        of_row = [read for read in reads if read.field is row.source and alike(read.outside, row.outside)]
        if one.base in of_row:
            return False
        if of_row:
            places = {(read.field, read.channel, *found.place(read.shift)[:2]) for read in reads}
            many = {(field, channel, s + later, m) for field, channel, s, m in places for later in range(block)}
            if len(many) > WAYS:
                return False
    return True


def parts(stencil: Stencil, depth: int) -> list[Stencil]:
    """The stencil cut after every `depth` stages, each part with what it takes from and leaves to the others."""
    if depth >= len(stencil.stages):
        return [stencil]
    out = []
    for begin in range(0, len(stencil.stages), depth):
        here = stencil.stages[begin : begin + depth]
        nodes = {one.node for one in here}
        later = {read.field for one in stencil.stages[begin + depth :] for read in one.reads()}
        outputs = [one.node for one in here if one.node in later or one.node in stencil.outputs]
        inputs: dict[Any, None] = {}
        for one in here:
            for _, source in one.slots():
                node = source.field if isinstance(source, Read) else source.weight
                if node not in nodes:
                    inputs[node] = None
            if one.base is not None and one.base.field not in nodes:
                inputs[one.base.field] = None
        out.append(replace(stencil, stages=here, inputs=tuple(inputs), outputs=tuple(outputs)))
    return out
