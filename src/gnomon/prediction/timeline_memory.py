"""What a predicted Timeline holds and moves: memory over time by class, and the bytes and FLOPs of every span.

`filled(timeline, structure, pricing, sizes, memory)` returns the played Timeline with the classes that `RankMemory`
names (parameters, gradients … overhead) as its buffers, so that the curve of a rank reaches its predicted peak. What
stays between steps, and what the allocator takes at the peak, is there throughout. Leaves out host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from gnomon.prediction.memory import RankMemory, gradients_made, held_moves, logits_bytes
from gnomon.prediction.step import Pricing
from gnomon.prediction.temporary_memory import temporaries, unmade_gradients
from gnomon.program import Program, Structure
from gnomon.timeline import NONE, Memory, Spans, Timeline

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moves:
    """Allocations (positive) and frees, one row each."""

    row: Longs
    """Row of the Program."""
    cls: Longs
    """Class of memory, as an index into the names."""
    change: Doubles
    """Bytes."""
    at_start: Bools
    """Of the row; otherwise at its end."""


def filled(
    timeline: Timeline,
    structure: Structure,
    pricing: Pricing,
    sizes: Mapping[str, float],
    memory: Sequence[RankMemory],
) -> Timeline:
    """The Timeline with memory by class, and bytes and FLOPs of its spans (of one rank; NONE where there are none).

    timeline: one step that `simulate` played from `structure`, from rest or of the steady state. sizes: of the
    Program's buffers. memory: of every rank class; of several kinds of worker in one, the fullest is shown.
    """
    program = structure.program
    names = tuple(dict.fromkeys(name for rank in memory for name in rank.by_class))
    moves = _moves(structure, pricing, sizes, names)
    span = _span_of_row(structure)[moves.row]
    worker = np.searchsorted(program.class_ptr, moves.row, side="right") - 1
    starts, ends = timeline.spans.start_s, timeline.spans.end_s
    filled_memory = Memory.of(
        worker=worker,
        buffer=moves.cls,
        span=span,
        time_s=np.where(moves.at_start, starts[span], ends[span]),
        change_bytes=moves.change,
        resident_bytes=_resident(program, moves, memory, names),
    )
    nbytes, flops = _amounts(structure, pricing)
    columns = {column.name: getattr(timeline.spans, column.name) for column in fields(Spans)}
    spans = Spans(**(columns | {"nbytes": nbytes, "flops": flops}))
    return replace(timeline, spans=spans, buffers=names, memory=filled_memory)


def _span_of_row(structure: Structure) -> Longs:
    """Span of each row: spans are in the order of their first rows, and rows that run as one share a span."""
    order = structure.order
    span = np.empty(order.size, np.int64)
    # position[row] is the place of the row's action; the first row of each action, ascending, numbers the spans.
    span[order.position[np.sort(order.rows)]] = np.arange(order.size)
    spans: Longs = span[order.position]
    return spans


def _moves(structure: Structure, pricing: Pricing, sizes: Mapping[str, float], names: Sequence[str]) -> _Moves:
    """What comes and goes by class: buffers, the logits among them apart, and what lives inside an action."""
    program = structure.program
    moved = held_moves(structure, pricing, sizes)
    known = [buffer.memory for buffer in program.buffers]
    of = np.array([NONE if name == "not in the step's" else names.index(name) for name in known])
    cls = of[moved.buffer]
    saved = np.array([b.name == "S" for b in program.buffers])[moved.buffer]
    # Logits are part of the buffer S; they are shown by themselves, so each change of S is divided in two.
    share = np.array([logits_bytes(pricing, s) / max(sizes.get(f"{s}S", 0.0), 1.0) for s in range(program.num_stages)])
    logits = np.where(saved, np.rint(moved.bytes * share[program.stage[moved.row]]), 0.0)
    inside = temporaries(program, pricing, gradients_made(program, pricing, moved))
    unmade = np.zeros(program.num_rows)
    for made_in, absent in unmade_gradients(program, pricing).items():
        unmade[made_in] = absent
    inside = inside + unmade
    brief, late = np.flatnonzero(inside), np.flatnonzero(unmade)
    row = np.concatenate([moved.row, moved.row, brief, brief, late, late])
    kind = np.concatenate(
        [
            cls,
            np.full(len(logits), names.index("logits")),
            np.full(2 * len(brief), names.index("temporary")),
            np.full(2 * len(late), names.index("gradients")),
        ]
    )
    # What lives inside an action comes at its start and goes at its end. `unmade` is the other way round: room that
    # gradients not made yet do not take while the action runs.
    change = np.concatenate([moved.bytes - logits, logits, inside[brief], -inside[brief], -unmade[late], unmade[late]])
    begins, comes = np.ones(len(brief), bool), np.ones(len(late), bool)
    at_start = np.concatenate([moved.at_start, moved.at_start, begins, ~begins, comes, ~comes])
    real = (change != 0) & (kind >= 0)
    return _Moves(
        row=row[real].astype(np.int64),
        cls=kind[real].astype(np.int64),
        change=change[real],
        at_start=at_start[real],
    )


def _resident(program: Program, moves: _Moves, memory: Sequence[RankMemory], names: Sequence[str]) -> Doubles:
    """[rank classes, classes of memory] bytes that are there throughout: those of the peak, less what has come and
    gone by then in the order of issue."""
    out = np.zeros((program.num_classes, len(names)))
    fullest = {rank.rank_class: rank for rank in sorted(memory, key=lambda rank: rank.peak_bytes)}
    for cls, rank in fullest.items():
        low, high = int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])
        mine = (moves.row >= low) & (moves.row < high)
        row, kind, change = moves.row[mine] - low, moves.cls[mine], moves.change[mine]
        starts = moves.at_start[mine]
        ended = np.bincount(row, np.where(starts, 0.0, change), high - low)
        # The peak is inside a row: what the row itself frees at its end is still there.
        top = int(np.argmax(np.cumsum(np.bincount(row, change, high - low)) - ended))
        there = (row < top) | ((row == top) & starts)
        come = np.bincount(kind[there], change[there], len(names))
        at_peak = np.array([rank.by_class.get(name, 0) for name in names], float)
        out[cls] = np.maximum(at_peak - come, 0.0)
    return out


def _amounts(structure: Structure, pricing: Pricing) -> tuple[Longs, Doubles]:
    """(bytes moved, FLOPs) of every span: those of its rows together."""
    program = structure.program
    amounts = np.array([pricing.amounts(key) for key in program.keys]).reshape(-1, 2)[program.key]
    span, count = _span_of_row(structure), structure.order.size
    nbytes, flops = (np.bincount(span, np.maximum(amounts[:, i], 0.0), count) for i in (0, 1))
    return (
        np.where(nbytes > 0, nbytes, NONE).astype(np.int64),
        np.where(flops > 0, flops, float(NONE)).astype(np.float64),
    )
