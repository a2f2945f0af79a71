"""Plain values to dataclasses and back, driven by the annotations: the value half of `gnomon.schema`.

`read_table(cls, plain, path)` and `write_table(cls, value, path)` are inverses. Each annotation is compiled once to a
`_Codec`, a pair of strict functions; both check, so a dataclass that holds what its annotation forbids is not written
either. Every error is an `InputError` or `UnitError` with the path to the value. TypeError is for annotations that no
file could express unambiguously (`str | Bytes`, None without a default of None): our own mistake, found at first use.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from numbers import Integral
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from gnomon import units
from gnomon.errors import GnomonError, InputError, UnitError, nearest
from gnomon.schema.toml import inline, join, quote

_MISSING: Any = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class _Codec:
    """How one annotation is read from and written to plain values."""

    expected: str
    """What an error message says was expected."""
    read: Callable[[Any, str], Any]
    """(plain value, path) -> value"""
    write: Callable[[Any, str], Any]
    """(value, path) -> plain value"""
    shape: str
    """The plain value it reads: boolean, integer, number, string, array or table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Marks text that must be a name that something knows, as in `Annotated[str, Known(find)]`."""

    find: Callable[[str], object]
    """Raises a GnomonError for other names."""


def describe(value: object) -> str:
    """A plain value as an error message names it."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean {str(value).lower()}"
        case int():
            return f"integer {value}" if abs(value) < 10**20 else "an integer over 64 bits"
        case float():
            return f"number {value!r}"
        case str():
            return "string " + quote(value if len(value) <= 48 else value[:45] + "...")
        case list() | tuple():
            return f"array of {len(value)}"
        case Mapping():
            return "table"
        case _:
            return f"{type(value).__name__} {str(value)[:48]}"


def _mismatch(expected: str, value: object, path: str) -> InputError:
    return InputError(f"Expected {expected}, got {describe(value)}", path)


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise _mismatch("boolean", value, path)
    return value


def _integer(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _mismatch("integer", value, path)
    # TOML's integers are of 64 bits, and other readers of the file have no larger ones.
    whole = int(value)  # one of numpy is one of Python's
    if not -(2**63) <= whole < 2**63:
        raise InputError("Expected an integer of 64 bits, got a larger one", path)
    return whole


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _mismatch("number", value, path)
    if isinstance(value, int):
        value = _integer(value, path)
        # 2^53 + 1 would be read back as another number.
        if int(float(value)) != value:
            raise InputError(f"Integer {value} is not exact as a number (float64); write it with an exponent", path)
    if not math.isfinite(value):
        raise InputError(f"Expected a finite number, got {value!r}", path)
    return float(value)


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _mismatch("string", value, path)
    # Python's strings can hold half of a surrogate pair, which no file can.
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError("Expected text that UTF-8 can hold, got an unpaired surrogate", path)
    return value


_SCALARS: dict[object, _Codec] = {
    bool: _Codec("boolean", _boolean, _boolean, "boolean"),
    int: _Codec("integer", _integer, _integer, "integer"),
    float: _Codec("number", _number, _number, "number"),
    str: _Codec("string", _text, _text, "string"),
}


@cache
def _codec(annotation: Any) -> _Codec:
    """The codec of an annotation. TypeError (our own mistake) if the schema cannot express it."""
    origin, args = get_origin(annotation), get_args(annotation)
    # Looked up before anything else: bool is a subclass of int, and matched by itself here.
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if origin is Annotated:
        known = next((extra for extra in args[1:] if isinstance(extra, Known)), None)
        if known is not None:
            return _known(known)
        # Other marks are for other readers and change nothing of the value.
        unit = next((extra for extra in args[1:] if isinstance(extra, units.Unit)), None)
        return _codec(args[0]) if unit is None else _quantity(unit, args[0])
    if origin is Literal:
        return _literal(args)
    if origin is tuple:
        return _array(_codec(args[0])) if args[1:] == (...,) else _fixed_array(tuple(_codec(arg) for arg in args))
    if origin in (dict, Mapping) and args[0] is str:
        return _dictionary(_codec(args[1]))
    if origin in (Union, types.UnionType):
        return _union(args)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum(annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        cls: type = annotation
        return _Codec("table", lambda v, p: read_table(cls, v, p), lambda v, p: write_table(cls, v, p), "table")
    raise TypeError(f"gnomon.schema cannot read or write {annotation!r}")


def _quantity(unit: units.Unit, base: Any) -> _Codec:
    # Bytes are counted exactly; every other quantity is a measurement.
    if (base is int) != (unit is units.Unit.BYTES):
        raise TypeError(f"{unit} is held as {'int' if unit is units.Unit.BYTES else 'float'}, not {base}")
    example = units.format_quantity(10**9 if base is int else 1e9, unit)
    expected = f'quantity in {unit.value} such as "{example}"'

    def read(value: Any, path: str) -> float | int:
        if isinstance(value, str):
            return units.parse(value, unit, path)
        if isinstance(value, int | float) and not isinstance(value, bool):
            # A bare 80 could be GB or GiB: a factor of 1.07 that nobody would see.
            raise UnitError(f'Expected a number with a unit, such as "{example}", got bare {value!r}', path)
        raise _mismatch(expected, value, path)

    def write(value: Any, path: str) -> str:
        units.check(value, unit, path)
        return units.format_quantity(value, unit)

    return _Codec(expected, read, write, "string")


def _known(names: Known) -> _Codec:
    def name(value: Any, path: str) -> str:
        text = _text(value, path)
        try:
            names.find(text)
        except GnomonError as error:
            raise InputError(str(error), path) from None
        return text

    return _Codec("string", name, _text, "string")


def _literal(choices: tuple[Any, ...]) -> _Codec:
    names = {choice: inline(choice) for choice in choices}
    expected = " or ".join(names.values())

    def same(value: Any, path: str) -> Any:
        # `1 == True`: the type must agree too.
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        hint = nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
        raise InputError(f"Expected {expected}, got {describe(value)}{hint}", path)

    shapes = {_shape(choice) for choice in choices}
    if len(shapes) != 1:
        raise TypeError(f"Literal{choices} mixes types")
    return _Codec(expected, same, same, shapes.pop())


def _enum(cls: type[Enum]) -> _Codec:
    members = {member.value: member for member in cls}
    values = _literal(tuple(members))

    def write(value: Any, path: str) -> Any:
        if not isinstance(value, cls):
            raise _mismatch(cls.__name__, value, path)
        return value.value

    return _Codec(values.expected, lambda value, path: members[values.read(value, path)], write, values.shape)


def _array(item: _Codec) -> _Codec:
    def items(value: Any, path: str, kind: Any, convert: Callable[[Any, str], Any]) -> Iterator[Any]:
        # Written values must be frozen, or the file and the value could part.
        if kind is tuple and isinstance(value, list):  # a file's arrays are lists, a dataclass's tuples
            raise InputError(f"Expected a tuple of {item.expected}, got a list", path)
        if not isinstance(value, kind):
            raise _mismatch(f"array of {item.expected}", value, path)
        return (convert(entry, f"{path}[{index}]") for index, entry in enumerate(value))

    return _Codec(
        f"array of {item.expected}",
        lambda value, path: tuple(items(value, path, list | tuple, item.read)),
        lambda value, path: list(items(value, path, tuple, item.write)),
        "array",
    )


def _fixed_array(items: tuple[_Codec, ...]) -> _Codec:
    expected = f"array of {len(items)} ({', '.join(item.expected for item in items)})"

    def entries(value: Any, path: str, kind: Any) -> list[tuple[_Codec, Any, str]]:
        if not isinstance(value, kind) or len(value) != len(items):
            raise _mismatch(expected, value, path)
        return [(item, entry, f"{path}[{i}]") for i, (item, entry) in enumerate(zip(items, value, strict=True))]

    return _Codec(
        expected,
        lambda value, path: tuple(item.read(entry, where) for item, entry, where in entries(value, path, list | tuple)),
        lambda value, path: [item.write(entry, where) for item, entry, where in entries(value, path, tuple)],
        "array",
    )


def _dictionary(item: _Codec) -> _Codec:
    def entries(value: Any, path: str, convert: Callable[[Any, str], Any]) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _mismatch("table", value, path)
        return {_text(key, path): convert(entry, join(path, key)) for key, entry in value.items()}

    return _Codec("table", lambda v, p: entries(v, p, item.read), lambda v, p: entries(v, p, item.write), "table")


def _shape(value: object) -> str:
    """The kind of plain value, as `_Codec.shape` names it."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", tuple: "array"}
    return kinds.get(type(value), "table" if isinstance(value, Mapping) else "other")


def _union(members: tuple[Any, ...]) -> _Codec:
    """A union without None (that is a matter of the field). Members are told apart by shape, tag, or tried in order."""
    if type(None) in members:
        raise TypeError(f"None is only possible for a field whose default is None, not in {members}")
    _refuse_ambiguous(members)
    codecs = [_codec(member) for member in members]
    expected = " or ".join(dict.fromkeys(codec.expected for codec in codecs))
    classes = tuple(member for member in members if dataclasses.is_dataclass(member))

    def read(value: Any, path: str) -> Any:
        # Here and not above: classes that contain this union would be looked into while they are being described.
        tagged = _tagged(classes) if isinstance(value, Mapping) else None
        if tagged:
            return tagged.read(value, path)
        shape = _shape(value)
        fitting = [codec for codec in codecs if codec.shape == shape]
        # People write 1 where a number is meant.
        if shape == "integer" and not fitting:
            fitting = [codec for codec in codecs if codec.shape == "number"]
        if len(fitting) == 1:
            return fitting[0].read(value, path)
        # In the order of the annotation; the reasons of all are in the error.
        return _first([codec.read for codec in fitting], value, path, expected)

    def write(value: Any, path: str) -> Any:
        return _first([codec.write for codec in codecs], value, path, expected)

    return _Codec(expected, read, write, "any")


def _refuse_ambiguous(members: tuple[Any, ...]) -> None:
    quantities = [m for m in members if get_origin(m) is Annotated]
    if quantities and (len(quantities) > 1 or {int, float, str} & set(members)):
        raise TypeError(f"a file cannot tell the members of {members} apart")


def _first(converts: list[Callable[[Any, str], Any]], value: Any, path: str, expected: str) -> Any:
    reasons = []
    for convert in converts:
        try:
            return convert(value, path)
        except InputError as error:
            reasons.append(str(error))
    detail = f" ({'; '.join(reasons)})" if reasons else ""
    raise InputError(f"Expected {expected}, got {describe(value)}{detail}", path)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tagged:
    """Dataclasses told apart by a field that is a Literal of one value in each, such as `kind`."""

    key: str
    classes: Mapping[str, type]

    def read(self, value: Mapping[str, Any], path: str) -> Any:
        tag = value.get(self.key)
        if not isinstance(tag, str) or tag not in self.classes:
            choices = ", ".join(repr(name) for name in self.classes)
            got = f"got {describe(tag)}" if self.key in value else "it is missing"
            raise InputError(f"Expected key {self.key!r} to be one of {choices}; {got}", path)
        return read_table(self.classes[tag], value, path)


@cache
def _tagged(classes: tuple[Any, ...]) -> _Tagged | None:
    if len(classes) < 2:
        return None
    tags = [{key: field.tag for key, field in _fields(cls).items() if field.tag is not None} for cls in classes]
    for key in tags[0]:
        values = [row.get(key) for row in tags]
        # The first field that tells all of them apart: the order of fields decides, not that of classes.
        if None not in values and len(set(values)) == len(values):
            return _Tagged(key, dict(zip([str(value) for value in values], classes, strict=True)))
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    codec: _Codec
    optional: bool
    """Whether None is a value; it is written by leaving the key out."""
    default: Any
    factory: Any
    tag: str | None
    """The only value of a one-value Literal; always written, so that a union can be read back."""

    @property
    def required(self) -> bool:
        return self.default is _MISSING and self.factory is _MISSING

    def is_default(self, value: Any) -> bool:
        # Both are always written: what a reader needs to know which class it is, and what it cannot fill in.
        if self.tag is not None or self.required:
            return False
        return bool(value == (self.default if self.factory is _MISSING else self.factory()))


@cache
def _fields(cls: type) -> dict[str, _Field]:
    hints = get_type_hints(cls, include_extras=True)
    fields = {}
    for field in dataclasses.fields(cls):
        if field.init:
            fields[field.name] = _field(hints[field.name], field)
    return fields


def _field(annotation: Any, field: dataclasses.Field[Any]) -> _Field:
    optional = False
    if get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation):
        if field.default is not None:
            raise TypeError(f"field {field.name!r} may be None, so its default must be None: TOML has no null")
        optional = True
        members = tuple(arg for arg in get_args(annotation) if arg is not type(None))
        annotation = members[0] if len(members) == 1 else Union[members]  # noqa: UP007
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    tag = choices[0] if len(choices) == 1 and isinstance(choices[0], str) else None
    return _Field(_codec(annotation), optional, field.default, field.default_factory, tag)


def read_table(cls: type, value: Any, path: str) -> Any:
    """A `cls` from plain values; `path` is where they stand."""
    if not isinstance(value, Mapping):
        raise _mismatch("table", value, path)
    fields = _fields(cls)
    for key in value:
        if key not in fields:
            # A mistyped key must never become a default in silence.
            hint = nearest(str(key), fields) or f"; the keys here are {', '.join(fields)}"
            raise InputError(f"Unknown key {describe(key).removeprefix('string ')}{hint}", path)
    arguments = {}
    for key, field in fields.items():
        if key in value:
            entry = value[key]
            arguments[key] = None if entry is None and field.optional else field.codec.read(entry, join(path, key))
        elif field.required:
            raise InputError(f'Missing key "{key}" ({field.codec.expected})', path)
    try:
        return cls(**arguments)
    except ValueError as error:
        # A class's own check knows nothing of files: the path is added here.
        kind = UnitError if isinstance(error, UnitError) else InputError
        raise kind(str(error), path) from error


def write_table(cls: type, value: Any, path: str) -> dict[str, Any]:
    """Plain values of a dataclass, defaults left out; `path` is where it will stand."""
    fields = _fields(cls)
    # A subclass would lose its own fields on the way.
    if type(value) is not cls:
        raise InputError(f"Expected {cls.__name__}, got {type(value).__name__}", path)
    table = {}
    for key, field in fields.items():
        entry = getattr(value, key)
        if not (field.is_default(entry) or (entry is None and field.optional)):
            table[key] = field.codec.write(entry, join(path, key))
    return table


def check_header(header: str, got: object, path: str) -> None:
    """InputError unless `got` is the header `wanted`, such as `gnomon.plan/1`; says whether kind or version differ."""
    kind, _, version = header.partition("/")
    match = re.fullmatch(r"([a-z_.]{1,64})/([0-9]{1,9})", got) if isinstance(got, str) else None
    if match is None:
        raise InputError(f'Expected schema "{header}", got {describe(got)}', path)
    if match[1] != kind:
        raise InputError(f"Expected a {kind} file, got a {match[1]} file", path)
    if int(match[2]) > int(version):
        raise InputError(f"{got} was written by a newer Gnomon; this one reads {header}: upgrade", path)
    if int(match[2]) < int(version):
        raise InputError(f"{got} is an old format; this Gnomon reads {header}", path)
