"""Values of a body as rules write them: `x * sigmoid(x)`, `exp(x - x.max(axes))`.

A `Value` is an instruction of a `Body` with Python's operators; functions here are those of cpp/math.h. Kinds
are made equal before an operation, as PyTorch promotes; plain numbers take the other side's kind. Leaves out
where tensors lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partialmethod

from gnomon.compiler.tiles.body import Body, UnfitError, wider

Number = float | int | bool


@dataclass(frozen=True, slots=True)
class Value:
    body: Body
    """The body that it is a value of."""
    id: int
    """Its number there."""

    @property
    def kind(self) -> str:
        return self.body.code[self.id].kind

    @property
    def axes(self) -> frozenset[int]:
        return self.body.code[self.id].axes

    def to(self, kind: str) -> Value:
        return Value(self.body, self.body.cast(self.id, kind))

    def like(self, number: Number) -> Value:
        kind = self.kind
        # As PyTorch promotes: of a plain number only the category counts, so it makes floats of integers and never
        # doubles of floats.
        if isinstance(number, float) and kind in "BL":
            kind = "F"
        elif not isinstance(number, bool) and kind == "B":
            kind = "L"
        return Value(self.body, self.body.const(number, kind))

    def _both(self, other: Value | Number) -> tuple[Value, Value]:
        right = other if isinstance(other, Value) else self.like(other)
        kind = wider(self.kind, right.kind)
        return self.to(kind), right.to(kind)

    def _two(self, op: str, other: Value | Number, kind: str | None = None) -> Value:
        a, b = self._both(other)
        if a.kind == "B" and kind is None:
            a, b = a.to("L"), b.to("L")
        return Value(self.body, self.body.emit(op, a.id, b.id, kind=kind or a.kind))

    def __add__(self, other: Value | Number) -> Value:
        return self._two("add", other)

    __radd__ = __add__

    def __sub__(self, other: Value | Number) -> Value:
        return self._two("sub", other)

    def __rsub__(self, other: Number) -> Value:
        a, b = self._both(other)
        return b._two("sub", a)

    def __mul__(self, other: Value | Number) -> Value:
        return self._two("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Value | Number) -> Value:
        a, b = self._both(other)
        if a.kind in "BL":
            a, b = a.to("F"), b.to("F")
        return a._two("div", b)

    def __rtruediv__(self, other: Number) -> Value:
        a, b = self._both(other)
        return b / a

    def __neg__(self) -> Value:
        if self.kind == "B":
            raise UnfitError("minus a bool")
        return one("neg", self)

    def compare(self, op: str, other: Value | Number) -> Value:
        a, b = self._both(other)
        if a.kind == "B":
            a, b = a.to("L"), b.to("L")
        return Value(self.body, self.body.emit(op, a.id, b.id, kind="B"))

    lt = partialmethod(compare, "lt")
    gt = partialmethod(compare, "gt")
    le = partialmethod(compare, "le")
    ge = partialmethod(compare, "ge")
    eq = partialmethod(compare, "eq")
    ne = partialmethod(compare, "ne")

    def __and__(self, other: Value) -> Value:
        return Value(self.body, self.body.emit("and", self.id, other.id, kind=_same(self, other)))

    def __or__(self, other: Value) -> Value:
        return Value(self.body, self.body.emit("or", self.id, other.id, kind=_same(self, other)))

    def __xor__(self, other: Value) -> Value:
        return Value(self.body, self.body.emit("xor", self.id, other.id, kind=_same(self, other)))

    def __invert__(self) -> Value:
        return one("not", self)

    def reduce(self, op: str, axes: Iterable[int]) -> Value:
        return Value(self.body, self.body.reduce(op, self.id, axes))

    def sum(self, axes: Iterable[int]) -> Value:
        return self.reduce("sum", axes)

    def max(self, axes: Iterable[int]) -> Value:
        return self.reduce("max", axes)

    def peak(self, axes: Iterable[int]) -> Value:
        """The maximum, for what is then subtracted from all values: a NaN need not come through it."""
        return self.reduce("peak" if self.kind in "FD" else "max", axes)

    def mean(self, axes: Iterable[int]) -> Value:
        """The sum times 1 / size: a row multiplies once more in place of dividing at each point."""
        over = tuple(axes)
        total = self.sum(over)
        return total * (1.0 / Value(self.body, self.body.extent(over, total.kind)))


def _same(a: Value, b: Value) -> str:
    if a.kind != b.kind or a.kind not in "BL":
        raise UnfitError("bits of unequal kinds")
    return a.kind


def one(op: str, x: Value) -> Value:
    return Value(x.body, x.body.emit(op, x.id, kind=x.kind))


def real(x: Value) -> Value:
    """Integers and bools become floats, as in functions of real numbers."""
    return x.to("F") if x.kind in "BL" else x


def exp(x: Value) -> Value:
    return one("exp", real(x))


def log(x: Value) -> Value:
    return one("log", real(x))


def sqrt(x: Value) -> Value:
    return one("sqrt", real(x))


def rsqrt(x: Value) -> Value:
    return 1.0 / sqrt(x)


def tanh(x: Value) -> Value:
    return one("tanh", real(x))


def erf(x: Value) -> Value:
    return one("erf", real(x))


def normal_cdf(x: Value, bell: Value) -> Value:
    """The share of the normal distribution below x. bell: exp(-x * x / 2), which spares half of the work."""
    return Value(x.body, x.body.emit("cdf", x.id, bell.id, kind=x.kind))


def sigmoid(x: Value) -> Value:
    return one("sigmoid", real(x))


def maximum(a: Value, b: Value | Number) -> Value:
    return a._two("maximum", b)


def minimum(a: Value, b: Value | Number) -> Value:
    return a._two("minimum", b)


def where(condition: Value, a: Value | Number, b: Value | Number) -> Value:
    """a where the condition holds, else b."""
    test = condition.to("B")
    if not isinstance(a, Value):
        a = b.like(a) if isinstance(b, Value) else Value(test.body, test.body.const(a, "F"))
    left, right = a._both(b)
    return Value(test.body, test.body.emit("select", test.id, left.id, right.id, kind=left.kind))


def fused(a: Value | Number, b: Value | Number, c: Value | Number) -> Value:
    """a * b + c, rounded once where the machine can: as ATen's compiler writes it of a product that is added. Of
    integers it is both. One of them at least is a `Value`."""
    some = next(x for x in (a, b, c) if isinstance(x, Value))
    values = [x if isinstance(x, Value) else some.like(x) for x in (a, b, c)]
    kind = wider(wider(values[0].kind, values[1].kind), values[2].kind)
    if kind not in "FD":
        return values[0] * values[1] + values[2]
    return Value(some.body, some.body.emit("fused", *(x.to(kind).id for x in values), kind=kind))


def is_at(body: Body, axis: int, position: Value) -> Value:
    """Whether a position along an axis is the wanted one, which is the same for the whole row."""
    at = position.to("L")
    return Value(body, body.emit("is_at", at.id, kind="B", axes={*at.axes, axis}, attr=axis))


def index(body: Body, axis: int) -> Value:
    """The position along an axis."""
    return Value(body, body.emit("index", kind="L", axes=(axis,), attr=axis))
