"""Effects of every row on every buffer, as one table sorted by buffer and issue order.

`effect_table(program)` expands the defaults of the kinds and the overrides into entries (buffer, row, op) and
numbers the buffers densely. Dependencies, liveness checks and memory are read off this table. Sorting packed 64-bit
integers is what keeps a million rows within a tenth of a second.
Left out: sizes, which `memory` looks up per buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import ProgramError, nearest
from gnomon.program.kinds import EFFECT_OPS, BufferClass, Effect, EffectOp
from gnomon.program.program import BufferRef, Program, RowEffect

# An entry is buffer << 26 | row << 3 | op in 63 bits. Buffer ids take 32 of the 37 that are left (`effect_table`
# refuses more), because they are divided as unsigned 32-bit numbers.
_ROW_BITS, _OP_BITS = 23, 3
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EffectTable:
    """Effects of all rows: entries sorted by (buffer, row, op)."""

    buffer: Longs
    """[entries] dense id of the buffer."""
    row: NDArray[np.int32]
    """[entries] row of the Program."""
    op: NDArray[np.int8]
    """[entries] index into EFFECT_OPS."""
    amounts: dict[tuple[int, int], int]
    """Maps (row, buffer) to the tokens of an `extend`."""
    places: tuple[tuple[int, int], ...]
    """The (rank class, stage) pairs that occur."""
    base: NDArray[np.int64]
    """[buffer classes, places] first buffer id, or -1 where the buffer does not exist there."""
    width: int
    """The number of buffer ids of one class at one place."""

    @property
    def num_ids(self) -> int:
        """One more than the largest buffer id."""
        return int(self.base.size) * self.width

    def buffer_class(self, buffer: Longs) -> Longs:
        """Index of the buffer class of each id."""
        # a constant divisor of unsigned 32 bits is several times faster than of signed 64
        per_class = np.uint32(self.width * len(self.places))
        return (buffer.astype(np.uint32) // per_class).astype(np.int64)

    def ref(self, program: Program, buffer: int) -> BufferRef:
        """Resolves a buffer id to its name, stage and index."""
        kind, rest = divmod(buffer, self.width * len(self.places))
        place, index = divmod(rest, self.width)
        return BufferRef(program.buffers[kind].name, self.places[place][1], index)

    def name(self, program: Program, buffer: int) -> str:
        """`S of stage 2, unit 3`, for messages."""
        ref = self.ref(program, buffer)
        per = next(b.per for b in program.buffers if b.name == ref.buffer)
        return f"{ref.buffer} of stage {ref.stage}" + ("" if per == "stage" else f", {per} {ref.at}")


def effect_table(program: Program) -> EffectTable:
    """Tabulates all effects of all rows. Raises ProgramError when an effect names an unknown buffer or stage."""
    places, place = _places(program)
    width = _width(program)
    base = _bases(program, places, width)
    if base.size * width >= 1 << 32:
        raise ProgramError(
            f"{len(program.buffers)} classes of buffers at {len(places)} places with {width} units are "
            f"{base.size * width} buffers; a Program holds fewer than 2**32: use fewer units or stages per rank"
        )
    packed: list[Longs] = []
    amounts: dict[tuple[int, int], int] = {}
    classes = {b.name: i for i, b in enumerate(program.buffers)}
    chained = _chained(program)
    replaced = np.zeros(program.num_rows, bool)
    replaced[[r for r, o in program.overrides.items() if o.effects is not None and not o.adds]] = True
    # Kind by kind, all of its rows at once: an effect is a few vector operations whatever the number of rows.
    for k, kind in enumerate(program.kinds):
        rows = np.flatnonzero((program.kind == k) & ~replaced)
        for effect in kind.effects if len(rows) else ():
            buffer = program.buffers[_class_index(classes, effect.buffer, f"kind {kind.name}")]
            if effect.which != "own" or buffer.per == "sequence" or buffer.name in chained:
                packed.append(_by_unit(program, rows, effect, buffer, base[classes[buffer.name]], place, amounts))
                continue
            # id = base of (class, place) + unit, where the class has one buffer a unit.
            ids = base[classes[buffer.name]][place[rows]]
            # A base of -1: this place has no such buffer (Y of the last stage), so the effect falls away.
            there = ids >= 0
            if buffer.per == "unit":
                units = program.unit[rows]
                if np.any(there & (units < 0)):
                    row = int(rows[there & (units < 0)][0])
                    raise ProgramError(
                        f"{program.where(row)} belongs to no unit but has effects on {buffer.name}, which is per unit"
                    )
                ids = ids + units
            packed.append(_pack(ids[there], rows[there], EFFECT_OPS.index(effect.op)))
    packed.append(_overridden(program, base, places, classes, amounts))
    # Sorting packed values sorts by buffer, then row, then op; the fields are unpacked by shifts.
    entries = np.sort(np.concatenate(packed)) if packed else np.zeros(0, np.int64)
    return EffectTable(
        buffer=entries >> (_ROW_BITS + _OP_BITS),
        row=((entries >> _OP_BITS) & ((1 << _ROW_BITS) - 1)).astype(np.int32),
        op=(entries & ((1 << _OP_BITS) - 1)).astype(np.int8),
        amounts=amounts,
        places=places,
        base=base,
        width=width,
    )


def _width(program: Program) -> int:
    """Ids that one class of buffer needs at one place: one per unit or, if more, per sequence."""
    sequences = _num_sequences(program) if any(b.per == "sequence" for b in program.buffers) else 0
    return max(1, len(program.units), sequences)


def _num_sequences(program: Program) -> int:
    return 1 + max((sequence for unit in program.units for sequence, _, _ in unit.pieces), default=0)


def _pack(ids: Longs, rows: Longs, op: int) -> Longs:
    out = ids.astype(np.int64) << (_ROW_BITS + _OP_BITS)
    out |= rows.astype(np.int64) << _OP_BITS
    out |= op
    return out


def _class_index(classes: dict[str, int], name: str, who: str) -> int:
    if name not in classes:
        raise ProgramError(f"{who} has an effect on buffer {name!r}, which is not declared{nearest(name, classes)}")
    return classes[name]


def _places(program: Program) -> tuple[tuple[tuple[int, int], ...], NDArray[np.int32]]:
    """Lists the (class, stage) pairs that occur, and each row's pair."""
    places: list[tuple[int, int]] = []
    place = np.empty(program.num_rows, np.int32)
    for cls in range(program.num_classes):
        part = slice(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1]))
        used = np.zeros(program.num_stages, bool)
        used[program.stage[part]] = True
        stages = np.flatnonzero(used)
        table = np.zeros(program.num_stages, np.int32)
        table[stages] = np.arange(len(places), len(places) + len(stages))
        place[part] = table[program.stage[part]]
        places += [(cls, s) for s in stages.tolist()]
    return tuple(places), place


def _bases(program: Program, places: tuple[tuple[int, int], ...], width: int) -> Longs:
    """First id of each buffer class at each place, after the chain between stages and aliases are applied."""
    names = [b.name for b in program.buffers]
    # Ids are dense: class-major, then place, then `width` numbers for units or sequences.
    base = np.arange(len(names) * len(places), dtype=np.int64).reshape(len(names), len(places)) * width
    at = {place: i for i, place in enumerate(places)}
    first = set(program.chains)
    for (cls, stage), i in at.items():
        # At the end of a chain nobody reads Y or gives DY; at its beginning nobody takes DX.
        last = stage + 1 in first or stage + 1 == program.num_stages
        after = at.get((cls, stage + 1))
        # Y of a stage is X of the next where both are on one rank, and exists at all only if there is a next stage in
        # the chain.
        for name, peer in (("Y", "X"), ("DY", "DX")):
            if name in names:
                if last:
                    base[names.index(name), i] = -1
                elif after is not None and name == "Y" and peer in names:
                    base[names.index("Y"), i] = base[names.index("X"), after]
        if stage in first:
            if "DX" in names:
                base[names.index("DX"), i] = -1
            if "X" in names and program.inputs == "resident":
                base[names.index("X"), i] = -1
        # Likewise DX of a stage is DY of the one before it.
        elif (cls, stage - 1) in at and "DX" in names and "DY" in names:
            base[names.index("DX"), i] = base[names.index("DY"), at[cls, stage - 1]]
    # An alias takes the ids of the buffer that stands for it.
    for one, same in program.aliases:
        for (cls, stage), i in at.items():
            if stage == same.stage and (cls, one.stage) in at:
                base[names.index(same.buffer), i] = base[names.index(one.buffer), at[cls, one.stage]]
    return base


def _chained(program: Program) -> frozenset[str]:
    """Finds per-unit buffers that later units of a sequence reach: they exist only for units that have a suffix."""
    return frozenset(e.buffer for kind in program.kinds for e in kind.effects if e.which != "own")


def _relations(program: Program) -> tuple[list[list[int]], list[list[int]]]:
    """Lists the units before and after each unit in the same sequences."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    for u, unit in enumerate(program.units):
        for sequence, start, _ in unit.pieces:
            pieces.setdefault(sequence, []).append((start, u))
    before: list[list[int]] = [[] for _ in program.units]
    after: list[list[int]] = [[] for _ in program.units]
    for members in pieces.values():
        order = [u for _, u in sorted(members)]
        for i, u in enumerate(order):
            # A unit with pieces of several sequences gets the units of each.
            before[u] += order[:i]
            after[u] += order[i + 1 :]
    return before, after


def _by_unit(
    program: Program,
    rows: Longs,
    effect: Effect,
    buffer: BufferClass,
    base: Longs,
    place: NDArray[np.int32],
    amounts: dict[tuple[int, int], int],
) -> Longs:
    """Effects that depend on which sequences a unit holds."""
    # A unit's pieces may belong to several sequences; earlier pieces of one are its prefix.
    before, after = _relations(program)
    ids: list[int] = []
    at: list[int] = []
    for row in rows.tolist():
        unit, first = int(program.unit[row]), int(base[place[row]])
        if unit < 0 or first < 0:
            continue
        if buffer.per == "sequence":
            indices = []
            for sequence, start, stop in program.units[unit].pieces:
                amounts[row, first + sequence] = stop - start
                indices.append(sequence)
        elif effect.which == "own":
            # What later units of a sequence would reach does not exist where no unit comes after.
            indices = [unit] if after[unit] else []
        else:
            indices = before[unit] if effect.which == "prefix" else after[unit]
        ids += [first + index for index in indices]
        at += [row] * len(indices)
    return _pack(np.array(ids, np.int64), np.array(at, np.int64), EFFECT_OPS.index(effect.op))


def _overridden(
    program: Program,
    base: Longs,
    places: tuple[tuple[int, int], ...],
    classes: dict[str, int],
    amounts: dict[tuple[int, int], int],
) -> Longs:
    at = {place: i for i, place in enumerate(places)}
    packed: list[int] = []
    for row, override in program.overrides.items():
        cls = program.rank_class(row)
        for op, ref in override.effects or ():
            kind = _class_index(classes, ref.buffer, program.where(row))
            if (cls, ref.stage) not in at:
                raise ProgramError(
                    f"{program.where(row)}: effect on {ref.buffer} of stage {ref.stage}, "
                    f"but rank class {cls} runs no row of that stage"
                )
            first = int(base[kind, at[cls, ref.stage]])
            if first < 0:
                raise ProgramError(f"{program.where(row)}: {ref.buffer} does not exist at stage {ref.stage}")
            per = program.buffers[kind].per
            limit = {"stage": 1, "unit": len(program.units), "sequence": _num_sequences(program)}[per]
            if not 0 <= ref.at < limit:
                raise ProgramError(
                    f"{program.where(row)}: {ref.buffer} of stage {ref.stage} is per {per}; there are {limit}, "
                    f"and {ref.at} is not one of them"
                )
            if op == "extend":
                amounts[row, first + ref.at] = _tokens(program, row, ref)
            packed.append(((first + ref.at) << (_ROW_BITS + _OP_BITS)) | (row << _OP_BITS) | EFFECT_OPS.index(op))
    return np.array(packed, np.int64)


def _tokens(program: Program, row: int, ref: BufferRef) -> int:
    unit = int(program.unit[row])
    pieces = program.units[unit].pieces if unit >= 0 else ()
    return sum(stop - start for sequence, start, stop in pieces if sequence == ref.at) or 1


def row_effects(program: Program, table: EffectTable, row: int) -> tuple[RowEffect, ...]:
    """Every effect of one row, resolved, for messages and tests."""
    entries = np.flatnonzero(table.row == row)
    ops: tuple[EffectOp, ...] = EFFECT_OPS
    return tuple(RowEffect(ops[table.op[i]], table.ref(program, int(table.buffer[i]))) for i in entries)
