"""What a Python configuration file says, read by `ast` and never run: assignments, literals, arithmetic and calls.

`module_values(text, source)` returns the values of names at the top of a file; a call is a dict of its keywords with
its dotted name under `CALL` and its positional arguments under `ARGUMENTS`. `function_values` follows one function that
builds a config, and others of the file that it starts from. Leaves out loops, conditions and everything that would need
the project's own code: such a value is `None`, and says nothing.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from gnomon.errors import FormatError
from gnomon.formats.keys import MAX_CHARACTERS

CALL, ARGUMENTS = "call()", "arguments()"
MAX_DEPTH = 32
"""Functions that start from each other, and calls within calls."""

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}

Values = dict[str, object]


def parsed(text: str, source: str) -> ast.Module:
    """The tree of a file. FormatError, with the line, for text that is not Python or is too long."""
    if len(text) > MAX_CHARACTERS // 8:
        raise FormatError("longer than any configuration", source)
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"not Python: {error}", f"{source}:{getattr(error, 'lineno', 1)}") from None


def module_values(text: str, source: str) -> Values:
    """Values of the names that a file assigns outermost."""
    found: Values = {}
    for statement in parsed(text, source).body:
        _assign(statement, found, {}, 0)
    return found


def functions_of(text: str, source: str) -> dict[str, ast.FunctionDef]:
    """Functions of a file by name."""
    return {node.name: node for node in parsed(text, source).body if isinstance(node, ast.FunctionDef)}


def function_values(name: str, functions: Mapping[str, ast.FunctionDef], depth: int = 0) -> object:
    """What a function returns, as far as its own lines say."""
    names: Values = {}
    if depth > MAX_DEPTH:
        return None
    for statement in functions[name].body:
        if isinstance(statement, ast.Return):
            return None if statement.value is None else _value(statement.value, names, functions, depth)
        _assign(statement, names, functions, depth)
    return None


def _assign(statement: ast.stmt, names: Values, functions: Mapping[str, ast.FunctionDef], depth: int) -> None:
    """Put what an assignment says among the names; `a.b.c = value` within what `a` holds."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets: list[ast.expr] = [statement.target]
        value = statement.value
    elif isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    else:
        return
    said = _value(value, names, functions, depth)
    for target in targets:
        if isinstance(target, ast.Name):
            names[target.id] = said
        elif isinstance(target, ast.Attribute) and isinstance(holder := _holder(target.value, names), dict):
            holder[target.attr] = said


def _holder(node: ast.expr, names: Values) -> object:
    """The dict that `a.b` names, made where nothing is."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(outer := _holder(node.value, names), dict):
        if not isinstance(outer.get(node.attr), dict):
            outer[node.attr] = {}
        return outer[node.attr]
    return None


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _value(node: ast.expr, names: Values, functions: Mapping[str, ast.FunctionDef], depth: int) -> object:
    if depth > MAX_DEPTH:
        return None

    def inner(part: ast.expr) -> object:
        return _value(part, names, functions, depth + 1)

    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name):
            return names.get(name, name)
        case ast.Attribute():
            holder = inner(node.value)
            return holder.get(node.attr) if isinstance(holder, dict) else dotted(node) or None
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [inner(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(inner(key)): inner(value) for key, value in pairs if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=part) if isinstance(number := inner(part), int | float):
            return -number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = inner(left), inner(right)
            if isinstance(a, int | float) and isinstance(b, int | float) and abs(a) < 1e18 and abs(b) < 1e18:
                return None if b == 0 and isinstance(op, ast.Div | ast.FloorDiv) else _OPERATORS[type(op)](a, b)
            return None
        case ast.Call():
            return _call(node, inner, functions, depth)
    return None


def _call(
    node: ast.Call, inner: Callable[[ast.expr], object], functions: Mapping[str, ast.FunctionDef], depth: int
) -> object:
    name = dotted(node.func)
    if name in functions and not node.args and not node.keywords:
        return function_values(name, functions, depth + 1)
    said: Values = {pair.arg: inner(pair.value) for pair in node.keywords if pair.arg is not None}
    if name == "dict":
        return said
    return {**said, CALL: name, ARGUMENTS: [inner(part) for part in node.args]}
