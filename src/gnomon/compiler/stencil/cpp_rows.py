"""The C++ text of a stencil's pipeline: one function, sizes and strides in one array, arrays in another.

A task has a band of rows, a stretch of what lies between and of points; stages are computed beyond it as far as those
behind them need (overlapped tiles), so tasks wait for nobody. In a task each stage keeps a ring of rows in cache, and
only outputs go to memory, past the caches where `d` says so. Nothing in the text depends on a size. `text(pipeline)`
gives the source and the names of the numbers that the call fills in. Leaves out which tiles (`tile`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from gnomon.compiler.build import ASKS
from gnomon.compiler.stencil.lags import LaggedArray, Pipeline
from gnomon.compiler.stencil.stages import Factor, Read, Stage, weighted
from gnomon.compiler.text.cpp_text import SCALAR, TYPES, Text, expression
from gnomon.compiler.tiles.body import kind_of
from gnomon.compiler.tiles.stages import classify
from gnomon.compiler.tiles.tiling import Nest

DIMS = "smv"
"""Dims of the text: s rows, m what lies between, v points of a row."""
HELD = 8
"""Vectors of a row that wait in the first cache before they leave for memory."""
HOST = ("bands", "band", "tiles_m", "tile_m", "tiles_v", "tile_v", "parallel", "past")
"""Names of the numbers that the call says first."""
FAR = 1 << 20
"""Rings counted before the first, so that a row before the first one has a place too."""


@dataclass(slots=True)
class RowsFunction:
    """The function under construction."""

    of: Pipeline
    lines: list[str] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    """What `d` holds after `HOST`: ("size", node, dim) or ("stride", node, dim)."""
    names: dict[Any, str] = field(default_factory=dict)
    """Names of inputs' and outputs' memory."""
    functions: list[str] = field(default_factory=list)
    """Functions of the points of rows: stages that are alike share one."""

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
        """Address of a row of an array in memory, from point 0."""
        name = self.names[node]
        place = "".join(f" + b{n} * {self.number('stride', node, n)}" for n in range(self.of.stencil.batch))
        if self.of.stencil.channel is not None:
            place += f" + {channel} * {self.number('stride', node, self.of.stencil.channel)}"
        for at, dim in zip(where, range(2), strict=True):
            if self.dim(dim) is not None:
                place += f" + ({at}) * {self.step(node, dim)}"
        return f"{name}{place}"

    def ring(self, n: int, where: tuple[str, str], channel: str, tail: bool = False) -> str:
        """Address of a row that is kept, from point 0. tail: of what is kept of its end."""
        row = self.of.rows[n]
        channels = self.channels(row)
        # Row i lies at i mod ring; FAR rings are added so that the index of a row before the first is not negative.
        at = f"({where[0]} + {FAR * row.ring}) % {row.ring}" if row.ring > 1 else "0"
        if self.of.stencil.channel is not None:
            at = f"({at}) * {channels} + {channel}"
        memory, wide, low = (f"z{n}", f"u{n}", f"g{n}") if tail else (f"k{n}", f"w{n}", f"lv{n}")
        return f"{memory} + (({at}) * m{n} + ({where[1]}) - lm{n}) * {wide} - {low}"

    def type(self, read: Read) -> str:
        """The type of what a read finds: an array's, or a ring's."""
        n = self.of.row_of(read)
        return _type(self.of, read.field) if n is None else _scalar(self.of.rows[n])

    def channels(self, row: LaggedArray) -> str:
        channel = self.of.stencil.channel
        return "1" if channel is None else self.number("size", row.source, channel)

    def in_memory(self, read: Read) -> bool:
        """Whether most of what is read lies where the array is, not in a ring."""
        n = self.of.row_of(read)
        return n is None or self.of.rows[n].ends

    def wrapped(self, node: Any, where: tuple[str, str]) -> tuple[str, str]:
        """A row by a positive modulus, where the array begins again behind its end."""
        sizes = [self.extent(node, place) for place in range(2)]
        first, second = (f"(({at}) % {size} + {size}) % {size}" for at, size in zip(where, sizes, strict=True))
        return first, second

    def at(self, read: Read, later: int = 0, part: str = "middle") -> str:
        """Address of a row that a stage reads, from its own point 0. later: of which row of a block. part: of the row,
        where only its ends are kept."""
        shift = self.of.place(read.shift)
        shift = (shift[0] + later, shift[1], shift[2])
        where = (f"i + {shift[0]}" if shift[0] else "i", f"m + {shift[1]}" if shift[1] else "m")
        channel = "c" if read.channel is None else str(read.channel)
        n = self.of.row_of(read)
        if n is None:
            return f"{self.memory(read.field, where, channel)} + {shift[2]}"
        outside = self.of.rows[n].outside
        if self.of.rows[n].ends and part == "middle":
            place = self.memory(read.field, self.wrapped(read.field, where) if outside == "wrap" else where, channel)
        else:
            place = self.ring(n, where, channel, tail=part == "tail")
        if outside is not None and outside != "wrap":
            # Beyond the edge (only where the shift can leave it) one constant row stands for all of them.
            inside = [
                f"({at}) >= 0 && ({at}) < {self.extent(read.field, dim)}" for dim, at in enumerate(where) if shift[dim]
            ]
            if inside:
                place = f"({' && '.join(inside)} ? {place} : f{n} - lv{n})"
        return f"{place} + {shift[2]}"


def text(of: Pipeline) -> tuple[str, list[Any]]:
    """(C++, what `d` holds after HOST). Arrays are the stencil's inputs, then its outputs."""
    rows = RowsFunction(of=of)
    stencil = of.stencil
    for n, node in enumerate(stencil.inputs):
        rows.names[node] = f"x{n}"
    for n, node in enumerate(stencil.outputs):
        rows.names[node] = f"y{n}"
    say = rows.say
    body = _task(rows)
    head = RowsFunction(of=of)
    head.say(0, f"{ASKS}-ffp-contract=off")
    head.say(0, '#include "vector.h"')
    head.say(0, '#include "math.h"')
    head.say(0, "ALWAYS int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }")
    head.say(0, "ALWAYS int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }")
    for line in (COPIED, *rows.functions):
        head.say(0, line)
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
    # task -> (batch, band of rows, tile between, tile of points).
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


def _scalar(row: LaggedArray) -> str:
    dtype = row.stage.dtype if row.stage is not None else row.source.meta["val"].dtype
    return SCALAR[kind_of(dtype)]


def _task(rows: RowsFunction) -> list[str]:
    of, say = rows.of, rows.say
    # Backwards over stages: a stage's range follows from those of the stages that read it.
    for n in reversed(range(len(of.rows))):
        _range(rows, n)
    _room(rows)
    every = [n for n in range(len(of.rows))]
    begin, end = "INT64_MAX", "INT64_MIN"
    # t counts rows of the last stage; a stage with lag L is at row t - L, so that its readers find what they need in
    # the ring.
    for n in every:
        begin = f"least({begin}, cs{n} + {of.rows[n].lag})"
        end = f"most({end}, ds{n} + {of.rows[n].lag})"
    say(2, f"const int64_t begin = {begin}, end = {end};")
    block = of.block
    say(2, f"for (int64_t t = begin; t < end; t += {block}) {{")
    for n, row in enumerate(of.rows):
        loop = "" if of.stencil.channel is None else f"for (int64_t c = 0; c < {rows.channels(row)}; c++) "
        loop += f"for (int64_t m = cm{n}; m < dm{n}; m++) {{"
        say(3, "{")
        say(4, f"const int64_t first = most(t - {row.lag}, cs{n}), after = least(t - {row.lag} + {block}, ds{n});")
        # A block of rows shares loads, but only where all of it lies inside the stage's box.
        whole = block > 1 and row.stage is not None
        if whole:
            assert row.stage is not None
            box = _inside(rows, row, row.stage, "first", "after", 0)
            say(4, f"if (after - first == {block} && {box}) {{")
            say(4, f"const int64_t i = first; {loop}")
            _computed(rows, n, row, row.stage, block)
            say(4, "}} else")
        say(4, f"for (int64_t i = first; i < after; i++) {loop}")
        if row.stage is None:
            _copied(rows, n, row)
        else:
            _computed(rows, n, row, row.stage, 1)
        say(4, "}")
        say(3, "}")
    say(2, "}")
    say(2, "if (past) st_past_end();")
    return rows.lines


def _range(rows: RowsFunction, n: int) -> None:
    """Writes the ranges along each dim: [l, h) that others read, [c, d) that is computed, [p, q) that the task leaves
    in memory."""
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


def _room(rows: RowsFunction) -> None:
    """Writes the rings, one after the other in a thread's own memory."""
    say = rows.say
    ring_rows = [(n, row) for n, row in enumerate(rows.of.rows) if row.ring]
    say(2, "int64_t wanted = 64;")
    for n, row in ring_rows:
        channels, kind = rows.channels(row), _scalar(row)
        # A row's width is rounded up to vectors with one to spare, so that the last vector may overlap the end.
        wide = f"(hv{n} - lv{n} + 3 * VW) / VW * VW"
        say(2, f"const int64_t m{n} = hm{n} - lm{n};")
        if row.ends:
            _ends(rows, n)
            say(2, f"const int64_t w{n} = (e{n} - lv{n} + 3 * VW) / VW * VW, u{n} = (hv{n} - g{n} + 3 * VW) / VW * VW;")
        else:
            say(2, f"const int64_t w{n} = {wide};")
        say(2, f"const int64_t o{n} = wanted;")
        say(2, f"const int64_t v{n} = {row.ring} * m{n} * {channels};")
        last = f"v{n} * u{n} + {wide}" if row.ends else f"w{n}"
        say(2, f"wanted += ((v{n} * w{n} + {last}) * (int64_t)sizeof({kind}) + 127) / 64 * 64;")
    say(2, "static thread_local char* room = 0;")
    say(2, "static thread_local int64_t room_bytes = 0;")
    say(2, "if (wanted > room_bytes) {")
    say(3, "free(room);")
    say(3, "room = (char*)aligned_alloc(64, (wanted + 63) / 64 * 64);")
    say(3, "room_bytes = wanted;")
    say(2, "}")
    for n, row in ring_rows:
        kind = _scalar(row)
        say(2, f"{kind}* const k{n} = ({kind}*)(room + o{n});")
        if row.ends:
            say(2, f"{kind}* const z{n} = k{n} + v{n} * w{n};")
        if row.outside is not None and row.outside != "wrap":
            say(2, f"{kind}* const f{n} = {f'z{n} + v{n} * u{n}' if row.ends else f'k{n} + v{n} * w{n}'};")
            say(2, f"for (int64_t j = 0; j < hv{n} - lv{n} + VW; j++) f{n}[j] = {_literal(row.outside)};")


def _far(rows: RowsFunction) -> tuple[int, str]:
    """(how far along a row inputs of which only the ends are kept are read, the least of their sizes)."""
    ends = [(n, row) for n, row in enumerate(rows.of.rows) if row.ends]
    far = max((abs(shift[2]) for n, _ in ends for _, shift in rows.of.users[n]), default=0)
    size, *others = dict.fromkeys(rows.extent(row.source, 2) for _, row in ends)
    for other in others:
        size = f"least({size}, {other})"
    return far, size


def _ends(rows: RowsFunction, n: int) -> None:
    """Writes which points of an input's row are kept: [l, e) of its beginning and [g, h) of its end, as far as
    `_by_parts` reads them."""
    far, size = _far(rows)
    rows.say(2, f"const int64_t short{n} = 2 * VW + {4 * far};")
    rows.say(2, f"const int64_t e{n} = {size} < short{n} ? hv{n} : most(lv{n}, least(hv{n}, short{n}));")
    rows.say(2, f"const int64_t g{n} = most(lv{n}, least(hv{n}, {size} - VW - {2 * far}));")


def _by_parts(rows: RowsFunction, stage: Stage, low: str, high: str) -> list[tuple[str, str, str]]:
    """(part, first point, point after the last) of a stage's row; writes where the parts end.

    Where nothing is read beyond an input's edges, inputs are read where they are. The first and the last vector of a
    row, and more where the reach is more, are computed from copies with their edges. A row too short for all three is
    the first part alone, or the last alone where the task begins far from the array's beginning.
    """
    say = rows.say
    reads = [one for one in stage.reads() if (n := rows.of.row_of(one)) is not None and rows.of.rows[n].ends]
    if not reads:
        return [("middle", low, high)]
    first = max(-rows.of.place(one.shift)[2] for one in reads)
    after = [f"{rows.extent(one.field, 2)} - {rows.of.place(one.shift)[2]}" for one in reads]
    least = after[0]
    for one in dict.fromkeys(after[1:]):
        least = f"least({least}, {one})"
    say(6, f"const int64_t inside = {least};")
    say(6, f"int64_t head = {low}, tail = {high};")
    say(6, f"if ({low} < {first}) head = most({first}, {low} + VW);")
    say(6, f"if ({high} > inside) tail = least(inside, {high} - VW);")
    say(6, f"if (head > tail) head = tail = {low} < {first} ? {high} : {low};")
    return [("head", low, "head"), ("middle", "head", "tail"), ("tail", "tail", high)]


def _literal(value: Any) -> str:
    if value != value:
        return "NANF"
    return "INF" if value == float("inf") else "-INF" if value == -float("inf") else repr(float(value))


def _copied(rows: RowsFunction, n: int, row: LaggedArray) -> None:
    """Writes a row of an input to its ring, with its edges."""
    say, kind = rows.say, _scalar(row)
    size_v = rows.extent(row.source, 2)
    where = rows.wrapped(row.source, ("i", "m")) if row.outside == "wrap" else ("i", "m")
    say(5, f"auto* const in = {rows.memory(row.source, where, 'c')};")
    stretches = [("lv", "e", False), ("g", "hv", True)] if row.ends else [("lv", "hv", False)]
    for low, high, tail in stretches:
        first, after = f"{low}{n}", f"{high}{n}"
        say(5, "{")
        say(5, f"{kind}* const out = {rows.ring(n, ('i', 'm'), 'c', tail)};")
        if row.outside == "wrap":
            # Wrap around: points in stretches up to the array's end.
            say(5, f"for (int64_t j = {first}; j < {after};) {{")
            say(6, f"const int64_t from = (j % {size_v} + {size_v}) % {size_v};")
            say(6, f"const int64_t many = least({after} - j, {size_v} - from);")
            _copy(rows, "in + from", "out + j", "0", "many", depth=6)
            say(6, "j += many;")
            say(5, "}")
        else:
            _copy(rows, "in", "out", f"most({first}, cv{n})", f"least({after}, dv{n})", depth=5)
            _edges(rows, n, row, "out", first, after)
        say(5, "}")


def _edges(rows: RowsFunction, n: int, row: LaggedArray, out: str, first: str = "", after: str = "") -> None:
    """Writes what stands outside the array, of points [first, after)."""
    if row.outside is not None and row.outside != "wrap":
        first, after, value = first or f"lv{n}", after or f"hv{n}", _literal(row.outside)
        rows.say(5, f"for (int64_t j = {first}; j < least(cv{n}, {after}); j++) {out}[j] = {value};")
        rows.say(5, f"for (int64_t j = most(dv{n}, {first}); j < {after}; j++) {out}[j] = {value};")


COPIED = """\
template <class A, class B> struct same { static const bool is = false; };
template <class A> struct same<A, A> { static const bool is = true; };
template <class A, class B> static void copied(const A* from, B* to, int64_t low, int64_t high) {
    int64_t e = low;
    for (; e + VW <= high; e += VW) st(to + e, ld(from + e));
    if constexpr (same<A, B>::is) for (; e < high; e++) to[e] = from[e];
    else if (e < high) st(to + e, ld(from + e, (int)(high - e)), (int)(high - e));
}"""


def _copy(rows: RowsFunction, source: str, target: str, low: str, high: str, depth: int) -> None:
    rows.say(depth, f"copied({source}, {target}, {low}, {high});")


def _computed(rows: RowsFunction, n: int, row: LaggedArray, stage: Stage, block: int) -> None:
    """Writes rows of a stage: to its ring where somebody reads it, to memory where it is a result."""
    say = rows.say
    direct = not row.ring
    for later in range(block):
        where = (f"i + {later}" if later else "i", "m")
        place = rows.memory(row.source, where, "c") if direct else rows.ring(n, where, "c")
        say(5, f"auto* const out{later} = {place};")
    if stage.box is None:
        _points(rows, stage, f"cv{n}", f"dv{n}", direct, block)
    else:
        assert stage.base is not None
        low, high = (rows.of.sizes(tuple(edge[k] for edge in stage.box)) for k in range(2))
        sizes = rows.of.sizes(stage.sizes)
        size_v = rows.extent(row.source, 2)
        say(
            5,
            f"const int64_t lo = most(cv{n}, {low[2]}), hi = most(lo, least(dv{n}, {size_v} - {sizes[2] - high[2]}));",
        )
        # Inside the box the stage's own formula; around it a copy of what stands there.
        inside = ["lo < hi", *([_inside(rows, row, stage, "i", "i + 1", 0)] if block == 1 else [])]
        say(5, f"const bool within = {' && '.join([*inside, _inside(rows, row, stage, 'm', 'm + 1', 1)])};")
        for later in range(block):
            say(5, f"auto* const base{later} = {rows.at(stage.base, later)};")
        say(5, "if (within) {")
        _rim(rows, n, block)
        _points(rows, stage, "lo", "hi", direct, block)
        say(5, "} else {")
        for later in range(block):
            _copy(rows, f"base{later}", f"out{later}", f"cv{n}", f"dv{n}", depth=6)
        say(5, "}")
    for later in range(block):
        if not direct:
            _edges(rows, n, row, f"out{later}")
            if row.output:
                at = f"i + {later}"
                say(5, f"if ({at} >= ps{n} && {at} < qs{n} && m >= pm{n} && m < qm{n}) {{")
                say(6, f"auto* const to = {rows.memory(row.source, (at, 'm'), 'c')};")
                _copy(rows, f"out{later}", "to", f"pv{n}", f"qv{n}", depth=6)
                say(5, "}")


def _inside(rows: RowsFunction, row: LaggedArray, stage: Stage, first: str, after: str, place: int) -> str:
    """Whether [first, after) lies inside a stage's box along a dim."""
    if stage.box is None or rows.dim(place) is None:
        return "true"
    low, high = (rows.of.sizes(tuple(edge[k] for edge in stage.box))[place] for k in range(2))
    above = rows.of.sizes(stage.sizes)[place] - high
    return f"{first} >= {low} && {after} <= {rows.extent(row.source, place)} - {above}"


def _rim(rows: RowsFunction, n: int, block: int) -> None:
    """Copies what stands around the box in rows that meet it."""
    for later in range(block):
        _copy(rows, f"base{later}", f"out{later}", f"cv{n}", "lo", depth=6)
        _copy(rows, f"base{later}", f"out{later}", "hi", f"dv{n}", depth=6)


@dataclass(slots=True)
class Vector:
    """The values of one vector of points, of all rows of a block."""

    of: RowsFunction
    stage: Stage
    block: int
    text: Text
    inner: list[int] = field(default_factory=list)
    """Instructions that vary along a row."""
    again: list[int] = field(default_factory=list)
    """Numbers of weights that are more than registers hold: each vector loads them anew, once for all rows."""
    loads: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """Names of loads; where rows read the same, they share one."""
    places: dict[tuple[Any, ...], tuple[int, Read]] = field(default_factory=dict)
    pointers: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """Names of addresses of rows, by a load's key without its place along the row."""

    def key(self, value: int, later: int) -> tuple[Any, ...]:
        read = self.stage.body.inputs[self.stage.body.code[value].attr].node
        shift = self.of.of.place(read.shift)
        # Two rows of a block that read the same place have one key, so the load is made once.
        return (shift[0] + later, shift[1], shift[2], read.channel, id(read.field), read.outside)

    def lines(self, partial: bool) -> list[str]:
        """C++ in an order in which what is loaded is used soon: from the first row to the last."""
        code = self.stage.body.code
        unemitted = [(i, later) for later in range(self.block) for i in self.inner if code[i].op != "load"]
        # Loads in order of memory, each followed by everything that has become computable: few registers are alive at
        # once. Where weights are loaded too, column by column: so all rows use those of one column and then no more.
        first = (2, 0, 1) if self.again else (0, 1, 2)
        loaded = sorted(self.loads, key=lambda key: (key[4], key[3] or 0, *(key[place] for place in first)))
        out, ready, done, held = [], set(), set(), set()
        remaining = list(unemitted)

        def known(value: int, later: int) -> bool:
            if value not in self.inner:
                return True
            return self.key(value, later) in ready if code[value].op == "load" else (value, later) in done

        def waiting() -> None:
            nonlocal remaining
            rest = []
            for i, later in remaining:
                if all(known(a, later) for a in code[i].args):
                    for a in code[i].args:
                        if a in self.again and a not in held:
                            out.append(f"const F v{a} = weights[{self.again.index(a)}];")
                            held.add(a)
                    formula = expression(self.text, i, last="j", partial=partial)
                    out.append(f"const {code[i].kind} v{i}_{later} = {self.named(formula, later)};")
                    done.add((i, later))
                else:
                    rest.append((i, later))
            remaining = rest

        for key in loaded:
            name = self.loads[key]
            value, _ = self.places[key]
            place = f"{self.pointers[key[:2] + key[3:]]} + j{f' + {key[2]}' if key[2] else ''}"
            kind, loads = code[value].kind, f"ld({place}{', n' if partial else ''})"
            uses = sum(
                a in self.inner and code[a].op == "load" and self.key(a, later) == key
                for i, later in unemitted
                for a in code[i].args
            )
            shared = kind == "F" and uses > 1 and not partial
            out.append(f"const {kind} {name} = {f'once({loads})' if shared else loads};")
            ready.add(key)
            waiting()
        waiting()
        return out

    def named(self, formula: str, later: int) -> str:
        """The text of an instruction with the names of a row's values."""

        def name(match: re.Match[str]) -> str:
            return self.name(int(match[1]), later)

        return re.sub(r"\bv(\d+)\b", name, formula)

    def name(self, value: int, later: int) -> str:
        if value not in self.inner:
            return f"v{value}"
        if self.stage.body.code[value].op == "load":
            return self.loads[self.key(value, later)]
        return f"v{value}_{later}"


def _points(rows: RowsFunction, stage: Stage, low: str, high: str, direct: bool, block: int) -> None:
    """The body along points [low, high) of rows, by a function that stages which are alike share."""
    nest = nest_of(rows.of, stage)
    vector = Vector(of=rows, stage=stage, block=block, text=Text(nest=nest))
    kind = TYPES[stage.dtype] if direct else SCALAR[kind_of(stage.dtype)]
    parameters = [f"{kind}* const out{k}" for k in range(block)]
    parameters += ["const int64_t low", "const int64_t high", "const bool past"]
    outs = [f"out{k}" for k in range(block)]
    factors: list[str] = []
    hoisted: list[str] = []
    for slot, source in stage.slots():
        if not isinstance(source, Read):
            parameters.append(f"const {TYPES[source.weight.meta['val'].dtype]}* const b_p{slot}")
            factors.append(f"{rows.names[source.weight]} + {source.element}{_channel(rows, stage, slot)}")
    for i in stage.values:
        ins = stage.body.code[i]
        if not (ins.op == "const" or not ins.axes or (ins.op == "load" and nest.inner[0] not in ins.axes)):
            vector.inner.append(i)
            continue
        formula = f"ld1(b_p{ins.attr})" if ins.op == "load" else expression(vector.text, i, last=None, partial=False)
        if ins.op == "load" and weighted(stage):
            hoisted.append(f"numbers[{len(vector.again)}] = {formula};")
            vector.again.append(i)
            continue
        hoisted.append(f"const {ins.kind} v{i} = {formula};")
    # The farthest row down of every array is prefetched one block ahead.
    furthest: dict[Any, tuple[int, Read]] = {}
    loaded: list[tuple[Read, int]] = []
    prefetched: list[str] = []
    for later in range(block):
        for i in vector.inner:
            if stage.body.code[i].op == "load":
                key = vector.key(i, later)
                read = stage.body.inputs[stage.body.code[i].attr].node
                if key not in vector.loads:
                    vector.loads[key], vector.places[key] = f"x{len(vector.loads)}_", (i, read)
                    name = f"b{len(vector.pointers)}"
                    if vector.pointers.setdefault(key[:2] + key[3:], name) == name:
                        loaded.append((replace(read, shift=(*read.shift[:-1], 0)), later))
                        parameters.append(f"const {rows.type(read)}* const {name}")
                if rows.in_memory(read) and key[0] >= furthest.get(read.field, (-FAR, read))[0]:
                    furthest[read.field] = (key[0], read)
    ahead: list[str] = []
    for n, (last, read) in enumerate(furthest.values() if rows.dim(0) is not None else ()):
        for row in range(block):
            prefetched.append(rows.at(read, last - rows.of.place(read.shift)[0] + 1 + row))
            parameters.append(f"const {rows.type(read)}* const a{n}_{row}")
            ahead.append(f"__builtin_prefetch(a{n}_{row} + j, 0, 2);")
    from_memory = any(rows.in_memory(read) for _, read in vector.places.values())
    body = _function(vector, hoisted, ahead, memory=direct and kind == "float", holds=from_memory)
    text = f"({', '.join(parameters)}) {{\n" + "\n".join(body) + "\n}"
    # Stages with equal text share one function: the compiler then has less to do.
    texts = [one.partition("(")[2] for one in rows.functions]
    if text[1:] not in texts:
        rows.functions.append(f"static __attribute__((noinline)) void points{len(texts)}{text}")
        texts.append(text[1:])
    for part, begin, end in _by_parts(rows, stage, low, high):
        places = [rows.at(read, later, part) for read, later in loaded]
        # The ends of rows go through the caches: whole lines of the middle leave past them.
        past = "past" if part == "middle" else "false"
        arguments = ", ".join([*outs, begin, end, past, *factors, *places, *prefetched])
        rows.say(6, f"if ({begin} < {end}) points{texts.index(text[1:])}({arguments});")


def _function(vector: Vector, hoisted: list[str], ahead: list[str], memory: bool, holds: bool) -> list[str]:
    """The loop along points; the last vector overlaps the one before it. memory: whether it may write past the
    caches. holds: whether results wait before they do, which pays where it reads from memory too."""
    holds = holds and memory
    value, block = vector.stage.value, vector.block
    # The empty statement hides where `weights` points: else they would be loaded before the loop, and spilled.
    weights = ["const F* weights = numbers;", 'asm volatile("" : "+r"(weights));'] if vector.again else []
    out = [f"F numbers[{len(vector.again)}];"] if vector.again else []
    out += hoisted
    out.append("if (high - low >= VW) {")
    if holds:
        # A store that waits to leave the core holds up loads at the same place of another page, and rows of images
        # begin at the same place: so results wait in the first cache, half a page from what is read, and leave by HELD
        # vectors of every row together (a 4096 x 4096 Jacobi step: 4.3 ms for 6.3 where they leave one by one, Zen 4).
        source = next(iter(vector.pointers.values()), "out0")
        out.append(f"constexpr int64_t HELD = {HELD} * VW;")
        out.append(f"alignas(sizeof(F)) char room[PAGE + {block} * HELD * (int64_t)sizeof(float)];")
        out.append("float* held = nullptr;")
        out.append("int64_t from = 0, count = 0;")
        out.append("const auto leave = [&] {")
        for k in range(block):
            out.append(
                f"for (int64_t e = 0; e < count; e += VW) st_past(out{k} + from + e, ld(held + {k} * HELD + e));"
            )
        out += ["count = 0;", "};"]
    if memory:
        out.append("const int64_t odd = (uintptr_t)(out0 + low) / sizeof(float) % VW;")
        aligned = " | ".join(f"(uintptr_t)(out{k} + low + VW - odd)" for k in range(block))
        out.append(f"const bool even = past && ({aligned}) % sizeof(F) == 0;")
    out.append("for (int64_t j = low;;) {")
    out += [*ahead, *weights, *vector.lines(partial=False)]
    stores = [f"st(out{k} + j, {vector.name(value, k)});" for k in range(block)]
    if holds:
        out.append("if (even && (uintptr_t)(out0 + j) % sizeof(F) == 0) {")
        out.append("if (!count) {")
        out.append(f"const int64_t place = ((uintptr_t)({source} + j) + PAGE / 2) / sizeof(F) * sizeof(F);")
        out.append("held = (float*)(room + ((place - (int64_t)(uintptr_t)room) & (PAGE - 1)));")
        out += ["from = j;", "}"]
        out += [f"st(held + {k} * HELD + count, {vector.name(value, k)});" for k in range(block)]
        out.append("if ((count += VW) == HELD) leave();")
        out.append(f"}} else {{ {' '.join(stores)} }}")
    elif memory:
        past = [f"st_past(out{k} + j, {vector.name(value, k)});" for k in range(block)]
        out.append(f"if (even && (uintptr_t)(out0 + j) % sizeof(F) == 0) {{ {' '.join(past)} }}")
        out.append(f"else {{ {' '.join(stores)} }}")
    else:
        out += stores
    # The last vector is moved back to end at `high`: some points are computed twice, to the same values.
    out.append("if (j + VW >= high) break;")
    # The first step brings the output to an aligned address, where stores may go past the caches.
    out.append("j += even && j == low && odd ? VW - odd : VW;" if memory else "j += VW;")
    out.append("if (j + VW > high) j = high - VW;")
    out.append("}")
    out += ["leave();"] if holds else []
    out += ["} else if (high > low) {", "const int64_t j = low;", "const int n = (int)(high - low);"]
    out += [*weights, *vector.lines(partial=True)]
    out += [f"st(out{k} + j, {vector.name(value, k)}, n);" for k in range(block)]
    return [*("    " + line for line in out), "    }"]


def _channel(rows: RowsFunction, stage: Stage, slot: int) -> str:
    """The text of where a channel's numbers of a weight begin."""
    source = stage.body.inputs[slot].node
    if not isinstance(source, Factor) or not source.by_channel:
        return ""
    return f" + {'c' if rows.of.stencil.channel is not None else f'b{source.dim}'} * {source.by_channel}"


def nest_of(of: Pipeline, stage: Stage) -> Nest:
    """A nest of the points of a row alone, as `cpp_text` reads it."""
    last = sum(size > 1 for size in stage.sizes) - 1
    stages = classify(stage.body, [stage.value])
    return Nest(
        body=stage.body, stages=stages, outputs=(), outer=(), inner=(last,), sizes={}, passes=(), post=(), scratch=()
    )  # fmt: skip
