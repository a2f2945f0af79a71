"""What stands before the first class of a Program's text: stages, units, and what differs from the standard.

`Header.read` takes one line; `Header.settled` fills in defaults and checks names that may be declared after their
use. Left out: the rows, which `rows` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from gnomon.errors import GnomonError
from gnomon.program.kinds import (
    EFFECT_OPS,
    STANDARD_BUFFERS,
    BufferClass,
    Kind,
    Lifetime,
    MemoryClass,
    Per,
    effects,
    with_buffers,
    with_kinds,
)
from gnomon.program.program import MAX_STAGES, MAX_UNITS, BufferRef, Communicator, Pool, plain_units
from gnomon.program.text.words import KIND, LARGEST, PART, Line, known_name, short
from gnomon.program.units import Unit


@dataclass(slots=True)
class Header:
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

    def read(self, line: Line) -> None:
        """Reads one line of the header."""
        word = line.word("a directive")
        if word not in ("kind", "buffer", "comm", "pool", "unit", "alias"):
            self.once(line, word)
        Header.FORMS[word](self, line)
        line.end()

    def once(self, line: Line, what: str, name: str = "") -> None:
        """Refuses a second declaration."""
        if (what, name) in self.seen:
            raise line.fail(f"{what} {name}".strip() + " is given twice")
        self.seen.add((what, name))

    def read_stages(self, line: Line) -> None:
        """Reads `stages N`."""
        self.num_stages = line.count("number of stages", 1, MAX_STAGES)

    def read_units(self, line: Line) -> None:
        """Reads `units N`."""
        if self.units:
            raise line.fail("give either `units N` or `unit` lines, not both")
        self.plain = line.count("number of units", 0, MAX_UNITS)

    def read_unit(self, line: Line) -> None:
        """`unit I = SEQUENCE:START:STOP … [weight W] [worker R] [local SEQUENCE:RANK …]`."""
        index = line.count("number of the unit", 0, MAX_UNITS - 1)
        if self.plain >= 0:
            raise line.fail("give either `units N` or `unit` lines, not both")
        if index != len(self.units):
            raise line.fail(f"expected unit {len(self.units)}, not unit {index}: units are numbered in order from 0")
        line.expect("=")
        column, pieces = line.at, []
        while (word := line.peek()) and word not in ("weight", "worker", "local"):
            parts = line.word("a piece").split(":")
            if len(parts) != 3:
                raise line.fail(f"expected a piece as sequence:start:stop, not {short(word)}")
            a, b, c = (line.integer(part, "a piece's number", 0, LARGEST, line.start) for part in parts)
            pieces.append((a, b, c))
        weight = _weight(line) if line.accept("weight") else 0.0
        worker = line.count("worker", 0) if line.accept("worker") else 0
        local = _local(line) if line.accept("local") else ()
        try:
            self.units.append(Unit(pieces=tuple(pieces), weight=weight, worker=worker, local=local))
        except GnomonError as error:
            raise line.fail(str(error), column) from None

    def read_chains(self, line: Line) -> None:
        """`chains STAGE … | chains none`."""
        starts: list[int] = []
        if not line.accept("none"):
            starts.append(line.count("first stage of a chain", 0))
            while line.has_more():
                starts.append(line.count("first stage of a chain", 0))
        self.chains = tuple(starts)
        self.later.append(partial(self.check_stages, line, starts, line.start))

    def check_stages(self, line: Line, stages: Sequence[int], column: int) -> None:
        """Stages that a line names must exist."""
        for stage in stages:
            if stage >= self.num_stages:
                raise line.fail(
                    f"stage {stage}, but there are {self.num_stages} stages (0 to {self.num_stages - 1})", column
                )

    def check_buffer(self, line: Line, name: str, column: int) -> None:
        """Buffers that a line names must be declared."""
        known_name(line, "buffer", name, [buffer.name for buffer in self.buffers], column)

    def check_pool(self, line: Line, name: str, column: int) -> None:
        """Pools that a line names must be declared."""
        known_name(line, "pool", name, [pool.name for pool in self.pools], column)

    def read_inputs(self, line: Line) -> None:
        """`inputs resident | loaded`."""
        self.loaded = line.choice(("resident", "loaded"), "where inputs come from") == "loaded"

    def read_buffer(self, line: Line) -> None:
        """`buffer NAME LIFETIME per PER [slots N] [pool NAME]`."""
        name = line.name("a buffer")
        self.once(line, "buffer", name)
        lifetime: Lifetime = line.choice(get_args(Lifetime), "lifetime")
        line.expect("per")
        per: Per = line.choice(get_args(Per), "what an instance belongs to")
        slots = line.count("slots", 1) if line.accept("slots") else 1
        pool = line.name("a pool") if line.accept("pool") else ""
        # text has no classes of memory: those of the standard buffers are known, the sizes of others are the reader's
        memory: MemoryClass = next((b.memory for b in STANDARD_BUFFERS if b.name == name), "not in the step's")
        self.buffers += (BufferClass(name=name, memory=memory, lifetime=lifetime, per=per, slots=slots, pool=pool),)
        if pool:
            self.later.append(partial(self.check_pool, line, pool, line.start))

    def read_pool(self, line: Line) -> None:
        """Reads `pool NAME SIZE`."""
        name = line.name("a pool")
        self.once(line, "pool", name)
        self.pools += (Pool(name=name, size=line.count("size of the pool", 1)),)

    def read_kind(self, line: Line) -> None:
        """`kind NAME on STREAM [comm NAME] [send HOP | recv HOP][: effects]`."""
        head, colon, acts = line.text.partition(":")
        line.text = head
        name = line.word("a name of a kind")
        if not re.fullmatch(KIND, name):
            raise line.fail(f"expected a name of a kind (A-Z, 0-9 and _, no digit last), not {short(name)}")
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

    def check_effects(self, line: Line, acts: str, column: int, has_effects: bool) -> None:
        """Effects of a kind, one by one; their buffers may be declared later."""
        for part in acts.split(",") if has_effects else ():
            match = PART.fullmatch(part)
            if not match:
                raise line.fail(
                    f"expected `op BUFFER` with op one of {', '.join(EFFECT_OPS)}, not {short(part)}", column
                )
            at, name = column + match.start(2), match[2]
            self.later.append(partial(self.check_buffer, line, name, at))
            column += len(part) + 1

    def read_comm(self, line: Line) -> None:
        """`comm NAME buffered [N] | rendezvous | collective [unordered]`."""
        name = line.name("a communicator")
        self.once(line, "comm", name)
        semantics: Literal["buffered", "rendezvous", "collective"] = line.choice(
            ("buffered", "rendezvous", "collective"), "semantics"
        )
        bounded = semantics == "buffered" and line.peek().isdigit()
        capacity = line.count("messages in flight", 1) if bounded else 0
        ordered = not line.accept("unordered")
        self.comms += (Communicator(name=name, semantics=semantics, capacity=capacity, ordered=ordered),)

    def read_alias(self, line: Line) -> None:
        """`alias BUFFER STAGE [AT] = BUFFER STAGE [AT]`."""
        pair, columns = [], []
        for side in (0, 1):
            if side:
                line.expect("=")
            name = line.name("a buffer")
            columns.append(line.start)
            stage = line.count("stage", 0)
            at = line.count("unit or sequence", 0) if line.peek().isdigit() else 0
            pair.append(BufferRef(name, stage, at))
        self.aliases += ((pair[0], pair[1]),)
        for ref, column in zip(pair, columns, strict=True):
            self.later.append(partial(self.check_buffer, line, ref.buffer, column))
            self.later.append(partial(self.check_stages, line, [ref.stage], column))

    def read_only(self, line: Line) -> None:
        """`kinds only | buffers only`."""
        line.expect("only")

    def settled(self, line: Line) -> Header:
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


def _local(line: Line) -> tuple[tuple[int, int], ...]:
    """Sequences that one context-parallel rank has whole: SEQUENCE:RANK, at least one."""
    sequences: list[tuple[int, int]] = []
    while not sequences or line.has_more():
        word = line.word("a local sequence")
        parts = word.split(":")
        if len(parts) != 2:
            raise line.fail(f"expected a local sequence as sequence:rank, not {short(word)}")
        sequence, rank = (line.integer(part, "a local sequence's number", 0, LARGEST, line.start) for part in parts)
        sequences.append((sequence, rank))
    return tuple(sequences)


def _weight(line: Line) -> float:
    word = line.word("a weight")
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,3})?", word) or not 0.0 <= float(word) <= 1.0:
        raise line.fail(f"expected a weight from 0 to 1, not {short(word)}")
    return float(word)
