"""The C++ text of single values of a loop nest: how they are read, written, computed, combined and begun.

`Text` is the function under construction: its lines, and the sizes and memory that it asks for. Leaves out the loops
(`nest`) and what comes after all rows (`after_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gnomon.compiler.tiles.sizes import Size, equal, product
from gnomon.compiler.tiles.tiling import Nest

TYPES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float64: "double",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
SPLAT = {"F": "splat", "D": "splatD", "L": "splatL", "B": "splatB"}
SCALAR = {"F": "float", "D": "double", "L": "int64_t", "B": "mask32"}
TOTAL = {"F": "double", "D": "double", "L": "int64_t", "B": "int32_t"}
"""What a total over all rows is held in."""
BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
COMPARE = {"lt": "<", "gt": ">", "le": "<=", "ge": ">=", "eq": "==", "ne": "!="}
CALLS = {"maximum": "maxi", "minimum": "mini", "select": "sel", "abs": "absv", "fused": "fused"}
FIRST_HOST = 6
"""Places of the array before the nest's own: rows of a task, tasks of rows, points of a task, tasks of points, whether
tasks run beside each other, whether outputs are written past the caches."""


@dataclass(slots=True)
class Text:
    nest: Nest
    sizes: list[Size] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def size(self, value: Size) -> str:
        """A size as text: its place in the array."""
        if isinstance(value, int) and value in (0, 1):
            return str(value)
        self.sizes.append(value)
        return f"d[{FIRST_HOST + len(self.sizes) - 1}]"

    def say(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)


def varies(nest: Nest, value: int, axes: set[int] | frozenset[int]) -> bool:
    return bool(axes_of(nest, value) & axes)


def axes_of(nest: Nest, value: int) -> frozenset[int]:
    """Axes of the merged nest along which a value varies: an axis that was merged away stands for the one it is in."""
    return nest.body.code[value].axes


def roles(nest: Nest, role: str) -> list[int]:
    return sorted(i for i, r in nest.stages.roles.items() if r == role)


def neutral(op: str, kind: str) -> str:
    if op in ("sum", "any"):
        return "0"
    if op in ("prod", "all"):
        return "1" if op == "prod" else "-1"
    if kind == "L":
        return "INT64_MIN" if op != "min" else "INT64_MAX"
    return "INF" if op == "min" else "-INF"


def combine(op: str, a: str, b: str) -> str:
    return {
        "sum": f"{a} + {b}",
        "prod": f"{a} * {b}",
        "max": f"maxi({a}, {b})",
        "min": f"mini({a}, {b})",
        "peak": f"peak({a}, {b})",
        "any": f"{a} | {b}",
        "all": f"{a} & {b}",
    }[op]


def combine_scalar(op: str, a: str, b: str) -> str:
    """Writes `combine` of two scalars, in which a NaN stays."""
    sign = {"max": ">", "peak": ">", "min": "<"}.get(op)
    return f"(({a} {sign} {b} || {a} != {a}) ? {a} : {b})" if sign else combine(op, a, b)


def linear(nest: Nest) -> str:
    """Writes where a row's part of scratch begins, for rows with several inner axes."""
    place = ""
    for axis in nest.inner[:-1]:
        place = f"({place} * m{axis} + i{axis})" if place else f"i{axis}"
    return f"{place} * points" if place else "0"


def place_of(text: Text, name: str, strides: dict[int, Size]) -> str:
    place = f"b_{name}"
    for axis in text.nest.inner[:-1]:
        if axis in strides:
            place += f" + i{axis} * {text.size(strides[axis])}"
    return place


def read(text: Text, name: str, strides: dict[int, Size], j: str, partial: bool) -> str:
    place = place_of(text, name, strides)
    step = strides.get(text.nest.inner[-1], 0)
    if equal(step, 0):
        return f"ld1({place})"
    if equal(step, 1):
        return f"ld({place} + {j}, n)" if partial else f"ld({place} + {j})"
    by = text.size(step)
    return f"lds({place} + ({j}) * {by}, {by}, {'n' if partial else 'VW'})"


def write(text: Text, n: int, strides: dict[int, Size], value: str, j: str, partial: bool) -> str:
    place = place_of(text, f"q{n}", strides)
    step = strides.get(text.nest.inner[-1], 0)
    out = text.nest.outputs[n]
    if out.dtype == torch.bfloat16 and text.nest.body.code[out.value].op == "bf16":
        value = f"rounded{{{value}}}"
    if equal(step, 1):
        return f"st({place} + {j}, {value}, n);" if partial else f"st({place} + {j}, {value});"
    by = text.size(step)
    return f"sts({place} + ({j}) * {by}, {by}, {value}, {'n' if partial else 'VW'});"


def expression(text: Text, value: int, last: str | None, partial: bool) -> str:
    """Writes one instruction as a C++ expression; `last` is the position along the vector axis, None between passes."""
    nest = text.nest
    ins = nest.body.code[value]
    args = [f"v{a}" for a in ins.args]
    kinds = [nest.body.code[a].kind for a in ins.args]
    if ins.op in ("load", "take"):
        inp = nest.body.inputs[ins.attr]
        if last is None:
            return f"ld1(b_p{ins.attr})"
        return read(text, f"p{ins.attr}", inp.strides, last, partial)
    if ins.op == "const":
        return constant(ins.attr, ins.kind)
    if ins.op == "extent":
        size = text.size(product(nest.body.axes[a] for a in ins.attr))
        return f"{SPLAT[ins.kind]}(({SCALAR[ins.kind]}){size})"
    if ins.op == "index":
        if last is not None and nest.inner and ins.attr == nest.inner[-1]:
            return f"splatL({last}) + lanesL()"
        return f"splatL(i{ins.attr})"
    if ins.op == "is_at":
        if last is not None and nest.inner and ins.attr == nest.inner[-1]:
            return f"at_lane({args[0]}, {last})"
        return f"__builtin_convertvector({args[0]} == splatL(i{ins.attr}), B)"
    if ins.op == "cast":
        return f"to{ins.kind}({args[0]})"
    if ins.op in BINARY:
        return f"{args[0]} {BINARY[ins.op]} {args[1]}"
    if ins.op in COMPARE:
        formula = f"{args[0]} {COMPARE[ins.op]} {args[1]}"
        if last is None:  # every lane is the same
            return f"splatB({args[0]}[0] {COMPARE[ins.op]} {args[1]}[0])"
        return f"__builtin_convertvector({formula}, B)" if kinds[0] in "LD" else formula
    if ins.op == "neg":
        return f"-{args[0]}"
    if ins.op == "not":
        return f"~{args[0]}"
    if ins.op == "bf16" and any(one.dtype in (torch.float32, torch.float64) for one in nest.body.inputs):
        return f"vbf16(quiet({args[0]}))"
    return f"{CALLS.get(ins.op, f'v{ins.op}')}({', '.join(args)})"


def constant(attr: str, kind: str) -> str:
    if kind == "B":
        return f"splatB({'true' if attr == 'True' else 'false'})"
    if kind == "L":
        # In C++ the least int64 is a minus before a number that is too large for the type.
        return f"splatL({attr}LL)" if int(attr) > -(2**63) else "splatL(INT64_MIN)"
    value = {"inf": "INF", "-inf": "-INF", "nan": "NANF"}.get(attr, attr)
    return f"{SPLAT[kind]}({value}{'f' if kind == 'F' and value == attr else ''})"
