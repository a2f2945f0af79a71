"""What a Python configuration file says, read by `ast` and never run: assignments, literals, arithmetic and calls.

`module_values(text, source)` returns the values of names at the top of a file; a call is a dict of its keywords with
its dotted name under `CALL` and its positional arguments under `ARGUMENTS`. `function_values` follows one function that
builds a config, with its arguments, its `if` on values that are known, and functions that it starts from, in this file
or in one beside it (`Module.import_sibling`). Leaves out loops and everything that would need the project's own code:
such a value is `None`, and says nothing.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gnomon.errors import FormatError, GnomonError
from gnomon.formats.job import read_source
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
_ORDER: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

MAX_ITEMS = 10_000
"""Items of a list that is computed."""

Values = dict[str, object]


def parsed(text: str, source: str) -> ast.Module:
    """The tree of a file. FormatError, with the line, for text that is not Python or is too long."""
    if len(text) > MAX_CHARACTERS // 8:
        raise FormatError("longer than any configuration", source)
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"not Python: {error}", f"{source}:{getattr(error, 'lineno', 1)}") from None


@dataclass(slots=True)
class Module:
    """A file: its functions and values by name, and what it imports from files next to it."""

    functions: dict[str, ast.FunctionDef]
    values: Values
    imports: dict[str, tuple[str, str]]
    """Name here -> (module, name there)."""
    folders: tuple[Path, ...] = ()
    """Where modules are looked for, by the last part of their names or by the whole."""
    loaded: dict[str, Module | None] = field(default_factory=dict)
    """Modules that were looked for."""

    def import_sibling(self, name: str) -> Module | None:
        """A module by its dotted name; None where no folder has it."""
        if name not in self.loaded:
            parts = name.strip(".").split(".")
            paths = [
                folder.joinpath(*parts[at:]).with_suffix(".py") for folder in self.folders for at in range(len(parts))
            ]
            # Looked for by the whole dotted name first, then without its leading packages: the folder may be the
            # package itself.
            file = next((path for path in paths if path.is_file()), None)
            try:
                self.loaded[name] = None if file is None else module_of(*read_source(file), self.folders, self.loaded)
            except GnomonError:
                self.loaded[name] = None
        return self.loaded[name]

    def function(self, name: str, depth: int = 0) -> tuple[Module, ast.FunctionDef] | None:
        """A function by the name it has here, and the file that it is in."""
        if name in self.functions:
            return self, self.functions[name]
        if name in self.imports and depth < MAX_DEPTH:
            there = self.import_sibling(self.imports[name][0])
            return None if there is None else there.function(self.imports[name][1], depth + 1)
        holder, _, last = name.rpartition(".")
        if holder in self.imports and (there := self.import_sibling(".".join(self.imports[holder]))) is not None:
            return there.function(last, depth + 1)
        return None


def module_of(
    text: str, source: str, folders: Sequence[Path] = (), loaded: dict[str, Module | None] | None = None
) -> Module:
    """A file that is read, not run. folders: where it imports from."""
    tree = parsed(text, source)
    imports = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    module = Module(functions, {}, imports, tuple(folders), {} if loaded is None else loaded)
    for statement in tree.body:
        _assign(statement, module.values, module, 0)
    return module


def module_values(text: str, source: str) -> Values:
    """Values of the names that a file assigns outermost."""
    values: Values = {}
    nothing = Module({}, {}, {})
    for statement in parsed(text, source).body:
        _assign(statement, values, nothing, 0)
    return values


def function_values(name: str, module: Module, arguments_given: Values | None = None, depth: int = 0) -> object:
    """What a function returns, as far as its own lines say. arguments_given: its arguments, by name."""
    there = module.function(name)
    if there is None or depth > MAX_DEPTH:
        return None
    home, node = there
    names: Values = {**_defaults(node, home, depth), **(arguments_given or {})}
    returned = _followed(node.body, names, home, depth)
    return None if returned is _GOES_ON else returned


_GOES_ON = object()
"""What a run of statements without a `return` gives."""


def _defaults(node: ast.FunctionDef, module: Module, depth: int) -> Values:
    arguments = [*node.args.posonlyargs, *node.args.args]
    # Python's defaults belong to the last arguments: paired from the end, the first ones are left without.
    late = zip(reversed(arguments), reversed(node.args.defaults), strict=False)
    named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    pairs = [*late, *((one, value) for one, value in named if value is not None)]
    unset: Values = dict.fromkeys(one.arg for one in arguments)
    return unset | {one.arg: _value(value, {}, module, depth + 1) for one, value in pairs}


def _followed(body: Sequence[ast.stmt], names: Values, module: Module, depth: int) -> object:
    """Evaluates what statements return; `_GOES_ON` where they return nothing. An `if` is followed where its test is
    known."""
    for statement in body:
        if isinstance(statement, ast.Return):
            return None if statement.value is None else _value(statement.value, names, module, depth)
        if isinstance(statement, ast.If):
            met = truth(statement.test, names, module, depth)
            # Of a test that is not known neither branch is followed: what either would set says nothing.
            part = statement.body if met else statement.orelse if met is False else []
            if (returned := _followed(part, names, module, depth)) is not _GOES_ON:
                return returned
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            _value(statement.value, names, module, depth)  # a function may set what it is given
        else:
            _assign(statement, names, module, depth)
    return _GOES_ON


def truth(node: ast.expr, names: Values, module: Module, depth: int) -> bool | None:
    """Whether a test holds; None where it cannot be known."""
    match node:
        case ast.BoolOp(op=op, values=parts):
            # Of three values: one part that is known can decide `or` (true) or `and` (false) though others are not
            # known.
            truths = [truth(part, names, module, depth) for part in parts]
            ends = isinstance(op, ast.Or)
            return ends if ends in truths else None if None in truths else not ends
        case ast.UnaryOp(op=ast.Not(), operand=part):
            met = truth(part, names, module, depth)
            return None if met is None else not met
        case ast.Compare(left=left_operand, ops=[op], comparators=[right]):
            a, b = _value(left_operand, names, module, depth), _value(right, names, module, depth)
            if isinstance(op, ast.Is | ast.Eq | ast.IsNot | ast.NotEq):
                return (a == b) == isinstance(op, ast.Is | ast.Eq)
            if isinstance(op, ast.In | ast.NotIn) and isinstance(b, list | dict):
                return ((str(a) if isinstance(b, dict) else a) in b) == isinstance(op, ast.In)
            if isinstance(a, int | float) and isinstance(b, int | float) and type(op) in _ORDER:
                return _ORDER[type(op)](a, b)
            return None
    value = _value(node, names, module, depth)
    return None if isinstance(value, dict) and CALL in value else bool(value)


def _assign(statement: ast.stmt, names: Values, module: Module, depth: int) -> None:
    """Put what an assignment says among the names; `a.b.c = value` within what `a` holds."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets: list[ast.expr] = [statement.target]
        value = statement.value
    elif isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    else:
        return
    assigned = _value(value, names, module, depth)
    for target in targets:
        if isinstance(target, ast.Name):
            names[target.id] = assigned
        elif isinstance(target, ast.Attribute) and isinstance(holder := _holder(target.value, names), dict):
            holder[target.attr] = assigned


def _holder(node: ast.expr, names: Values) -> object:
    """The dict that `a.b` names, made where nothing is."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(outer := _holder(node.value, names), dict):
        if not isinstance(callable_ := outer.get(node.attr), dict):
            outer[node.attr] = {CALL: callable_} if isinstance(callable_, str) else {}
        return outer[node.attr]
    return None


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _value(node: ast.expr, names: Values, module: Module, depth: int) -> object:
    if depth > MAX_DEPTH:
        return None

    def inner(part: ast.expr) -> object:
        return _value(part, names, module, depth + 1)

    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        # A name that is not known stands for itself, so that an enum's or a class's name can be read from the result.
        case ast.Name(id=name):
            return names[name] if name in names else module.values.get(name, name)
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
        case ast.BinOp(left=left_operand, op=op, right=right) if type(op) in _OPERATORS:
            a, b = inner(left_operand), inner(right)
            if isinstance(a, list) or isinstance(b, list):
                return _lists(a, op, b)
            # Bounded: a file that multiplies whole numbers again and again would make ones of any length.
            if isinstance(a, int | float) and isinstance(b, int | float) and abs(a) < 1e18 and abs(b) < 1e18:
                return None if b == 0 and isinstance(op, ast.Div | ast.FloorDiv) else _OPERATORS[type(op)](a, b)
            return None
        case ast.BoolOp(op=op, values=parts):
            for part in parts[:-1]:
                if bool(operand := inner(part)) == isinstance(op, ast.Or):
                    return operand
            return inner(parts[-1])
        case ast.Subscript(value=mapping_node, slice=key) if isinstance(table := inner(mapping_node), dict):
            return table.get(str(inner(key)))
        case ast.IfExp(test=test, body=body, orelse=other):
            met = truth(test, names, module, depth + 1)
            return None if met is None else inner(body if met else other)
        case ast.Call():
            return _call(node, names, inner, module, depth)
    return None


def _lists(a: object, op: ast.operator, b: object) -> list[object] | None:
    """`[…] + […]`, `[…] * n`."""
    if isinstance(a, list) and isinstance(b, list) and isinstance(op, ast.Add):
        return [*a, *b] if len(a) + len(b) <= MAX_ITEMS else None
    if isinstance(a, list) and isinstance(b, int) and isinstance(op, ast.Mult):
        return a * b if len(a) * b <= MAX_ITEMS else None
    return None


def _call(node: ast.Call, names: Values, inner: Callable[[ast.expr], object], module: Module, depth: int) -> object:
    name = dotted(node.func)
    keywords: Values = {pair.arg: inner(pair.value) for pair in node.keywords if pair.arg is not None}
    arguments = [inner(part) for part in node.args]
    # A local name hides a function of the module, as in Python.
    if there := module.function(name) if name not in names else None:
        takes = [one.arg for one in (*there[1].args.posonlyargs, *there[1].args.args)]
        return function_values(name, module, {**dict(zip(takes, arguments, strict=False)), **keywords}, depth + 1)
    if name == "dict":
        return keywords
    if name == "getattr" and len(arguments) == 3 and isinstance(arguments[0], dict):
        return arguments[0].get(str(arguments[1]), arguments[2])
    if isinstance(node.func, ast.Attribute):
        holder = inner(node.func.value)
        if isinstance(holder, str) and node.func.attr in ("lower", "upper", "strip") and not arguments:
            return str(getattr(holder, node.func.attr)())
        if not name and isinstance(holder, dict) and CALL in holder:  # a method of what a call returns
            return {ARGUMENTS: holder.get(ARGUMENTS), **keywords, CALL: f"{holder[CALL]}.{node.func.attr}"}
    return {**keywords, CALL: name, ARGUMENTS: arguments}
