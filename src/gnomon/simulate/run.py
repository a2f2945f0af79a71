"""A Program and durations in, a Timeline out: spans with their causes, memory by class of buffer, makespan and period.

`simulate(structure, durations, sizes)` plays from rest, or shows one step of the steady state. Workers are rank
classes. Rows that run as one (a composite such as `(0F3&1B1)`) are one span, of kind `F&B`. Left out: bytes and
FLOPs of spans, which prices know and durations do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.program import Program, Structure, buffer_moves
from gnomon.simulate.causes import causes
from gnomon.simulate.durations import Durations
from gnomon.simulate.period import period
from gnomon.simulate.play import Clock, Times, play_steps
from gnomon.simulate.steady import steady as steady_state
from gnomon.timeline import NONE, ROLES, Memory, Role, Spans, Timeline, Worker

Longs = NDArray[np.int64]

STREAM_ROLES: Mapping[str, Role] = {
    "host": "host",
    "cpu": "host",
    "load": "copy",
    "copy": "copy",
    "d2h": "copy",
    "h2d": "copy",
}
"""What rows on a stream of this name do, unless they communicate; rows on any other stream compute."""


def simulate(
    structure: Structure,
    durations: Durations,
    sizes: Mapping[str, float] | None = None,
    *,
    steps: int = 1,
    steady: bool = False,
    roles: Mapping[str, Role] = STREAM_ROLES,
    assumptions: tuple[str, ...] = (),
) -> Timeline:
    """The Timeline of a Program.

    durations: one scenario, seconds on the grid (`durations`, `simulate.durations`).
    sizes: label -> bytes as in `program.buffer_bytes`; without them the Timeline has no memory.
    steps: how many steps to play from rest, all of them shown.
    steady: show one step of the steady state instead; every span recurs each period.
    roles: stream -> what its rows do, where they use no communicator.
    Raises UnpricedError for a buffer without a size and InputError for more than one scenario.
    """
    if durations.busy.ndim != 1:
        raise InputError(f"simulate plays one scenario, got durations of shape {durations.busy.shape}; pick a row")
    if steps < 1 or (steady and steps > 1):
        raise InputError(f"steps must be at least 1, and 1 for a steady step, not {steps}")
    entries = _entries(structure)
    if steady:
        state = steady_state(structure, durations)
        played, sources = [state.times], [(state.cause, state.cause_steps)]
        seconds = state.period_s
    else:
        played = play_steps(structure, durations, steps)
        sources = [_causes(structure, played, k) for k in range(steps)]
        seconds = period(structure, durations).seconds
    program = structure.program
    return Timeline(
        clock="predicted",
        workers=tuple(Worker(name=f"class {c}", count=count) for c, count in enumerate(program.counts)),
        streams=program.streams,
        kinds=entries.kinds,
        paths=entries.paths,
        buffers=tuple(b.name for b in program.buffers),
        spans=_spans(structure, durations, entries, played, sources, roles, steady),
        makespan_s=max(float(times.end.max(initial=0.0)) for times in played),
        period_s=seconds,
        repeats=steady,
        memory=None if sizes is None else _memory(structure, entries, played, sizes),
        assumptions=assumptions,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entries:
    """Spans of one step in issue order; several rows may be one entry."""

    row: Longs
    """First row of each span."""
    position: Longs
    """Position of each span in the order of play."""
    span: Longs
    """Span at each position; the last item, for "nothing", is NONE."""
    kind: NDArray[np.int32]
    path: NDArray[np.int32]
    kinds: tuple[str, ...]
    paths: tuple[str, ...]


def _entries(structure: Structure) -> _Entries:
    program, order = structure.program, structure.order
    # Issue order is row order: spans are listed as the host issues them.
    row = np.sort(order.rows)
    position = order.position[row].astype(np.int64)
    # The extra item at the end answers index -1 ("waited for nothing") with NONE.
    span = np.full(order.size + 1, NONE, np.int64)
    span[position] = np.arange(order.size)
    kind, path = program.kind[row].astype(np.int32), np.full(order.size, NONE, np.int32)
    kinds = {k.name: i for i, k in enumerate(program.kinds)}
    paths: dict[str, int] = {}
    for at, rows in _composites(structure, span).items():
        name = "&".join(program.kinds[program.kind[r]].name for r in rows)
        kind[at] = kinds.setdefault(name, len(kinds))
        path[at] = paths.setdefault("(" + "&".join(program.token(r) for r in rows) + ")", len(paths))
    return _Entries(row=row, position=position, span=span, kind=kind, path=path, kinds=tuple(kinds), paths=tuple(paths))


def _composites(structure: Structure, span: Longs) -> dict[int, list[int]]:
    """Maps a span of more than one row to its rows."""
    if structure.order.size == structure.program.num_rows:
        return {}
    of_row = span[structure.order.position]
    many = np.flatnonzero(np.bincount(of_row) > 1)
    rows = np.flatnonzero(np.isin(of_row, many))
    by_span: dict[int, list[int]] = {}
    for row in rows.tolist():
        by_span.setdefault(int(of_row[row]), []).append(row)
    return by_span


def _causes(structure: Structure, played: Sequence[Times], step: int) -> tuple[Longs, Longs]:
    reach = int(structure.order.before[2].max(initial=0))
    # Only so many steps back: no edge reaches farther.
    earlier = {back: played[step - back] for back in range(1, min(step, reach) + 1)}
    return causes(structure.order, played[step], earlier)


def _spans(
    structure: Structure,
    durations: Durations,
    entries: _Entries,
    played: Sequence[Times],
    sources: Sequence[tuple[Longs, Longs]],
    roles: Mapping[str, Role],
    steady: bool,
) -> Spans:
    program, size, at = structure.program, structure.order.size, entries.position
    # Spans of each rank class: rows are sorted, and those of a class lie between two of its borders.
    count = np.diff(np.searchsorted(entries.row, program.class_ptr))
    lag = Clock.of(structure, durations).lag
    causing = []
    # In a step from rest a cause may lie `back` steps earlier; spans of step k start at k x size.
    for step, (cause, back) in enumerate(sources):
        mine = entries.span[cause[at]]  # position -1 picks the last item, which is NONE
        causing.append(np.where(mine < 0, NONE, mine + (0 if steady else (step - back[at]) * size)))

    def tiled(column: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.tile(column, len(played))

    return Spans.of(
        worker=tiled(np.repeat(np.arange(len(count)), count)),
        stream=tiled(program.stream[entries.row]),
        kind=tiled(entries.kind),
        role=tiled(_roles(program, roles)[entries.row]),
        stage=tiled(program.stage[entries.row]),
        unit=tiled(program.unit[entries.row]),
        path=tiled(entries.path),
        step=np.repeat(np.arange(len(played)), size),
        start_s=np.concatenate([times.start[at] for times in played]),
        end_s=np.concatenate([times.end[at] for times in played]),
        lag_s=0.0 if lag is None else tiled(lag[at]),
        cause=np.concatenate(causing),
        cause_steps=sources[0][1][at] if steady else 0,
    )


def _roles(program: Program, roles: Mapping[str, Role]) -> NDArray[np.int32]:
    """Role of each row: communication if it uses a communicator, else what its stream is for."""
    talks = np.array([bool(kind.comm or kind.message) for kind in program.kinds], bool)[program.kind]
    talks[[row for row, override in program.overrides.items() if override.comm]] = True
    by_stream = np.array([ROLES.index(roles.get(name, "compute")) for name in program.streams], np.int32)
    return np.where(talks, ROLES.index("communication"), by_stream[program.stream]).astype(np.int32)


def _memory(structure: Structure, entries: _Entries, played: Sequence[Times], sizes: Mapping[str, float]) -> Memory:
    program = structure.program
    moved = buffer_moves(program, structure.deps, sizes)
    # What changes no bytes is no event.
    real = moved.bytes != 0
    row, buffer, change = moved.row[real], moved.buffer[real], moved.bytes[real]
    at, span = structure.order.position[row], entries.span[structure.order.position[row]]
    size = structure.order.size
    return Memory.of(
        worker=np.tile(np.searchsorted(program.class_ptr, row, side="right") - 1, len(played)),
        buffer=np.tile(buffer, len(played)),
        span=np.concatenate([span + step * size for step in range(len(played))]),
        # Allocations happen at the start of a span, frees at its end.
        time_s=np.concatenate([np.where(change > 0, times.start[at], times.end[at]) for times in played]),
        change_bytes=np.tile(change, len(played)),
        resident_bytes=moved.resident,
    )
