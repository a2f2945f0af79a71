"""A Timeline: what every worker did when, and what it held, as columns.

The simulator returns one and the runtime measures one; nothing here needs the Program behind it, so two of them can
be compared wherever they come from. `Spans` are the actions, `Memory` the bytes that came and went. Every time lies
on the grid of `gnomon.units` (measured times are put on it when they enter), so sums and differences are exact and
a breakdown adds up to the step to the bit. Left out: what follows from a timeline (`breakdown`, `memory`,
`difference`) and its text form (`text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gnomon.errors import InputError
from gnomon.program.program import same_value
from gnomon.units import MAX_TIME_S, TICK_S, quantise

Role = Literal["compute", "communication", "copy", "host"]
ROLES: tuple[Role, ...] = ("compute", "communication", "copy", "host")
"""What a span's time is spent on. copy: between memories of one machine, or loading; host: the CPU's own work."""

Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]
NONE = -1
"""No unit, no path, no cause; bytes and FLOPs that are not known."""


class _SameValues:
    """Equality of dataclasses that hold arrays."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        # NumPy's == gives an array, which a dataclass's own comparison would take for a truth value.
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return all(same_value(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One rank, or ranks that did the same."""

    name: str
    """Unique in a timeline; two timelines are compared by it."""
    count: int = 1
    """Ranks it stands for."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"worker {self.name!r} must stand for at least 1 rank, not {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans(_SameValues):
    """Actions, one row each. Indices point into the tables of the Timeline. Make one with `Spans.of`."""

    worker: Ints
    """Index into the workers."""
    stream: Ints
    """Index into the streams."""
    kind: Ints
    """Index into the kinds of action."""
    role: Ints
    """Index into ROLES: what this span's time is."""
    stage: Ints
    """NONE where there is none."""
    unit: Ints
    """NONE where it belongs to no unit."""
    path: Ints
    """Which operation inside the action, as an index into the paths; NONE for the action as a whole."""
    step: Ints
    """Step the action belongs to, counted from the first one shown."""
    start_s: Doubles
    """Seconds from the start of the timeline."""
    duration_s: Doubles
    """Seconds it holds its stream. A receive's span is the transfer, not the wait for its sender."""
    lag_s: Doubles
    """Seconds after its end at which other streams may go on (latency)."""
    nbytes: NDArray[np.int64]
    """Bytes moved; NONE if not known."""
    flops: Doubles
    """FLOPs done; NONE if not known."""
    cause: Ints
    """The span whose end (and lag) let this one start; NONE if it waited for nothing."""
    cause_steps: Ints
    """In a timeline that repeats: how many periods before this span its cause lies."""

    def __post_init__(self) -> None:
        _freeze(self)
        for name in ("start_s", "duration_s", "lag_s"):
            _check_grid(getattr(self, name), name)

    @property
    def size(self) -> int:
        """Counts the spans."""
        return len(self.worker)

    @property
    def end_s(self) -> Doubles:
        """End of each span in seconds, exact."""
        return self.start_s + self.duration_s

    @staticmethod
    def of(
        *,
        worker: ArrayLike,
        stream: ArrayLike,
        kind: ArrayLike,
        role: ArrayLike,
        start_s: ArrayLike,
        end_s: ArrayLike,
        stage: ArrayLike = NONE,
        unit: ArrayLike = NONE,
        path: ArrayLike = NONE,
        step: ArrayLike = 0,
        lag_s: ArrayLike = 0.0,
        nbytes: ArrayLike = NONE,
        flops: ArrayLike = float(NONE),
        cause: ArrayLike = NONE,
        cause_steps: ArrayLike = 0,
    ) -> Spans:
        """Columns from anything array-like; a single value fills its column. Times go onto the grid.

        Starts and ends are rounded, not durations, so spans that touched before touch after. UnitError for a time
        that is negative, not finite or too large; InputError for an end before its start.
        """
        # The grid (2^-36 s) makes sums and differences of times exact, so that shares of a step add up to it to the
        # bit.
        start = quantise(np.array(start_s, np.float64).reshape(-1))
        end = quantise(np.array(end_s, np.float64).reshape(-1))
        if len(start) != len(end):
            raise InputError(f"{len(start)} starts but {len(end)} ends")

        def column(value: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
            return np.array(np.broadcast_to(np.asarray(value, dtype), start.shape))

        return Spans(
            worker=column(worker, np.int32),
            stream=column(stream, np.int32),
            kind=column(kind, np.int32),
            role=column(role, np.int32),
            stage=column(stage, np.int32),
            unit=column(unit, np.int32),
            path=column(path, np.int32),
            step=column(step, np.int32),
            start_s=start,
            duration_s=end - start,
            lag_s=quantise(column(lag_s, np.float64)),
            nbytes=column(nbytes, np.int64),
            flops=column(flops, np.float64),
            cause=column(cause, np.int32),
            cause_steps=column(cause_steps, np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory(_SameValues):
    """Bytes that came and went: one row per allocation (positive) or free (negative). Make one with `Memory.of`."""

    worker: Ints
    """Index into the workers."""
    buffer: Ints
    """Index into the buffer classes."""
    span: Ints
    """The action that allocates or frees."""
    time_s: Doubles
    """Start of the action for an allocation, its end for a free."""
    change_bytes: Doubles
    """Bytes allocated, or freed where negative."""
    resident_bytes: Doubles
    """[workers, buffer classes] bytes that are there throughout."""

    def __post_init__(self) -> None:
        _freeze(self, apart=("resident_bytes",))
        self.resident_bytes.flags.writeable = False
        _check_grid(self.time_s, "time_s")

    @staticmethod
    def of(
        *,
        worker: ArrayLike,
        buffer: ArrayLike,
        span: ArrayLike,
        time_s: ArrayLike,
        change_bytes: ArrayLike,
        resident_bytes: ArrayLike,
    ) -> Memory:
        """Columns from anything array-like; times go onto the grid."""
        return Memory(
            worker=np.array(worker, np.int32),
            buffer=np.array(buffer, np.int32),
            span=np.array(span, np.int32),
            time_s=quantise(np.array(time_s, np.float64)),
            change_bytes=np.array(change_bytes, np.float64),
            resident_bytes=np.array(resident_bytes, np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline(_SameValues):
    """Spans with their tables of names. Checks that indices, names and times agree (InputError)."""

    clock: Literal["predicted", "measured"]
    """Where the times come from: a simulation of a Program, or a recording of a run."""
    workers: tuple[Worker, ...]
    """Ranks, each standing for those that did the same."""
    streams: tuple[str, ...]
    """Names of the queues of a device, `compute` among them; actions of one never overlap."""
    kinds: tuple[str, ...]
    """Names of actions, as `F` and `B`."""
    paths: tuple[str, ...] = ()
    """Names of operations inside actions; empty where actions are shown as a whole."""
    buffers: tuple[str, ...] = ()
    """Names of classes of memory; empty without `memory`."""
    spans: Spans
    """All actions."""
    makespan_s: float
    """From 0 to the end of the last span; for a measured step, of the step."""
    period_s: float | None = None
    """Steady-state seconds per step, if known; not the same as the makespan. On the grid if the timeline repeats."""
    repeats: bool = False
    """The spans are one step of the steady state: each recurs every `period_s`. False: they start from rest at 0."""
    memory: Memory | None = None
    """Allocations and frees; None where sizes were not given or not recorded."""
    assumptions: tuple[str, ...] = ()
    """What the times rest on, a sentence each."""

    def __post_init__(self) -> None:
        names = (tuple(w.name for w in self.workers), self.streams, self.kinds, self.paths, self.buffers)
        for what, table in zip(("worker", "stream", "kind", "path", "buffer"), names, strict=True):
            _check_names(what, table)
        for text in self.assumptions:
            _check_text("assumption", text)
        if self.clock not in ("predicted", "measured"):
            raise InputError(f"clock must be 'predicted' or 'measured', not {self.clock!r}")
        self._check_spans()
        self._check_times()
        if self.memory is not None:
            self._check_memory(self.memory)

    def _check_spans(self) -> None:
        s = self.spans
        for name, low, limit in (
            ("worker", 0, len(self.workers)),
            ("stream", 0, len(self.streams)),
            ("kind", 0, len(self.kinds)),
            ("role", 0, len(ROLES)),
            ("path", NONE, len(self.paths)),
            ("cause", NONE, s.size),
        ):
            _check_range(getattr(s, name), name, low, limit)
        for name, low in (("stage", NONE), ("unit", NONE), ("step", 0), ("nbytes", NONE), ("cause_steps", 0)):
            values = getattr(s, name)
            if (values < low).any():
                raise InputError(f"{name} must be at least {low}, got {int(values.min())}")
        if not (np.isfinite(s.flops) & ((s.flops >= 0) | (s.flops == NONE))).all():
            raise InputError("flops must be finite and at least 0, or -1 where they are not known")
        # Only a steady state has a step before the one shown.
        if s.cause_steps.any() and not self.repeats:
            raise InputError("a cause lies in an earlier period, but this timeline does not repeat")

    def _check_times(self) -> None:
        for name in ("makespan_s", "period_s"):
            value = getattr(self, name)
            # A period of a timeline that does not repeat is a number of the prediction and need not lie on the grid.
            if value is not None and (name == "makespan_s" or self.repeats):
                _check_grid(np.array([value]), name)
        if self.period_s is not None and not 0 <= self.period_s < np.inf:
            raise InputError(f"period_s must be a finite number of seconds, not {self.period_s!r}")
        last = float(self.spans.end_s.max(initial=0.0))
        # It may be later: a measured step goes on after its last span, with what is not recorded.
        if self.makespan_s < last:
            raise InputError(f"makespan is {self.makespan_s!r} s, but the last span ends at {last!r} s")
        if self.repeats and self.period_s is None:
            raise InputError("a timeline that repeats needs its period")

    def _check_memory(self, memory: Memory) -> None:
        _check_range(memory.worker, "worker of memory", 0, len(self.workers))
        _check_range(memory.buffer, "buffer", 0, len(self.buffers))
        _check_range(memory.span, "span of memory", 0, self.spans.size)
        shape = (len(self.workers), len(self.buffers))
        if memory.resident_bytes.shape != shape:
            raise InputError(f"resident_bytes has shape {memory.resident_bytes.shape}; [workers, buffers] is {shape}")
        if not (np.isfinite(memory.change_bytes).all() and np.isfinite(memory.resident_bytes).all()):
            raise InputError("bytes must be finite numbers")

    @property
    def step_s(self) -> float:
        """Seconds that a breakdown adds up to: the period if the timeline repeats, else the makespan."""
        return self.period_s if self.repeats and self.period_s is not None else self.makespan_s

    def action(self, span: int) -> str:
        """`2F0`: stage, kind, unit; `UNSHARD` where there is neither."""
        stage, unit = int(self.spans.stage[span]), int(self.spans.unit[span])
        kind: str = self.kinds[self.spans.kind[span]]
        return ("" if stage < 0 else str(stage)) + kind + ("" if unit < 0 else str(unit))

    def where(self, span: int) -> str:
        """`2F0 on class 1 (span 7)`, for messages."""
        return f"{self.action(span)} on {self.workers[self.spans.worker[span]].name} (span {span})"


def _freeze(table: Spans | Memory, apart: Sequence[str] = ()) -> None:
    """Makes columns read-only and checks that they are one-dimensional and of one length."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    size = len(columns["worker"])
    for name, column in columns.items():
        if name not in apart and column.shape != (size,):
            raise InputError(f"column {name} has shape {column.shape}, but there are {size} rows")
        # A frozen dataclass protects the name and not the array.
        column.flags.writeable = False


def _check_grid(values: Doubles, name: str) -> None:
    legal = (values >= 0) & (values <= MAX_TIME_S)
    if not legal.all():
        raise InputError(f"{name} must be from 0 to {MAX_TIME_S:.0f} s, got {float(values[~legal][0])!r}")
    # A power of two: the product is exact, so whole numbers are found without a tolerance.
    ticks = values * (1 / TICK_S)
    if (ticks != np.rint(ticks)).any():
        at = int(np.flatnonzero(ticks != np.rint(ticks))[0])
        raise InputError(f"{name} {float(values[at])!r} s is not on the grid of 2**-36 s; use `Spans.of` or `quantise`")


def _check_range(values: NDArray[np.integer[Any]], name: str, low: int, limit: int) -> None:
    if len(values) and (int(values.min()) < low or int(values.max()) >= limit):
        bad = int(values[(values < low) | (values >= limit)][0])
        raise InputError(f"{name} index {bad} is outside its table of {limit}")


def _check_names(what: str, names: tuple[str, ...]) -> None:
    for name in names:
        _check_text(what, name)
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError(f"{what} {twice!r} is named twice")


def _check_text(what: str, text: str) -> None:
    if not text or not text.isprintable() or text != text.strip():
        raise InputError(f"{what} {text!r} must be printable text on one line, not empty, without blanks around it")
