"""The C++ text of a stencil's pipeline: one function, sizes and strides in one array, arrays in another.

A task has a band of rows, a stretch of what lies between and of points; stages are computed beyond it as far as those
behind them need (overlapped tiles), so tasks wait for nobody. In a task each stage keeps a ring of rows in cache, and
only outputs go to memory, past the caches where `d` says so. Nothing in the text depends on a size. `text(pipeline)`
gives the source and the names of the numbers that the call fills in. Leaves out which tiles (`tile`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gnomon.compiler.body import kind_of
from gnomon.compiler.build import ASKS
from gnomon.compiler.cpp_text import SCALAR, TYPES, Text, expression
from gnomon.compiler.stages import classify
from gnomon.compiler.stencil.lags import Pipeline, Place, Row
from gnomon.compiler.stencil.stages import Factor, Read, Stage
from gnomon.compiler.tiles import Nest

DIMS = "smv"
"""Rows, what lies between, points of a row."""
HOST = ("bands", "band", "tiles_m", "tile_m", "tiles_v", "tile_v", "parallel", "past")
"""What the call says first."""
FAR = 1 << 20
"""Rings before the first: a row before the first one has a place too."""


@dataclass(slots=True)
class Rows:
    """The function under construction."""

    of: Pipeline
    lines: list[str] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    """What `d` holds after `HOST`: ("size", node, dim) or ("stride", node, dim)."""
    names: dict[Any, str] = field(default_factory=dict)
    """Of inputs' and outputs' memory."""

    def say(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def number(self, *what: Any) -> str:
        if what not in self.numbers:
            self.numbers.append(what)
        return f"d[{len(HOST) + self.numbers.index(what)}]"

    # ---- names
    def dim(self, place: int) -> int | None:
        """The array's dim of one of the three, None where it has none."""
        spatial = self.of.stencil.rank - self.of.first
        return {1: (None, None, 0), 2: (0, None, 1), 3: (0, 1, 2)}[spatial][place]

    def extent(self, node: Any, place: int) -> str:
        dim = self.dim(place)
        return "1" if dim is None else self.number("size", node, self.of.first + dim)

    def step(self, node: Any, place: int) -> str:
        dim = self.dim(place)
        return "0" if dim is None else self.number("stride", node, self.of.first + dim)

    def memory(self, node: Any, where: tuple[str, str], channel: str) -> str:
        """A row of an array in memory, from point 0."""
        name = self.names[node]
        place = "".join(f" + b{n} * {self.number('stride', node, n)}" for n in range(self.of.stencil.batch))
        if self.of.stencil.channel is not None:
            place += f" + {channel} * {self.number('stride', node, self.of.stencil.channel)}"
        for at, dim in zip(where, range(2), strict=True):
            if self.dim(dim) is not None:
                place += f" + ({at}) * {self.step(node, dim)}"
        return f"{name}{place}"

    def ring(self, n: int, where: tuple[str, str], channel: str) -> str:
        """A row that is kept, from point 0."""
        row = self.of.rows[n]
        channels = self.channels(row)
        at = f"({where[0]} + {FAR * row.ring}) % {row.ring}" if row.ring > 1 else "0"
        if self.of.stencil.channel is not None:
            at = f"({at}) * {channels} + {channel}"
        return f"k{n} + (({at}) * m{n} + ({where[1]}) - lm{n}) * w{n} - lv{n}"

    def channels(self, row: Row) -> str:
        channel = self.of.stencil.channel
        return "1" if channel is None else self.number("size", row.source, channel)

    def at(self, read: Read) -> str:
        """A row that a stage reads, from its own point 0."""
        shift = self.of.place(read.shift)
        where = (f"i + {shift[0]}" if shift[0] else "i", f"m + {shift[1]}" if shift[1] else "m")
        channel = "c" if read.channel is None else str(read.channel)
        n = self.of.found(read)
        if n is None:
            return f"{self.memory(read.field, where, channel)} + {shift[2]}"
        place = self.ring(n, where, channel)
        outside = self.of.rows[n].outside
        if outside is not None and outside != "wrap":
            inside = [
                f"({at}) >= 0 && ({at}) < {self.extent(read.field, dim)}"
                for dim, at in enumerate(where)
                if shift[dim]
            ]
            if inside:
                place = f"({' && '.join(inside)} ? {place} : f{n} - lv{n})"
        return f"{place} + {shift[2]}"


def text(of: Pipeline) -> tuple[str, list[Any]]:
    """(C++, what `d` holds after HOST). Arrays are the stencil's inputs, then its outputs."""
    rows = Rows(of=of)
    stencil = of.stencil
    for n, node in enumerate(stencil.inputs):
        rows.names[node] = f"x{n}"
    for n, node in enumerate(stencil.outputs):
        rows.names[node] = f"y{n}"
    say = rows.say
    body = _task(rows)
    head = Rows(of=of)
    head.say(0, f"{ASKS}-ffp-contract=off")
    head.say(0, '#include "vector.h"')
    head.say(0, '#include "math.h"')
    head.say(0, "ALWAYS int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }")
    head.say(0, "ALWAYS int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }")
    head.say(0, 'extern "C" int gnomon_kernel(const int64_t* __restrict d, char* const* __restrict arrays) {')
    for n, node in enumerate(stencil.inputs):
        head.say(1, f"const {_type(of, node)}* const x{n} = (const {_type(of, node)}*)arrays[{n}];")
    for n, node in enumerate(stencil.outputs):
        kind = _type(of, node)
        head.say(1, f"{kind}* const y{n} = ({kind}*)arrays[{len(stencil.inputs) + n}];")
    for n, name in enumerate(HOST):
        head.say(1, f"const int64_t {name} = d[{n}];")
    batches = [rows.number("size", stencil.stages[0].node, n) for n in range(stencil.batch)]
    head.say(1, f"const int64_t batches = {' * '.join(['1', *batches])};")
    head.say(1, "#pragma omp parallel for if (parallel) schedule(static)")
    head.say(1, "for (int64_t task = 0; task < batches * bands * tiles_m * tiles_v; task++) {")
    head.say(2, "const int64_t at_v = task % tiles_v, at_m = task / tiles_v % tiles_m;")
    head.say(2, "const int64_t at_s = task / (tiles_v * tiles_m) % bands;")
    rest = "task / (tiles_v * tiles_m * bands)"
    for n in reversed(range(stencil.batch)):
        head.say(2, f"const int64_t b{n} = {rest} % {batches[n]};")
        rest = f"({rest} / {batches[n]})"
    del say
    return "\n".join([*head.lines, *body, "    }", "    return 0;", "}"]) + "\n", rows.numbers


def _type(of: Pipeline, node: Any) -> str:
    return TYPES[node.meta["val"].dtype]


def _scalar(row: Row) -> str:
    dtype = row.stage.dtype if row.stage is not None else row.source.meta["val"].dtype
    return SCALAR[kind_of(dtype)]


def _task(rows: Rows) -> list[str]:
    of, say = rows.of, rows.say
    for n in reversed(range(len(of.rows))):
        _range(rows, n)
    _room(rows)
    every = [n for n in range(len(of.rows))]
    begin, end = "INT64_MAX", "INT64_MIN"
    for n in every:
        begin = f"least({begin}, cs{n} + {of.rows[n].lag})"
        end = f"most({end}, ds{n} + {of.rows[n].lag})"
    say(2, f"const int64_t begin = {begin}, end = {end};")
    say(2, "for (int64_t t = begin; t < end; t++) {")
    for n, row in enumerate(of.rows):
        say(3, "{")
        say(4, f"const int64_t i = t - {row.lag};")
        say(4, f"if (i >= cs{n} && i < ds{n})")
        loop = "" if of.stencil.channel is None else f"for (int64_t c = 0; c < {rows.channels(row)}; c++) "
        say(4, f"{loop}for (int64_t m = cm{n}; m < dm{n}; m++) {{")
        if row.stage is None:
            _copied(rows, n, row)
        else:
            _computed(rows, n, row, row.stage)
        say(4, "}")
        say(3, "}")
    say(2, "}")
    say(2, "if (past) st_past_end();")
    return rows.lines


def _range(rows: Rows, n: int) -> None:
    """Along each dim: [l, h) that others read, [c, d) that is computed, [p, q) that the task leaves in memory."""
    of, row = rows.of, rows.of.rows[n]
    for place, dim in enumerate(DIMS):
        size = rows.extent(row.source, place)
        low = [f"c{dim}{user} + {shift[place]}" for user, shift in of.users[n]]
        high = [f"d{dim}{user} + {shift[place]}" for user, shift in of.users[n]]
        if row.output:
            tile, tiles = ("band", "bands") if dim == "s" else (f"tile_{dim}", f"tiles_{dim}")
            rows.say(2, f"const int64_t p{dim}{n} = least(at_{dim} * {tile}, {size});")
            rows.say(
                2, f"const int64_t q{dim}{n} = at_{dim} + 1 < {tiles} ? least(p{dim}{n} + {tile}, {size}) : {size};"
            )
            low.append(f"p{dim}{n}")
            high.append(f"q{dim}{n}")
        first, last = low[0], high[0]
        for a, b in zip(low[1:], high[1:], strict=True):
            first, last = f"least({first}, {a})", f"most({last}, {b})"
        rows.say(2, f"int64_t l{dim}{n} = {first}, h{dim}{n} = {last};")
        if row.outside == "wrap":
            rows.say(2, f"const int64_t c{dim}{n} = l{dim}{n}, d{dim}{n} = h{dim}{n};")
            continue
        rows.say(2, f"const int64_t c{dim}{n} = most(l{dim}{n}, 0), d{dim}{n} = least(h{dim}{n}, {size});")
        if row.outside is None or not _beyond(of, n, place):
            rows.say(2, f"l{dim}{n} = c{dim}{n}, h{dim}{n} = most(d{dim}{n}, c{dim}{n});")


def _beyond(of: Pipeline, n: int, place: int) -> bool:
    """Whether somebody reads beyond the edges along a dim."""
    return any(shift[place] for _, shift in of.users[n])


def _room(rows: Rows) -> None:
    """The rings, one after the other in a thread's own memory."""
    say = rows.say
    kept = [(n, row) for n, row in enumerate(rows.of.rows) if row.ring]
    say(2, "int64_t wanted = 64;")
    for n, row in kept:
        say(2, f"const int64_t w{n} = (hv{n} - lv{n} + 3 * VW) / VW * VW, m{n} = hm{n} - lm{n};")
        say(2, f"const int64_t o{n} = wanted;")
        lines = f"{row.ring} * m{n} * {rows.channels(row)} + 1"
        say(2, f"wanted += (({lines}) * w{n} * (int64_t)sizeof({_scalar(row)}) + 127) / 64 * 64;")
    say(2, "static thread_local char* room = 0;")
    say(2, "static thread_local int64_t room_bytes = 0;")
    say(2, "if (wanted > room_bytes) {")
    say(3, "free(room);")
    say(3, "room = (char*)aligned_alloc(64, (wanted + 63) / 64 * 64);")
    say(3, "room_bytes = wanted;")
    say(2, "}")
    for n, row in kept:
        kind = _scalar(row)
        say(2, f"{kind}* const k{n} = ({kind}*)(room + o{n});")
        if row.outside is not None and row.outside != "wrap":
            say(2, f"{kind}* const f{n} = k{n} + {row.ring} * m{n} * {rows.channels(row)} * w{n};")
            say(2, f"for (int64_t j = 0; j < w{n}; j++) f{n}[j] = {_literal(row.outside)};")


def _literal(value: Any) -> str:
    if value != value:
        return "NANF"
    return "INF" if value == float("inf") else "-INF" if value == -float("inf") else repr(float(value))


def _copied(rows: Rows, n: int, row: Row) -> None:
    """A row of an input, with its edges."""
    say, kind = rows.say, _scalar(row)
    size_v = rows.extent(row.source, 2)
    say(5, f"{kind}* const out = {rows.ring(n, ('i', 'm'), 'c')};")
    if row.outside == "wrap":
        where = [
            f"(({at}) % {rows.extent(row.source, place)} + {rows.extent(row.source, place)}) % "
            f"{rows.extent(row.source, place)}"
            for place, at in enumerate(("i", "m"))
        ]
        say(5, f"auto* const in = {rows.memory(row.source, (where[0], where[1]), 'c')};")
        say(5, f"for (int64_t j = cv{n}; j < dv{n};) {{")
        say(6, f"const int64_t from = (j % {size_v} + {size_v}) % {size_v};")
        say(6, f"const int64_t many = least(dv{n} - j, {size_v} - from);")
        _copy(rows, "in + from", "out + j", "0", "many", depth=6)
        say(6, "j += many;")
        say(5, "}")
        return
    say(5, f"auto* const in = {rows.memory(row.source, ('i', 'm'), 'c')};")
    _copy(rows, "in", "out", f"cv{n}", f"dv{n}", depth=5)
    _edges(rows, n, row)


def _edges(rows: Rows, n: int, row: Row) -> None:
    if row.outside is not None and row.outside != "wrap":
        rows.say(5, f"for (int64_t j = lv{n}; j < cv{n}; j++) out[j] = {_literal(row.outside)};")
        rows.say(5, f"for (int64_t j = dv{n}; j < hv{n}; j++) out[j] = {_literal(row.outside)};")


def _copy(rows: Rows, source: str, target: str, low: str, high: str, depth: int) -> None:
    rows.say(depth, "{")
    rows.say(depth + 1, f"int64_t e = {low};")
    rows.say(depth + 1, f"for (; e + VW <= {high}; e += VW) st({target} + e, ld({source} + e));")
    rows.say(depth + 1, f"if (e < {high}) {{")
    rows.say(depth + 2, f"const int last = (int)({high} - e);")
    rows.say(depth + 2, f"st({target} + e, ld({source} + e, last), last);")
    rows.say(depth + 1, "}")
    rows.say(depth, "}")


def _computed(rows: Rows, n: int, row: Row, stage: Stage) -> None:
    """A row of a stage: to its ring where somebody reads it, to memory where it is a result."""
    say = rows.say
    direct = not row.ring
    out = rows.memory(row.source, ("i", "m"), "c") if direct else rows.ring(n, ("i", "m"), "c")
    say(5, f"auto* const out = {out};")
    if stage.box is None:
        _points(rows, stage, f"cv{n}", f"dv{n}", direct)
    else:
        assert stage.base is not None
        low, high = (rows.of.sizes(tuple(edge[k] for edge in stage.box)) for k in range(2))
        sizes = rows.of.sizes(stage.sizes)
        inside = []
        for at, place in (("i", 0), ("m", 1)):
            if rows.dim(place) is not None and (low[place] or high[place] != sizes[place]):
                above = sizes[place] - high[place]
                inside.append(f"{at} >= {low[place]} && {at} < {rows.extent(row.source, place)} - {above}")
        size_v = rows.extent(row.source, 2)
        above = sizes[2] - high[2]
        say(5, f"auto* const base = {rows.at(stage.base)};")
        say(5, f"int64_t lo = most(cv{n}, {low[2]}), hi = least(dv{n}, {size_v} - {above});")
        if inside:
            say(5, f"if (!({' && '.join(inside)})) lo = hi = dv{n};")
        say(5, "if (hi < lo) hi = lo;")
        _copy(rows, "base", "out", f"cv{n}", f"least(lo, dv{n})", depth=5)
        _copy(rows, "base", "out", "hi", f"dv{n}", depth=5)
        _points(rows, stage, "lo", "hi", direct)
    if not direct:
        _edges(rows, n, row)
        if row.output:
            say(5, f"if (i >= ps{n} && i < qs{n} && m >= pm{n} && m < qm{n}) {{")
            say(6, f"auto* const to = {rows.memory(row.source, ('i', 'm'), 'c')};")
            _copy(rows, "out", "to", f"pv{n}", f"qv{n}", depth=6)
            say(5, "}")


def _points(rows: Rows, stage: Stage, low: str, high: str, direct: bool) -> None:
    """The body along points [low, high) of a row; the last vector overlaps the one before it."""
    say = rows.say
    nest = _nest(rows.of, stage)
    line = Text(nest=nest)
    hoisted, inner = [], []
    for slot, source in stage.slots():
        if isinstance(source, Read):
            say(5, f"auto* const b_p{slot} = {rows.at(source)};")
        else:
            say(5, f"auto* const b_p{slot} = {rows.names[source.weight]} + {source.element};")
    for i in stage.values:
        ins = stage.body.code[i]
        varies = ins.op != "const" and nest.inner[0] in ins.axes
        (inner if varies or not ins.op == "load" and ins.axes else hoisted).append(i)
    for i in hoisted:
        ins = stage.body.code[i]
        made = expression(line, i, last=None, partial=False)
        if ins.op == "load":
            made = f"ld1(b_p{ins.attr}{_channel(rows, stage, ins.attr)})"
        say(5, f"const {ins.kind} v{i} = {made};")
    memory = direct and TYPES[stage.dtype] == "float"
    say(5, f"if ({high} - {low} >= VW) {{")
    if memory:
        say(6, f"const int64_t odd = (uintptr_t)(out + {low}) / sizeof(float) % VW;")
    say(6, f"for (int64_t j = {low};;) {{")
    for i in inner:
        say(7, f"const {stage.body.code[i].kind} v{i} = {expression(line, i, last='j', partial=False)};")
    if memory:
        say(7, "if (past && (uintptr_t)(out + j) % sizeof(F) == 0) st_past(out + j, v{0});".format(stage.value))
        say(7, f"else st(out + j, v{stage.value});")
    else:
        say(7, f"st(out + j, v{stage.value});")
    say(7, f"if (j + VW >= {high}) break;")
    say(7, f"j += past && j == {low} && odd ? VW - odd : VW;" if memory else "j += VW;")
    say(7, f"if (j + VW > {high}) j = {high} - VW;")
    say(6, "}")
    say(5, f"}} else if ({high} > {low}) {{")
    say(6, f"const int64_t j = {low};")
    say(6, f"const int n = (int)({high} - {low});")
    for i in inner:
        say(6, f"const {stage.body.code[i].kind} v{i} = {expression(line, i, last='j', partial=True)};")
    say(6, f"st(out + j, v{stage.value}, n);")
    say(5, "}")


def _channel(rows: Rows, stage: Stage, slot: int) -> str:
    source = stage.body.inputs[slot].node
    if not isinstance(source, Factor) or not source.by_channel:
        return ""
    if rows.of.stencil.channel is not None:
        return f" + c * {source.by_channel}"
    [axis] = stage.body.inputs[slot].strides
    return f" + b{axis} * {source.by_channel}"


def _nest(of: Pipeline, stage: Stage) -> Nest:
    """A nest of the points of a row alone, as `cpp_text` reads it."""
    last = sum(size > 1 for size in stage.sizes) - 1
    stages = classify(stage.body, [stage.value])
    return Nest(
        body=stage.body, stages=stages, outputs=(), outer=(), inner=(last,), sizes={}, passes=(), post=(), scratch=()
    )  # fmt: skip


__all__ = ["HOST", "Place", "text"]
