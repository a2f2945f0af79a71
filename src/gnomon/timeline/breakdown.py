"""Where a step goes: busy time by action, idle time by cause, adding up to the step to the bit with no "other".

`breakdown(timeline)` looks at one stream of each worker. Its window is the makespan or, in a timeline that repeats, one
period from the worker's first action on that stream (up to the last span's end, if it has none there). Busy time goes
to the action that holds the stream. An idle interval ends when an action starts; that action's cause is the *arrival*
that ended it. From there the chain of causes is walked back to the start of the interval, and each part of it is what
the chain was doing at that time:
  communication  in a communication action or in a lag: exposed communication
  bubble         computing, on another worker or another stream
  copy, host     in a copy or in the host's own work
  ahead          nothing: in a steady state, this worker does not depend on those that set the period
After a worker's last action the arrival is the action that ends the step (`at_end`). A gap between a cause and what it
causes is the host's in a measured timeline (launch). Example, one receiver on two workers:
  worker 0   F 0-3
  worker 1              RECV 3-4  F 4-6      with SEND 3-4 a rendezvous with RECV, caused by F
worker 1 computes for 2 of 6 seconds and waits from 0 to 4 for RECV: communication 1 (RECV), bubble 3 (F of worker 0);
worker 0 computes for 3 and waits from 3 to 6 for the end of the step: bubble 2 (F of worker 1), communication 1 (RECV).
Left out: streams other than the one asked for (what they hide), and causes that a measurement did not record, which
show as the host's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError, nearest
from gnomon.timeline.types import NONE, Timeline
from gnomon.units import TICK_S

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]

Part = Literal["compute", "communication", "copy", "host", "bubble", "ahead"]
PARTS: tuple[Part, ...] = ("compute", "communication", "copy", "host", "bubble", "ahead")
"""compute: busy with compute. bubble and ahead: idle. The others: busy with it, or idle waiting for it."""

_HOST, _BUBBLE, _AHEAD, _COMMUNICATION = 3, 4, 5, 1
_ROUNDING_S = 2 * TICK_S  # a start and its cause's end are rounded apart; so small a gap is the cause's
_DENSE = 1 << 22  # totals are added up in a table up to this many cells, else by sorting


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Seconds of one worker's step that are one thing."""

    worker: str
    """Name of the worker."""
    part: Part
    """What the seconds are, of PARTS."""
    busy: bool
    """The stream is held by an action; otherwise it is idle."""
    action: str
    """Kind of the action that the time went into: on the stream, or in the chain of causes that it waits for."""
    path: str
    """Operation inside that action; empty for the action as a whole."""
    arrival: str
    """Idle: kind of the action whose end ended the wait. Busy: empty."""
    at_end: bool
    """Idle from the worker's last action to the end of the step."""
    seconds: float
    """Seconds of the step; over all shares of a worker they add up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Shares of every worker, largest first; those of a worker add up to `step_s` exactly."""

    stream: str
    """The stream that was looked at, of every worker."""
    window: Literal["makespan", "period"]
    """What `step_s` is: one step from rest, or one of the steady state in a timeline that repeats."""
    step_s: float
    """Seconds of the window."""
    workers: tuple[str, ...]
    """Names of the workers, in order."""
    shares: tuple[Share, ...]
    """Of all workers."""

    def __post_init__(self) -> None:
        total = dict.fromkeys(self.workers, 0.0)
        for share in self.shares:
            total[share.worker] += share.seconds
        # To the bit, in whatever order shares are added: all times are multiples of TICK_S, whose sums are exact.
        wrong = [name for name, seconds in total.items() if seconds != self.step_s]
        assert not wrong, f"shares of {wrong} do not add up to {self.step_s!r}"

    def of(self, worker: str) -> tuple[Share, ...]:
        """Shares of one worker. InputError for a name that is not there."""
        if worker not in self.workers:
            raise InputError(f"no worker {worker!r} in this breakdown{nearest(worker, self.workers)}")
        return tuple(share for share in self.shares if share.worker == worker)

    def seconds(self, worker: str, part: Part, *, busy: bool | None = None) -> float:
        """Seconds of one part of a worker's step; only busy or only idle ones if asked."""
        return sum(s.seconds for s in self.of(worker) if s.part == part and busy in (None, s.busy))

    def idle_s(self, worker: str) -> float:
        """Seconds in which the worker's stream is idle."""
        return sum(s.seconds for s in self.of(worker) if not s.busy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Idle:
    """Every idle interval of a stream, one row each."""

    worker: Longs
    """Index of the worker."""
    start_s: Doubles
    """Seconds at which the stream goes idle."""
    end_s: Doubles
    """Seconds at which it works again, or the step ends."""
    until: Longs
    """The span that starts at the end of the interval; NONE at the end of the step."""
    arrival: Longs
    """The span whose end ended it; `until` itself where no cause is known."""
    arrival_steps: Longs
    """Periods before the interval's own in which the arrival lies (a timeline that repeats)."""


def breakdown(timeline: Timeline, stream: str = "compute") -> Breakdown:
    """Attributes each worker's step to its actions and to the causes of its waiting. InputError for an unknown stream,
    or spans that overlap on it."""
    chosen = _on_stream(timeline, stream)
    idle = _idle(timeline, chosen)
    totals = _Totals(timeline)
    s = timeline.spans
    totals.add(s.worker[chosen], s.role[chosen], s.kind[chosen], s.path[chosen], s.duration_s[chosen])
    _walk(timeline, idle, totals)
    return Breakdown(
        stream=stream,
        window="period" if timeline.repeats else "makespan",
        step_s=timeline.step_s,
        workers=tuple(w.name for w in timeline.workers),
        shares=totals.shares(),
    )


def idle_intervals(timeline: Timeline, stream: str = "compute") -> Idle:
    """Every idle interval with the action that ended it, by worker and time. Errors as `breakdown`."""
    return _idle(timeline, _on_stream(timeline, stream))


def exposed_communication(timeline: Timeline, stream: str = "compute") -> dict[str, float]:
    """Worker -> seconds of its step in which the stream holds a communication action or idles for one."""
    parts = breakdown(timeline, stream)
    out = dict.fromkeys(parts.workers, 0.0)
    for share in parts.shares:
        if share.part == "communication":
            out[share.worker] += share.seconds
    return out


def _on_stream(timeline: Timeline, stream: str) -> Longs:
    """Spans of the stream, by worker and time."""
    if stream not in timeline.streams:
        raise InputError(f"no stream {stream!r} in this timeline{nearest(stream, timeline.streams)}")
    s = timeline.spans
    rows = np.flatnonzero(s.stream == timeline.streams.index(stream))
    worker, start, end = s.worker[rows], s.start_s[rows], s.end_s[rows]
    ordered = (worker[1:] > worker[:-1]) | ((worker[1:] == worker[:-1]) & (start[1:] >= end[:-1]))
    if not ordered.all():
        rows = rows[np.lexsort((end, start, worker))]
        worker, start, end = s.worker[rows], s.start_s[rows], s.end_s[rows]
        over = np.flatnonzero((worker[1:] == worker[:-1]) & (start[1:] < end[:-1]))
        if len(over):
            one, two = int(rows[over[0]]), int(rows[over[0] + 1])
            raise InputError(f"{timeline.where(one)} and {timeline.where(two)} overlap on stream {stream!r}")
    return rows


def _idle(timeline: Timeline, chosen: Longs) -> Idle:
    """Gaps before, between and after the chosen spans of each worker."""
    s, count = timeline.spans, len(timeline.workers)
    worker, start, end = s.worker[chosen], s.start_s[chosen], s.end_s[chosen]
    ptr = np.searchsorted(worker, np.arange(count + 1))
    some = np.flatnonzero(ptr[1:] > ptr[:-1])
    window = np.zeros(count)
    if timeline.repeats:
        window[:] = float(s.end_s.max(initial=timeline.step_s)) - timeline.step_s
        # In a steady state any period is as good; from its first action on, no action of this worker is cut in two.
        window[some] = start[ptr[some]]
    close = window + timeline.step_s
    before = np.empty(len(chosen))
    before[1:] = end[:-1]
    before[ptr[some]] = window[some]
    last = window.copy()
    last[some] = end[ptr[some + 1] - 1]
    if (last > close).any():
        name = timeline.workers[int(np.flatnonzero(last > close)[0])].name
        raise InputError(
            f"{name} is longer at work than a period of {timeline.step_s!r} s: a stream cannot overlap itself"
        )
    gap, tail = np.flatnonzero(start > before), np.flatnonzero(close > last)
    until = np.concatenate([chosen[gap], np.full(len(tail), NONE)])
    arrival = s.cause[until[: len(gap)]].astype(np.int64)
    steps = s.cause_steps[until[: len(gap)]].astype(np.int64)
    unreached = arrival < 0
    # A span without a cause stands for itself: its own time is after the interval, so that all of it is late.
    arrival[unreached] = until[: len(gap)][unreached]
    ending, ending_steps = _enders(timeline, chosen, ptr, tail)
    idle = Idle(
        worker=np.concatenate([worker[gap], tail]).astype(np.int64),
        start_s=np.concatenate([before[gap], last[tail]]),
        end_s=np.concatenate([start[gap], close[tail]]),
        until=until,
        arrival=np.concatenate([arrival, ending]),
        arrival_steps=np.concatenate([steps, ending_steps]),
    )
    return _sorted(idle)


def _sorted(idle: Idle) -> Idle:
    order = np.lexsort((idle.start_s, idle.worker))
    # `Idle` has slots and no other state, so these names are all of its columns.
    return Idle(**{name: getattr(idle, name)[order] for name in Idle.__slots__})


def _enders(timeline: Timeline, chosen: Longs, ptr: Longs, tail: Longs) -> tuple[Longs, Longs]:
    """What ends the step for each worker in `tail`: the last span to end or, in a steady state, what the worker's first
    action of the next step waits for (itself, when it waits for nothing)."""
    s = timeline.spans
    if not s.size:
        return np.full(len(tail), NONE), np.zeros(len(tail), np.int64)
    last = np.full(len(tail), int(np.argmax(s.end_s)))
    if not timeline.repeats:
        return last, np.zeros(len(tail), np.int64)
    busy = ptr[tail + 1] > ptr[tail]
    head = np.full(len(tail), NONE)
    head[busy] = chosen[ptr[tail[busy]]]
    cause = np.where(busy, s.cause[head], NONE)
    # One period later than its own step, the head's cause is one step nearer.
    steps = np.where(cause >= 0, s.cause_steps[head], 0) - 1
    arrival = np.where(cause >= 0, cause, np.where(busy, head, last))
    return arrival, np.where(busy, steps, 0)


class _Totals:
    """Seconds by (worker, part, busy, kind, path, arrival, at the end), collected and then added up once."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        kinds = len(timeline.kinds)
        # Sizes of the digits of a key: paths and arrivals may be NONE (-1), and are stored one higher.
        self.radix = (len(timeline.workers), len(PARTS), 2, kinds, len(timeline.paths) + 1, kinds + 1, 2)
        self.keys: list[Longs] = []
        self.seconds: list[Doubles] = []

    def add(
        self,
        worker: NDArray[np.integer],
        part: NDArray[np.integer] | int,
        kind: NDArray[np.integer],
        path: NDArray[np.integer],
        seconds: Doubles,
        arrival: NDArray[np.integer] | None = None,
        at_end: NDArray[np.bool_] | None = None,
    ) -> None:
        """Adds pieces; without an arrival they are busy time. Kinds, paths and arrivals are indices."""
        busy = int(arrival is None)
        digits = (part, busy, kind, path + 1, 0 if arrival is None else arrival + 1, 0 if at_end is None else at_end)
        key = worker.astype(np.int64)
        for digit, size in zip(digits, self.radix[1:], strict=True):
            key *= size
            key += digit
        self.keys.append(key)
        self.seconds.append(seconds)

    def shares(self) -> tuple[Share, ...]:
        """All pieces added up by what they are, ordered by worker and then largest first."""
        t = self.timeline
        if not self.keys:
            return ()
        key, seconds, cells = np.concatenate(self.keys), np.concatenate(self.seconds), int(np.prod(self.radix))
        # A table of all cells costs nothing to sort; with many workers and paths it would be mostly empty.
        if cells <= _DENSE:
            total = np.bincount(key, seconds, cells)
            occupied = np.flatnonzero(total)
            total = total[occupied]
        else:
            occupied, inverse = np.unique(key, return_inverse=True)
            total = np.bincount(inverse, seconds, len(occupied))
        out: list[tuple[int, float, int, Share]] = []
        for digits, amount in zip(
            np.stack(np.unravel_index(occupied, self.radix), 1).tolist(), total.tolist(), strict=True
        ):
            worker, part, busy, kind, path, arrival, at_end = digits
            if amount:
                share = Share(
                    worker=t.workers[worker].name,
                    part=PARTS[part],
                    busy=bool(busy),
                    action=t.kinds[kind],
                    path=t.paths[path - 1] if path else "",
                    arrival=t.kinds[arrival - 1] if arrival else "",
                    at_end=bool(at_end),
                    seconds=amount,
                )
                out.append((worker, -amount, len(out), share))
        return tuple(item[-1] for item in sorted(out, key=lambda item: item[:3]))


def _walk(timeline: Timeline, idle: Idle, totals: _Totals) -> None:
    """Walks the causes of all idle intervals back together, one cause a round, and adds up what they were."""
    chain = _Chain(timeline, idle, totals)
    # A chain stays within its interval, no longer than a period, and so meets each span once: more rounds are a cycle.
    for _ in range(timeline.spans.size + 2):
        if not len(chain.item):
            return
        chain.late()
        if chain.lagged:
            chain.lag()
        chain.own()
        chain.back()
    span = int(chain.at[0])
    raise InputError(f"causes form a cycle, met at {timeline.where(span)}; a cause must end before its span starts")


class _Chain:
    """Follows causes backwards: of every interval still open it holds the span that its chain has reached and the time
    down to which it is explained."""

    def __init__(self, timeline: Timeline, idle: Idle, totals: _Totals) -> None:
        self.spans, self.idle, self.totals = timeline.spans, idle, totals
        s = self.spans
        self.end = s.end_s
        self.lagged = bool(s.lag_s.any())
        self.period = timeline.step_s if timeline.repeats else 0.0
        # By role, in the order of ROLES: what computes elsewhere is a bubble here.
        self.part = np.array([_BUBBLE, _COMMUNICATION, 2, _HOST])[s.role] if s.size else s.role
        self.late_part = _HOST if timeline.clock == "measured" else _AHEAD
        self.item = np.arange(len(idle.until)) if s.size else np.zeros(0, np.int64)
        self.at, self.now, self.low = idle.arrival, idle.end_s.copy(), idle.start_s
        self.shift = -idle.arrival_steps * self.period
        self.waiter = np.where(idle.until >= 0, idle.until, idle.arrival)

    def _add(self, mine: Longs, span: Longs, part: NDArray[np.integer] | int, down_to: Doubles) -> None:
        """Explains the open intervals `mine` down to a time."""
        item, s = self.item[mine], self.spans
        seconds = self.now[mine] - down_to
        arrival, at_end = s.kind[self.idle.arrival[item]], self.idle.until[item] < 0
        self.totals.add(self.idle.worker[item], part, s.kind[span], s.path[span], seconds, arrival, at_end)
        self.now[mine] = down_to

    def late(self) -> None:
        """Time between what was waited for and what waited."""
        ready = self.end[self.at] + self.shift
        if self.lagged:
            ready += self.spans.lag_s[self.at]
        mine = np.flatnonzero(self.now - ready > _ROUNDING_S)
        if len(mine):
            self._add(mine, self.waiter[mine], self.late_part, np.maximum(ready[mine], self.low[mine]))

    def lag(self) -> None:
        """The lag after the end of what was waited for."""
        finish = np.maximum(self.end[self.at] + self.shift, self.low)
        mine = np.flatnonzero((self.now > finish) & (self.spans.lag_s[self.at] > 0))
        if len(mine):
            self._add(mine, self.at[mine], _COMMUNICATION, finish[mine])

    def own(self) -> None:
        """The time of what was waited for."""
        first = self.spans.start_s[self.at]
        if self.period:
            first += self.shift
        np.maximum(first, self.low, out=first)
        mine = np.flatnonzero(self.now > first)
        span = self.at[mine]
        self._add(mine, span, self.part[span], first[mine])

    def back(self) -> None:
        """Steps to the cause of each interval that is not yet explained; where there is none, its rest counts as
        late."""
        go = np.flatnonzero(self.now > self.low)
        self.item, self.now, self.low, self.shift = self.item[go], self.now[go], self.low[go], self.shift[go]
        self.waiter = self.at[go]
        self.at = self.spans.cause[self.waiter].astype(np.int64)
        if self.period:
            self.shift = self.shift - self.spans.cause_steps[self.waiter] * self.period
        root = np.flatnonzero(self.at < 0)
        if len(root):
            self._add(root, self.waiter[root], self.late_part, self.low[root])
            stay = np.flatnonzero(self.at >= 0)
            for name in ("item", "now", "low", "shift", "waiter", "at"):
                setattr(self, name, getattr(self, name)[stay])
