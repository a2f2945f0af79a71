"""The text form of a Program: `parse_program(text)` and `print_program(program)`, which undo each other exactly.

    gnomon.program/1
    stages 2
    units 2                                  # or, one a line:  unit 0 = 0:0:4 1:0:2 weight 0.5 worker 1
    class 0 count 8
      0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0AR 0OPT
    class 1
      1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 (1F1&1W0) 1B1 1SEND_B1 1OPT@host{read G 1, write P 1}

Header lines give only what differs from the standard kinds, buffers and communicators: `chains`, `inputs loaded`,
`buffer`, `pool`, `kind`, `comm`, `alias` (`_Header` lists their forms; `kinds only` and `buffers only` leave the
standard ones out). A row is stage, kind, unit, then `>peer` `/name` `@stream` `:comm` `#group` `!` `{effects}`. Reading
is strict: anything unknown, repeated or out of range is a FormatError with line and column. Left out: whether the
Program can run, which is `validate`'s question, and durations.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar, get_args

import numpy as np

from gnomon.errors import FormatError, GnomonError, ProgramError, nearest
from gnomon.plans import Unit
from gnomon.program.kinds import (
    EFFECT_OPS,
    STANDARD_BUFFERS,
    STANDARD_KINDS,
    BufferClass,
    Kind,
    Lifetime,
    Per,
    effects,
    effects_text,
    with_buffers,
    with_kinds,
)
from gnomon.program.program import (
    MAX_STAGES,
    MAX_UNITS,
    NO_UNIT,
    BufferRef,
    Communicator,
    Override,
    Pool,
    Program,
    RowEffect,
    default_comms,
    from_columns,
    plain_units,
)

VERSION = 1
MAX_BYTES = 8_000_000
"""Longest text that is read unless the caller allows more; about a million rows."""
_HEADER = "gnomon.program/"
_WORD = r"[A-Za-z_][A-Za-z0-9_.\-]*"
_KIND = r"[A-Z](?:[A-Z0-9_]*[A-Z_])?"
_LARGEST = 2**31 - 1
_WIDTH = 100
_T = TypeVar("_T", bound=str)


def _row_pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?P<stage>\d*)(?P<kind>{_KIND})(?P<unit>\d*)(?:>(?P<peer>\d+))?"
        rf'(?:/(?P<name>"(?:[^"\\]|\\.)*"|{name}+))?(?:@(?P<stream>{_WORD}))?(?::(?P<comm>{_WORD}))?'
        r"(?:#(?P<group>\d+))?(?P<inside>!)?(?:\{(?P<effects>[^{}]*)\})?"
    )


_NAME = r'[^\s"@:#!{}()/]'
_ROW, _MEMBER = _row_pattern(_NAME), _row_pattern(_NAME.replace("/", "/&"))
_COMMENT = re.compile(r"#(?=\s|$)")
_PART = re.compile(rf"\s*({'|'.join(EFFECT_OPS)})\s+({_WORD})([<>]?)\s*")
_REF = re.compile(rf"\s*({'|'.join(EFFECT_OPS)})\s+({_WORD})\s+(\d+)(?:\s+(\d+))?\s*")


# Printing


def print_program(program: Program) -> str:
    """The text of a Program, which `parse_program` reads back to an equal one.

    ProgramError when a name of a kind, buffer, stream, communicator or pool cannot be written: such names are ASCII
    words (kinds in upper case). Names of prices may be anything.
    """
    _check_names(program)
    lines = [f"{_HEADER}{VERSION}", f"stages {program.num_stages}", *_unit_lines(program.units)]
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
        if not re.fullmatch(_WORD, name):
            raise ProgramError(f"{what} name {name!r} cannot be written as text; use ASCII letters, digits and _ . -")
    for kind in program.kinds:
        if not re.fullmatch(_KIND, kind.name):
            raise ProgramError(f"kind name {kind.name!r} cannot be written as text; use A-Z, 0-9 and _, no digit last")


def _unit_lines(units: tuple[Unit, ...]) -> list[str]:
    if units == plain_units(len(units)):
        return [f"units {len(units)}"]
    lines = []
    for i, unit in enumerate(units):
        pieces = " ".join(f"{sequence}:{start}:{stop}" for sequence, start, stop in unit.pieces)
        weight = f" weight {float(unit.weight)!r}" if unit.weight else ""
        lines.append(f"unit {i} = {pieces}{weight}" + (f" worker {unit.worker}" if unit.worker else ""))
    return lines


def _buffer_lines(buffers: tuple[BufferClass, ...]) -> list[str]:
    shown = tuple(b for b in buffers if b not in STANDARD_BUFFERS)
    only = with_buffers(*shown) != buffers
    lines = ["buffers only"] if only else []
    for b in buffers if only else shown:
        slots, pool = f" slots {b.slots}" if b.slots != 1 else "", f" pool {b.pool}" if b.pool else ""
        lines.append(f"buffer {b.name} {b.lifetime} per {b.per}{slots}{pool}")
    return lines


def _kind_lines(kinds: tuple[Kind, ...]) -> list[str]:
    shown = tuple(k for k in kinds if k not in STANDARD_KINDS)
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
    found: dict[int, int] = {}
    row, ptr = 0, set(program.class_ptr.tolist())
    while row < program.num_rows:
        end = row + 1
        while end < program.num_rows and end not in ptr and program.group[end] == program.group[row] >= 0:
            end += 1
        if end - row > 1 and sizes[int(program.group[row])] == end - row and _is_composite(program, row, end):
            found[row] = end - row
        row = end
    taken = set(sizes) - {int(program.group[first]) for first in found}
    base = max(taken, default=-1) + 1
    numbers = [int(program.group[first]) for first in found]
    plain = numbers == list(range(base, base + len(found)))
    return {first: (size, "" if plain else f"#{program.group[first]}") for first, size in found.items()}


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
    mark = f"#{group}" if group >= 0 and not member else ""
    o = program.overrides.get(row)
    if o is None:
        return program.token(row) + mark
    peer = "" if o.peer is None else f">{o.peer}"
    name = f"/{_quoted(o.name)}" if o.name and not member else ""
    stream, comm = f"@{o.stream}" if o.stream else "", f":{o.comm}" if o.comm else ""
    return program.token(row) + peer + name + stream + comm + mark + ("!" if o.inside else "") + _acts(program, o)


def _quoted(name: str) -> str:
    return name if re.fullmatch(_NAME + "+", name) else json.dumps(name).replace("#", "\\u0023")


def _acts(program: Program, override: Override) -> str:
    if override.effects is None:
        return ""
    per_stage = {b.name for b in program.buffers if b.per == "stage"}
    acts = ", ".join(f"{op} {_ref(ref, ref.buffer in per_stage)}" for op, ref in override.effects)
    return "{" + ("+" + " " * bool(acts) if override.adds else "") + acts + "}"


def _wrapped(tokens: Iterator[str]) -> Iterator[str]:
    line = ""
    for token in tokens:
        if line and len(line) + len(token) + 3 > _WIDTH:
            yield "  " + line
            line = ""
        line += " " * bool(line) + token
    if line:
        yield "  " + line


# Parsing


def parse_program(text: str, source: str = "program", *, max_bytes: int = MAX_BYTES) -> Program:
    """The Program that a text describes.

    source: what to call the text in errors (a file's name). max_bytes: longer texts are refused.
    Raises FormatError, with `source:line:column`, at the first thing that is not understood.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > max_bytes:
        raise FormatError(
            f"the text has {size:,} bytes, over the limit of {max_bytes:,}; allow more with max_bytes", f"{source}:1:1"
        )
    lines = [_Line(source, i + 1, line) for i, line in enumerate(text.split("\n"))]
    used = [line for line in lines if line.more()]
    if not used:
        raise lines[0].fail(f"an empty text; expected `{_HEADER}{VERSION}` in its first line")
    _check_version(used[0])
    header, body = _Header(), None
    for line in used[1:]:
        word = line.peek()
        if body is None and word in _Header.FORMS:
            header.read(line)
        elif word == "class":
            body = body or _Body(header.settled(line))
            body.open_class(line)
        elif body is None or word in _Header.FORMS or re.fullmatch(r"[a-z]+", word):
            raise line.fail(_unexpected(word, body is not None))
        else:
            body.rows(line)
    body = body or _Body(header.settled(used[-1]))
    return body.program(source)


def _unexpected(word: str, in_class: bool) -> str:
    known = (*_Header.FORMS, "class")
    if in_class:
        return f"{word!r} among rows; header lines come before the first class" if word in known else f"{word!r}"
    return f"expected one of {', '.join(known)} before any row, not {word!r}{nearest(word, known)}"


def _check_version(line: _Line) -> None:
    word = line.word(f"`{_HEADER}{VERSION}`")
    match = re.fullmatch(re.escape(_HEADER) + r"(\d{1,9})", word)
    if not match:
        raise line.fail(f"expected the header `{_HEADER}{VERSION}`, not {_short(word)}")
    if int(match[1]) != VERSION:
        why = "it was written by a newer Gnomon" if int(match[1]) > VERSION else "there is no such version"
        raise line.fail(f"schema version {match[1]}, but this Gnomon reads version {VERSION}; {why}")
    line.end()


def _short(word: str) -> str:
    return repr(word if len(word) <= 40 else word[:37] + "...")


class _Line:
    """One line being read, word by word; knows where it is."""

    def __init__(self, source: str, number: int, text: str) -> None:
        comment = _COMMENT.search(text)
        self.text = text[: comment.start()] if comment else text
        self.source, self.number, self.at, self.start = source, number, 0, 0

    def fail(self, message: str, column: int | None = None) -> FormatError:
        """The error at a column (from 0), or at the word read last."""
        return FormatError(message, f"{self.source}:{self.number}:{(self.start if column is None else column) + 1}")

    def more(self) -> bool:
        """Whether another word follows; skips the blanks before it."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.at < len(self.text)

    def peek(self) -> str:
        """The next word, or ''."""
        found = re.compile(r"\S+").match(self.text, self.at) if self.more() else None
        self.start = self.at
        return found[0] if found else ""

    def word(self, expected: str) -> str:
        """The next word."""
        found = self.peek()
        if not found:
            raise self.fail(f"expected {expected}, but the line ends")
        self.at += len(found)
        return found

    def accept(self, text: str) -> bool:
        """Reads `text` if it is the next word."""
        if self.peek() != text:
            return False
        self.at += len(text)
        return True

    def expect(self, text: str) -> None:
        """Reads `text`, which must come next."""
        if not self.accept(text):
            raise self.fail(f"expected `{text}`, not {_short(self.peek()) if self.more() else 'the end of the line'}")

    def name(self, what: str) -> str:
        """A name: an ASCII word."""
        word = self.word(f"a name of {what}")
        if not re.fullmatch(_WORD, word):
            raise self.fail(f"expected a name of {what} (ASCII letters, digits and _ . -), not {_short(word)}")
        return word

    def choice(self, options: Sequence[_T], what: str) -> _T:
        """One of `options`."""
        word = self.word(f"{what}: one of {', '.join(options)}")
        for option in options:
            if option == word:
                return option
        raise self.fail(f"expected {what}: one of {', '.join(options)}, not {_short(word)}{nearest(word, options)}")

    def count(self, what: str, low: int, high: int = _LARGEST) -> int:
        """An integer from low to high."""
        return self.integer(self.word(what), what, low, high, self.start)

    def integer(self, word: str, what: str, low: int, high: int, column: int) -> int:
        """The integer that a word at a column says."""
        if not re.fullmatch(r"-?(0|[1-9][0-9]*)", word):
            raise self.fail(f"expected {what}, an integer without leading zeros, not {_short(word)}", column)
        if len(word) > 12 or not low <= int(word) <= high:
            raise self.fail(f"{what} {_short(word)[1:-1]} is not in {low} to {high}", column)
        return int(word)

    def end(self) -> None:
        """Nothing may follow."""
        if self.more():
            raise self.fail(f"expected the end of the line, not {_short(self.peek())}")


@dataclass(slots=True)
class _Header:
    """What the lines before the first class declare."""

    num_stages: int = 0
    plain: int = -1
    units: list[Unit] = field(default_factory=list)
    chains: tuple[int, ...] = ()
    loaded: bool = False
    kinds: tuple[Kind, ...] = ()
    buffers: tuple[BufferClass, ...] = ()
    comms: tuple[Communicator, ...] = ()
    pools: tuple[Pool, ...] = ()
    aliases: tuple[tuple[BufferRef, BufferRef], ...] = ()
    seen: set[tuple[str, str]] = field(default_factory=set)
    later: list[Callable[[], None]] = field(default_factory=list)
    """Checks that need the whole header."""

    def read(self, line: _Line) -> None:
        """One header line."""
        word = line.word("a directive")
        if word not in ("kind", "buffer", "comm", "pool", "unit", "alias"):
            self.once(line, word)
        _Header.FORMS[word](self, line)
        line.end()

    def once(self, line: _Line, what: str, name: str = "") -> None:
        """Refuses a second declaration."""
        if (what, name) in self.seen:
            raise line.fail(f"{what} {name}".strip() + " is given twice")
        self.seen.add((what, name))

    def read_stages(self, line: _Line) -> None:  # stages N
        self.num_stages = line.count("number of stages", 1, MAX_STAGES)

    def read_units(self, line: _Line) -> None:  # units N
        if self.units:
            raise line.fail("give either `units N` or `unit` lines, not both")
        self.plain = line.count("number of units", 0, MAX_UNITS)

    def read_unit(self, line: _Line) -> None:  # unit I = SEQUENCE:START:STOP … [weight W] [worker R]
        index = line.count("number of the unit", 0, MAX_UNITS - 1)
        if self.plain >= 0:
            raise line.fail("give either `units N` or `unit` lines, not both")
        if index != len(self.units):
            raise line.fail(f"expected unit {len(self.units)}, not unit {index}: units are numbered in order from 0")
        line.expect("=")
        column, pieces = line.at, []
        while (word := line.peek()) and word not in ("weight", "worker"):
            parts = line.word("a piece").split(":")
            if len(parts) != 3:
                raise line.fail(f"expected a piece as sequence:start:stop, not {_short(word)}")
            a, b, c = (line.integer(part, "a piece's number", 0, _LARGEST, line.start) for part in parts)
            pieces.append((a, b, c))
        weight = _weight(line) if line.accept("weight") else 0.0
        worker = line.count("worker", 0) if line.accept("worker") else 0
        try:
            self.units.append(Unit(pieces=tuple(pieces), weight=weight, worker=worker))
        except GnomonError as error:
            raise line.fail(str(error), column) from None

    def read_chains(self, line: _Line) -> None:  # chains STAGE … | chains none
        starts: list[int] = []
        if not line.accept("none"):
            starts.append(line.count("first stage of a chain", 0))
            while line.more():
                starts.append(line.count("first stage of a chain", 0))
        self.chains = tuple(starts)
        self.later.append(partial(self.check_stages, line, starts))

    def check_stages(self, line: _Line, stages: Sequence[int]) -> None:
        """Stages that a line names must exist."""
        for stage in stages:
            if stage >= self.num_stages:
                raise line.fail(f"stage {stage}, but there are {self.num_stages} stages (0 to {self.num_stages - 1})")

    def check_buffer(self, line: _Line, name: str, column: int | None = None) -> None:
        """Buffers that a line names must be declared."""
        _known(line, "buffer", name, [buffer.name for buffer in self.buffers], column)

    def check_pool(self, line: _Line, name: str) -> None:
        """Pools that a line names must be declared."""
        _known(line, "pool", name, [pool.name for pool in self.pools])

    def read_inputs(self, line: _Line) -> None:  # inputs resident | loaded
        self.loaded = line.choice(("resident", "loaded"), "where inputs come from") == "loaded"

    def read_buffer(self, line: _Line) -> None:  # buffer NAME LIFETIME per PER [slots N] [pool NAME]
        name = line.name("a buffer")
        self.once(line, "buffer", name)
        lifetime: Lifetime = line.choice(get_args(Lifetime), "lifetime")
        line.expect("per")
        per: Per = line.choice(get_args(Per), "what an instance belongs to")
        slots = line.count("slots", 1) if line.accept("slots") else 1
        pool = line.name("a pool") if line.accept("pool") else ""
        self.buffers += (BufferClass(name=name, lifetime=lifetime, per=per, slots=slots, pool=pool),)
        if pool:
            self.later.append(partial(self.check_pool, line, pool))

    def read_pool(self, line: _Line) -> None:  # pool NAME SIZE
        name = line.name("a pool")
        self.once(line, "pool", name)
        self.pools += (Pool(name=name, size=line.count("size of the pool", 1)),)

    def read_kind(self, line: _Line) -> None:  # kind NAME on STREAM [comm NAME] [send HOP | recv HOP][: effects]
        head, colon, acts = line.text.partition(":")
        line.text = head
        name = line.word("a name of a kind")
        if not re.fullmatch(_KIND, name):
            raise line.fail(f"expected a name of a kind (A-Z, 0-9 and _, no digit last), not {_short(name)}")
        self.once(line, "kind", name)
        line.expect("on")
        stream = line.name("a stream")
        comm = line.name("a communicator") if line.accept("comm") else ""
        message: Literal["", "send", "recv"] = ""
        if line.accept("send"):
            message = "send"
        elif line.accept("recv"):
            message = "recv"
        hop = line.count("hop in stages", -MAX_STAGES, MAX_STAGES) if message else 0
        if message and not comm:
            raise line.fail(f"kind {name} is a message; say on which communicator, as in `on {stream} comm NAME`")
        line.end()
        self.check_effects(line, acts, len(head) + 1, bool(colon))
        kind = Kind(name=name, stream=stream, effects=effects(acts), comm=comm, message=message, hop=hop)
        self.kinds += (kind,)

    def check_effects(self, line: _Line, acts: str, column: int, given: bool) -> None:
        """Effects of a kind, one by one; their buffers may be declared later."""
        for part in acts.split(",") if given else ():
            match = _PART.fullmatch(part)
            if not match:
                raise line.fail(f"expected `op BUFFER` with op one of {', '.join(EFFECT_OPS)}, not {part!r}", column)
            at, name = column + match.start(2), match[2]
            self.later.append(partial(self.check_buffer, line, name, at))
            column += len(part) + 1

    def read_comm(self, line: _Line) -> None:  # comm NAME buffered [N] | rendezvous | collective [unordered]
        name = line.name("a communicator")
        self.once(line, "comm", name)
        semantics: Literal["buffered", "rendezvous", "collective"] = line.choice(
            ("buffered", "rendezvous", "collective"), "semantics"
        )
        bounded = semantics == "buffered" and line.peek().isdigit()
        capacity = line.count("messages in flight", 1) if bounded else 0
        ordered = not line.accept("unordered")
        self.comms += (Communicator(name=name, semantics=semantics, capacity=capacity, ordered=ordered),)

    def read_alias(self, line: _Line) -> None:  # alias BUFFER STAGE [AT] = BUFFER STAGE [AT]
        pair = []
        for side in (0, 1):
            if side:
                line.expect("=")
            name, stage = line.name("a buffer"), line.count("stage", 0)
            at = line.count("unit or sequence", 0) if line.peek().isdigit() else 0
            pair.append(BufferRef(name, stage, at))
        one, same = pair
        self.aliases += ((one, same),)
        for ref in pair:
            self.later.append(partial(self.check_buffer, line, ref.buffer))
        self.later.append(partial(self.check_stages, line, [one.stage, same.stage]))

    def read_only(self, line: _Line) -> None:  # kinds only | buffers only
        line.expect("only")

    def settled(self, line: _Line) -> _Header:
        """The header with defaults filled in, checked as a whole. line: where the body starts, for errors."""
        for what, missing in (("stages", not self.num_stages), ("units", self.plain < 0 and not self.units)):
            if missing:
                raise line.fail(f"`{what} N` is missing before the first class", 0)
        if self.plain >= 0:
            self.units = list(plain_units(self.plain))
        if ("kinds", "") not in self.seen:
            self.kinds = with_kinds(*self.kinds)
        if ("buffers", "") not in self.seen:
            self.buffers = with_buffers(*self.buffers)
        if ("chains", "") not in self.seen:
            self.chains = (0,)
        for check in self.later:
            check()
        return self

    FORMS = {
        "stages": read_stages,
        "units": read_units,
        "unit": read_unit,
        "chains": read_chains,
        "inputs": read_inputs,
        "buffers": read_only,
        "buffer": read_buffer,
        "pool": read_pool,
        "kinds": read_only,
        "kind": read_kind,
        "comm": read_comm,
        "alias": read_alias,
    }


def _weight(line: _Line) -> float:
    word = line.word("a weight")
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,3})?", word) or not 0.0 <= float(word) <= 1.0:
        raise line.fail(f"expected a weight from 0 to 1, not {_short(word)}")
    return float(word)


def _known(line: _Line, what: str, name: str, known: Sequence[str], column: int | None = None) -> None:
    if name not in known:
        raise line.fail(f"unknown {what} {name!r}{nearest(name, known)}; declare it before the first class", column)


@dataclass(slots=True)
class _Body:
    """Rows read so far, as columns."""

    header: _Header
    counts: list[int] = field(default_factory=list)
    ptr: list[int] = field(default_factory=lambda: [0])
    columns: tuple[list[int], list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], [], []))
    """Kind, stage, unit, group."""
    overrides: dict[int, Override] = field(default_factory=dict)
    given: int | None = None
    """Stage of rows that name none, where the class line says so."""
    bare: _Line | None = None
    """A line of the open class with rows that name no stage."""
    assumed: _Line | None = None
    """A line with rows that name no stage although the class line names none: class i is taken to be stage i."""
    unnumbered: list[range] = field(default_factory=list)
    """Rows of composites without a group number."""
    index: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, BufferClass] = field(default_factory=dict)
    comms: tuple[str, ...] = ()
    streams: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = {kind.name: i for i, kind in enumerate(self.header.kinds)}
        self.buffers = {buffer.name: buffer for buffer in self.header.buffers}
        self.comms = tuple(c.name for c in (*self.header.comms, *default_comms(self.header.kinds)))

    def open_class(self, line: _Line) -> None:
        """`class I [count N] [stage S]`."""
        line.expect("class")
        number = line.count("number of the class", 0)
        if number != len(self.counts):
            twice = "is given twice" if number < len(self.counts) else f"comes before class {len(self.counts)}"
            raise line.fail(f"class {number} {twice}: classes are numbered in order from 0")
        self.close_class()
        self.counts.append(line.count("ranks in the class", 1) if line.accept("count") else 1)
        self.given = line.count("stage", 0, self.header.num_stages - 1) if line.accept("stage") else None
        line.end()
        self.ptr.append(self.ptr[-1])

    def close_class(self) -> None:
        """Rows without a stage are clear only where the class has one stage."""
        if self.bare is None:
            return
        stages = set(self.columns[1][self.ptr[-2] : self.ptr[-1]])
        if len(stages) > 1:
            raise self.bare.fail("rows without a stage in a class of several stages; write the stage, as in `2F0`", 0)
        self.bare = None

    def rows(self, line: _Line) -> None:
        """One line of rows."""
        while line.more():
            line.start = line.at
            if line.text[line.at] == "(":
                self.composite(line)
            else:
                self.row(line, _ROW)
            if line.at < len(line.text) and not line.text[line.at].isspace():
                line.start = line.at
                raise line.fail(f"expected a blank after the row, not {_short(line.peek())}")

    def row(self, line: _Line, pattern: re.Pattern[str]) -> None:
        """One row at the line's position."""
        match = pattern.match(line.text, line.at)
        if not match:
            raise line.fail(f"expected a row such as `2F0` or `3SEND_F1>5`, not {_short(line.peek())}", line.at)
        line.start = line.at
        line.at = match.end()
        name = match["kind"]
        if name not in self.index:
            raise line.fail(f"unknown kind {name!r}{nearest(name, self.index)}", match.start("kind"))
        kind, stage, unit = self.index[name], self.stage(line, match), NO_UNIT
        if match["unit"]:
            count = len(self.header.units)
            unit = line.integer(match["unit"], f"unit (of {count})", 0, count - 1, match.start("unit"))
        group = -1
        if match["group"]:
            group = line.integer(match["group"], "group", 0, _LARGEST, match.start("group"))
        override = self.override(line, match)
        if override is not None:
            self.overrides[self.ptr[-1]] = override
        for column, value in zip(self.columns, (kind, stage, unit, group), strict=True):
            column.append(value)
        self.ptr[-1] += 1

    def stage(self, line: _Line, match: re.Match[str]) -> int:
        """The row's stage; if it names none, that of its class."""
        last = self.header.num_stages - 1
        if match["stage"]:
            return line.integer(match["stage"], f"stage (of {last + 1})", 0, last, match.start("stage"))
        self.bare = line
        if self.given is not None:
            return self.given
        self.assumed = self.assumed or line
        return min(len(self.counts) - 1, last)

    def override(self, line: _Line, match: re.Match[str]) -> Override | None:
        """What a row says beyond stage, kind and unit."""
        peer, name, stream, comm, acts = match.group("peer", "name", "stream", "comm", "effects")
        if not (peer or name or stream or comm or match["inside"]) and acts is None:
            return None
        if comm and comm not in self.comms:
            raise line.fail(f"unknown communicator {comm!r}{nearest(comm, self.comms)}", match.start("comm"))
        last = self.header.num_stages - 1
        given = None if acts is None else self.effects(line, acts.removeprefix("+"), match.end("effects"))
        return Override(
            stream=stream or "",
            comm=comm or "",
            peer=line.integer(peer, "stage at the other end", 0, last, match.start("peer")) if peer else None,
            name=self.unquoted(line, name or "", match.start("name")),
            effects=given,
            adds=acts is not None and acts.startswith("+"),
            inside=bool(match["inside"]),
        )

    def unquoted(self, line: _Line, name: str, column: int) -> str:
        """A price's name, quoted or not."""
        if not name.startswith('"'):
            return name
        try:
            value = json.loads(name)
        except json.JSONDecodeError:
            value = ""
        if not value or not isinstance(value, str):
            raise line.fail(f"expected a name in quotes, as JSON writes it, not {_short(name)}", column)
        return value

    def effects(self, line: _Line, acts: str, end: int) -> tuple[RowEffect, ...]:
        """`read G 0, write P 0`; `end` is the column after it."""
        found = []
        column = end - len(acts)
        for part in acts.split(",") if acts.strip() else ():
            match = _REF.fullmatch(part)
            if not match:
                wanted = f"`op BUFFER STAGE [AT]` with op one of {', '.join(EFFECT_OPS)}"
                raise line.fail(f"expected {wanted}, not {part.strip()!r}", column)
            _known(line, "buffer", match[2], tuple(self.buffers), column + match.start(2))
            last, per = self.header.num_stages - 1, self.buffers[match[2]].per
            stage = line.integer(match[3], f"stage (of {last + 1})", 0, last, column + match.start(3))
            if (per == "stage") == (match[4] is not None):
                form = "BUFFER STAGE" if per == "stage" else f"BUFFER STAGE {per.upper()}"
                raise line.fail(f"buffer {match[2]} is per {per}: expected `op {form}`, not {part.strip()!r}", column)
            at = line.integer(match[4], per, 0, _LARGEST, column + match.start(4)) if match[4] else 0
            op = next(op for op in EFFECT_OPS if op == match[1])
            found.append(RowEffect(op, BufferRef(match[2], stage, at)))
            column += len(part) + 1
        return tuple(found)

    def composite(self, line: _Line) -> None:
        """`(0F3&1B1)` or `(0F3&1B1)#5`."""
        column, first = line.at, self.ptr[-1]
        line.at += 1
        while True:
            start = line.at
            self.row(line, _MEMBER)
            if self.columns[3][-1] >= 0 or (self.overrides.get(self.ptr[-1] - 1) or Override()).name:
                raise line.fail("a row of a composite has no name or group of its own", start)
            if line.text[line.at : line.at + 1] != "&":
                break
            line.at += 1
        if line.text[line.at : line.at + 1] != ")":
            raise line.fail(f"expected `&` or `)` in a composite, not {_short(line.peek())}", line.at)
        line.at += 1
        rows = range(first, self.ptr[-1])
        number = re.compile(r"#(\d+)").match(line.text, line.at)
        self.join(line, rows, column)
        if number:
            line.at = number.end()
            value = line.integer(number[1], "group", 0, _LARGEST, number.start(1))
            self.columns[3][first:] = [value] * len(rows)
        else:
            self.unnumbered.append(rows)

    def join(self, line: _Line, rows: range, column: int) -> None:
        """Names the rows of a composite after their kinds; they must share a stream."""
        kinds = [self.header.kinds[k] for k in self.columns[0][rows.start :]]
        own = [self.overrides.get(row) or Override() for row in rows]
        streams = {o.stream or kind.stream for o, kind in zip(own, kinds, strict=True)}
        if len(rows) < 2 or len(streams) > 1:
            wrong = "one row" if len(rows) < 2 else f"streams {', '.join(sorted(streams))}"
            raise line.fail(f"a composite joins two or more rows of one stream, not {wrong}", column)
        name = "&".join(kind.name for kind in kinds)
        self.overrides.update((row, replace(o, name=name)) for row, o in zip(rows, own, strict=True))

    def program(self, source: str) -> Program:
        """The Program of all that was read."""
        self.close_class()
        if self.assumed is not None and len(self.counts) != self.header.num_stages:
            raise self.assumed.fail(
                f"rows without a stage, but there are {len(self.counts)} classes and {self.header.num_stages} stages; "
                "write the stage, as in `2F0`, or `class N stage S`",
                0,
            )
        group = self.columns[3]
        base = max(group, default=-1) + 1
        if base + len(self.unnumbered) > _LARGEST:
            raise FormatError(f"no group numbers are left above {base - 1}", source)
        for i, rows in enumerate(self.unnumbered):
            group[rows.start : rows.stop] = [base + i] * len(rows)
        h = self.header
        try:
            return from_columns(
                class_ptr=np.array(self.ptr, np.int64),
                kind=np.array(self.columns[0], np.int8),
                stage=np.array(self.columns[1], np.int16),
                unit=np.array(self.columns[2], np.int32),
                group=np.array(group, np.int32),
                num_stages=h.num_stages,
                units=tuple(h.units),
                kinds=h.kinds,
                buffers=h.buffers,
                comms=h.comms,
                pools=h.pools,
                counts=tuple(self.counts),
                chains=h.chains,
                inputs="loaded" if h.loaded else "resident",
                aliases=h.aliases,
                overrides=self.overrides,
            )
        except GnomonError as error:
            raise FormatError(str(error), source) from error
