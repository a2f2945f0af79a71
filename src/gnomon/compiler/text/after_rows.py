"""The C++ text that follows all rows of a loop nest: partial results of tasks added up in order, and what needs them.

`after_rows` writes it; `needed_after_rows` names the values that it computes or reads again. Leaves out rows (`nest`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnomon.compiler.text.cpp_text import (
    SPLAT,
    TOTAL,
    Text,
    combine_scalar,
    expression,
    linear,
    neutral,
    roles,
    varies,
    write,
)
from gnomon.compiler.tiles.stages import POST
from gnomon.compiler.tiles.tiling import Nest


def needed_after_rows(nest: Nest) -> set[int]:
    """Values that are computed, or read again, once all rows are done."""
    outputs = _constant_outputs(nest) + _along_outputs(nest)
    return set(_needed_after(nest, [*(nest.outputs[n].value for n in outputs), *_checks(nest)]))


def after_rows(text: Text) -> None:
    """Writes what follows all rows: partial results of tasks are added up in order, then what depends on them."""
    nest = text.nest
    for i in roles(nest, "column"):
        ins = nest.body.code[i]
        # Into the first task's columns, task after task, so that the order of the sum is the same with any number of
        # threads.
        text.say(1, "for (int64_t c = 1; c < chunks; c++)")
        text.say(2, "for (int64_t j = 0; j < row_points; j++)")
        text.say(3, f"c{i}[j] = {combine_scalar(ins.op, f'c{i}[j]', f'c{i}[c * row_points + j]')};")
    for i in roles(nest, "total"):
        ins = nest.body.code[i]
        text.say(1, f"{TOTAL[ins.kind]} u{i} = {neutral(ins.op, ins.kind)};")
        text.say(
            1, f"for (int64_t t = 0; t < chunks * tiles; t++) u{i} = {combine_scalar(ins.op, f'u{i}', f't{i}[t]')};"
        )
        text.say(1, f"free(t{i});")
    _post(text)
    if roles(nest, "column"):
        text.say(1, "free(columns);")


def _constant_outputs(nest: Nest) -> list[int]:
    """Outputs of one element that are not written with the row: where there is one row, those of a row are."""
    level = nest.stages.level
    return [n for n, out in enumerate(nest.outputs) if not out.strides and (nest.outer or level[out.value] == POST)]


def _along_outputs(nest: Nest) -> list[int]:
    """Outputs along a row that are known only after all rows."""
    return [n for n, out in enumerate(nest.outputs) if nest.stages.level[out.value] == POST and out.strides]


def _checks(nest: Nest) -> list[int]:
    """What must hold once all rows are known."""
    return [i for i in nest.post if nest.body.code[i].op == "check"]


def _post(text: Text) -> None:
    nest = text.nest
    inner = nest.stages.inner
    constant, along, checks = _constant_outputs(nest), _along_outputs(nest), _checks(nest)
    if not constant and not along and not checks:
        return
    text.say(1, "{")
    declared: set[int] = set()
    for i in _needed_after(nest, [*(nest.outputs[n].value for n in (*constant, *along)), *checks]):
        if not varies(nest, i, inner):
            declared.add(i)
            if nest.body.code[i].op == "check":
                text.say(2, f"failed |= !all(v{nest.body.code[i].args[0]});")
                continue
            text.say(2, f"const {nest.body.code[i].kind} v{i} = {_after_value(text, i, None, False)};")
    for n in constant:
        text.say(2, f"st(q{n}, v{nest.outputs[n].value}, 1);")
    checked = [i for i in checks if i not in declared]
    if along or checked:
        depth = 2
        for axis in nest.inner[:-1]:
            text.say(depth, f"for (int64_t i{axis} = 0; i{axis} < m{axis}; i{axis}++) {{")
            depth += 1
        text.say(depth, f"const int64_t base = {linear(nest)}; (void)base;")
        for partial in (False, True):
            if partial:
                text.say(depth, "if (points % VW) {")
                text.say(depth + 1, "const int64_t j = points / VW * VW; const int n = (int)(points - j);")
            else:
                text.say(depth, "for (int64_t j = 0; j + VW <= points; j += VW) {")
            for i in _needed_after(nest, [*(nest.outputs[n].value for n in along), *checked]):
                if i in checked:
                    # Lanes beyond the last point hold anything.
                    rest = " | ~first(n)" if partial else ""
                    text.say(depth + 1, f"failed |= !all(v{nest.body.code[i].args[0]}{rest});")
                elif i not in declared:
                    text.say(depth + 1, f"const {nest.body.code[i].kind} v{i} = {_after_value(text, i, 'j', partial)};")
            for n in along:
                written = write(text, n, nest.outputs[n].strides, f"v{nest.outputs[n].value}", "j", partial)
                # There is no row here, so arrays begin at their own first element and not at a row's base.
                text.say(depth + 1, written.replace("b_q", "q"))
            text.say(depth, "}")
        for _ in nest.inner[:-1]:
            depth -= 1
            text.say(depth, "}")
    text.say(1, "}")


def _needed_after(nest: Nest, roots: Sequence[int]) -> Iterator[int]:
    needed = set(roots)
    for i in range(max(roots, default=-1), -1, -1):
        if i in needed and not nest.stages.roles.get(i):
            needed.update(nest.body.code[i].args)
    return iter(sorted(needed))


def _after_value(text: Text, value: int, last: str | None, partial: bool) -> str:
    nest = text.nest
    ins = nest.body.code[value]
    role = nest.stages.roles.get(value)
    if role == "total":
        if ins.kind == "B":
            return f"splatB(u{value} != 0)"
        return f"{SPLAT[ins.kind]}(u{value})"
    if role == "column":
        base = "base + " if len(nest.inner) > 1 else ""
        return f"ld(c{value} + {base}{last}, n)" if partial else f"ld(c{value} + {base}{last})"
    return expression(text, value, last, partial).replace("b_p", "p")
