"""A Graph as plain values, as JSON holds them, and back: `to_plain` and `from_plain` are inverses.

Reading makes only the dataclasses of a Graph, by their own constructors, which check themselves: a file can be wrong,
and cannot run anything. Equal values are written once: `rows` is a list of `[class, field, ...]`, and a field of a row
is a scalar, a list for a tuple, or `{"row": n}` for an earlier row. Leaves out files (`request.cache`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gnomon.errors import FormatError, GraphError
from gnomon.graph.graph import Graph
from gnomon.graph.types import Block, Call
from gnomon.ops.op import Captured, Op
from gnomon.tensors import captured
from gnomon.tensors.dims import Dim
from gnomon.tensors.tensor import Tensor

CLASSES: Mapping[str, type] = {
    cls.__name__: cls
    for cls in (
        Graph, Call, Block, Op, Tensor, Dim, Captured,
        captured.Node, captured.Use, captured.Size, captured.Torch, captured.Literal, captured.Cost, captured.Term,
    )
}  # fmt: skip
"""All that a Graph is made of."""

SCALARS = (bool, int, float, str, type(None))


def to_plain(graph: Graph) -> dict[str, Any]:
    """The Graph as dicts, lists and scalars. FormatError for a value that no file holds (a complex constant)."""
    rows: list[list[Any]] = []
    known: dict[tuple[Any, ...], int] = {}

    def plain(value: Any) -> Any:
        if type(value) in SCALARS:
            return value
        if type(value) is tuple:
            return [plain(item) for item in value]
        name = type(value).__name__
        cls = CLASSES.get(name)
        # A subclass would be written without what it adds, and read back as its base.
        if cls is None or cls is not type(value):
            raise FormatError(f"a Graph with a {name} ({str(value)[:40]}) in it cannot be written")
        # Parts come first and stand in the row as their numbers: equal values are one row, and comparing two is never
        # deep.
        row = [name, *(plain(getattr(value, field)) for field in _checks(name))]
        key = _key(row)
        if key not in known:
            known[key] = len(rows)
            rows.append(row)
        return {"row": known[key]}

    plain(graph)
    return {"rows": rows}


def from_plain(plain_graph: object) -> Graph:
    """Rebuilds the Graph. FormatError or GraphError for anything that `to_plain` did not write."""
    listed = plain_graph.get("rows") if isinstance(plain_graph, dict) else None
    if not isinstance(listed, list):
        raise FormatError("a Graph is a table with a list of rows")
    values: list[Any] = []

    def value(plain: Any) -> Any:
        if type(plain) in SCALARS:
            return plain
        if type(plain) is list:
            return tuple(value(item) for item in plain)
        index = plain.get("row") if type(plain) is dict and len(plain) == 1 else None
        # Rows refer to earlier rows only: no cycle can be read, and no reading order needs to be found.
        if type(index) is not int or not 0 <= index < len(values):
            raise FormatError(f"row {len(values)} of a Graph holds {str(plain)[:40]!r}, which is no earlier row")
        return values[index]

    for row in listed:
        if type(row) is not list or not row or type(row[0]) is not str or row[0] not in CLASSES:
            raise FormatError(f"row {len(values)} of a Graph is {str(row)[:40]!r}; it begins with one of {[*CLASSES]}")
        cls = CLASSES[row[0]]
        checks = _checks(row[0])
        if len(row) != len(checks) + 1:
            raise FormatError(f"row {len(values)} of a Graph gives {len(row) - 1} fields, {row[0]} has {len(checks)}")
        checked = {name: value(item) for name, item in zip(checks, row[1:], strict=True)}
        for name, fits in checks.items():
            if not fits(checked[name]):
                raise FormatError(f"row {len(values)} of a Graph: {row[0]}.{name} is {str(checked[name])[:40]!r}")
        try:
            values.append(cls(**checked))
        except (TypeError, ValueError, LookupError) as error:  # what a constructor takes for granted
            raise GraphError(f"row {len(values)} of a Graph makes no {row[0]}: {error}") from error
    if not values or not isinstance(values[-1], Graph):
        raise FormatError("the last row of a Graph is the Graph")
    return values[-1]


def _key(plain: Any) -> Any:
    """Plain values to tell rows apart by: `1`, `1.0` and `True` are equal, and other values."""
    if isinstance(plain, list):
        return tuple(_key(item) for item in plain)
    return ("row", plain["row"]) if isinstance(plain, dict) else (type(plain), repr(plain))


@cache
def _checks(name: str) -> Mapping[str, Callable[[Any], bool]]:
    """Field of a class that its constructor takes -> whether a value is of the field's type."""
    cls = CLASSES[name]
    hints = get_type_hints(cls)
    return {field.name: _check(hints[field.name]) for field in fields(cls) if field.init}


def _check(annotation: Any) -> Callable[[Any], bool]:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda value: True
    if origin is Literal:
        return lambda value: type(value) is str and value in args
    if origin in (Union, types.UnionType):
        checks = [_check(arg) for arg in args]
        return lambda value: any(fits(value) for fits in checks)
    if origin is tuple and args[1:] == (...,):
        item = _check(args[0])
        return lambda value: type(value) is tuple and all(item(x) for x in value)
    if origin is tuple:
        items = [_check(arg) for arg in args]
        return lambda value: (
            type(value) is tuple
            and len(value) == len(items)
            and all(fits(x) for fits, x in zip(items, value, strict=True))
        )
    assert isinstance(annotation, type), f"{annotation!r} is no type of a Graph's field"
    # The very type: a bool is an int to isinstance, and would take a size's place.
    return lambda value: type(value) is annotation
