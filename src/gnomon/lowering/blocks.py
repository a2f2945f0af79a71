"""Stages taken apart into blocks, so that what happens to each block (gather, reduce, update) is a row of its own.

`with_blocks(program, blocks)` turns stage s of a Program into blocks[s] stages: forwards run through a stage's blocks
in order, backwards in reverse, messages leave from the last block and arrive at the first. Returns a Program in which
a stage is a block. Left out: how long a block takes, and composite actions, whose halves would have to be matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.program import Program
from gnomon.program.rows import Rows

_BACKWARD = ("B", "I", "W", "R")
_AT_FIRST = ("LOAD", "RECV_F", "SEND_B")
_AT_LAST = ("SEND_F", "RECV_B")


def with_blocks(program: Program, blocks: Sequence[int]) -> Program:
    """The Program with stage s as blocks[s] stages, numbered on through all stages.

    A recompute followed at once by its backward goes block by block with it; reductions that follow a backward go
    after each block's. PlanError for a stage without blocks, and for rows whose meaning in blocks is not known: grouped
    rows, rows with effects or peers of their own, aliases.
    """
    if len(blocks) != program.num_stages or min(blocks) < 1:
        raise PlanError(f"blocks {tuple(blocks)} must give each of the {program.num_stages} stages one block or more")
    if program.aliases:
        raise PlanError("stages with tied parameters cannot be taken apart; say which blocks are tied afterwards")
    first = [sum(blocks[:s]) for s in range(len(blocks))]
    if (expanded := _by_column(program, np.array(blocks, np.int64))) is not None:
        return expanded.like(replace(program, num_stages=sum(blocks), chains=tuple(first[s] for s in program.chains)))
    spans = [range(start, start + count) for start, count in zip(first, blocks, strict=True)]
    listed = [[one_row for run in _runs(rows) for one_row in _expanded(run, spans)] for rows in rows_of(program)]
    chains = tuple(first[s] for s in program.chains)
    return with_rows(replace(program, num_stages=sum(blocks), chains=chains), listed)


def _by_column(program: Program, blocks: NDArray[np.int64]) -> Rows | None:
    """The rows in blocks, all at once; None where rows differ from their kinds or go through blocks together."""
    names = [kind.name for kind in program.kinds]
    kind, stage = program.kind.astype(np.int64), program.stage.astype(np.int64)
    # A pair of kinds as one number, so that neighbours are compared at once.
    pairs = {names.index(a) * len(names) + names.index(b) for a, b in _TOGETHER if a in names and b in names}
    next_to = np.isin(kind[:-1] * len(names) + kind[1:], list(pairs)) & (stage[:-1] == stage[1:])
    if program.overrides or (program.group >= 0).any() or next_to.any():
        return None

    def of(*names_chosen: str) -> NDArray[np.bool_]:
        return np.array([name in names_chosen for name in names])[kind]

    at_first, at_last = of(*_AT_FIRST), of(*_AT_LAST)
    count = np.where(at_first | at_last, 1, blocks[stage])
    ends = np.cumsum(count)
    row = np.repeat(np.arange(len(kind)), count)
    # Number of each row within the expansion of the row that it comes from.
    place = np.arange(len(row)) - (ends - count)[row]
    last = blocks[stage] - 1
    # Block within its stage: backwards run from the last block to the first, messages stand at one end.
    offset = np.where(of(*_BACKWARD, "AR")[row], last[row] - place, np.where(at_last[row], last[row], place))
    # ends[i] is one past the last new row of old row i, so [0, *ends] at the old borders of classes are the new ones.
    begin = np.cumsum(blocks) - blocks
    return replace(
        Rows.of(program),
        num_stages=int(blocks.sum()),
        class_ptr=np.append(0, ends)[program.class_ptr],
        kind=program.kind[row],
        stage=(begin[stage[row]] + offset).astype(np.int16),
        unit=program.unit[row],
        group=program.group[row],
    )


def _runs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that go through the blocks together: R and its B, a backward and the reduction after it; others alone."""
    run: list[Row] = []
    for row in rows:
        joins = run and run[-1].stage == row.stage and (run[-1].kind, row.kind) in _TOGETHER
        if run and not joins:
            yield run
            run = []
        run.append(row)
    if run:
        yield run


_TOGETHER = (("R", "B"), ("R", "I"), ("B", "AR"), ("W", "AR"))


def _expanded(run: Sequence[Row], spans: Sequence[range]) -> Iterator[Row]:
    for row in run:
        if row.group >= 0 or (row.override and (row.override.effects is not None or row.override.peer is not None)):
            raise PlanError(f"{row} is grouped or has effects or a peer of its own; take stages apart before that")
    span = spans[run[0].stage]
    if run[0].kind in _AT_FIRST:
        span = span[:1]
    elif run[0].kind in _AT_LAST:
        span = span[-1:]
    for block in reversed(span) if run[0].kind in (*_BACKWARD, "AR") else span:
        for row in run:
            yield Row(kind=row.kind, stage=block, unit=row.unit, override=row.override)
