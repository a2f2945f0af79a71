"""The C++ text of a loop nest: one function, its own memory pointers, sizes and strides given in one array.

`kernel` gives the source, the sizes that the array must hold, and which memory the pointers are. Nothing in the
text depends on a size, so one compilation serves all shapes, and layers that are alike share it. Leaves out
compiling (`build`) and instruction sets (cpp/*.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gnomon.compiler.build import ASKS
from gnomon.compiler.text.after_rows import after_rows, needed_after_rows
from gnomon.compiler.text.cpp_text import (
    SCALAR,
    SPLAT,
    TOTAL,
    TYPES,
    Text,
    combine,
    combine_scalar,
    expression,
    linear,
    neutral,
    read,
    roles,
    varies,
    write,
)  # fmt: skip
from gnomon.compiler.tiles import tiling as tiles
from gnomon.compiler.tiles.body import REDUCTIONS
from gnomon.compiler.tiles.sizes import Size, equal, product
from gnomon.compiler.tiles.stages import POST
from gnomon.compiler.tiles.tiling import Nest, Pass

_ACROSS = {"sum": "hsum", "prod": "hprod", "max": "hmax", "peak": "hmax", "min": "hmin", "any": "any", "all": "all"}

WRAP = frozenset({"add", "sub", "mul", "neg", "abs", "sum", "prod"})
"""Operations whose result may leave the integers of 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    nest: Nest
    source: str
    sizes: tuple[Size, ...]
    """What the array holds after the host's `FIRST_HOST` places."""
    slots: tuple[int, ...]
    """Inputs of the body, in the order of their pointers; outputs follow."""


def kernel(nest: Nest) -> Kernel:
    text = Text(nest=nest)
    # Only inputs that some value reads get a pointer: dead loads are not passed.
    values = {i for p in nest.passes for i in p.values} | set(_between(nest)) | set(nest.post)
    values |= needed_after_rows(nest)
    text.slots = sorted({nest.body.code[i].attr for i in values if nest.body.code[i].op in ("load", "take")})
    _function(text)
    return Kernel(nest=nest, source="\n".join(text.lines) + "\n", sizes=tuple(text.sizes), slots=tuple(text.slots))


def _between(nest: Nest) -> list[int]:
    """Values that are the same for a whole row, in order; those known after all rows are not among them."""
    level = nest.stages.level
    inner = set(nest.inner) | nest.stages.inner
    return [i for i in sorted(level) if level[i] != POST and not varies(nest, i, inner)]


def _function(text: Text) -> None:
    nest = text.nest
    arguments = [f"const {TYPES[nest.body.inputs[s].dtype]}* p{s}" for s in text.slots]
    arguments += [f"{TYPES[out.dtype]}* q{n}" for n, out in enumerate(nest.outputs)]
    # Eager rounds each product before it is added (a * b - b * a is 0) but in the loops that rules say by `fused`.
    # Integers wrap as ATen's do; to C++ a sum that overflows means nothing.
    wraps = " -fwrapv" if any(ins.kind == "L" and ins.op in WRAP for ins in nest.body.code) else ""
    text.say(0, f"{ASKS}-ffp-contract=off{wraps}")
    text.say(0, '#include "vector.h"')
    text.say(0, '#include "math.h"')
    text.say(0, "")
    text.say(0, f'extern "C" int gnomon_kernel(const int64_t* __restrict d, {", ".join(arguments)}) {{')
    text.say(1, "const int64_t chunk = d[0], chunks = d[1], tile = d[2], tiles = d[3];")
    text.say(1, f"const int64_t rows = {text.size(product(nest.sizes[a] for a in nest.outer))};")
    last = nest.sizes[nest.inner[-1]] if nest.inner else 1
    text.say(1, f"const int64_t points = {text.size(last)};")
    # inner[:-1] are loops around the vectorised axis; row_points counts all points of a row.
    others = [text.size(nest.sizes[a]) for a in nest.inner[:-1]]
    text.say(1, f"const int64_t row_points = {' * '.join(['points', *others])};")
    for axis, name in zip(nest.inner[:-1], others, strict=True):
        text.say(1, f"const int64_t m{axis} = {name};")
    for axis in nest.outer:
        text.say(1, f"const int64_t n{axis} = {text.size(nest.sizes[axis])};")
    text.say(1, "int failed = 0;")
    _partials(text)
    if nest.scratch:
        arrays = [*(f"p{slot}" for slot in text.slots), *(f"q{n}" for n in range(len(nest.outputs)))]
        text.say(1, f"const int64_t place = aside({', '.join(arrays)});")
    # Static schedule: which thread runs a task does not matter, since partial results are added up in order of tasks.
    text.say(1, "#pragma omp parallel for if (d[4]) schedule(static) reduction(| : failed)")
    text.say(1, "for (int64_t task = 0; task < chunks * tiles; task++) {")
    _task(text)
    text.say(1, "}")
    after_rows(text)
    text.say(1, "return failed;")
    text.say(0, "}")


def _neutral_vector(op: str, kind: str) -> str:
    value = neutral(op, kind)
    return "splatB(true)" if value == "-1" else f"{SPLAT[kind]}({value})"


def _partials(text: Text) -> None:
    """Memory for what tasks add up: a row of columns for each task of rows, one number of each total for each task."""
    nest = text.nest
    columns, at = roles(nest, "column"), "0"
    for i in columns:
        kind = SCALAR[nest.body.code[i].kind]
        text.say(1, f"const int64_t a{i} = {at};")
        # Columns of several reductions lie one after another, each on a page of its own, so threads share no line.
        at = f"a{i} + apart(sizeof({kind}) * chunks * row_points)"
    if columns:
        text.say(1, f"char* const columns = (char*)aligned_alloc(PAGE, ({at} + PAGE - 1) / PAGE * PAGE);")
    for i in columns:
        kind = SCALAR[nest.body.code[i].kind]
        text.say(1, f"{kind}* const c{i} = ({kind}*)(columns + a{i});")
    for i in roles(nest, "total"):
        kind = TOTAL[nest.body.code[i].kind]
        text.say(1, f"{kind}* const t{i} = ({kind}*)malloc(sizeof({kind}) * (chunks * tiles + 1));")


def _task(text: Text) -> None:
    nest = text.nest
    # task -> (chunk of rows, tile of points).
    text.say(2, "const int64_t c = task / tiles, at = task % tiles * tile;")
    text.say(2, "const int64_t begin = c * chunk, end = begin + chunk < rows ? begin + chunk : rows;")
    whole = len(nest.inner) == 1
    text.say(
        2,
        "const int64_t lo = at, hi = at + tile < points ? at + tile : points;"
        if whole
        else "const int64_t lo = 0, hi = points;",
    )
    if nest.scratch:
        # Scratch is a thread's own and grows once; `place` sets it off from the arrays so that they do not meet in one
        # set of the cache.
        text.say(2, "static thread_local char* room = 0;")
        text.say(2, "static thread_local int64_t room_bytes = 0;")
        text.say(
            2, f"const int64_t scratch = (row_points + 2 * VW) * 8, wanted = {len(nest.scratch)} * scratch + 2 * PAGE;"
        )
        text.say(2, "if (wanted > room_bytes) { free(room); room = (char*)malloc(wanted); room_bytes = wanted; }")
        text.say(2, "char* const room0 = (char*)(((uintptr_t)room + PAGE - 1) / PAGE * PAGE) + place;")
        for n, value in enumerate(nest.scratch):
            kind = SCALAR[nest.body.code[value].kind]
            text.say(2, f"{kind}* const s{value} = ({kind}*)(room0 + {n} * scratch / 64 * 64);")
    for i in roles(nest, "column"):
        ins = nest.body.code[i]
        kind = SCALAR[ins.kind]
        text.say(2, f"{kind}* const k{i} = c{i} + c * row_points;")
        first, last = ("lo", "hi") if whole else ("0", "row_points")
        text.say(2, f"for (int64_t j = {first}; j < {last}; j++) k{i}[j] = {neutral(ins.op, ins.kind)};")
    for i in roles(nest, "total"):
        ins = nest.body.code[i]
        text.say(2, f"{TOTAL[ins.kind]} a{i} = {neutral(ins.op, ins.kind)};")
    _first_place(text)
    text.say(2, "for (int64_t row = begin; row < end; row++) {")
    _row(text)
    _next_place(text)
    text.say(2, "}")
    for i in roles(nest, "total"):
        text.say(2, f"t{i}[task] = a{i};")
    if _may_pass(nest):
        text.say(2, "if (d[5]) st_past_end();")


def _first_place(text: Text) -> None:
    # The row's index is divided out once a task, then counted up (`_next_place`).
    """Writes where along the outer axes a task begins."""
    outer, rest = text.nest.outer, "begin"
    for axis in reversed(outer[1:]):
        text.say(2, f"int64_t i{axis} = {rest} % n{axis};")
        rest = f"({rest} / n{axis})"
    if outer:
        text.say(2, f"int64_t i{outer[0]} = {rest};")


def _next_place(text: Text) -> None:
    """Writes the step to the next row: it is counted, as a division takes as long as the vectors of a short row."""
    outer = text.nest.outer
    for axis in reversed(outer[1:]):
        text.say(3, f"if (++i{axis} < n{axis}) continue;")
        text.say(3, f"i{axis} = 0;")
    if outer:
        text.say(3, f"++i{outer[0]};")


def _row(text: Text) -> None:
    nest = text.nest
    declared: set[int] = set()
    based: set[str] = set()
    between = _between(nest)
    # In order: values that this pass needs from the row, bases of arrays, the pass, and its reductions as one number
    # each.
    for step in nest.passes:
        _between_passes(text, between, declared, based, step.level)
        _bases(text, step, based)
        _pass(text, step)
        for i in step.reductions:
            ins = nest.body.code[i]
            if nest.stages.roles[i] == "row":
                reduced = _horizontal(ins.op, f"r{i}", ins.kind)
                text.say(3, f"const {ins.kind} v{i} = {SPLAT[ins.kind]}({reduced});")
                declared.add(i)
            elif nest.stages.roles[i] == "total":
                reduced = _horizontal(ins.op, f"r{i}", ins.kind)
                text.say(3, f"a{i} = {combine_scalar(ins.op, f'a{i}', f'({TOTAL[ins.kind]}){reduced}')};")
    # What is left for the row once all passes are over.
    _between_passes(text, between, declared, based, POST - 1)
    for i in roles(nest, "total"):
        source = nest.body.code[i].args[0]
        if not varies(nest, source, nest.stages.inner):
            ins = nest.body.code[i]
            text.say(3, f"a{i} = {combine_scalar(ins.op, f'a{i}', f'({TOTAL[ins.kind]})v{source}[0]')};")
    inner = set(nest.inner)
    for n, out in enumerate(nest.outputs):
        shared = not set(out.strides) & inner and (out.strides or not nest.outer)
        if nest.stages.level[out.value] != POST and shared:
            _base(text, f"q{n}", out.strides, based)
            text.say(3, f"st(b_q{n}, v{out.value}, 1);")


def _horizontal(op: str, name: str, kind: str) -> str:
    return f"{_ACROSS[op]}({name})"


def _between_passes(text: Text, between: Sequence[int], declared: set[int], based: set[str], level: int) -> None:
    """Writes values of the whole row that are known by now."""
    nest = text.nest
    for i in between:
        if i in declared or nest.stages.level[i] > level or nest.body.code[i].op in REDUCTIONS:
            continue
        declared.add(i)
        ins = nest.body.code[i]
        if ins.op == "check":
            text.say(3, f"failed |= !all(v{ins.args[0]});")
            continue
        if ins.op in ("load", "take"):
            _base(text, f"p{ins.attr}", nest.body.inputs[ins.attr].strides, based)
        text.say(3, f"const {ins.kind} v{i} = {expression(text, i, last=None, partial=False)};")


def _bases(text: Text, step: Pass, based: set[str]) -> None:
    nest = text.nest
    for i in step.values:
        ins = nest.body.code[i]
        if ins.op in ("load", "take"):
            _base(text, f"p{ins.attr}", nest.body.inputs[ins.attr].strides, based)
    for n in step.stores:
        _base(text, f"q{n}", nest.outputs[n].strides, based)
    for where in step.read_back.values():
        if where.startswith("output"):
            n = int(where.split()[1])
            _base(text, f"q{n}", nest.outputs[n].strides, based)


def _base(text: Text, name: str, strides: dict[int, Size], based: set[str]) -> None:
    """Writes the row's place in memory; a row that an index chose is checked first."""
    if name in based:
        return
    based.add(name)
    nest = text.nest
    place = name
    if name[0] == "p":
        inp = nest.body.inputs[int(name[1:])]
        if inp.index is not None:
            k = name[1:]
            text.say(3, f"const int64_t at{k} = v{inp.index}[0];")
            # An index outside its table reads row 0 instead, and the call fails: nothing outside memory is touched.
            text.say(3, f"const bool in{k} = at{k} >= 0 && at{k} < {text.size(inp.rows)};")
            text.say(3, f"failed |= !in{k};")
            place += f" + (in{k} ? at{k} : 0) * {text.size(inp.index_stride)}"
    for axis in nest.outer:
        if axis in strides:
            place += f" + i{axis} * {text.size(strides[axis])}"
    text.say(3, f"auto* const b_{name} = {place};")


def _pass(text: Text, step: Pass) -> None:
    nest = text.nest
    for i in step.reductions:
        ins = nest.body.code[i]
        if nest.stages.roles[i] != "column":
            text.say(3, f"{ins.kind} r{i} = {_neutral_vector(ins.op, ins.kind)};")
    checks = any(nest.body.code[i].op == "check" for i in step.values)
    if checks:
        text.say(3, f"B wrong{step.level} = {{}};")
    depth = 3
    for axis in nest.inner[:-1]:
        text.say(depth, f"for (int64_t i{axis} = 0; i{axis} < m{axis}; i{axis}++) {{")
        depth += 1
    for n in step.stores:
        if n in _may_pass(nest):
            # A stream of stores past the caches must be aligned; whether it is, is known only at run time.
            text.say(depth, f"const bool past{n} = d[5] && ((uintptr_t)(b_q{n} + lo)) % sizeof(F) == 0;")
    lane = linear(nest)
    text.say(depth, f"const int64_t base = {lane};" if lane != "0" else "{")
    if lane != "0":
        text.say(depth, "{")
    # Several partial sums at once hide the latency of additions; they are combined in a fixed order.
    unroll = tiles.unroll(nest, step)
    gathered = [i for i in step.reductions if nest.stages.roles[i] != "column"]
    text.say(depth, "int64_t j = lo;")
    if unroll > 1:
        for i in gathered:
            ins = nest.body.code[i]
            for u in range(1, unroll):
                text.say(depth, f"{ins.kind} r{i}_{u} = {_neutral_vector(ins.op, ins.kind)};")
        text.say(depth, f"for (; j + {unroll} * VW <= hi; j += {unroll} * VW) {{")
        for u in range(unroll):
            text.say(depth + 1, "{")
            _points(text, step, depth + 2, partial=False, copy=u)
            text.say(depth + 1, "}")
        text.say(depth, "}")
        for i in gathered:
            for u in range(1, unroll):
                text.say(depth, f"r{i} = {combine(nest.body.code[i].op, f'r{i}', f'r{i}_{u}')};")
    # The rest in single vectors, then one partial vector.
    text.say(depth, "for (; j + VW <= hi; j += VW) {")
    _points(text, step, depth + 1, partial=False, copy=0)
    text.say(depth, "}")
    text.say(depth, "if (j < hi) {")
    text.say(depth + 1, "const int n = (int)(hi - j);")
    _points(text, step, depth + 1, partial=True, copy=0)
    text.say(depth, "}")
    text.say(depth, "}")
    for _ in nest.inner[:-1]:
        depth -= 1
        text.say(depth, "}")
    if checks:
        text.say(3, f"failed |= any(wrong{step.level});")


def _points(text: Text, step: Pass, depth: int, partial: bool, copy: int) -> None:
    """The statements for one vector of points."""
    nest = text.nest
    j = f"j + {copy} * VW" if copy else "j"
    base = "base + " if len(nest.inner) > 1 else ""
    for value, where in sorted(step.read_back.items()):
        kind = nest.body.code[value].kind
        if where == "scratch":
            text.say(depth, f"const {kind} v{value} = ld(s{value} + {base}{j});")
        else:
            n = int(where.split()[1])
            text.say(depth, f"const {kind} v{value} = {read(text, f'q{n}', nest.outputs[n].strides, j, partial)};")
    for i in step.values:
        ins = nest.body.code[i]
        # Points beyond the end of a row must not report a failure.
        if ins.op == "check":
            rest = " & first(n)" if partial else ""
            text.say(depth, f"wrong{step.level} = wrong{step.level} | (~v{ins.args[0]}{rest});")
            continue
        if ins.op in REDUCTIONS:
            continue
        text.say(depth, f"const {ins.kind} v{i} = {expression(text, i, last=j, partial=partial)};")
        if i in step.scratch:
            text.say(depth, f"st(s{i} + {base}{j}, v{i});")
    for i in step.reductions:
        ins = nest.body.code[i]
        source = f"v{ins.args[0]}"
        if nest.stages.roles[i] == "column":
            place = f"k{i} + {base}{j}"
            if partial:
                text.say(depth, f"st({place}, ({ins.kind})({combine(ins.op, f'ld({place}, n)', source)}), n);")
            else:
                text.say(depth, f"st({place}, ({ins.kind})({combine(ins.op, f'ld({place})', source)}));")
            continue
        # A partial vector's missing points take the neutral element.
        if partial:
            source = f"sel(first(n), {source}, {_neutral_vector(ins.op, ins.kind)})"
        name = f"r{i}_{copy}" if copy else f"r{i}"
        text.say(depth, f"{name} = {combine(ins.op, name, source)};")
    for n in step.stores:
        out = nest.outputs[n]
        written = write(text, n, out.strides, f"v{out.value}", j, partial)
        if not partial and n in _may_pass(nest):
            text.say(depth, f"if (past{n}) st_past(b_q{n} + {j}, v{out.value}); else {written}")
        else:
            text.say(depth, written)
    if not partial:
        for place in _ahead(text, step):
            text.say(depth, f"__builtin_prefetch({place} + {j}, 0, 2);")


def _may_pass(nest: Nest) -> list[int]:
    """Outputs that may be written past the caches: float vectors side by side that no later pass reads back. Half lines
    of bfloat16 are slower so."""
    back = {where for p in nest.passes for where in p.read_back.values()}
    return [
        n
        for p in nest.passes
        for n in p.stores
        if nest.outputs[n].dtype == torch.float32
        and equal(nest.outputs[n].strides.get(nest.inner[-1], 0), 1)
        and f"output {n}" not in back
        and len(nest.inner) == 1
    ]


def _ahead(text: Text, step: Pass) -> list[str]:
    """Memory of the next row that the last pass asks for while it computes, so that the first pass finds it in the
    second cache: asked for into the first, it would come in the way of this row's loads and stores."""
    nest = text.nest
    if not nest.outer or len(nest.passes) < 2 or step is not nest.passes[-1] or len(nest.inner) != 1:
        return []
    out = []
    for i in nest.passes[0].values:
        ins = nest.body.code[i]
        if ins.op != "load":
            continue
        strides = nest.body.inputs[ins.attr].strides
        if equal(strides.get(nest.inner[-1], 0), 1) and nest.outer[-1] in strides:
            out.append(f"b_p{ins.attr} + {text.size(strides[nest.outer[-1]])}")
    return out
