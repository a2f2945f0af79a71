"""Actions split into chunks, so that the collective of one overlaps with the computing of another.

`split(program, kinds, parts)` replaces each row of `kinds` by `parts` rows. Neighbouring split rows of one stage and
unit (a gather and the matmul that reads it) are a run: what only the run touches becomes one buffer a part (`XG.0 …
XG.3`), so that part j waits for part j; everything else is read, added to and freed as a whole. A part has the price
name `2F.4`, a quarter of `2F`, and a part that need not travel `2AG_F.own`. Sizes of the parts add up to the whole.
Left out: what parts cost; several smaller matmuls take longer than one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.program import BufferClass, BufferRef, Override, Program, RowEffect, effect_table, row_effects, with_buffers


def split(program: Program, kinds: Mapping[str, str], parts: int, *, stages: Collection[int] | None = None) -> Program:
    """The Program with every row of `kinds` (of `stages`, or of all) cut into `parts`.

    kinds: kind -> "" or which part is the rank's own and does not travel, "first" or "last". Rows of a run go part by
    part when each is on another stream, otherwise row by row, so that a stream takes one row's parts first. PlanError
    for fewer than two parts and for grouped rows.
    """
    if parts < 2:
        raise PlanError(f"a split into {parts} parts; use 2 or more")
    table = effect_table(program)
    acts = [row_effects(program, table, row) for row in range(program.num_rows)]
    streams = {kind.name: kind.stream for kind in program.kinds}
    runs = _runs(program, kinds, stages)
    starts = {run[0]: run for run in runs}
    of_run = {row: i for i, run in enumerate(runs) for row in run}
    private = _private(program, acts, of_run)
    listed, at = [], 0
    for rows in rows_of(program):
        out: list[Row] = []
        for index, row in enumerate(rows, at):
            if index in starts:
                run = starts[index]
                cut = [
                    _cut(program, rows[i - at], acts[i], parts, kinds[rows[i - at].kind], private[of_run[i]])
                    for i in run
                ]
                apart = len({_stream(rows[i - at], streams) for i in run}) == len(run)
                out += [row for part in zip(*cut, strict=True) for row in part] if apart else sum(cut, [])
            elif index not in of_run:
                out.append(row)
        listed.append(out)
        at += len(rows)
    return with_rows(replace(program, buffers=_with_parts(program, private, parts)), listed)


def _stream(row: Row, streams: Mapping[str, str]) -> str:
    return (row.override.stream if row.override else "") or streams[row.kind]


def _runs(program: Program, kinds: Mapping[str, str], stages: Collection[int] | None) -> list[list[int]]:
    """Neighbouring rows to split, of one rank class, stage and unit, each on another stream than the one before: a
    backward right after its forward is a run of its own, for its parts come in another order."""
    chosen = [kind.name in kinds for kind in program.kinds]
    runs: list[list[int]] = []
    for row in range(program.num_rows):
        if not chosen[program.kind[row]] or (stages is not None and int(program.stage[row]) not in stages):
            continue
        if program.group[row] >= 0:
            raise PlanError(f"{program.where(row)} is in a group, which cannot be split")
        # -2 is next to no row.
        last = runs[-1][-1] if runs else -2
        joins = last == row - 1 and all(column[last] == column[row] for column in (program.stage, program.unit))
        joins = joins and program.stream[last] != program.stream[row]
        if joins and program.rank_class(last) == program.rank_class(row):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


_Owner = tuple[int, BufferRef]


def _private(
    program: Program, acts: Sequence[tuple[RowEffect, ...]], of_run: Mapping[int, int]
) -> list[set[BufferRef]]:
    """Finds for each run the step buffers that only its own rows touch."""
    touched: dict[_Owner, set[int]] = {}
    for row, listed in enumerate(acts):
        for _, ref in listed:
            # Buffers are a rank's own, so instances are told apart by class.
            touched.setdefault((program.rank_class(row), ref), set()).add(row)
    in_step = {buffer.name for buffer in program.buffers if buffer.lifetime in ("action", "step")}
    private: list[set[BufferRef]] = [set() for _ in range(1 + max(of_run.values(), default=-1))]
    for (_, ref), rows in touched.items():
        runs = {of_run.get(row, -1) for row in rows}
        # What one row alone touches is not handed from part to part.
        if len(runs) == 1 and -1 not in runs and len(rows) > 1 and ref.buffer in in_step:
            private[runs.pop()].add(ref)
    return private


def _cut(
    program: Program, row: Row, acts: Sequence[RowEffect], parts: int, own: str, private: set[BufferRef]
) -> list[Row]:
    """The parts of one row."""
    out = []
    for part in range(parts):
        changed = []
        for op, ref in acts:
            if ref in private:
                changed.append(RowEffect(op, ref._replace(buffer=f"{ref.buffer}.{part}")))
            elif op == "write":
                # Parts add to what the whole wrote: none of them makes all of it.
                changed.append(RowEffect("accumulate", ref))
            # Only the last part may use it up.
            elif op == "consume" and part < parts - 1:
                changed.append(RowEffect("read", ref))
            elif op != "free" or part == parts - 1:
                changed.append(RowEffect(op, ref))
        stays = own == ("first" if part == 0 else "last" if part == parts - 1 else "no")
        name = f"{row.stage}{row.kind}.{'own' if stays else parts}"
        # `acts` has the effects of the kind too, so these replace them.
        override = replace(row.override or Override(), name=name, effects=tuple(changed), adds=False)
        out.append(replace(row, override=override))
    return out


def _with_parts(program: Program, private: Sequence[set[BufferRef]], parts: int) -> tuple[BufferClass, ...]:
    names = {ref.buffer for refs in private for ref in refs}
    part_buffers = [
        replace(buffer, name=f"{buffer.name}.{part}")
        for buffer in program.buffers
        if buffer.name in names
        for part in range(parts)
    ]
    return with_buffers(*part_buffers, base=program.buffers)
