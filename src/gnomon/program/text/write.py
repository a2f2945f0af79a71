"""`print_program(program)`: the text of a Program, short where it agrees with the standard.

Rows of a composite print as one token, lines are wrapped, and what differs from the standard kinds, buffers and
communicators is declared first. Left out: names that are not words, which a ProgramError refuses.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

from gnomon.errors import ProgramError
from gnomon.program.kinds import (
    STANDARD_BUFFERS,
    STANDARD_KINDS,
    BufferClass,
    Kind,
    effects_text,
    with_buffers,
    with_kinds,
)
from gnomon.program.program import BufferRef, Override, Program, default_comms, plain_units
from gnomon.program.text.words import HEADER, KIND, NAME, VERSION, WORD
from gnomon.program.units import Unit

_WIDTH = 100


def print_program(program: Program) -> str:
    """The text of a Program, which `parse_program` reads back to an equal one.

    ProgramError when a name of a kind, buffer, stream, communicator or pool cannot be written: such names are ASCII
    words (kinds in upper case). Names of prices may be anything.
    """
    _check_names(program)
    lines = [f"{HEADER}{VERSION}", f"stages {program.num_stages}", *_unit_lines(program.units)]
    if program.chains != (0,):
        lines.append(f"chains {' '.join(map(str, program.chains)) or 'none'}")
    if program.inputs == "loaded":
        lines.append("inputs loaded")
    lines += _buffer_lines(program.buffers)
    lines += [f"pool {pool.name} {pool.size}" for pool in program.pools]
    lines += _kind_lines(program.kinds)
    lines += _comm_lines(program)
    lines += [f"alias {_ref(one)} = {_ref(same)}" for one, same in program.aliases]
    composites = _composites(program)
    for cls, count in enumerate(program.counts):
        lines.append(f"class {cls}" + (f" count {count}" if count != 1 else ""))
        rows = range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1]))
        lines += _wrapped(_tokens(program, rows, composites))
    return "\n".join(lines) + "\n"


def _check_names(program: Program) -> None:
    words = [("buffer", b.name) for b in program.buffers] + [("communicator", c.name) for c in program.comms]
    words += [("pool", p.name) for p in program.pools] + [("stream", s) for s in program.streams]
    for what, name in words:
        if not re.fullmatch(WORD, name):
            raise ProgramError(f"{what} name {name!r} cannot be written as text; use ASCII letters, digits and _ . -")
    for kind in program.kinds:
        if not re.fullmatch(KIND, kind.name):
            raise ProgramError(f"kind name {kind.name!r} cannot be written as text; use A-Z, 0-9 and _, no digit last")


def _unit_lines(units: tuple[Unit, ...]) -> list[str]:
    if units == plain_units(len(units)):
        return [f"units {len(units)}"]
    lines = []
    for i, unit in enumerate(units):
        pieces = " ".join(f"{sequence}:{start}:{stop}" for sequence, start, stop in unit.pieces)
        weight = f" weight {float(unit.weight)!r}" if unit.weight else ""
        worker = f" worker {unit.worker}" if unit.worker else ""
        local = "".join(f" {sequence}:{rank}" for sequence, rank in unit.local)
        lines.append(f"unit {i} = {pieces}{weight}{worker}" + (f" local{local}" if local else ""))
    return lines


def _buffer_lines(buffers: tuple[BufferClass, ...]) -> list[str]:
    shown = tuple(b for b in buffers if b not in STANDARD_BUFFERS)
    # Reading adds the standard buffers that are not named. Where that is not the same list, all are written.
    only = with_buffers(*shown) != buffers
    lines = ["buffers only"] if only else []
    for b in buffers if only else shown:
        slots, pool = f" slots {b.slots}" if b.slots != 1 else "", f" pool {b.pool}" if b.pool else ""
        lines.append(f"buffer {b.name} {b.lifetime} per {b.per}{slots}{pool}")
    return lines


def _kind_lines(kinds: tuple[Kind, ...]) -> list[str]:
    shown = tuple(k for k in kinds if k not in STANDARD_KINDS)
    # As for buffers.
    only = with_kinds(*shown) != kinds
    lines = ["kinds only"] if only else []
    for k in kinds if only else shown:
        comm = f" comm {k.comm}" if k.comm else ""
        message = f" {k.message} {k.hop}" if k.message else ""
        acts = f": {effects_text(k.effects)}" if k.effects else ""
        lines.append(f"kind {k.name} on {k.stream}{comm}{message}{acts}")
    return lines


def _comm_lines(program: Program) -> list[str]:
    defaults = default_comms(program.kinds)
    shown = tuple(c for c in program.comms if c not in defaults)
    names = {c.name for c in shown}
    # Reading puts the defaults after what is declared. Where that is another order, all are declared.
    if (*shown, *(c for c in defaults if c.name not in names)) != program.comms:
        shown = program.comms
    return [
        f"comm {c.name} {c.semantics}" + (f" {c.capacity}" if c.capacity else "") + ("" if c.ordered else " unordered")
        for c in shown
    ]


def _ref(ref: BufferRef, per_stage: bool = True) -> str:
    return f"{ref.buffer} {ref.stage}" + ("" if per_stage and not ref.at else f" {ref.at}")


def _composites(program: Program) -> dict[int, tuple[int, str]]:
    """First rows of composites -> (rows, suffix): runs that are a whole group, named after their kinds."""
    sizes = Counter(program.group.tolist())
    composites: dict[int, int] = {}
    row, ptr = 0, set(program.class_ptr.tolist())
    while row < program.num_rows:
        end = row + 1
        while end < program.num_rows and end not in ptr and program.group[end] == program.group[row] >= 0:
            end += 1
        if end - row > 1 and sizes[int(program.group[row])] == end - row and _is_composite(program, row, end):
            composites[row] = end - row
        row = end
    groups = set(sizes) - {int(program.group[first]) for first in composites}
    # Reading numbers composites without a suffix from here on, in order. Where that gives the numbers that they have,
    # no suffix is written.
    base = max(groups, default=-1) + 1
    numbers = [int(program.group[first]) for first in composites]
    plain = numbers == list(range(base, base + len(composites)))
    return {first: (size, "" if plain else f"#{program.group[first]}") for first, size in composites.items()}


def _is_composite(program: Program, row: int, end: int) -> bool:
    name = "&".join(program.kinds[k].name for k in program.kind[row:end].tolist())
    named = all(r in program.overrides and program.overrides[r].name == name for r in range(row, end))
    return named and len(set(program.stream[row:end].tolist())) == 1


def _tokens(program: Program, rows: range, composites: dict[int, tuple[int, str]]) -> Iterator[str]:
    row = rows.start
    while row < rows.stop:
        if row in composites:
            size, suffix = composites[row]
            yield f"({'&'.join(_token(program, r, member=True) for r in range(row, row + size))}){suffix}"
            row += size
        else:
            yield _token(program, row)
            row += 1


def _token(program: Program, row: int, member: bool = False) -> str:
    group = int(program.group[row])
    # The group and the name of a member are those of its composite.
    mark = f"#{group}" if group >= 0 and not member else ""
    o = program.overrides.get(row)
    if o is None:
        return program.token(row) + mark
    peer = "" if o.peer is None else f">{o.peer}"
    name = f"/{_quoted(o.name)}" if o.name and not member else ""
    stream, comm = f"@{o.stream}" if o.stream else "", f":{o.comm}" if o.comm else ""
    return program.token(row) + peer + name + stream + comm + mark + ("!" if o.inside else "") + _acts(program, o)


def _quoted(name: str) -> str:
    # A `#` before a blank would begin a comment, which is cut off before quotes are read.
    return name if re.fullmatch(NAME + "+", name) else json.dumps(name).replace("#", "\\u0023")


def _acts(program: Program, override: Override) -> str:
    if override.effects is None:
        return ""
    per_stage = {b.name for b in program.buffers if b.per == "stage"}
    acts = ", ".join(f"{op} {_ref(ref, ref.buffer in per_stage)}" for op, ref in override.effects)
    return "{" + ("+" + " " * bool(acts) if override.adds else "") + acts + "}"


def _wrapped(tokens: Iterator[str]) -> Iterator[str]:
    line = ""
    for token in tokens:
        # 3: two blanks before the line, and one before the token.
        if line and len(line) + len(token) + 3 > _WIDTH:
            yield "  " + line
            line = ""
        line += " " * bool(line) + token
    if line:
        yield "  " + line
