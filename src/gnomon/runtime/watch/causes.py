"""What each measured span waited for, so that a wait is told from work.

`with_causes(spans, kinds)` returns the spans of one rank of each class with their causes: what did not wait follows
from the computing before it, a receive also from its send, and what all classes do together from the last to come.
Receives and such collectives then begin when they could. Left out: ranks of one class that wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from gnomon.timeline import NONE, ROLES, Spans

SENDERS = {"RECV_F": ("SEND_F", -1), "RECV_B": ("SEND_B", 1)}
"""Receive -> (its send, stages from the receiver to the sender)."""
TOGETHER = ("NORM",)
"""Kinds that all ranks do at once."""


def with_causes(spans: Spans, kinds: Sequence[str]) -> Spans:
    """The spans with causes filled in and the starts of what waits for another worker moved to when it came."""
    cause, start = spans.cause.copy(), spans.start_s.copy()
    names = [kinds[kind] for kind in spans.kind.tolist()]
    _after_compute(spans, cause)
    _messages(spans, names, cause, start)
    _collectives(spans, names, cause, start)
    columns = {column.name: getattr(spans, column.name) for column in fields(Spans)}
    return replace(spans, **columns | {"cause": cause, "start_s": start, "duration_s": spans.end_s - start})


def _after_compute(spans: Spans, cause: NDArray[np.int32]) -> None:
    """What has no cause follows from the last computing of its worker that was over before it."""
    computes = spans.role == ROLES.index("compute")
    for worker in np.unique(spans.worker).tolist():
        mine = np.flatnonzero((spans.worker == worker) & computes)
        mine = mine[np.argsort(spans.end_s[mine], kind="stable")]
        others = np.flatnonzero((spans.worker == worker) & (cause == NONE) & (spans.duration_s > 0))
        before = np.searchsorted(spans.end_s[mine], spans.start_s[others], side="right") - 1
        cause[others[before >= 0]] = mine[before[before >= 0]]


def _messages(spans: Spans, names: Sequence[str], cause: NDArray[np.int32], start: NDArray[np.float64]) -> None:
    """Each receive begins with its send, if that is shown; it is posted long before."""
    stage, unit = spans.stage.tolist(), spans.unit.tolist()
    sends = {(name, stage[i], unit[i]): i for i, name in enumerate(names) if name.startswith("SEND")}
    for i, name in enumerate(names):
        if name in SENDERS:
            send, offset = SENDERS[name]
            source = sends.get((send, stage[i] + offset, unit[i]))
            if source is not None and spans.start_s[source] >= start[i]:
                # At most its own end, so that no span has a length below 0.
                start[i] = min(spans.start_s[source], spans.end_s[i])
                cause[i] = cause[source]


def _collectives(spans: Spans, names: Sequence[str], cause: NDArray[np.int32], start: NDArray[np.float64]) -> None:
    """What all workers do together begins when the last of them asks for it."""
    for name in TOGETHER:
        rows = [i for i, other in enumerate(names) if other == name]
        if len({int(spans.worker[i]) for i in rows}) == len(rows) > 1:  # one each
            last = max(rows, key=lambda i: float(start[i]))
            for i in rows:
                if start[last] > start[i]:
                    start[i] = min(start[last], spans.end_s[i])
                    cause[i] = cause[last]
