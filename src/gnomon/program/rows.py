"""Rows of a schedule before they are a Program: what each rank computes, in issue order, as columns.

A schedule (`gpipe`, `one_f_one_b` …) returns `Rows` with compute actions only; passes insert rows (messages,
reductions, the optimizer) without a Python loop over rows, and `Rows.program` makes the Program. Left out: durations,
and whether the result can run, which is `validate`'s question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.program.kinds import STANDARD_BUFFERS, STANDARD_KINDS, BufferClass, Kind
from gnomon.program.program import BufferRef, Communicator, Override, Pool, Program, from_columns, plain_units
from gnomon.program.units import Unit

Longs = NDArray[np.int64]
Ints = NDArray[np.int32]
KIND = {kind.name: i for i, kind in enumerate(STANDARD_KINDS)}
"""Index of each standard kind; kinds of `Rows` begin with the standard ones, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of all rank classes, class after class, each in issue order. Passes return new ones."""

    num_stages: int
    """Stages of all rank classes together."""
    num_units: int
    """Units of a step."""
    class_ptr: Longs
    """Where classes begin: rows class_ptr[c]:class_ptr[c + 1] are those of rank class c."""
    kind: NDArray[np.int8]
    """[rows] index into `kinds`."""
    stage: NDArray[np.int16]
    """[rows] the stage."""
    unit: Ints
    """NO_UNIT (-1) where the row belongs to none."""
    group: Ints
    """Rows of one group (>= 0) start and end together; -1 elsewhere."""
    kinds: tuple[Kind, ...] = STANDARD_KINDS
    """Kinds that `kind` is an index into."""
    overrides: Mapping[int, Override] = field(default_factory=dict)
    """Maps a row to where it differs from its kind."""
    comms: tuple[Communicator, ...] = ()
    """The communicators that overrides name."""

    @property
    def num_rows(self) -> int:
        """Counts the rows of all classes."""
        return int(self.class_ptr[-1])

    @property
    def num_classes(self) -> int:
        """Counts the rank classes."""
        return len(self.class_ptr) - 1

    @property
    def rank_class(self) -> NDArray[np.int16]:
        """[rows] the class of each row."""
        return np.repeat(np.arange(self.num_classes, dtype=np.int16), np.diff(self.class_ptr))

    def is_kind(self, *names: str) -> NDArray[np.bool_]:
        """[rows] whether a row is of one of these kinds."""
        named = np.array([kind.name in names for kind in self.kinds])
        mask: NDArray[np.bool_] = named[self.kind]
        return mask

    @staticmethod
    def of(program: Program) -> Rows:
        """Takes the rows of a Program, for passes that insert some; `like` turns them back into one."""
        usual = {Communicator(name=k.comm, semantics="buffered" if k.message else "collective") for k in program.kinds}
        return Rows(
            num_stages=program.num_stages,
            num_units=len(program.units),
            class_ptr=program.class_ptr,
            kind=program.kind,
            stage=program.stage,
            unit=program.unit,
            group=program.group,
            kinds=program.kinds,
            overrides=program.overrides,
            comms=tuple(comm for comm in program.comms if comm not in usual),
        )

    def like(self, program: Program) -> Program:
        """A Program of these rows that keeps everything else of `program`."""
        return self.program(
            units=program.units,
            counts=program.counts,
            buffers=program.buffers,
            pools=program.pools,
            chains=program.chains,
            inputs=program.inputs,
            aliases=program.aliases,
        )

    def with_overrides(self, overrides: Mapping[int, Override]) -> Rows:
        """The same rows with these overrides, and no others."""
        return replace(self, overrides=overrides)

    def program(
        self,
        *,
        units: tuple[Unit, ...] = (),
        counts: tuple[int, ...] = (),
        buffers: tuple[BufferClass, ...] = STANDARD_BUFFERS,
        comms: tuple[Communicator, ...] = (),
        pools: tuple[Pool, ...] = (),
        chains: tuple[int, ...] = (0,),
        inputs: Literal["resident", "loaded"] = "resident",
        aliases: tuple[tuple[BufferRef, BufferRef], ...] = (),
    ) -> Program:
        """The Program of these rows. units: left out, plain microbatches. counts: ranks of each class, or one each.
        comms: how communicators behave, where it is not the usual way."""
        if units and len(units) != self.num_units:
            raise PlanError(f"the schedule has {self.num_units} microbatches, but {len(units)} units are given")
        return from_columns(
            class_ptr=self.class_ptr,
            kind=self.kind,
            stage=self.stage,
            unit=self.unit,
            group=self.group,
            overrides=self.overrides,
            num_stages=self.num_stages,
            units=units or plain_units(self.num_units),
            kinds=self.kinds,
            counts=counts,
            buffers=buffers,
            comms=tuple({comm.name: comm for comm in (*self.comms, *comms)}.values()),
            pools=pools,
            chains=chains,
            inputs=inputs,
            aliases=aliases,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inserted:
    """Rows to insert beside existing ones ("anchors")."""

    anchor: Longs
    """The row of the old numbering that each stands next to. Rows of one anchor keep the order in which they are
    given."""
    kind: NDArray[np.int8]
    """[inserted] index into the kinds of the rows that they are inserted into."""
    stage: NDArray[np.int16]
    """[inserted] the stage."""
    unit: Ints
    """[inserted] the unit; NO_UNIT for none."""
    before: bool = False
    """Whether they come before their anchors or after."""
    override: Override | None = None
    """Where all of them differ from their kind; None where they do not."""
    group: int = -1
    """The group of all of them; -1 for none."""


def insert(rows: Rows, parts: Sequence[Inserted], kinds: tuple[Kind, ...] = ()) -> Rows:
    """The rows with those of `parts` in their places. Parts after one anchor come in the order of the parts.

    kinds: replaces the kinds (indices of old kinds must stay).
    """
    old, size = rows.num_rows, rows.num_rows + sum(len(part.anchor) for part in parts)
    before, after = np.zeros(old + 1, np.int32), np.zeros(old + 1, np.int32)
    for part in parts:
        (before if part.before else after)[:old] += np.bincount(part.anchor, minlength=old).astype(np.int32)
    befores, afters = np.cumsum(before), np.cumsum(after)  # inclusive: those next to rows up to and including this one
    # New row number: old number + rows inserted before it (its own `before` ones included) + rows inserted after
    # earlier ones.
    moved = np.arange(old, dtype=np.int64) + befores[:old] + (afters - after)[:old]
    kind, stage = np.zeros(size, np.int8), np.zeros(size, np.int16)
    unit, group = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    kind[moved], stage[moved], unit[moved], group[moved] = rows.kind, rows.stage, rows.unit, rows.group
    overrides = {int(moved[row]): override for row, override in rows.overrides.items()}
    for side in (True, False):
        mine = [part for part in parts if part.before == side and len(part.anchor)]
        for part, place in zip(mine, _places(mine, moved, before), strict=True):
            kind[place], stage[place], unit[place], group[place] = part.kind, part.stage, part.unit, part.group
            if part.override is not None:
                overrides.update((row, part.override) for row in place.tolist())
    # total[r]: rows inserted before old row r; class borders move by it.
    total = np.append(0, befores[:old] + afters[:old])
    return replace(
        rows,
        class_ptr=rows.class_ptr + total[rows.class_ptr],
        kind=kind,
        stage=stage,
        unit=unit,
        group=group,
        kinds=kinds or rows.kinds,
        overrides=overrides,
    )


def _places(parts: Sequence[Inserted], moved: Longs, before: Ints) -> list[Longs]:
    """Final rows of the inserted ones of one side, for each part."""
    if not parts:
        return []
    anchor = np.concatenate([part.anchor for part in parts])
    order = np.argsort(anchor, kind="stable")
    sorted_anchor = anchor[order]
    first = np.flatnonzero(np.append(True, sorted_anchor[1:] != sorted_anchor[:-1]))
    # rank: number of an inserted row among those of its anchor, in the order of the parts.
    rank = np.arange(len(anchor)) - np.repeat(first, np.diff(np.append(first, len(anchor))))
    # Rows before an anchor end right above it; rows after it begin right below it.
    base = moved[sorted_anchor] - before[sorted_anchor] if parts[0].before else moved[sorted_anchor] + 1
    place = np.empty(len(anchor), np.int64)
    place[order] = base + rank
    return np.split(place, np.cumsum([len(part.anchor) for part in parts])[:-1])


def by_time(
    *, time: Longs, kind: NDArray[np.int8], stage: NDArray[np.int16], unit: Ints, num_stages: int, num_units: int
) -> Rows:
    """Rows of a table [ranks, actions], each rank's in the order of its `time`; equal times keep the table's order."""
    order = np.argsort(time, axis=1, kind="stable")
    return of_table(
        np.take_along_axis(np.broadcast_to(kind, time.shape), order, axis=1).ravel(),
        np.take_along_axis(np.broadcast_to(stage, time.shape), order, axis=1).ravel(),
        np.take_along_axis(np.broadcast_to(unit, time.shape), order, axis=1).ravel(),
        num_ranks=len(time),
        num_stages=num_stages,
        num_units=num_units,
    )


def of_table(
    kind: NDArray[np.int8],
    stage: NDArray[np.int16],
    unit: Ints,
    *,
    num_ranks: int,
    num_stages: int,
    num_units: int,
) -> Rows:
    """Rows of `num_ranks` classes of equally many rows, given one after the other."""
    size = len(kind)
    return Rows(
        num_stages=num_stages,
        num_units=num_units,
        class_ptr=np.arange(num_ranks + 1, dtype=np.int64) * (size // num_ranks),
        kind=kind,
        stage=stage,
        unit=unit,
        group=np.full(size, -1, np.int32),
    )


def of_lists(rows: Sequence[Sequence[tuple[str, int, int]]], *, num_stages: int, num_units: int) -> Rows:
    """Rows from lists of (kind, stage, unit) of standard kinds, one list a rank. For short hand-written orders."""
    flat = [(KIND[kind], stage, unit) for part in rows for kind, stage, unit in part]
    table = np.array(flat, np.int64).reshape(-1, 3)
    return Rows(
        num_stages=num_stages,
        num_units=num_units,
        class_ptr=np.cumsum([0, *map(len, rows)]).astype(np.int64),
        kind=table[:, 0].astype(np.int8),
        stage=table[:, 1].astype(np.int16),
        unit=table[:, 2].astype(np.int32),
        group=np.full(len(table), -1, np.int32),
    )


def repeated(rows: Rows, times: int) -> Rows:
    """The rows of compute so many times over, one after the other on every rank, each with units of its own."""
    if times == 1:
        return rows
    sizes = np.diff(rows.class_ptr)
    # [times, rows] of each class in turn: every repeat of a class's rows, then the next class
    order = np.concatenate(
        [np.tile(np.arange(low, low + n), times) for low, n in zip(rows.class_ptr[:-1], sizes, strict=True)]
    )
    turn = np.concatenate([np.repeat(np.arange(times), n) for n in sizes])
    unit, group = rows.unit[order], rows.group[order]
    groups = int(rows.group.max(initial=-1)) + 1
    return replace(
        rows,
        num_units=rows.num_units * times,
        class_ptr=rows.class_ptr * times,
        kind=rows.kind[order],
        stage=rows.stage[order],
        # -1 (no unit, no group) stays; every other number gets a range of its own for each repeat.
        unit=np.where(unit >= 0, unit + turn * rows.num_units, unit).astype(np.int32),
        group=np.where(group >= 0, group + turn * groups, group).astype(np.int32),
        overrides={
            int(row): rows.overrides[int(order[row])] for row in np.flatnonzero(np.isin(order, list(rows.overrides)))
        },
    )


def check_counts(name: str, num_ranks: int, num_microbatches: int) -> None:
    """PlanError unless both are at least 1."""
    if num_ranks < 1 or num_microbatches < 1:
        raise PlanError(
            f"schedule {name} needs at least 1 pipeline rank and 1 microbatch, but has {num_ranks} and "
            f"{num_microbatches}"
        )
