"""What a user says of a custom op: `@op_price` what it costs, `@op_sharding` how it may be divided.

    @gnomon.op_price("mylib::scan")
    def scan_price(x, decay):
        batch, seq, hidden = x.shape
        return {"flops": 6 * batch * seq * hidden, "bytes": 3 * x.nbytes}

The function takes the op's arguments, with a `TensorShape` for each tensor, and is called when a module with the op is
captured. Sizes are symbols (`Count`), so what it returns holds for every batch, and for a rank's part. Leaves out what
the op computes, which torch knows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gnomon.errors import CaptureError, InputError, nearest
from gnomon.graph import Cost, Dim, Term

Function = TypeVar("Function", bound=Callable[..., object])

COSTS = ("flops", "bytes", "seconds", "backward_flops", "backward_bytes", "backward_seconds")
DIVISIONS = ("independent", "summed")
_PRICES: dict[str, Callable[..., object]] = {}
_SHARDINGS: dict[str, Callable[..., object]] = {}


def op_price(op: object) -> Callable[[Function], Function]:
    """Says what a custom op costs. op: `namespace::name`, or the op itself.

    The function returns a dict with any of `flops`, `bytes` (read and written), `seconds` (in place of both, on any
    device) and the same with `backward_` before it. Left out, bytes are those of its operands, and a backward costs
    twice its forward. InputError for what names no op; a later rule for one op replaces the earlier.
    """
    return _registered(_PRICES, op)


def op_sharding(op: object) -> Callable[[Function], Function]:
    """Says along which dims a custom op may be divided. op: as for `op_price`.

    The function returns a dict: `independent`, dims that ranks may have parts of, each by itself; `summed`, dims that
    the op sums over, so that ranks with parts of them have partial sums. Each is a list of `x.dim(1)`, or of a tuple of
    those that are one dim (`(weight.dim(0), outputs[0].dim(2))`, if the function has a parameter `outputs`), or a
    dict from a word of the graph (`heads`, `ffn`: tp divides them; `seq`: cp) to such an entry.
    """
    return _registered(_SHARDINGS, op)


def _registered(rules: dict[str, Callable[..., object]], op: object) -> Callable[[Function], Function]:
    name = _name(op)

    def add(function: Function) -> Function:
        if not callable(function):
            raise InputError(f"the rule of {name} is a function of its arguments, not a {type(function).__name__}")
        rules[name] = function
        return function

    return add


def _name(op: object) -> str:
    """The name of a custom op as `namespace::name`."""
    qualname = op if isinstance(op, str) else getattr(op, "_qualname", None) or getattr(op, "_name", None)
    if not isinstance(qualname, str):
        called = getattr(op, "_qualified_op_name", "")  # of an OpOverloadPacket
        qualname = called if isinstance(called, str) else ""
    # The overload is dropped: a rule holds for all of them, as for `mul.Tensor` and `mul.Scalar`.
    match = re.fullmatch(r"(\w+)::(\w+)(\.\w+)?", qualname)
    if match is None:
        shown = repr(op) if isinstance(op, str) else f"a {type(op).__name__}"
        raise InputError(f"a custom op is named as 'namespace::name', or given itself; {shown} is none")
    return f"{match[1]}::{match[2]}"


class _AskedError(Exception):
    """A rule asked whether a size is something, or for its value."""


class Count:
    """A number that follows from sizes: a sum of products of dims."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[tuple[Dim, ...], float]) -> None:
        self.terms = {dims: factor for dims, factor in terms.items() if factor}

    @staticmethod
    def of(value: object) -> Count:
        """A Count of a number, or the Count that is given."""
        if isinstance(value, Count):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"a size and a {type(value).__name__} make no number")
        return Count({(): float(value)})

    def __add__(self, other: object) -> Count:
        terms = dict(self.terms)
        for dims, factor in Count.of(other).terms.items():
            terms[dims] = terms.get(dims, 0.0) + factor
        return Count(terms)

    def __mul__(self, other: object) -> Count:
        terms: dict[tuple[Dim, ...], float] = {}
        for a, x in self.terms.items():
            for b, y in Count.of(other).terms.items():
                # Sorted, so that batch·seq and seq·batch are one term.
                dims = tuple(sorted((*a, *b), key=lambda dim: dim.name))
                terms[dims] = terms.get(dims, 0.0) + x * y
        return Count(terms)

    def __truediv__(self, other: object) -> Count:
        divisor = Count.of(other)
        # A quotient by a sum is no polynomial: the rule is asked again with the example's numbers, and the user told.
        if len(divisor.terms) != 1:
            raise _AskedError
        [(below, factor)] = divisor.terms.items()
        terms: dict[tuple[Dim, ...], float] = {}
        for dims, number in self.terms.items():
            dims_left = list(dims)
            for dim in below:
                if dim not in dims_left:
                    raise _AskedError
                dims_left.remove(dim)
            terms[tuple(dims_left)] = number / factor
        return Count(terms)

    def __sub__(self, other: object) -> Count:
        return self + Count.of(other) * -1

    def __rsub__(self, other: object) -> Count:
        return Count.of(other) - self

    def __pow__(self, power: object) -> Count:
        if not isinstance(power, int) or power < 0:
            raise _AskedError
        result = Count.of(1)
        for _ in range(power):
            result = result * self
        return result

    __radd__, __rmul__, __floordiv__ = __add__, __mul__, __truediv__

    def __neg__(self) -> Count:
        return self * -1

    def _refuse(self, *_: object) -> Any:
        raise _AskedError

    # Whatever would take a branch on a size: a price read from one branch would be wrong for other sizes, in silence.
    # Nor is it hashed, as a dict would compare by identity and never ask.
    __bool__ = __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = _refuse
    __rtruediv__ = __rfloordiv__ = __round__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Place:
    """One dim of one tensor."""

    axis: int
    """Of the capture's axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """A tensor among the arguments of a rule."""

    shape: tuple[Any, ...]
    """Sizes: symbols, or numbers where the rule looked at them."""
    itemsize: int
    """Bytes of an element, as it was recorded."""
    dtype: str
    """Name of its dtype."""
    axes: tuple[int, ...] = field(repr=False)

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> Any:
        """Elements times bytes of each."""
        return self.numel() * self.itemsize

    def numel(self) -> Any:
        """The number of elements."""
        total: Any = 1
        for size in self.shape:
            total = total * size
        return total

    def dim(self, index: int) -> Place:
        """A dim, to say how it is divided."""
        return Place(self.axes[index])


def has_price(target: str) -> bool:
    """Whether a user says what `mylib.scan.default` costs."""
    return _key(target) in _PRICES


def has_sharding(target: str) -> bool:
    """Whether a user says how it may be divided."""
    return _key(target) in _SHARDINGS


def _key(target: str) -> str:
    space, _, name = target.partition(".")
    return f"{space}::{name.partition('.')[0]}"


def cost_of(
    target: str, symbols: tuple[Sequence[Any], Mapping[str, Any]], numbers: tuple[Sequence[Any], Mapping[str, Any]]
) -> tuple[Cost, str]:
    """(what an op costs, a note or nothing). symbols, numbers: its arguments with tensors of symbolic sizes, and with
    those of the example, for a function that looks at them. CaptureError where the rule is wrong."""
    function, name, note = _PRICES[_key(target)], _key(target), ""
    try:
        price = _called("op_price", name, function, *symbols)
    except _AskedError:
        price = _called("op_price", name, function, *numbers)
        note = f"the price of {name} looks at sizes, and is that of the example's: {_where(function)}"
    values = _checked("op_price", name, function, price, COSTS)
    if not values:
        raise _error("op_price", name, function, f"says nothing; give one of {', '.join(COSTS)}")
    amounts = {}
    for key, value in values.items():
        try:
            terms = Count.of(value).terms
        except TypeError:
            raise _error("op_price", name, function, f"gives {key} = {value!r}, which is no number") from None
        # Signs of several terms depend on sizes (n·(n-1)/2 has a negative one), so only a single term is judged.
        if not terms or (len(terms) == 1 and next(iter(terms.values())) < 0):
            raise _error("op_price", name, function, f"gives {key} = {value!r}; give more than 0, or leave it out")
        amounts[key] = tuple(Term(factor, dims) for dims, factor in terms.items())
    return Cost(**amounts), note


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a custom op may be divided."""

    independent: tuple[tuple[int, ...], ...]
    """Axes that are one, of each dim that ranks may have parts of."""
    summed: tuple[tuple[int, ...], ...]
    """The same of dims that are summed over."""
    words: Mapping[int, str]
    """Axis -> what it is called."""


def division_of(target: str, arguments: Sequence[Any], named: Mapping[str, Any], outputs: Sequence[Any]) -> Division:
    """What a user says of it. CaptureError where the rule is wrong."""
    function, name = _SHARDINGS[_key(target)], _key(target)
    # By name, as most rules need nothing of the outputs.
    extra = {"outputs": tuple(outputs)} if "outputs" in inspect.signature(function).parameters else {}
    try:
        division = _called("op_sharding", name, function, arguments, {**named, **extra})
    except _AskedError:
        raise _error("op_sharding", name, function, "looks at sizes; how an op divides is the same for all") from None
    values = _checked("op_sharding", name, function, division, DIVISIONS)
    words: dict[int, str] = {}
    groups: dict[str, tuple[tuple[int, ...], ...]] = {}
    for key in DIVISIONS:
        entries: Any = values.get(key, ())
        listed = list(entries.items()) if isinstance(entries, Mapping) else [("", entry) for entry in entries]
        divisions = []
        for word, entry in listed:
            places = entry if isinstance(entry, list | tuple) else (entry,)
            if not places or not all(isinstance(place, Place) for place in places):
                raise _error("op_sharding", name, function, f"lists {entry!r} as {key}; give dims, as x.dim(1)")
            axes = tuple(place.axis for place in places)
            divisions.append(axes)
            if word:
                words[axes[0]] = str(word)
        groups[key] = tuple(divisions)
    return Division(independent=groups["independent"], summed=groups["summed"], words=words)


def _called(
    what: str, name: str, function: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any]
) -> object:
    try:
        return function(*arguments, **named)
    except _AskedError:
        raise
    # The rule is the user's code and may raise anything; what it is a rule of is said with it.
    except Exception as error:
        raise _error(what, name, function, f"failed: {type(error).__name__}: {error}") from error


def _checked(
    what: str, name: str, function: Callable[..., object], returned: object, known: Sequence[str]
) -> Mapping[str, Any]:
    if not isinstance(returned, Mapping):
        raise _error(
            what, name, function, f"returned a {type(returned).__name__}; return a dict with {', '.join(known)}"
        )
    for key in returned:
        if key not in known:
            raise _error(what, name, function, f"gives {key!r}{nearest(str(key), known)}; there are {', '.join(known)}")
    return returned


def _error(what: str, name: str, function: Callable[..., object], problem: str) -> CaptureError:
    return CaptureError(f"{_where(function)}: the {what} of {name} {problem}")


def _where(function: Callable[..., object]) -> str:
    code = getattr(function, "__code__", None)
    return "?" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


@op_price("aten::linalg_solve_triangular")
def solve_triangular_price(
    a: TensorShape, b: TensorShape, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> dict[str, object]:
    """FLOPs of a triangular solve, (…, n, n) and (…, n, m), which torch's counter leaves out: half the products of a
    square matrix. Its backward is another solve, and the gradient of the matrix one whole product."""
    forward = b.numel() * a.shape[-1]
    return {"flops": forward, "backward_flops": 3 * forward}
