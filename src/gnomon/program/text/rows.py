"""The rows of a Program's text: classes, rows and composites, gathered as columns.

`ReadRows` takes one line at a time and builds the Program at the end. Names, units and stages are checked here, where
line and column are known.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

import numpy as np

from gnomon.errors import FormatError, GnomonError, nearest
from gnomon.program.kinds import EFFECT_OPS, BufferClass
from gnomon.program.program import (
    NO_UNIT,
    BufferRef,
    Override,
    Program,
    RowEffect,
    default_comms,
    from_columns,
)
from gnomon.program.text.header import Header
from gnomon.program.text.words import LARGEST, MEMBER, REF, ROW, Line, known_name, short


@dataclass(slots=True)
class ReadRows:
    """Rows read so far, as columns."""

    header: Header
    counts: list[int] = field(default_factory=list)
    ptr: list[int] = field(default_factory=lambda: [0])
    columns: tuple[list[int], list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], [], []))
    """Kind, stage, unit, group."""
    overrides: dict[int, Override] = field(default_factory=dict)
    class_stage: int | None = None
    """Stage of rows that name none, where the class line says so."""
    bare: Line | None = None
    """A line of the open class with rows that name no stage."""
    assumed: Line | None = None
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

    def open_class(self, line: Line) -> None:
        """`class I [count N] [stage S]`."""
        line.expect("class")
        number = line.count("number of the class", 0)
        if number != len(self.counts):
            twice = "is given twice" if number < len(self.counts) else f"comes before class {len(self.counts)}"
            raise line.fail(f"class {number} {twice}: classes are numbered in order from 0")
        self.close_class()
        self.counts.append(line.count("ranks in the class", 1) if line.accept("count") else 1)
        self.class_stage = line.count("stage", 0, self.header.num_stages - 1) if line.accept("stage") else None
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

    def rows(self, line: Line) -> None:
        """One line of rows."""
        while line.has_more():
            line.start = line.at
            if line.text[line.at] == "(":
                self.composite(line)
            else:
                self.row(line, ROW)
            if line.at < len(line.text) and not line.text[line.at].isspace():
                line.start = line.at
                raise line.fail(f"expected a blank after the row, not {short(line.peek())}")

    def row(self, line: Line, pattern: re.Pattern[str]) -> None:
        """One row at the line's position."""
        match = pattern.match(line.text, line.at)
        if not match:
            raise line.fail(f"expected a row such as `2F0` or `3SEND_F1>5`, not {short(line.peek())}", line.at)
        line.start = line.at
        line.at = match.end()
        name = match["kind"]
        if name not in self.index:
            raise line.fail(f"unknown kind {short(name)}{nearest(name[:40], self.index)}", match.start("kind"))
        kind, stage, unit = self.index[name], self.stage(line, match), NO_UNIT
        if match["unit"]:
            count = len(self.header.units)
            unit = line.integer(match["unit"], f"unit (of {count})", 0, count - 1, match.start("unit"))
        group = -1
        if match["group"]:
            group = line.integer(match["group"], "group", 0, LARGEST, match.start("group"))
        override = self.override(line, match)
        if override is not None:
            self.overrides[self.ptr[-1]] = override
        for column, value in zip(self.columns, (kind, stage, unit, group), strict=True):
            column.append(value)
        self.ptr[-1] += 1

    def stage(self, line: Line, match: re.Match[str]) -> int:
        """Reads the row's stage; if it names none, that of its class."""
        last = self.header.num_stages - 1
        if match["stage"]:
            return line.integer(match["stage"], f"stage (of {last + 1})", 0, last, match.start("stage"))
        self.bare = line
        if self.class_stage is not None:
            return self.class_stage
        self.assumed = self.assumed or line
        # Class i is stage i; refused in `program` unless there are as many classes as stages.
        return min(len(self.counts) - 1, last)

    def override(self, line: Line, match: re.Match[str]) -> Override | None:
        """What a row says beyond stage, kind and unit."""
        peer, name, stream, comm, acts = match.group("peer", "name", "stream", "comm", "effects")
        if not (peer or name or stream or comm or match["inside"]) and acts is None:
            return None
        if comm and comm not in self.comms:
            raise line.fail(f"unknown communicator {short(comm)}{nearest(comm[:40], self.comms)}", match.start("comm"))
        last = self.header.num_stages - 1
        effects = None if acts is None else self.effects(line, acts.removeprefix("+"), match.end("effects"))
        return Override(
            stream=stream or "",
            comm=comm or "",
            peer=line.integer(peer, "stage at the other end", 0, last, match.start("peer")) if peer else None,
            name=self.unquoted(line, name or "", match.start("name")),
            effects=effects,
            adds=acts is not None and acts.startswith("+"),
            inside=bool(match["inside"]),
        )

    def unquoted(self, line: Line, name: str, column: int) -> str:
        """A price's name, quoted or not."""
        if not name.startswith('"'):
            return name
        try:
            value = json.loads(name)
        except json.JSONDecodeError:
            value = ""
        if not value or not isinstance(value, str):
            raise line.fail(f"expected a name in quotes, as JSON writes it, not {short(name)}", column)
        return value

    def effects(self, line: Line, acts: str, end: int) -> tuple[RowEffect, ...]:
        """`read G 0, write P 0`; `end` is the column after it."""
        effects = []
        # acts lacks its leading `+`, so it is measured from the end.
        column = end - len(acts)
        for part in acts.split(",") if acts.strip() else ():
            match = REF.fullmatch(part)
            if not match:
                expected = f"`op BUFFER STAGE [AT]` with op one of {', '.join(EFFECT_OPS)}"
                raise line.fail(f"expected {expected}, not {short(part.strip())}", column)
            known_name(line, "buffer", match[2], tuple(self.buffers), column + match.start(2))
            last, per = self.header.num_stages - 1, self.buffers[match[2]].per
            stage = line.integer(match[3], f"stage (of {last + 1})", 0, last, column + match.start(3))
            # A buffer per stage has no AT; every other one needs it.
            if (per == "stage") == (match[4] is not None):
                form = "BUFFER STAGE" if per == "stage" else f"BUFFER STAGE {per.upper()}"
                raise line.fail(
                    f"buffer {match[2]} is per {per}: expected `op {form}`, not {short(part.strip())}", column
                )
            at = line.integer(match[4], per, 0, LARGEST, column + match.start(4)) if match[4] else 0
            op = next(op for op in EFFECT_OPS if op == match[1])
            effects.append(RowEffect(op, BufferRef(match[2], stage, at)))
            # With the comma.
            column += len(part) + 1
        return tuple(effects)

    def composite(self, line: Line) -> None:
        """Reads `(0F3&1B1)` or `(0F3&1B1)#5`."""
        column, first = line.at, self.ptr[-1]
        line.at += 1
        while True:
            start = line.at
            self.row(line, MEMBER)
            if self.columns[3][-1] >= 0 or (self.overrides.get(self.ptr[-1] - 1) or Override()).name:
                raise line.fail("a row of a composite has no name or group of its own", start)
            if line.text[line.at : line.at + 1] != "&":
                break
            line.at += 1
        if line.text[line.at : line.at + 1] != ")":
            raise line.fail(f"expected `&` or `)` in a composite, not {short(line.peek())}", line.at)
        line.at += 1
        rows = range(first, self.ptr[-1])
        number = re.compile(r"#(\d+)").match(line.text, line.at)
        self.join(line, rows, column)
        if number:
            line.at = number.end()
            value = line.integer(number[1], "group", 0, LARGEST, number.start(1))
            self.columns[3][first:] = [value] * len(rows)
        else:
            self.unnumbered.append(rows)

    def join(self, line: Line, rows: range, column: int) -> None:
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
        # Above every number that is given, so that no two groups become one (`write._composites` counts the same way).
        base = max(group, default=-1) + 1
        if base + len(self.unnumbered) > LARGEST:
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
