"""A Program as lists of rows and back: what passes edit.

`rows_of(program)` gives each rank class its rows in issue order, each with its own override; `with_rows` makes a
Program of edited lists that keeps everything else. Meant for passes that move single actions; schedules with a
million rows are built as columns and do not come through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gnomon.program import NO_UNIT, Kind, Override, Program, ProgramBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One action with its place and where it differs from its kind."""

    kind: str
    """Name of the kind."""
    stage: int
    """Stage it works on."""
    unit: int = NO_UNIT
    """Unit it works on, or NO_UNIT."""
    group: int = -1
    """Rows of one group start and end together; -1 is none."""
    override: Override | None = None
    """Where it differs from its kind."""

    @property
    def place(self) -> tuple[int, int]:
        """The pair (stage, unit) by which effects find an instance of a buffer."""
        return self.stage, self.unit

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + ("" if self.unit < 0 else str(self.unit))


def rows_of(program: Program) -> list[list[Row]]:
    """Rows of each rank class, in issue order."""
    names = [kind.name for kind in program.kinds]
    # As lists of Python's numbers, which rows hold.
    kinds, stages = program.kind.tolist(), program.stage.tolist()
    units, groups = program.unit.tolist(), program.group.tolist()
    every = [
        Row(kind=names[kinds[i]], stage=stages[i], unit=units[i], group=groups[i], override=program.overrides.get(i))
        for i in range(program.num_rows)
    ]
    ptr = program.class_ptr.tolist()
    return [every[low:high] for low, high in zip(ptr[:-1], ptr[1:], strict=True)]


def with_rows(
    program: Program,
    rows: Sequence[Iterable[Row]],
    *,
    kinds: tuple[Kind, ...] | None = None,
    counts: tuple[int, ...] | None = None,
) -> Program:
    """The Program with other rows; units, buffers, communicators, pools, chains and aliases stay as they are.

    rows: per rank class, in issue order. kinds: instead of the Program's. counts: ranks in each class, when classes
    have come or gone.
    """
    counts = program.counts if counts is None else counts
    builder = ProgramBuilder(
        num_stages=program.num_stages, units=program.units, kinds=program.kinds if kinds is None else kinds
    )
    for count, listed in zip(counts, rows, strict=True):
        cls = builder.rank_class(count)
        for row in listed:
            builder.add(cls, row.kind, row.stage, row.unit, group=row.group, override=row.override)
    return builder.build(
        buffers=program.buffers,
        comms=program.comms,
        pools=program.pools,
        chains=program.chains,
        inputs=program.inputs,
        aliases=program.aliases,
    )
