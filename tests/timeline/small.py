"""Small timelines written out by hand, and a strategy for any that can be written down."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from gnomon.timeline import ROLES, Memory, Spans, Timeline, Worker

Row = tuple[int, str, str, str, float, float, int]
"""Worker, stream, kind, role, start, end, cause."""


def timeline(rows: list[Row], makespan: float | None = None, **more: Any) -> Timeline:
    """A Timeline from rows; tables follow from what occurs."""
    workers, streams, kinds, roles, starts, ends, causes = map(list, zip(*rows, strict=True)) if rows else [[]] * 7
    tables = [tuple(dict.fromkeys(column)) for column in (streams, kinds)]
    spans = Spans.of(
        worker=workers,
        stream=[tables[0].index(s) for s in streams],
        kind=[tables[1].index(k) for k in kinds],
        role=[ROLES.index(r) for r in roles],
        start_s=starts,
        end_s=ends,
        cause=causes,
        **more.pop("columns", {}),
    )
    given = {
        "clock": "predicted",
        "workers": tuple(Worker(name=f"w{i}") for i in range(1 + max(workers, default=-1))),
        "streams": tables[0],
        "kinds": tables[1],
        "spans": spans,
        "makespan_s": max(ends, default=0.0) if makespan is None else makespan,
    }
    return Timeline(**{**given, **more})


# One message between two workers: the example of breakdown's docstring.
MESSAGE: list[Row] = [
    (0, "compute", "F", "compute", 0, 3, -1),
    (0, "send", "SEND", "communication", 3, 4, 0),
    (1, "recv", "RECV", "communication", 3, 4, 0),
    (1, "compute", "F", "compute", 4, 6, 2),
]

_NAME = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=6)
_TIME = st.integers(0, 2**53).map(lambda ticks: ticks * 2.0**-36)
_BYTES = st.floats(0, 1e18, allow_nan=False)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any Timeline with up to eight spans: times anywhere on the grid, overlaps and all."""

    def names(most: int = 3, least: int = 1) -> tuple[str, ...]:
        return tuple(draw(st.lists(_NAME, min_size=least, max_size=most, unique=True)))

    tables = {"stream": names(), "kind": names(), "path": names(least=0), "buffer": names(least=0)}
    workers = tuple(Worker(name=name, count=draw(st.integers(1, 10**6))) for name in names())
    size = draw(st.integers(0, 8))

    def column(elements: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(elements, min_size=size, max_size=size))

    ends = [sorted(pair) for pair in column(st.tuples(_TIME, _TIME))]
    repeats = draw(st.booleans())
    spans = Spans.of(
        worker=column(st.integers(0, len(workers) - 1)),
        stream=column(st.integers(0, len(tables["stream"]) - 1)),
        kind=column(st.integers(0, len(tables["kind"]) - 1)),
        role=column(st.integers(0, len(ROLES) - 1)),
        stage=column(st.integers(-1, 5)),
        unit=column(st.integers(-1, 2**31 - 1)),
        path=column(st.integers(-1, len(tables["path"]) - 1)),
        step=column(st.integers(0, 3)),
        start_s=[start for start, _ in ends],
        end_s=[end for _, end in ends],
        lag_s=column(_TIME),
        nbytes=column(st.integers(-1, 2**63 - 1)),
        flops=column(st.just(-1.0) | _BYTES),
        cause=column(st.integers(-1, size - 1)),
        cause_steps=column(st.integers(0, 2)) if repeats else 0,
    )
    return Timeline(
        clock=draw(st.sampled_from(["predicted", "measured"])),
        workers=workers,
        streams=tables["stream"],
        kinds=tables["kind"],
        paths=tables["path"],
        buffers=tables["buffer"],
        spans=spans,
        makespan_s=float(spans.end_s.max(initial=0.0)),
        period_s=draw(_TIME) if repeats else draw(st.none() | st.floats(0, 1e6)),
        repeats=repeats,
        memory=draw(st.none() | _memories(len(workers), len(tables["buffer"]), size)),
        assumptions=names(least=0),
    )


@st.composite
def _memories(draw: st.DrawFn, workers: int, buffers: int, spans: int) -> Memory:
    size = draw(st.integers(0, 4)) if buffers and spans else 0

    def column(elements: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(elements, min_size=size, max_size=size))

    return Memory.of(
        worker=column(st.integers(0, workers - 1)),
        buffer=column(st.integers(0, max(buffers - 1, 0))),
        span=column(st.integers(0, max(spans - 1, 0))),
        time_s=column(_TIME),
        change_bytes=column(_BYTES | _BYTES.map(float.__neg__)),
        resident_bytes=np.array(
            draw(st.lists(_BYTES, min_size=workers * buffers, max_size=workers * buffers)), float
        ).reshape(workers, buffers),
    )
