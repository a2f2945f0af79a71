"""Borders of tensor-parallel regions as actions: what is gathered before a region and scattered after it.

`tensor_parallel_regions(program, begin=, end=)` takes a Program whose stages are parts of a block (down to a single
matrix matmul) and puts, around the regions from a stage of `begin` to the next of `end`, Megatron-LM's collectives:
with sequence parallelism a gather before and a reduce-scatter after, mirrored in backward; without it an all-reduce
after, and one of the input gradient. Both send the same bytes: 2(n-1)/n of the activation. Returns a Program.
Left out: which parts are inside (that is the layout's), and the second gather of an input for its weight gradient.
Source: Shoeybi et al. 2019; Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.insertions import by_name
from gnomon.program import (
    BufferClass,
    BufferRef,
    Effect,
    Kind,
    Override,
    Program,
    RowEffect,
    effects,
    with_buffers,
    with_kinds,
)


def _kind(name: str, acts: str) -> Kind:
    return Kind(name=name, stream="tp", comm="tp", effects=effects(acts))


SEQUENCE_PARALLEL = {
    "before F": _kind("AG_F", "consume X, write XG"),
    "after F": _kind("RS_F", "consume YP, write Y"),
    "before B": _kind("AG_B", "consume DY, write DYG"),
    "after B": _kind("RS_B", "consume DXP, write DX"),
}
PLAIN = {"after F": _kind("AR_F", "consume YP, write Y"), "after B": _kind("AR_B", "consume DXP, write DX")}
"""What stands before and after forwards and backwards. XG and DYG are gathered, YP and DXP are partial sums."""

_RENAMED = {"before F": ("X", "XG"), "after F": ("Y", "YP"), "before B": ("DY", "DYG"), "after B": ("DX", "DXP")}


def tensor_parallel_regions(
    program: Program,
    *,
    begin: Collection[int],
    end: Collection[int],
    sequence_parallel: bool = True,
    inside: bool = False,
) -> Program:
    """The Program with the collectives at the borders of its tensor-parallel regions.

    begin, end: stages that open and close a region (column- and row-parallel matmuls). sequence_parallel: gather and
    reduce-scatter, with the sequence divided between regions; otherwise all-reduces. inside: mark the rows as
    collectives inside a block, which are checked by trace. PlanError when a region ends in the last stage of a chain
    (nothing would wait for its result; give the loss a stage of its own), for other kinds than F and B on these
    stages, and for rows that are grouped or have effects of their own.
    """
    for stage in end:
        if stage + 1 == program.num_stages or stage + 1 in program.chains:
            raise PlanError(f"a region ends in stage {stage}, the last of its chain; give the loss a stage of its own")
    borders = frozenset((*begin, *end))
    chosen = SEQUENCE_PARALLEL if sequence_parallel else PLAIN
    override = Override(inside=True) if inside else None
    listed = []
    for rows in rows_of(program):
        out: list[Row] = []
        for row in rows:
            if row.stage in borders and row.kind in ("C", "R", "I", "W"):
                raise PlanError(f"regions are known for forwards F and full backwards B, not for {row}")
            places = [place for place in chosen if _applies(program, row, place, begin, end)]
            replaced = {place: replace(row, kind=chosen[place].name, override=override) for place in places}
            out += [replaced[place] for place in places if place.startswith("before")]
            out.append(_renamed(program, row, places) if places else row)
            out += [replaced[place] for place in places if place.startswith("after")]
        listed.append(out)
    buffers = with_buffers(
        *(BufferClass(name=_RENAMED[place][1], memory="not in the step's") for place in chosen),
        base=program.buffers,
    )
    kinds = with_kinds(*chosen.values(), base=program.kinds)
    return with_rows(replace(program, buffers=buffers), listed, kinds=kinds)


def _applies(program: Program, row: Row, place: str, begin: Collection[int], end: Collection[int]) -> bool:
    """Whether a collective stands at this place of a row."""
    if row.kind != place[-1]:
        return False
    # A region's forward begins where its backward ends.
    opens = place in ("before F", "after B")
    if row.stage not in (begin if opens else end):
        return False
    return place != "after B" or row.stage not in program.chains  # nobody wants the gradient of the model's input


def _renamed(program: Program, row: Row, places: Collection[str]) -> Row:
    """The row with gathered inputs and partial outputs in place of its own."""
    if row.group >= 0 or (row.override is not None and row.override.effects is not None):
        raise PlanError(f"{row} is grouped or has effects of its own; put the borders of regions in before that")
    names = dict(_RENAMED[place] for place in places)
    acts = []
    for effect in by_name(program.kinds)[row.kind].effects:
        if effect.buffer in names or exists(program, effect.buffer, row.stage):
            acts.append(_instance(program, effect, names.get(effect.buffer, effect.buffer), row))
    return replace(row, override=replace(row.override or Override(), effects=tuple(acts)))


def _instance(program: Program, effect: Effect, name: str, row: Row) -> RowEffect:
    per = {buffer.name: buffer.per for buffer in program.buffers}.get(name, "unit")
    if effect.which != "own" or per == "sequence":
        raise PlanError(f"{row} reaches {effect.buffer} of other units or of sequences, which regions do not handle")
    return RowEffect(effect.op, BufferRef(name, row.stage, row.unit if per == "unit" else 0))


def exists(program: Program, buffer: str, stage: int) -> bool:
    """Whether a buffer of the chain between stages exists at a stage: the first has no X (unless loaded) and no DX, the
    last no Y and no DY."""
    if buffer == "DX" or (buffer == "X" and program.inputs == "resident"):
        return stage not in program.chains
    if buffer in ("Y", "DY"):
        return stage + 1 != program.num_stages and stage + 1 not in program.chains
    return True
