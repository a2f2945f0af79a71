"""The Triton text of a loop nest, for GPUs: what `nest.py` is for C++.

`triton_kernel` gives a module's source with up to three functions: `whole`, where the points of a row lie in one block
of a program; `walk`, which goes along the row in blocks, once a pass, and computes again what a later pass reads; and
`after`, which adds up what programs left of columns and totals, and stores what follows from them. Which is called
depends on sizes (`triton_launch`). Sums are in an order that depends on sizes alone. Raises UnfitError for what it
cannot say (products, powers); leaves out launching.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from gnomon.compiler.text.cpp_text import BINARY, COMPARE
from gnomon.compiler.text.nest import Kernel
from gnomon.compiler.tiles.body import REDUCTIONS, UnfitError
from gnomon.compiler.tiles.sizes import Size, equal, product
from gnomon.compiler.tiles.stages import POST, live
from gnomon.compiler.tiles.tiling import Nest

TYPES = {"F": "tl.float32", "D": "tl.float64", "L": "tl.int64", "B": "tl.int1"}
NARROW = {torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.bool}
CALLS = {
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})",
    "erf": "tl.erf({0})",
    "cdf": "0.5 * (1 + tl.erf({0} * 0.7071067811865476))",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "abs": "tl.abs({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "sigmoid": "tl.sigmoid({0})",
    "tanh": "tanh({0})",
    "expm1": "expm1({0})",
    "log1p": "log1p({0})",
    "select": "tl.where({0}, {1}, {2})",
    "bf16": "{0}.to(tl.bfloat16).to(tl.float32)",
    "int32": "{0}.to(tl.int32).to(tl.int64)",
    "int16": "{0}.to(tl.int16).to(tl.int64)",
    "int8": "{0}.to(tl.int8).to(tl.int64)",
    "uint8": "({0} & 255)",
    "fits32": "{0}",
    "fused": "tl.fma({0}, {1}, {2})",
}
NOWHERE = "tl.zeros([1, 1], tl.int32)"
"""Makes a tensor of what is a plain number or pointer."""
PARTS, SOME = 32, 1024
"""The number of partial results of columns, and of a total, that are read at once."""
# 1 - 2 / (e^2x + 1) and e^x - 1 lose digits near 0, where Taylor's series stand for them. In `log1p` u is 1 + x
# rounded, and log(u) x / (u - 1) takes that rounding out again (Goldberg, What Every Computer Scientist Should Know
# About Floating-Point Arithmetic, 1991, theorem 4).
HEAD = """\
import triton
import triton.language as tl


@triton.jit
def tanh(x):
    s = x * x
    near = x * (1 + s * (-0.3333333333333333 + s * (0.13333333333333333 + s * -0.05396825396825397)))
    return tl.where(tl.abs(x) < 0.1, near, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def expm1(x):
    near = x * (1 + x * (0.5 + x * (0.16666666666666666 + x * (0.041666666666666664 + x * 0.008333333333333333))))
    return tl.where(tl.abs(x) < 0.1, near, tl.exp(x) - 1)


@triton.jit
def log1p(x):
    u = 1 + x
    return tl.where(u == 1, x, tl.where(u == float("inf"), u, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1))))


@triton.jit
def larger(x, axis: tl.constexpr):
    nan = tl.max((x != x).to(tl.int32), axis=axis, keep_dims=True)
    return tl.where(nan > 0, float("nan"), tl.max(x, axis=axis, keep_dims=True))


@triton.jit
def smaller(x, axis: tl.constexpr):
    nan = tl.max((x != x).to(tl.int32), axis=axis, keep_dims=True)
    return tl.where(nan > 0, float("nan"), tl.min(x, axis=axis, keep_dims=True))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonKernel(Kernel):
    """`sizes` are the functions' arguments d0, d1, …; the pointers of `slots`, of outputs and of partial results come
    before them."""

    columns: tuple[int, ...]
    """Indices of reductions down the rows, each with a table of partial results: a row for each program."""
    totals: tuple[int, ...]
    walks: bool
    """Whether `walk` was written."""
    after: bool
    """Whether `after` was written."""
    checks: bool
    """Whether something in it can fail."""


@dataclass(slots=True)
class TritonText:
    nest: Nest
    sizes: list[Size] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    emitted: set[int] = field(default_factory=set)
    """Values that the function has a name for by now."""

    def size(self, value: Size) -> str:
        # 0 and 1 stay literals: Triton specialises on them, and a stride of 1 is what makes loads contiguous.
        if isinstance(value, int) and value in (0, 1):
            return str(value)
        for n, known in enumerate(self.sizes):
            if equal(known, value):
                return f"d{n}"
        self.sizes.append(value)
        return f"d{len(self.sizes) - 1}"

    def say(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def along(self, value: int) -> tuple[bool, bool]:
        """Whether a value differs between rows, and along a row."""
        axes = self.nest.body.code[value].axes
        return bool(axes & self.nest.stages.outer), bool(axes & self.nest.stages.inner)


def triton_kernel(nest: Nest) -> TritonKernel:
    """Source and what it is to be called with."""
    _check(nest)
    code = nest.body.code
    roots = [out.value for out in nest.outputs]
    values = live(nest.body, roots)
    slots = tuple(sorted({code[i].attr for i in values if code[i].op in ("load", "take")}))
    roles = nest.stages.roles
    columns, totals = (tuple(sorted(i for i in roles if roles[i] == role)) for role in ("column", "total"))
    text = TritonText(nest=nest)
    for axis in (*nest.outer, *nest.inner):
        text.size(nest.sizes[axis])
    bodies: list[list[str]] = []
    # Columns need all rows of a program at once, so there is no walk with them.
    walks = nest.has_row and not columns
    for name, written in (("whole", True), ("walk", walks), ("after", _stored_after(nest))):
        # Each function has its own names, but all share the arguments d0, d1, ….
        text.lines, text.emitted = [], set()
        if written:
            {"whole": _whole, "walk": _walk, "after": _after}[name](text, values)
        bodies.append(text.lines)
    pointers = [*(f"p{s}" for s in slots), *(f"q{n}" for n in range(len(nest.outputs)))]
    pointers += [*(f"c{i}" for i in columns), *(f"t{i}" for i in totals)]
    parameters = [*pointers, *(f"d{n}" for n in range(len(text.sizes)))]
    lines = [HEAD]
    for name, body in zip(("whole", "walk", "after"), bodies, strict=True):
        if body:
            launch_args = ["programs", "tiles", "chunk", "WIDE: tl.constexpr", "BM: tl.constexpr", "BN: tl.constexpr"]
            lines += ["", "@triton.jit", f"def {name}({', '.join([*parameters, *launch_args])}):", *body, ""]
    return TritonKernel(
        nest=nest, source="\n".join(lines), sizes=tuple(text.sizes), slots=slots, columns=columns, totals=totals,
        walks=bool(bodies[1]), after=bool(bodies[2]), checks=any(code[i].op in ("check", "take") for i in values),
    )  # fmt: skip


def _check(nest: Nest) -> None:
    code, roots = nest.body.code, [out.value for out in nest.outputs]
    for i in live(nest.body, roots):
        ins = code[i]
        plain = ("load", "take", "const", "extent", "index", "is_at", "cast", "check", "neg", "not")
        known = (*plain, "maximum", "minimum", *CALLS, *BINARY, *COMPARE, *REDUCTIONS)
        if ins.op not in known or ins.op == "prod":
            raise UnfitError(f"{ins.op} has no Triton text")
        if ins.op in ("floor", "ceil", "erf", "sin", "cos") and ins.kind not in "FD":
            raise UnfitError(f"{ins.op} of integers")
        if ins.op in ("load", "take") and nest.body.inputs[ins.attr].dtype not in NARROW:
            raise UnfitError("a type that Triton does not load")
    if any(out.dtype not in NARROW for out in nest.outputs):
        raise UnfitError("a type that Triton does not store")


# ---- places
def _places(text: TritonText, depth: int) -> None:
    """Rows and points of a program as indices along each axis; `rm` and `cm` say which exist."""
    nest = text.nest
    for axes, name, letter in ((nest.outer, "row", "r"), (nest.inner, "col", "c")):
        rest = name
        for axis in reversed(axes[1:]):
            text.say(depth, f"i{axis} = {rest} % {text.size(nest.sizes[axis])}")
            rest = f"({rest} // {text.size(nest.sizes[axis])})"
        if axes:
            text.say(depth, f"i{axes[0]} = {rest}")
        # rm, cm: masks of rows and points that exist, since blocks are powers of two.
        text.say(depth, f"{letter}m = {name} < {_count(text, axes)}")


def _rows_of(text: TritonText, depth: int) -> None:
    text.say(depth, "row = block * BM + tl.arange(0, BM)[:, None]")


def _count(text: TritonText, axes: Sequence[int]) -> str:
    return text.size(product(text.nest.sizes[a] for a in axes))


def _offset(text: TritonText, strides: dict[int, Size]) -> str:
    parts = [
        f"i{axis}" if equal(strides[axis], 1) else f"i{axis} * {text.size(strides[axis])}"
        for axis in (*text.nest.outer, *text.nest.inner)
        if axis in strides and not equal(strides[axis], 0)
    ]
    return " + ".join(parts)


def _mask(text: TritonText, axes: Iterable[int]) -> str:
    varying = set(axes)
    parts = [name for name, own in (("rm", text.nest.outer), ("cm", text.nest.inner)) if varying & set(own)]
    return " & ".join(parts)


# ---- values
def _value(text: TritonText, value: int, depth: int) -> None:
    """`v{value} = …`, unless it has been written."""
    if value in text.emitted:
        return
    text.emitted.add(value)
    ins = text.nest.body.code[value]
    if ins.op == "check":
        rows = f" | ~({mask})" if (mask := _mask_of(text, ins.args[0])) else ""
        text.say(depth, f'tl.device_assert(v{ins.args[0]}{rows}, "an index is outside its table")')
        return
    text.say(depth, f"v{value} = {expression(text, value, depth)}")


def _mask_of(text: TritonText, value: int) -> str:
    rows, points = text.along(value)
    return " & ".join(name for name, has in (("rm", rows), ("cm", points)) if has)


def expression(text: TritonText, value: int, depth: int) -> str:
    nest = text.nest
    ins = nest.body.code[value]
    args = [f"v{a}" for a in ins.args]
    if ins.op in ("load", "take"):
        return _load(text, value, depth)
    if ins.op == "const":
        return _constant(ins.attr, ins.kind)
    if ins.op == "extent":
        return f"(tl.zeros([1, 1], {TYPES[ins.kind]}) + {text.size(product(nest.body.axes[a] for a in ins.attr))})"
    if ins.op == "index":
        return f"i{ins.attr}.to(tl.int64)"
    if ins.op == "is_at":
        return f"(i{ins.attr} == {args[0]})"
    if ins.op == "cast":
        return _cast(args[0], nest.body.code[ins.args[0]].kind, ins.kind)
    if ins.op in BINARY:
        return f"({args[0]} {BINARY[ins.op]} {args[1]})"
    if ins.op in COMPARE:
        return f"({args[0]} {COMPARE[ins.op]} {args[1]})"
    if ins.op == "neg":
        return f"(-{args[0]})"
    if ins.op == "not":
        return f"({args[0]} == 0)" if ins.kind == "B" else f"(~{args[0]})"
    # Triton's maximum drops NaN by default; ATen's keeps it.
    if ins.op in ("maximum", "minimum"):
        nan = ", propagate_nan=tl.PropagateNan.ALL" if ins.kind in "FD" else ""
        return f"tl.{ins.op}({args[0]}, {args[1]}{nan})"
    return CALLS[ins.op].format(*args)


def _cast(text_of_value: str, before: str, after: str) -> str:
    if after == "B":
        return f"({text_of_value} != 0)"
    return (
        f"tl.where({text_of_value}, 1, 0).to({TYPES[after]})"
        if before == "B"
        else f"{text_of_value}.to({TYPES[after]})"
    )


def _constant(attr: str, kind: str) -> str:
    """Writes a constant as a tensor, so that Python does not choose the kind of what it is combined with."""
    plain = f'float("{attr}")' if attr in ("inf", "-inf", "nan") else attr
    # A [1, 1] tensor broadcasts against any block and has its own type, where a Python number would take the other's.
    return f"tl.full([1, 1], {plain}, {TYPES[kind]})"


def _load(text: TritonText, value: int, depth: int) -> str:
    ins = text.nest.body.code[value]
    inp = text.nest.body.inputs[ins.attr]
    parts = [f"p{ins.attr}"]
    if not equal(inp.offset, 0):
        parts.append(text.size(inp.offset))
    masks = [_mask(text, inp.strides)] if inp.strides else []
    if inp.index is not None:
        at = f"v{inp.index}"
        # Outside its table an index fails in debug builds and reads nothing otherwise (masked).
        text.say(depth, f"in{value} = ({at} >= 0) & ({at} < {text.size(inp.rows)})")
        rows = f" | ~({mask})" if (mask := _mask_of(text, inp.index)) else ""
        text.say(depth, f'tl.device_assert(in{value}{rows}, "an index is outside its table")')
        parts.append(f"{at} * {text.size(inp.index_stride)}")
        masks += [f"in{value}", *([mask] if mask else [])]
    if offset := _offset(text, inp.strides):
        parts.append(offset)
    mask = " & ".join(f"({m})" for m in masks if m)
    shaped = " + ".join(parts) if len(parts) > 1 and (offset or inp.index is not None) else None
    place = shaped or f"{' + '.join(parts)} + {NOWHERE}"
    loaded = f"tl.load({place}{f', mask={mask}, other=0' if mask else ''})"
    return f"({loaded} != 0)" if ins.kind == "B" else f"{loaded}.to({TYPES[ins.kind]})"


def _full(text: TritonText, value: int) -> str:
    return f"tl.broadcast_to(v{value}, (BM, BN))"


def _neutral(op: str, kind: str) -> str:
    if op in ("sum", "any"):
        return "0"
    if op == "all":
        return "1"
    if kind == "L":
        return "-9223372036854775807" if op != "min" else "9223372036854775807"
    return 'float("inf")' if op == "min" else 'float("-inf")'


def _reduced(op: str, kind: str, text_of_value: str, axis: int) -> str:
    if op == "sum":
        return f"tl.sum({text_of_value}, axis={axis}, keep_dims=True)"
    if op in ("any", "all"):
        return f"tl.{'max' if op == 'any' else 'min'}({text_of_value}, axis={axis}, keep_dims=True)"
    # tl.max drops NaN: `larger` and `smaller` (see HEAD) bring it back.
    if op == "peak" or kind == "L":
        return f"tl.{'min' if op == 'min' else 'max'}({text_of_value}, axis={axis}, keep_dims=True)"
    return f"{'smaller' if op == 'min' else 'larger'}({text_of_value}, {axis})"


def _joined(op: str, kind: str, a: str, b: str) -> str:
    if op == "sum":
        return f"{a} + {b}"
    name = "minimum" if op in ("min", "all") else "maximum"
    nan = ", propagate_nan=tl.PropagateNan.ALL" if kind in "FD" and op != "peak" else ""
    return f"tl.{name}({a}, {b}{nan})"


def _held(kind: str) -> str:
    """What partial results of a kind are held in."""
    return {"F": "tl.float32", "D": "tl.float64", "L": "tl.int64", "B": "tl.int32"}[kind]


def _source(text: TritonText, reduction: int, mask: str) -> str:
    ins = text.nest.body.code[reduction]
    value_text = _full(text, ins.args[0])
    value_text = f"tl.where({value_text}, 1, 0)" if ins.kind == "B" else value_text
    # Masked points take the neutral element, so a block may reach beyond the data.
    return f"tl.where({mask}, {value_text}, {_neutral(ins.op, ins.kind)})"


# ---- functions
def _whole(text: TritonText, values: Sequence[int]) -> None:
    nest, code = text.nest, text.nest.body.code
    roles, level = nest.stages.roles, nest.stages.level
    # With reductions over rows a program loops over `chunk` blocks and keeps the running result.
    loops = any(role != "row" for role in roles.values())
    text.say(1, "program = tl.program_id(0)")
    text.say(1, "program = program.to(tl.int64) if WIDE else program")
    text.say(1, "tile = program % tiles")
    text.say(1, "part = program // tiles")
    text.say(1, "col = tile * BN + tl.arange(0, BN)[None, :]")
    for i in sorted(i for i in roles if roles[i] != "row"):
        shape = "[1, BN]" if roles[i] == "column" else "[1, 1]"
        text.say(1, f"a{i} = tl.full({shape}, {_neutral(code[i].op, code[i].kind)}, {_held(code[i].kind)})")
    depth = 2 if loops else 1
    if loops:
        text.say(1, "for step in range(0, chunk):")
        text.say(2, "block = part * chunk + step")
    else:
        text.say(1, "block = part")
    _rows_of(text, depth)
    _places(text, depth)
    for i in values:
        role = roles.get(i)
        if level[i] == POST and role is None:
            # What follows from all rows belongs to `after`.
            continue
        if role is None:
            _value(text, i, depth)
        elif role == "row":
            text.emitted.add(i)
            row_value = _reduced(code[i].op, code[i].kind, _source(text, i, "cm"), 1)
            text.say(depth, f"v{i} = {row_value}{' != 0' if code[i].kind == 'B' else ''}")
        else:
            _gather(text, i, depth)
    for n, out in enumerate(nest.outputs):
        if level[out.value] != POST and out.strides:
            _store(text, n, depth)
    for i in sorted(i for i in roles if roles[i] == "column"):
        text.say(
            1, f"tl.store(c{i} + part * {_count(text, nest.inner)} + col, a{i}, mask=col < {_count(text, nest.inner)})"
        )
    for i in sorted(i for i in roles if roles[i] == "total"):
        text.say(1, f"tl.store(t{i} + program + {NOWHERE}, a{i})")


def _gather(text: TritonText, i: int, depth: int) -> None:
    """Adds a block's part of a column or a total."""
    ins = text.nest.body.code[i]
    if text.nest.stages.roles[i] == "column":
        gathered_value = _reduced(ins.op, ins.kind, _source(text, i, "rm"), 0)
    else:
        rows, points = text.along(ins.args[0])
        # A value that does not differ along rows (or points) counts once, not once a row: mask all but the first.
        mask = " & ".join([*(["rm"] if rows else ["(row == 0)"]), *(["cm"] if points else ["(col == 0)"])])
        inside = _reduced(ins.op, ins.kind, _source(text, i, mask), 1)
        gathered_value = _reduced(ins.op, ins.kind, inside, 0)
    text.say(depth, f"a{i} = {_joined(ins.op, ins.kind, f'a{i}', gathered_value)}.to({_held(ins.kind)})")


def _store(text: TritonText, n: int, depth: int) -> None:
    out = text.nest.outputs[n]
    mask = " & ".join(f"({m})" for m in (_mask(text, out.strides), *_first(text, out.strides)) if m)
    offset = _offset(text, out.strides) or NOWHERE
    text.say(
        depth, f"tl.store(q{n} + {offset}, tl.broadcast_to(v{out.value}, ({_shape(text, out.strides)})), mask={mask})"
    )


def _shape(text: TritonText, strides: dict[int, Size]) -> str:
    axes = {axis for axis, stride in strides.items() if not equal(stride, 0)}
    return f"{'BM' if axes & set(text.nest.outer) else '1'}, {'BN' if axes & set(text.nest.inner) else '1'}"


def _first(text: TritonText, strides: dict[int, Size]) -> tuple[str, ...]:
    """What all programs of a row know is stored by the first of them."""
    return () if set(strides) & set(text.nest.inner) else (f"tile + {NOWHERE} == 0",)


def _walk(text: TritonText, values: Sequence[int]) -> None:
    nest, code = text.nest, text.nest.body.code
    roles, level = nest.stages.roles, nest.stages.level
    text.say(1, "program = tl.program_id(0)")
    text.say(1, "program = program.to(tl.int64) if WIDE else program")
    text.say(1, "tile = program * 0")
    text.say(1, "block = program")
    _rows_of(text, 1)
    text.say(1, "col = tl.arange(0, BN)[None, :]")
    _places(text, 1)
    inner = nest.stages.inner
    row_level = [i for i in values if not code[i].axes & inner and level[i] != POST and roles.get(i) is None]
    # Pass by pass: a later pass computes again what it reads, since a block's values do not outlive the loop.
    for step in nest.passes:
        for i in row_level:
            if level[i] <= step.level and all(a in text.emitted for a in code[i].args):
                _value(text, i, 1)
        for i in step.reductions:
            if text.along(code[i].args[0])[1]:
                kind = _held(code[i].kind)
                text.say(1, f"r{i} = tl.full([BM, BN], {_neutral(code[i].op, code[i].kind)}, {kind})")
        text.say(1, f"for at in range(0, {_count(text, nest.inner)}, BN):")
        text.say(2, "col = at + tl.arange(0, BN)[None, :]")
        _places(text, 2)
        # Names of the loop's body are not known outside of it.
        before = set(text.emitted)
        roots = [code[i].args[0] for i in step.reductions] + [nest.outputs[n].value for n in step.stores]
        for i in _closure(text, [*roots, *(i for i in step.values if code[i].op == "check")]):
            _value(text, i, 2)
        for i in step.reductions:
            if text.along(code[i].args[0])[1]:
                point_value = _source(text, i, "cm" if roles[i] == "row" else "rm & cm")
                text.say(2, f"r{i} = {_joined(code[i].op, code[i].kind, f'r{i}', point_value)}")
        for n in step.stores:
            _store(text, n, 2)
        text.emitted = before
        for i in step.reductions:
            if roles[i] == "row":
                text.emitted.add(i)
                point_value = _reduced(code[i].op, code[i].kind, f"r{i}", 1)
                text.say(1, f"v{i} = {point_value}{' != 0' if code[i].kind == 'B' else ''}")
            else:
                inside = _reduced(code[i].op, code[i].kind, f"r{i}", 1)
                point_value = _reduced(code[i].op, code[i].kind, inside, 0)
                text.say(1, f"tl.store(t{i} + program + {NOWHERE}, {point_value})")
    for i in row_level:
        _value(text, i, 1)
    for i in sorted(i for i in roles if roles[i] == "total"):
        if not text.along(code[i].args[0])[1]:
            text.say(1, f"a{i} = tl.full([1, 1], {_neutral(code[i].op, code[i].kind)}, {_held(code[i].kind)})")
            text.say(1, "col = tl.arange(0, BN)[None, :]")
            _gather(text, i, 1)
            text.say(1, f"tl.store(t{i} + program + {NOWHERE}, a{i})")
    for n, out in enumerate(nest.outputs):
        if level[out.value] != POST and out.strides and not set(out.strides) & set(nest.inner):
            _store(text, n, 1)


def _closure(text: TritonText, roots: Sequence[int]) -> list[int]:
    """Values to compute for these, in order: without those that the function has already."""
    code, needed, waiting = text.nest.body.code, set[int](), list(roots)
    while waiting:
        i = waiting.pop()
        if i in needed or i in text.emitted:
            continue
        needed.add(i)
        waiting += code[i].args
        if code[i].op == "take":
            index = text.nest.body.inputs[code[i].attr].index
            waiting += [] if index is None else [index]
    return sorted(needed)


def _stored_after(nest: Nest) -> bool:
    return any(nest.stages.level[out.value] == POST or not out.strides for out in nest.outputs)


def _after(text: TritonText, values: Sequence[int]) -> None:
    """Writes the sum of partial results in order, and what follows from them."""
    nest, code = text.nest, text.nest.body.code
    roles, level = nest.stages.roles, nest.stages.level
    text.say(1, "col = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]")
    text.say(1, f"row = {NOWHERE}")
    text.say(1, "tile = tl.program_id(0)")
    _places(text, 1)
    count = _count(text, nest.inner)
    roots = [out.value for out in nest.outputs if level[out.value] == POST or not out.strides]
    for i in _closure_after(nest, roots):
        role, ins = roles.get(i), code[i]
        if role == "column":
            text.say(1, f"v{i} = tl.full([1, BN], {_neutral(ins.op, ins.kind)}, {_held(ins.kind)})")
            # PARTS rows at a time, in order: the sum does not depend on how many programs ran at once.
            text.say(1, f"for at in range(0, programs, {PARTS}):")
            text.say(2, f"part = at + tl.arange(0, {PARTS})[:, None]")
            mask = f"cm & (part < programs), other={_neutral(ins.op, ins.kind)}"
            loaded = _reduced(ins.op, ins.kind, f"tl.load(c{i} + part * {count} + col, mask={mask})", 0)
            text.say(2, f"v{i} = {_joined(ins.op, ins.kind, f'v{i}', loaded)}")
        elif role == "total":
            text.say(1, f"u{i} = tl.full([1, {SOME}], {_neutral(ins.op, ins.kind)}, {_held(ins.kind)})")
            text.say(1, f"for at in range(0, programs * tiles, {SOME}):")
            text.say(2, f"some = at + tl.arange(0, {SOME})[None, :]")
            loaded = f"tl.load(t{i} + some, mask=some < programs * tiles, other={_neutral(ins.op, ins.kind)})"
            text.say(2, f"u{i} = {_joined(ins.op, ins.kind, f'u{i}', loaded)}")
            row_value = _reduced(ins.op, ins.kind, f"u{i}", 1)
            text.say(1, f"v{i} = {row_value}{' != 0' if ins.kind == 'B' else ''}")
        elif role is None:
            _value(text, i, 1)
        text.emitted.add(i)
    for n, out in enumerate(nest.outputs):
        if level[out.value] != POST and out.strides:
            continue
        if out.strides:
            _store(text, n, 1)
        else:
            text.say(
                1,
                f"tl.store(q{n} + {NOWHERE}, v{out.value}, mask=tile + {NOWHERE} == 0)",
            )


def _closure_after(nest: Nest, roots: Sequence[int]) -> list[int]:
    needed, waiting = set[int](), list(roots)
    while waiting:
        i = waiting.pop()
        if i not in needed:
            needed.add(i)
            if nest.stages.roles.get(i) in ("column", "total"):
                continue
            if nest.stages.roles.get(i) == "row" or nest.body.code[i].op == "check":
                raise UnfitError("a row's result after all rows")
            waiting += nest.body.code[i].args
    return sorted(needed)
