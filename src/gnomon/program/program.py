"""A Program: what every rank does in one step, as columns of rows in issue order.

Rows of one rank class stand together (`class_ptr`), in the order in which the host issues them; a stream's order is
that list restricted to it. Defaults (stream, communicator, effects) come from the row's `Kind`; `overrides` hold
the few rows that differ. Buffers are named by (class of buffer, stage, unit or sequence) and belong to one rank class.
Left out: durations and sizes (looked up by `keys` and buffer labels), and dependencies, which `dependencies` derives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import ProgramError, nearest
from gnomon.program.kinds import STANDARD_BUFFERS, STANDARD_KINDS, BufferClass, EffectOp, Kind
from gnomon.program.units import Unit

Ints = NDArray[np.int32]
Integers = NDArray[np.signedinteger[Any]]
NO_UNIT = -1
"""The unit of a row that belongs to no unit (a reduction, the optimizer)."""
MAX_ROWS, MAX_STAGES, MAX_UNITS = (1 << 23) - 1, (1 << 11) - 2, (1 << 18) - 2
"""The most rows, stages and units of a Program: messages and effects are packed into 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A declared communicator and what sending on it means."""

    name: str
    """The name that rows use."""
    semantics: Literal["buffered", "rendezvous", "collective"] = "buffered"
    """What sending means. buffered: a send ends without its receive. rendezvous: both start and end together.
    collective: no messages."""
    capacity: int = 0
    """The number of messages that may be in flight between two ranks when buffered; 0 is no limit."""
    ordered: bool = True
    """Whether messages between two ranks match by order, as in NCCL: they must be received in the order sent."""

    def __post_init__(self) -> None:
        if self.capacity < 0 or (self.capacity and self.semantics != "buffered"):
            raise ProgramError(
                f"communicator {self.name}: capacity {self.capacity} with {self.semantics}; only a buffered one has a "
                "capacity, 1 or more (0 is no limit)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A bound on how many buffers of a pool a rank holds at once."""

    name: str
    """The name that buffer classes use."""
    size: int
    """The number of buffers in the pool: the k-th allocation waits for the (k - size)-th free, also across the step."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ProgramError(f"pool {self.name}: size must be at least 1, not {self.size}")


class BufferRef(NamedTuple):
    """One buffer of the rank class that names it."""

    buffer: str
    """Name of its buffer class."""
    stage: int
    """The stage that it belongs to."""
    at: int = 0
    """The unit or sequence; 0 for buffers that are per stage."""


class RowEffect(NamedTuple):
    """An effect given for one row."""

    op: EffectOp
    """What the row does to it."""
    ref: BufferRef
    """The buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Says where one row differs from its kind. Empty fields keep the default."""

    stream: str = ""
    """The stream that it runs on; empty: its kind's."""
    comm: str = ""
    """The communicator that it uses; empty: its kind's."""
    peer: int | None = None
    """The stage at the other end of a message, when it is not one hop away."""
    name: str = ""
    """The name of this row's price, where it is not that of its kind."""
    effects: tuple[RowEffect, ...] | None = None
    """Effects that replace the kind's (or, with `adds`, come in addition to them)."""
    adds: bool = False
    """Whether `effects` come in addition to the kind's, in place of replacing them."""
    inside: bool = False
    """Mode: this row describes a collective that runs inside a block (checked by trace), not an action of its own."""

    def __post_init__(self) -> None:
        if self.adds and self.effects is None:
            raise ProgramError("an override that adds effects must give them; effects is None")


class Key(NamedTuple):
    """What a row's price depends on; prices resolve it with the plan into a LocalContext."""

    rank_class: int
    """Index of the rank class."""
    kind: str
    """Name of the row's kind."""
    stage: int
    """The row's stage."""
    shape: str
    """Shape of the unit among the Program's units: empty when all units are alike, else as `4` or `2+2` (tokens +
    prefix)."""
    name: str
    """The name that an override sets; empty otherwise."""

    @property
    def label(self) -> str:
        """`2F`, `2F~4`, or the override's name."""
        return self.name or f"{self.stage}{self.kind}" + (f"~{self.shape}" if self.shape else "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """Rows of all rank classes. Arrays are read-only; build one with `ProgramBuilder` or `from_columns`."""

    kinds: tuple[Kind, ...]
    """Kinds of rows: name, stream and what they do to buffers."""
    buffers: tuple[BufferClass, ...]
    """Classes of buffers."""
    comms: tuple[Communicator, ...]
    """Communicators that rows use."""
    pools: tuple[Pool, ...]
    """Limits on how many buffers of a kind are there at once; empty: none is limited."""
    units: tuple[Unit, ...]
    """Microbatches of a step, or pieces of them."""
    num_stages: int
    """Stages of all rank classes together."""
    chains: tuple[int, ...]
    """Stages that start a chain: they take no input from the stage before them. (0,) for a plain pipeline."""
    inputs: Literal["resident", "loaded"]
    """Whether inputs of first stages are always there, or written by rows (LOAD)."""
    counts: tuple[int, ...]
    """The number of ranks in each class."""
    aliases: tuple[tuple[BufferRef, BufferRef], ...]
    """Buffers (per stage) that are one and the same: tied parameters on one rank. The first stands for the second."""
    streams: tuple[str, ...]
    """Names of a rank's streams."""
    class_ptr: NDArray[np.int64]
    """Where classes begin: rows class_ptr[c]:class_ptr[c + 1] are those of rank class c, in issue order."""
    kind: NDArray[np.int8]
    """[rows] index into `kinds`."""
    stage: NDArray[np.int16]
    """[rows] the stage."""
    unit: Ints
    """NO_UNIT where the row belongs to none."""
    stream: NDArray[np.int8]
    """[rows] index into `streams`."""
    group: Ints
    """Rows of one group (>= 0) start and end together; -1 elsewhere."""
    key: Ints
    """[rows] index into `keys`."""
    keys: tuple[Key, ...]
    """What rows can cost: rows of one key have one price."""
    overrides: Mapping[int, Override] = field(default_factory=dict)
    """Row -> where it differs from its kind."""

    @property
    def num_rows(self) -> int:
        """Counts the rows of all classes."""
        return int(self.class_ptr[-1])

    @property
    def num_classes(self) -> int:
        """Counts the rank classes."""
        return len(self.counts)

    def rank_class(self, row: int) -> int:
        """The class to which a row belongs."""
        # side="right": class_ptr[c] is itself a row of class c.
        return int(np.searchsorted(self.class_ptr, row, side="right")) - 1

    def comm_of(self, row: int) -> str:
        """The communicator that a row uses, or ''."""
        override = self.overrides.get(row)
        return (override.comm if override else "") or self.kinds[self.kind[row]].comm

    def token(self, row: int) -> str:
        """The action's name, `2F0`: stage, kind, unit."""
        unit = int(self.unit[row])
        return f"{self.stage[row]}{self.kinds[self.kind[row]].name}" + ("" if unit < 0 else str(unit))

    def where(self, row: int) -> str:
        """`rank class 1, action 2F0 (row 3)`, for messages."""
        cls = self.rank_class(row)
        return f"rank class {cls}, action {self.token(row)} (row {row - int(self.class_ptr[cls])})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return all(same_value(getattr(self, name), getattr(other, name)) for name in Program.__slots__)

    def __hash__(self) -> int:
        # Arrays are left out, which have no hash: equal Programs still have equal hashes.
        return hash((self.num_rows, self.num_stages, self.counts, self.keys))


def same_value(a: object, b: object) -> bool:
    """Equality of two fields of a value, element by element of arrays."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return a == b


def plain_units(count: int) -> tuple[Unit, ...]:
    """Makes ordinary microbatches: unit i holds all of sequence i (one token long), equal weights."""
    return tuple(Unit(pieces=((i, 0, 1),), weight=1.0 / count, worker=0) for i in range(count))


def unit_shapes(units: Sequence[Unit]) -> tuple[tuple[str, ...], Ints]:
    """Distinct shapes of the units (tokens, prefix where there is one, and rank of a local sequence: `4,2+2,8@1`) and
    the shape of each unit.

    All units alike give the single shape ''.
    """
    seen: dict[str, int] = {}
    index = np.zeros(len(units), np.int32)
    for i, unit in enumerate(units):
        where = {sequence: f"@{rank}" for sequence, rank in unit.local}
        text = ",".join(
            f"{stop - start}" + (f"+{start}" if start else "") + where.get(sequence, "")
            for sequence, start, stop in unit.pieces
        )
        # A new shape gets the next number.
        index[i] = seen.setdefault(text, len(seen))
    return (tuple(seen) if len(seen) > 1 else ("",)), index


def from_columns(
    *,
    class_ptr: NDArray[np.int64],
    kind: NDArray[np.int8],
    stage: NDArray[np.int16],
    unit: Ints,
    num_stages: int,
    units: tuple[Unit, ...],
    kinds: tuple[Kind, ...] = STANDARD_KINDS,
    buffers: tuple[BufferClass, ...] = STANDARD_BUFFERS,
    comms: tuple[Communicator, ...] = (),
    pools: tuple[Pool, ...] = (),
    counts: tuple[int, ...] = (),
    chains: tuple[int, ...] = (0,),
    inputs: Literal["resident", "loaded"] = "resident",
    aliases: tuple[tuple[BufferRef, BufferRef], ...] = (),
    group: Ints | None = None,
    overrides: Mapping[int, Override] | None = None,
) -> Program:
    """A Program from its columns. Streams and price keys follow from the kinds; communicators not declared are
    buffered.

    `kind` indexes `kinds`; `class_ptr[c]:class_ptr[c + 1]` are the rows of class c in issue order. Checks names and
    ranges (ProgramError); whether the Program can run is `validate`'s question.
    """
    # In order of rows, because streams and named keys are numbered as they are met.
    overrides = {row: o for row, o in sorted((overrides or {}).items()) if o != Override()}
    num_rows, num_classes = int(class_ptr[-1]), len(class_ptr) - 1
    _check_columns(kind, stage, unit, num_stages, len(kinds), len(units), num_rows)
    _check_overrides(overrides, num_rows, num_stages)
    if counts and (len(counts) != num_classes or min(counts) < 1):
        raise ProgramError(f"counts {counts}: give the ranks of each of the {num_classes} classes, 1 or more")
    streams = tuple(dict.fromkeys([k.stream for k in kinds] + [o.stream for o in overrides.values() if o.stream]))
    stream = np.array([streams.index(k.stream) for k in kinds], np.int8)[kind]
    for row, override in overrides.items():
        if override.stream:
            stream[row] = streams.index(override.stream)
    keys, key = _keys(class_ptr, kind, stage, unit, kinds, units, num_stages, overrides)
    columns = (class_ptr, kind, stage, unit, stream, key)
    group = np.full(num_rows, -1, np.int32) if group is None else group
    # Programs made from this one share its columns.
    for column in (*columns, group):
        column.flags.writeable = False
    return Program(
        kinds=kinds,
        buffers=buffers,
        comms=_all_comms(comms, kinds, overrides),
        pools=_all_pools(pools, buffers),
        units=units,
        num_stages=num_stages,
        chains=chains,
        inputs=inputs,
        counts=counts or (1,) * num_classes,
        aliases=aliases,
        streams=streams,
        class_ptr=class_ptr,
        kind=kind,
        stage=stage,
        unit=unit,
        stream=stream,
        group=group,
        key=key,
        keys=keys,
        overrides=overrides,
    )


_MAX_KINDS = 127  # the column of kinds is int8


def _check_columns(
    kind: Integers, stage: Integers, unit: Integers, stages: int, kinds: int, units: int, rows: int
) -> None:
    if rows > MAX_ROWS or stages > MAX_STAGES or units > MAX_UNITS:
        raise ProgramError(
            f"{rows} rows, {stages} stages, {units} units: a Program holds up to {MAX_ROWS}, {MAX_STAGES} and "
            f"{MAX_UNITS} of them"
        )
    if kinds > _MAX_KINDS:
        raise ProgramError(f"{kinds} kinds: a Program holds up to {_MAX_KINDS} of them")
    if not len(kind) == len(stage) == len(unit) == rows:
        raise ProgramError(f"columns have {len(kind)}, {len(stage)} and {len(unit)} rows, class_ptr says {rows}")
    for name, column, low, limit in (
        ("kind", kind, 0, kinds),
        ("stage", stage, 0, stages),
        ("unit", unit, NO_UNIT, units),
    ):
        if rows and not (low <= int(column.min()) and int(column.max()) < limit):
            bad = int(np.flatnonzero((column < low) | (column >= limit))[0])
            raise ProgramError(f"row {bad} has {name} {int(column[bad])}, but the Program declares {limit} {name}s")


def _check_overrides(overrides: Mapping[int, Override], num_rows: int, num_stages: int) -> None:
    for row, override in overrides.items():
        if not 0 <= row < num_rows:
            raise ProgramError(f"an override is given for row {row}, but the Program has {num_rows} rows")
        if override.peer is not None and not 0 <= override.peer < num_stages:
            raise ProgramError(f"row {row} has peer {override.peer}, but the Program has {num_stages} stages")


def default_comms(kinds: tuple[Kind, ...]) -> tuple[Communicator, ...]:
    """The communicators that kinds name, as they are unless declared: buffered for messages, else collective."""
    by_name: dict[str, Communicator] = {}
    for kind in kinds:
        if kind.comm and kind.comm not in by_name:
            by_name[kind.comm] = Communicator(name=kind.comm, semantics="buffered" if kind.message else "collective")
    return tuple(by_name.values())


def _all_comms(
    comms: tuple[Communicator, ...], kinds: tuple[Kind, ...], overrides: Mapping[int, Override]
) -> tuple[Communicator, ...]:
    by_name = {comm.name: comm for comm in comms}
    for comm in default_comms(kinds):
        by_name.setdefault(comm.name, comm)
    for override in overrides.values():
        if override.comm and override.comm not in by_name:
            raise ProgramError(
                f"communicator {override.comm!r} is used but not declared{nearest(override.comm, by_name)}"
            )
    return tuple(by_name.values())


def _all_pools(pools: tuple[Pool, ...], buffers: tuple[BufferClass, ...]) -> tuple[Pool, ...]:
    known = {pool.name for pool in pools}
    for buffer in buffers:
        if buffer.pool and buffer.pool not in known:
            raise ProgramError(
                f"buffer {buffer.name} is in pool {buffer.pool!r}, which is not declared{nearest(buffer.pool, known)}"
            )
    return pools


def _keys(
    class_ptr: NDArray[np.int64],
    kind: NDArray[np.int8],
    stage: NDArray[np.int16],
    unit: Ints,
    kinds: tuple[Kind, ...],
    units: tuple[Unit, ...],
    num_stages: int,
    overrides: Mapping[int, Override],
) -> tuple[tuple[Key, ...], Ints]:
    """Interns price keys: one per (class, kind, stage, unit shape), and one per named override."""
    # One more shape than there are: the last stands for "no unit".
    shapes, shape_of = unit_shapes(units)
    num_classes, num_shapes = len(class_ptr) - 1, len(shapes) + 1
    # code = ((kind x stages) + stage) x shapes + shape: a dense number for each combination, so a table lookup replaces
    # hashing of rows.
    code = kind.astype(np.int32)
    code *= num_stages
    code += stage
    code *= num_shapes
    # A row without a unit (-1) picks the appended item. Where all units are alike the shape is 0 for every row.
    code += np.append(shape_of, np.int32(num_shapes - 1))[unit] if num_shapes > 2 else 0
    per_class = len(kinds) * num_stages * num_shapes
    keys: list[Key] = []
    out = np.empty(len(kind), np.int32)
    # Class by class: used codes get the next key numbers.
    for cls in range(num_classes):
        part = slice(int(class_ptr[cls]), int(class_ptr[cls + 1]))
        used = np.zeros(per_class, bool)
        used[code[part]] = True
        codes = np.flatnonzero(used)
        remap = np.zeros(per_class, np.int32)
        remap[codes] = np.arange(len(keys), len(keys) + len(codes), dtype=np.int32)
        out[part] = remap[code[part]]
        for value in codes.tolist():
            rest, shape = divmod(value, num_shapes)
            k, s = divmod(rest, num_stages)
            text = shapes[shape] if shape < len(shapes) else ""
            keys.append(Key(cls, kinds[k].name, s, text, ""))
    named: dict[Key, int] = {}
    for row, override in sorted(overrides.items()):
        if override.name:
            key = keys[out[row]]._replace(name=override.name)
            if key not in named:
                named[key] = len(keys)
                keys.append(key)
            out[row] = named[key]
    if named:  # a key whose rows all have names of their own would ask for a price that no row uses
        used = np.bincount(out, minlength=len(keys)) > 0
        # The new number of a used key is how many used ones come before it.
        out = (np.cumsum(used, dtype=np.int32) - 1)[out]
        keys = [key for key, is_used in zip(keys, used.tolist(), strict=True) if is_used]
    return tuple(keys), out


class ProgramBuilder:
    """Collects rows one at a time; for schedules by hand, parsers and passes. Large schedules use `from_columns`."""

    def __init__(
        self, *, num_stages: int, units: int | tuple[Unit, ...], kinds: tuple[Kind, ...] = STANDARD_KINDS
    ) -> None:
        self.num_stages = num_stages
        self.units = plain_units(units) if isinstance(units, int) else units
        self.kinds = kinds
        self._index = {kind.name: i for i, kind in enumerate(kinds)}
        self._rows: list[list[tuple[int, int, int, int]]] = []
        self._overrides: list[dict[int, Override]] = []
        self.counts: list[int] = []

    def rank_class(self, count: int = 1) -> int:
        """Opens the next rank class of `count` ranks and returns its index."""
        self._rows.append([])
        self._overrides.append({})
        self.counts.append(count)
        return len(self.counts) - 1

    def add(
        self, cls: int, kind: str, stage: int, unit: int = NO_UNIT, *, group: int = -1, override: Override | None = None
    ) -> None:
        """Appends one row to class `cls`, in issue order."""
        if kind not in self._index:
            raise ProgramError(f"unknown kind {kind!r}{nearest(kind, self._index)}")
        if override is not None and override != Override():
            self._overrides[cls][len(self._rows[cls])] = override
        self._rows[cls].append((self._index[kind], stage, unit, group))

    def add_all(self, cls: int, rows: Iterable[tuple[str, int, int]]) -> None:
        """Appends (kind, stage, unit) rows."""
        for kind, stage, unit in rows:
            self.add(cls, kind, stage, unit)

    def build(
        self,
        *,
        buffers: tuple[BufferClass, ...] = STANDARD_BUFFERS,
        comms: tuple[Communicator, ...] = (),
        pools: tuple[Pool, ...] = (),
        chains: tuple[int, ...] = (0,),
        inputs: Literal["resident", "loaded"] = "resident",
        aliases: tuple[tuple[BufferRef, BufferRef], ...] = (),
    ) -> Program:
        """Builds the Program. Groups keep their numbers."""
        ptr = np.concatenate([[0], np.cumsum([len(rows) for rows in self._rows])]).astype(np.int64)
        # Checked below before columns are narrowed, where what is too large would wrap around.
        table = np.array([row for rows in self._rows for row in rows], np.int64).reshape(-1, 4)
        _check_columns(
            table[:, 0], table[:, 1], table[:, 2], self.num_stages, len(self.kinds), len(self.units), len(table)
        )
        # From rows of a class to rows of the Program.
        overrides = {int(ptr[c]) + i: o for c, by_row in enumerate(self._overrides) for i, o in by_row.items()}
        return from_columns(
            class_ptr=ptr,
            kind=table[:, 0].astype(np.int8),
            stage=table[:, 1].astype(np.int16),
            unit=table[:, 2].astype(np.int32),
            group=table[:, 3].astype(np.int32),
            num_stages=self.num_stages,
            units=self.units,
            kinds=self.kinds,
            buffers=buffers,
            comms=comms,
            pools=pools,
            counts=tuple(self.counts),
            chains=chains,
            inputs=inputs,
            aliases=aliases,
            overrides=overrides,
        )
