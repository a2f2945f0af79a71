"""Operations that treat each element alone: arithmetic, comparisons, activations and their backward.

A formula takes `Value`s and plain numbers under the names of ATen's schema and gives a `Value`. Leaves out
random numbers, which stay ATen's so that a seed gives what eager gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gnomon.compiler.tiles.body import HELD, Tensor, UnfitError, kind_of
from gnomon.compiler.tiles.lowering import Lowering, as_type
from gnomon.compiler.tiles.sizes import sizes_of
from gnomon.compiler.tiles.values import (
    Value,
    erf,
    exp,
    fused,
    log,
    maximum,
    minimum,
    normal_cdf,
    one,
    real,
    rsqrt,
    sigmoid,
    sqrt,
    tanh,
    where,
)

aten = torch.ops.aten
ONEDNN_GELU = 1e38
"""Beyond it oneDNN, which ATen asks for dense tensors, gives infinity, and NaN for infinity."""
LARGEST_EXACT = 1 << 24
"""Integers up to which all are float32."""
SQRT_HALF, SQRT_2_OVER_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


def pointwise(formula: Callable[..., Any], node: Lowering, *args: Any, **named: Any) -> Tensor:
    """Operands broadcast to the output and converted to its type, as ATen converts them; bools stay what they are."""
    tensors = [a for a in (*args, *named.values()) if isinstance(a, torch.fx.Node)]
    for operand in tensors:
        if not isinstance(operand.meta.get("val"), torch.Tensor):
            raise UnfitError("a number that is known when called")
    out = node.out
    dims = node.dims_of(sizes_of(out.shape), tensors)
    floating = out.dtype.is_floating_point
    out_dtype = out.dtype if out.dtype != torch.bool else _compared(formula, args)

    def value(arg: Any) -> Any:
        if formula in BOUNDS and isinstance(arg, int):
            return _held(arg, out.dtype)
        if isinstance(arg, torch.fx.Node):
            value_on_dims = node.operand(arg, dims)
            return (
                value_on_dims if out_dtype is None or value_on_dims.kind == "B" else as_type(value_on_dims, out_dtype)
            )
        if formula in ROUNDS_NUMBERS or out.dtype == torch.bool:
            return arg if out_dtype is None else _of_type(arg, out_dtype)
        return arg

    operands = [value(a) for a in args]
    if any(isinstance(a, float) for a in (*args, *named.values())) and not (floating or out.dtype == torch.bool):
        raise UnfitError("a fraction among integers")
    if formula in GUARDS and floating:
        for holds in GUARDS[formula](*operands):
            node.guard(holds)
    value_on_dims = formula(*operands, **{key: value(a) for key, a in named.items()})
    if not isinstance(value_on_dims, Value):
        raise UnfitError("a plain number")
    return node.result(value_on_dims, dims)


def _compared(formula: Callable[..., Any], args: Sequence[Any]) -> torch.dtype | None:
    """The type in which two operands are compared; None where each is looked at by itself."""
    if not isinstance(formula, partial) or formula.func is not compare:
        return None
    return torch.result_type(*(a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args))


def _of_type(number: Any, dtype: torch.dtype) -> Any:
    """A plain number as the tensor of one element that ATen makes of it."""
    if dtype not in HELD or isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return torch.tensor(number, dtype=torch.float32 if dtype.is_floating_point else torch.int64).to(dtype).item()


def _held(number: int, dtype: torch.dtype) -> int:
    """A bound as a tensor of integers holds it: -5 among bytes is 251."""
    if dtype.is_floating_point or dtype == torch.bool or isinstance(number, bool):
        return number
    return int(torch.tensor(number).to(dtype))


def add(self: Value, other: Any, *, alpha: Any = 1) -> Value:
    if alpha == 1:
        return self + other
    if isinstance(other, Value) and self.kind == other.kind == "B":  # ATen's alpha is a truth too
        return self | other if alpha else self
    return fused(other, alpha, self)


def sub(self: Value, other: Any, *, alpha: Any = 1) -> Value:
    return self - other if alpha == 1 else fused(other, -alpha, self)


def rsub(self: Value, other: Any, alpha: Any = 1) -> Value:
    return other - self if alpha == 1 else fused(self, -alpha, other)


def mul(self: Any, other: Any) -> Value:
    # A product of truths is a truth.
    if isinstance(self, Value) and isinstance(other, Value) and self.kind == other.kind == "B":
        return self & other
    return self * other  # type: ignore[no-any-return]


def div(self: Value, other: Any) -> Value:
    return self / other


def div_mode(self: Value, other: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return self / other
    raise UnfitError("division that rounds")


def power(self: Value, exponent: Any) -> Value:
    if not isinstance(self, Value) or self.kind not in "FD":
        raise UnfitError("a power of integers")
    if isinstance(exponent, Value):
        return self._two("pow", exponent)
    if exponent == 2:
        return self * self
    if exponent == 3:
        return self * self * self
    if exponent == 4:
        return (self * self) * (self * self)
    if exponent == 1:
        return self
    if exponent == 0.5:
        return sqrt(self)
    if exponent == -0.5:
        return rsqrt(self)
    if exponent == -1:
        return 1.0 / self
    if self.kind == "F" and _far_from_floats(float(exponent)):  # ATen raises to the power of a double
        raise UnfitError("an exponent that float32 makes another")
    return self._two("pow", float(exponent))


def _far_from_floats(number: float) -> bool:
    """Whether float32 makes 0 of a number, infinity, or an even one of an odd one."""
    rounded = float(torch.tensor(number, dtype=torch.float64).float())
    return rounded != number and (not rounded or math.isinf(rounded) or abs(number) > LARGEST_EXACT)


def clamp(self: Value, min: Any = None, max: Any = None) -> Value:
    # The upper bound last: where min > max, ATen gives max.
    clamped = self if min is None else maximum(self, min)
    return clamped if max is None else minimum(clamped, max)


def clamp_max(self: Value, max: Any) -> Value:
    return minimum(self, max)


def gelu(self: Value, *, approximate: str = "none") -> Value:
    x = self
    if approximate == "tanh":
        return x * _upper_half(x)
    return 0.5 * x * (1.0 + erf(x * SQRT_HALF))


def _upper_half(x: Value) -> Value:
    """GELU's (1 + tanh(u)) / 2 as sigmoid(2 u): nothing cancels where x is negative."""
    return sigmoid(2 * SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x)))


def gelu_backward(grad_output: Value, self: Value, *, approximate: str = "none") -> Value:
    x = self
    if approximate == "tanh":
        half = _upper_half(x)
        # d(x s(2u)) = s + x s (1 - s) 2u', with s the sigmoid and u = sqrt(2/pi) (x + 0.044715 x³).
        slope = half * (1.0 - half) * (2 * SQRT_2_OVER_PI * (1.0 + 3 * 0.044715 * (x * x)))
        return grad_output * (half + x * slope)
    # d(x P(x)) = P(x) + x p(x), with P the normal distribution and p its density, whose exponential serves both.
    bell = exp(-0.5 * (x * x))
    return grad_output * (normal_cdf(x, bell) + x * (bell * (1 / math.sqrt(2 * math.pi))))


def silu_backward(grad_output: Value, self: Value) -> Value:
    # d(x s(x)) = s (1 + x (1 - s)).
    s = sigmoid(self)
    return grad_output * s * fused(self, 1.0 - s, 1.0)


def threshold_backward(grad_output: Value, self: Value, threshold: Any) -> Value:
    # Asked this way round, a NaN is not at or below the threshold and its gradient passes, as ATen's does.
    return where(self.le(threshold), 0, grad_output)


def softplus(self: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = self * beta
    # Both sides of a `where` are computed: held to the threshold, the exponential of a side that is not chosen cannot
    # overflow.
    return where(scaled.gt(threshold), self, one("log1p", exp(minimum(scaled, threshold))) / beta)


def softplus_backward(grad_output: Value, self: Value, beta: float, threshold: float) -> Value:
    scaled = self * beta
    # As ATen's: e^x is a denormal at -90, where a sigmoid is 0 and makes NaN of an infinite gradient.
    z = exp(minimum(scaled, threshold))
    return where(scaled.gt(threshold), grad_output, grad_output * z / (z + 1.0))


def leaky_relu(self: Value, negative_slope: float = 0.01) -> Value:
    return where(self.gt(0), self, self * negative_slope)


def leaky_relu_backward(grad_output: Value, self: Value, negative_slope: float, self_is_result: bool) -> Value:
    return where(self.gt(0), grad_output, grad_output * negative_slope)


def elu(self: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    return where(self.gt(0), self * scale, one("expm1", self * input_scale) * (alpha * scale))


def hardtanh(self: Value, min_val: float = -1, max_val: float = 1) -> Value:
    return minimum(maximum(self, min_val), max_val)


def hardtanh_backward(grad_output: Value, self: Value, min_val: float, max_val: float) -> Value:
    return where(self.gt(min_val) & self.lt(max_val), grad_output, 0)


def hardsigmoid(self: Value) -> Value:
    return minimum(maximum(self + 3.0, 0.0), 6.0) / 6.0


def hardswish(self: Value) -> Value:
    return self * minimum(maximum(self + 3.0, 0.0), 6.0) / 6.0


def hardswish_backward(grad_output: Value, self: Value) -> Value:
    inside = where(self.lt(3.0), grad_output * (self / 3.0 + 0.5), grad_output)
    return where(self.le(-3.0), 0, inside)


def sign(self: Value) -> Value:
    return self.gt(0).to(self.kind) - self.lt(0).to(self.kind)


def logical(op: str, self: Value, other: Value) -> Value:
    a, b = self.to("B"), other.to("B")
    return {"and": a & b, "or": a | b, "xor": a ^ b}[op]


def bits(op: str, self: Value, other: Any) -> Value:
    right = other if isinstance(other, Value) else self.like(other)
    return {"and": lambda: self & right, "or": lambda: self | right, "xor": lambda: self ^ right}[op]()


def masked_fill(self: Value, mask: Value, value: Any) -> Value:
    return where(mask, value.to(self.kind) if isinstance(value, Value) else self.like(value).to(self.kind), self)


def select(condition: Value, self: Any, other: Any) -> Value:
    return where(condition, self, other)


def addcmul(self: Value, tensor1: Value, tensor2: Value, *, value: Any = 1) -> Value:
    return fused(tensor1 if value == 1 else tensor1 * value, tensor2, self)


def addcdiv(self: Value, tensor1: Value, tensor2: Value, *, value: Any = 1) -> Value:
    return self + (tensor1 / tensor2 if value == 1 else tensor1 * value / tensor2)


def lerp(self: Value, end: Value, weight: Any) -> Value:
    """Interpolates from the nearer end, as ATen does, so that both ends are exact."""
    if not isinstance(weight, Value) and self.kind == "F":
        # As the float that ATen takes: 1 less that is not the float that is nearest to 1 - weight.
        weight = torch.tensor(weight, dtype=torch.float32).item()
    apart = end - self
    near, far = fused(weight, apart, self), fused(-apart, 1.0 - weight, end)
    if not isinstance(weight, Value):
        return near if abs(weight) < 0.5 else far
    return where(one("abs", weight).lt(0.5), near, far)


def copy(self: Value, **_: Any) -> Value:
    return self


def sigmoid_backward(grad_output: Value, output: Value) -> Value:
    return grad_output * (1.0 - output) * output


def tanh_backward(grad_output: Value, output: Value) -> Value:
    return grad_output * fused(-output, output, 1.0)


def square(self: Value) -> Value:
    return self * self


def isinf(self: Value) -> Value:
    return one("abs", real(self)).eq(math.inf)


def compare(op: str, self: Value, other: Any) -> Value:
    return self.compare(op, other)


def backward_of_dropout(grad_output: Value, mask: Value, scale: float) -> Value:
    return grad_output * mask.to(grad_output.kind) * scale


def filled(node: Lowering, value: Any) -> Tensor:
    if not isinstance(value, (int, float, bool)):
        raise UnfitError("filled with a number that is known when called")
    dims = node.dims_of(sizes_of(node.out.shape), [])
    kind = kind_of(node.out.dtype)
    return node.result(Value(node.body, node.body.const(value, kind)), dims)


def full(node: Lowering, size: Any, fill_value: Any, **_: Any) -> Tensor:
    return filled(node, fill_value)


def full_like(node: Lowering, self: Any, fill_value: Any, **_: Any) -> Tensor:
    return filled(node, fill_value)


def _unary(op: str, as_real: bool = True) -> Callable[[Value], Value]:
    def formula(self: Value) -> Value:
        return one(op, real(self) if as_real else self)

    return formula


def _rounding(op: str) -> Callable[[Value], Value]:
    def formula(self: Value) -> Value:
        return self if self.kind in "BL" else one(op, self)

    return formula


ROUNDS_NUMBERS = (add, sub, rsub, power)
"""Where ATen rounds plain numbers to the type of the tensors (bfloat16) before it computes."""

BOUNDS = (clamp, clamp_max)
"""Where ATen converts plain integers to the type of the tensor, and so wraps them, before it compares."""

GUARDS: dict[Callable[..., Any], Callable[..., list[Value]]] = {
    gelu: lambda self: [~self.gt(ONEDNN_GELU)],
    # Of NaN ATen's vectors give one gradient (NaN, 0), and the rest of a row another (what was given).
    hardswish_backward: lambda grad_output, self: [self.eq(self)],
    hardtanh_backward: lambda grad_output, self, min_val, max_val: [self.eq(self)],
}
"""Formula -> what must hold of its operands for ATen to compute it."""

FORMULAS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: add,
    aten.add.Scalar: add,
    aten.sub.Tensor: sub,
    aten.sub.Scalar: sub,
    aten.rsub.Scalar: rsub,
    aten.rsub.Tensor: rsub,
    aten.mul.Tensor: mul,
    aten.mul.Scalar: mul,
    aten.div.Tensor: div,
    aten.div.Scalar: div,
    aten.div.Tensor_mode: div_mode,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: power,
    aten.square.default: square,
    aten.neg.default: lambda self: -self,
    aten.abs.default: _unary("abs", False),
    aten.exp.default: exp,
    aten.log.default: log,
    aten.log1p.default: _unary("log1p"),
    aten.expm1.default: _unary("expm1"),
    aten.sqrt.default: sqrt,
    aten.rsqrt.default: rsqrt,
    aten.reciprocal.default: lambda self: 1.0 / real(self),
    aten.sigmoid.default: sigmoid,
    aten.tanh.default: tanh,
    aten.erf.default: erf,
    aten.sin.default: _unary("sin"),
    aten.cos.default: _unary("cos"),
    aten.floor.default: _rounding("floor"),
    aten.ceil.default: _rounding("ceil"),
    aten.trunc.default: _rounding("trunc"),
    aten.round.default: _rounding("nearest"),
    aten.sign.default: sign,
    aten.relu.default: lambda self: maximum(self, 0),
    aten.gelu.default: gelu,
    aten.silu.default: lambda self: self * sigmoid(self),
    aten.softplus.default: softplus,
    aten.leaky_relu.default: leaky_relu,
    aten.elu.default: elu,
    aten.hardtanh.default: hardtanh,
    aten.hardswish.default: hardswish,
    aten.hardsigmoid.default: hardsigmoid,
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_max.default: clamp_max,
    aten.maximum.default: maximum,
    aten.minimum.default: minimum,
    aten.where.self: select,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    aten.lerp.Scalar: lerp,
    aten.lerp.Tensor: lerp,
    aten.logical_and.default: partial(logical, "and"),
    aten.logical_or.default: partial(logical, "or"),
    aten.logical_xor.default: partial(logical, "xor"),
    aten.logical_not.default: lambda self: ~self.to("B"),
    aten.bitwise_and.Tensor: partial(bits, "and"),
    aten.bitwise_or.Tensor: partial(bits, "or"),
    aten.bitwise_xor.Tensor: partial(bits, "xor"),
    aten.bitwise_not.default: lambda self: ~self,
    # NaN alone differs from itself.
    aten.isnan.default: lambda self: self.ne(self),
    aten.isinf.default: isinf,
    aten.gelu_backward.default: gelu_backward,
    aten.silu_backward.default: silu_backward,
    aten.threshold_backward.default: threshold_backward,
    aten.softplus_backward.default: softplus_backward,
    aten.leaky_relu_backward.default: leaky_relu_backward,
    aten.hardtanh_backward.default: hardtanh_backward,
    aten.hardswish_backward.default: hardswish_backward,
    aten.sigmoid_backward.default: sigmoid_backward,
    aten.tanh_backward.default: tanh_backward,
    aten.native_dropout_backward.default: backward_of_dropout,
    aten.clone.default: copy,
    aten._to_copy.default: copy,
    torch.ops.prims.convert_element_type.default: lambda self, dtype: self,
    **{
        getattr(getattr(aten, op), overload): partial(compare, op)
        for op in ("lt", "gt", "le", "ge", "eq", "ne")
        for overload in ("Tensor", "Scalar")
    },
}
RULES: dict[Any, Callable[..., Any]] = {
    **{op: partial(pointwise, formula) for op, formula in FORMULAS.items()},
    aten.full.default: full,
    aten.full_like.default: full_like,
    aten.zeros_like.default: lambda node, self, **_: filled(node, 0),
    aten.ones_like.default: lambda node, self, **_: filled(node, 1),
}
