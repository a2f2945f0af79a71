"""Memory in issue order: what a caching allocator on the host's side sees, a property of the structure alone.

`Sizes` gives each buffer its bytes; `issue_order_peak` replays allocations and frees as issued (allocation at the
start of a row, free at its end) and returns each rank class's peak and the row where it happens. What offload and
prefetch see is the peak in time order, which needs durations: see `simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import UnpricedError, nearest
from gnomon.program.dependencies import Dependencies
from gnomon.program.kinds import EXTEND
from gnomon.program.program import Program, unit_shapes

Doubles = NDArray[np.float64]


def size_labels(buffer: str, stage: int, shape: str, rank_class: int) -> tuple[str, ...]:
    """The labels under which a size may be given, most specific first: `1:2S~4`, `2S~4`, `1:S~4`, `S~4`, `1:2S`, `2S`,
    `1:S`, `S`. The number before the colon is the rank class."""
    shapes = (f"~{shape}", "") if shape else ("",)
    names = [f"{place}{buffer}{suffix}" for suffix in shapes for place in (stage, "")]
    return tuple(label for name in names for label in (f"{rank_class}:{name}", name))


def buffer_bytes(program: Program, deps: Dependencies, sizes: Mapping[str, float]) -> Doubles:
    """[number of buffer ids] bytes of each buffer (per token for buffers that are extended).

    sizes: label -> bytes, see `size_labels`. UnpricedError names a buffer without a size.
    """
    table = deps.table
    out = np.zeros(table.num_ids)
    shapes, shape_of = unit_shapes(program.units)
    used = np.zeros(table.num_ids, bool)
    used[table.buffer] = True
    for b, buffer in enumerate(program.buffers):
        for place, (cls, stage) in enumerate(table.places):
            first = int(table.base[b, place])
            own = (b * len(table.places) + place) * table.width
            # Sizes are asked only for buffers that some row touches: a caller need not name the others.
            if first < 0 or not used[first : first + table.width].any():
                continue
            if first != own and table.buffer_class(np.array([first]))[0] == b:
                continue  # an alias: the size is that of the buffer that stands for it
            # Units of one shape have buffers of one size: a look-up for each shape, not for each unit.
            if buffer.per == "unit" and len(shapes) > 1:
                by_shape = np.array([_lookup(sizes, buffer.name, stage, shape, cls) for shape in shapes])
                out[first : first + len(shape_of)] = by_shape[shape_of]
            else:
                out[first : first + table.width] = _lookup(sizes, buffer.name, stage, "", cls)
    return out


def _lookup(sizes: Mapping[str, float], buffer: str, stage: int, shape: str, rank_class: int) -> float:
    labels = size_labels(buffer, stage, shape, rank_class)
    for label in labels:
        if label in sizes:
            return float(sizes[label])
    raise UnpricedError(
        f"no size for buffer {buffer} of stage {stage}: give one of {', '.join(labels)}{nearest(labels[-1], sizes)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Allocations and frees of every row."""

    allocated: Doubles
    """[rows] bytes allocated at the start of each row."""
    freed: Doubles
    """[rows] bytes freed at the end of each row."""
    resident: Doubles
    """[rank classes] bytes of carried buffers, always there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferMoves:
    """Allocations and frees one by one: one entry per row and buffer."""

    row: NDArray[np.int64]
    """The row that allocates or frees."""
    buffer: NDArray[np.int64]
    """Indices into the Program's buffer classes."""
    bytes: Doubles
    """Bytes: positive where allocated at the start of the row, negative where freed at its end."""
    resident: Doubles
    """[rank classes, buffer classes] bytes of carried buffers, always there."""


def buffer_moves(program: Program, deps: Dependencies, sizes: Mapping[str, float]) -> BufferMoves:
    """What each row allocates and frees of each class of buffer, in bytes: allocations first, then frees."""
    nbytes, come, gone, come_bytes, grown = _changes(program, deps, sizes)
    entries = np.concatenate([come, gone])
    return BufferMoves(
        row=deps.table.row[entries].astype(np.int64),
        buffer=deps.table.buffer_class(deps.table.buffer[entries]),
        bytes=np.concatenate([come_bytes, -grown]),
        resident=_resident(program, deps, nbytes),
    )


def moves(program: Program, deps: Dependencies, sizes: Mapping[str, float]) -> Moves:
    """What each row allocates and frees, in bytes."""
    nbytes, come, gone, come_bytes, grown = _changes(program, deps, sizes)
    row, rows = deps.table.row, program.num_rows
    return Moves(
        allocated=np.bincount(row[come], come_bytes, rows).astype(float),
        freed=np.bincount(row[gone], grown, rows).astype(float),
        resident=_resident(program, deps, nbytes).sum(axis=1),
    )


def _changes(
    program: Program, deps: Dependencies, sizes: Mapping[str, float]
) -> tuple[Doubles, NDArray[np.int64], NDArray[np.int64], Doubles, Doubles]:
    """(bytes of each buffer, entries that allocate, entries that free, bytes of the former, bytes of the latter)."""
    table = deps.table
    nbytes = buffer_bytes(program, deps, sizes)
    come, gone = np.flatnonzero(deps.alloc), np.flatnonzero(deps.release)
    extend = np.flatnonzero(table.op == EXTEND)
    if not len(extend):
        return nbytes, come, gone, nbytes[table.buffer[come]], nbytes[table.buffer[gone]]
    amount = nbytes[table.buffer]
    tokens = np.array([table.amounts[int(table.row[i]), int(table.buffer[i])] for i in extend.tolist()], float)
    # Extended buffers grow by a number of tokens each time, at bytes a token.
    amount[extend] *= tokens
    return nbytes, come, gone, amount[come], _grown(deps, amount, np.zeros(table.num_ids), gone)


def _grown(deps: Dependencies, amount: Doubles, open_bytes: Doubles, gone: NDArray[np.int64]) -> Doubles:
    """Bytes given back by each free, for buffers that may have been extended; entries are in issue order per buffer."""
    grown = []
    freeing = set(gone.tolist())
    # A free gives back what all extensions have added.
    for i in np.flatnonzero(deps.alloc | deps.release).tolist():
        buffer = int(deps.table.buffer[i])
        if deps.alloc[i]:
            open_bytes[buffer] += amount[i]
        if i in freeing:
            grown.append(open_bytes[buffer])
            open_bytes[buffer] = 0.0
    return np.array(grown)


def _resident(program: Program, deps: Dependencies, nbytes: Doubles) -> Doubles:
    """[rank classes, buffer classes] carried buffers, every slot, aliases counted once."""
    table = deps.table
    out = np.zeros((program.num_classes, len(program.buffers)))
    waiting = np.zeros(table.num_ids, bool)
    waiting[table.buffer] = True
    for b, buffer in enumerate(program.buffers):
        if buffer.lifetime != "carried":
            continue
        for place, (cls, _) in enumerate(table.places):
            first = int(table.base[b, place])
            if first >= 0:
                ids = slice(first, first + (1 if buffer.per == "stage" else table.width))
                out[cls, b] += float(nbytes[ids][waiting[ids]].sum()) * buffer.slots
                # An alias has the same ids: whoever comes second finds nothing left to count.
                waiting[ids] = False
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuePeak:
    """Peak memory of one rank class in issue order."""

    rank_class: int
    """Index of the rank class."""
    bytes: float
    """Peak, carried buffers included."""
    row: int
    """The row during which it is reached first; -1 for a class without rows."""


def issue_order_peak(program: Program, deps: Dependencies, sizes: Mapping[str, float]) -> tuple[IssuePeak, ...]:
    """Peak of each rank class, in bytes, allocations at the start and frees at the end of each row as issued."""
    change = moves(program, deps, sizes)
    after = np.cumsum(change.allocated - change.freed)
    # While a row runs, what it frees at its end is still there.
    during = after + change.freed
    peaks = []
    for cls in range(program.num_classes):
        low, high = int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])
        if low == high:
            peaks.append(IssuePeak(rank_class=cls, bytes=float(change.resident[cls]), row=-1))
            continue
        # The running sum goes over all classes; what those before hold at their end is not this one's.
        base = float(after[low - 1]) if low else 0.0
        row = low + int(np.argmax(during[low:high]))
        peaks.append(IssuePeak(rank_class=cls, bytes=float(during[row]) - base + float(change.resident[cls]), row=row))
    return tuple(peaks)
