"""Gradients that ranks of tp and ep add up once a step: norms and routers under sequence parallelism, copied heads,
experts that several ranks hold.

`tensor_sums` reads from the sharding which stages have parameters of which every tp rank has a term of the gradient
(each saw its part of the tokens) or which several tp ranks hold copies of (fewer key-value heads than tp);
`with_tensor_sums` inserts an AR for each before the update. Left out: sums within blocks, which are the blocks' own,
and bytes, which `sharding.parameter_collectives` has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from gnomon.errors import PlanError
from gnomon.graph import BF16, Block, Graph, Layer
from gnomon.lowering.gradients import WRITES_GRADIENTS
from gnomon.plans import Layout, Mesh
from gnomon.program import NO_UNIT, BufferRef, Communicator, Override, RowEffect
from gnomon.program.rows import KIND, Inserted, Rows, insert
from gnomon.sharding import shard_block
from gnomon.units import distinct

TERMS, COPIES, REPLICAS = "tp", "kv_copies", "replicas"
"""Communicators, and price names, of the sums: over all tp ranks, over those that hold one head's copies, and over
those of ep that hold one expert's (FlexMoE)."""


def tensor_sums(
    graph: Graph, layout: Layout, parts: Iterable[tuple[Mesh, Sequence[Layer]]]
) -> tuple[tuple[int, str], ...]:
    """(stage, TERMS, COPIES or REPLICAS) of each sum. parts: mesh and layers of each stage."""

    sums: dict[tuple[int, str], None] = {}
    for stage, (mesh, layers) in enumerate(parts):
        # Layers of one block are alike, so each kind of block is asked once.
        blocks = dict.fromkeys(layer.call.block for layer in layers) if mesh.tp > 1 else ()
        names = [_needed(graph.block(name), layout, _alike(mesh)) for name in blocks]
        sums.update(((stage, name), None) for name in (TERMS, COPIES) if any(name in needed for needed in names))
        if mesh.ep > 1 and any(_has_replicas(graph.block(layer.call.block)) for layer in layers):
            sums[stage, REPLICAS] = None
    return tuple(sums)


def _has_replicas(block: Block) -> bool:
    return any(op.does == "dispatches" and op.attr("replicas", 0) for op in block.ops)


@lru_cache(maxsize=1024)
def _alike(mesh: Mesh) -> Mesh:
    """The mesh with as few data-parallel ranks as experts leave: they change nothing here."""
    return replace(mesh, dp_replicate=1, dp_shard=mesh.ep * mesh.etp)


@lru_cache(maxsize=1024)
def _needed(block: Block, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The sums that a block's parameters need."""
    sizes = {dim.name: 2 * mesh.cp * mesh.tp for dim in block.dims if dim.size is None}  # any that axes divide
    sharded = shard_block(block, layout, mesh, sizes, BF16)
    terms = any("tp" in axes for axes in sharded.partial_grads.values())
    return (*((TERMS,) if terms else ()), *((COPIES,) if sharded.copies else ()))


def with_tensor_sums(rows: Rows, sums: Sequence[tuple[int, str]], *, buffer: str = "G") -> Rows:
    """The rows with an AR for each sum before its rank's first update, or, where the update is on the host, before the
    gradient goes there (D2H).

    buffer: what is summed, the gradient or its shard. PlanError where a stage with a sum has no update.
    """
    # Where the kind AR adds to this buffer itself, its rows need no effects of their own.
    usual = any(effect.buffer == buffer for kind in rows.kinds if kind.name == "AR" for effect in kind.effects)
    anchors, parts = _anchors(rows, buffer), []
    for stage, name in sums:
        for anchor in anchors.get(stage, ()):
            effect = RowEffect("accumulate", BufferRef(buffer, stage))
            part = Inserted(
                anchor=np.array([anchor], np.int64),
                kind=np.array([KIND["AR"]], np.int8),
                stage=np.array([stage], np.int16),
                unit=np.array([NO_UNIT], np.int32),
                before=True,
                override=Override(comm=name, name=name, effects=None if usual else (effect,)),
            )
            parts.append(part)
    if {stage for stage, _ in sums} - set(anchors):
        raise PlanError("tensor-parallel ranks add up gradients before the update (OPT), which a stage here has not")
    comms = {comm.name: comm for comm in rows.comms}
    for _, name in sums:
        comms.setdefault(name, Communicator(name=name, semantics="collective"))
    return replace(insert(rows, parts), comms=tuple(comms.values())) if sums else rows


def _anchors(rows: Rows, buffer: str) -> dict[int, list[int]]:
    """Stage -> the row, on each rank that updates it, before which its gradient must be whole: the rank's first update,
    or the norm of all gradients where that is measured already: among gradients that stay (`streaming`), or before they
    go to the host (`offload_optimizer`)."""
    anchors: dict[int, list[int]] = {}
    updates = np.flatnonzero(rows.is_kind("OPT"))
    read = np.flatnonzero(rows.is_kind(*({"OPT", "NORM"} & {kind.name for kind in rows.kinds})))
    classes = rows.rank_class[updates]
    for stage in distinct(rows.stage[updates]).tolist():
        mine = distinct(classes[rows.stage[updates] == stage])
        anchors[stage] = [int(read[rows.rank_class[read] == cls][0]) for cls in mine]
    if not any(kind.name == "D2H" for kind in rows.kinds):
        return anchors
    measured = _measured_norms(rows)
    for row in np.flatnonzero(rows.is_kind("D2H")).tolist():
        override = rows.overrides.get(row)
        named = [e.ref.stage for e in override.effects or () if e.ref.buffer == buffer] if override else []
        for stage in dict.fromkeys(named) or (int(rows.stage[row]),):
            # Before the gradient goes down, and before the norm where that is measured first.
            anchors.setdefault(stage, []).append(min(row, measured.get(int(rows.rank_class[row]), row)))
    return anchors


def _measured_norms(rows: Rows) -> dict[int, int]:
    """Rank class -> its first norm of gradients of this step. One before all of the step's gradients is of those of the
    step before (`delayed_update`), which were added up then."""
    norms: dict[int, int] = {}
    gradient_writes = np.flatnonzero(rows.is_kind(*WRITES_GRADIENTS))
    for row in np.flatnonzero(rows.is_kind("NORM")).tolist():
        cls = int(rows.rank_class[row])
        if (rows.rank_class[gradient_writes[gradient_writes < row]] == cls).any():
            norms.setdefault(cls, row)
    return norms
