"""Softmax, layer norm, RMS norm, group norm and batch norm, with their backward.

Each is a row's reductions stitched with what consumes them: one group reads a row once from memory and works on
it in cache. Weights' gradients are sums down the columns of the same group. A channel of batch norm is a row. Leaves
out gradients through running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnomon.compiler.rules.reduce import variance_of
from gnomon.compiler.tiles.body import Tensor, UnfitError
from gnomon.compiler.tiles.lowering import Dims, Lowering, axes_in
from gnomon.compiler.tiles.values import Value, exp, log, one, rsqrt

aten = torch.ops.aten


def _rows(node: Lowering, self: Any, dim: int) -> tuple[Value, Dims, tuple[int, ...]]:
    x, dims = node.whole(self)
    if not dims:
        raise UnfitError("a softmax of one number")
    return x, dims, axes_in(dims, [dim % len(dims)])


def softmax(node: Lowering, self: Any, dim: int, half_to_float: bool) -> Tensor:
    x, dims, axes = _rows(node, self, dim)
    # The largest is taken out first, so that no exponential overflows; the sum is then at least 1 and can be divided
    # by.
    e = exp(x - x.peak(axes))
    return node.result(e * (1.0 / e.sum(axes)), dims)


def log_softmax(node: Lowering, self: Any, dim: int, half_to_float: bool) -> Tensor:
    x, dims, axes = _rows(node, self, dim)
    shifted = x - x.peak(axes)
    return node.result(shifted - log(exp(shifted).sum(axes)), dims)


def _pair(node: Lowering, a: Any, b: Any) -> tuple[Value, Value, Dims]:
    dims = node.dims_of(node.shape(a), [a, b])
    return node.operand(a, dims), node.operand(b, dims), dims


# Rows are computed here while their sums stay below FINITE (the largest float32 is 3.4e38) and their variance above
# LEAST_VARIANCE; others are ATen's.
FINITE = 1e38
LEAST_VARIANCE = 1e-30


def _within(node: Lowering, *sums: Value) -> None:
    """Gives a row back to ATen where its sums are not finite: its order of operations says what becomes NaN."""
    for total in sums:
        node.guard(one("abs", total).lt(FINITE))


def softmax_backward(node: Lowering, grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Tensor:
    g, y, dims = _pair(node, grad_output, output)
    axes = axes_in(dims, [dim % len(dims)]) if dims else ()
    # With y = softmax(x): dx = y (g - sum(g y)), so the input need not be kept.
    return node.result(y * (g - (g * y).sum(axes)), dims)


def log_softmax_backward(node: Lowering, grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Tensor:
    g, y, dims = _pair(node, grad_output, output)
    axes = axes_in(dims, [dim % len(dims)]) if dims else ()
    # With y = log softmax(x): dx = g - exp(y) sum(g).
    return node.result(g - exp(y) * g.sum(axes), dims)


def _affine(node: Lowering, tensor: Any, dims: Dims) -> Value | None:
    return None if tensor is None else node.operand(tensor, dims)


def layer_norm(node: Lowering, input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    x, dims = node.whole(input)
    over = range(len(dims) - len(normalized_shape), len(dims))
    spread, average = variance_of(x, axes_in(dims, over), 0)
    # A constant row without eps divides 0 by 0, and a variance that overflows infinity by infinity: those rows are
    # ATen's.
    node.guard((spread + eps).gt(LEAST_VARIANCE) & spread.lt(FINITE))
    rstd = rsqrt(spread + eps)
    y = (x - average) * rstd
    w, b = _affine(node, weight, dims), _affine(node, bias, dims)
    y = y if w is None else y * w
    y = y if b is None else y + b
    # Backward reads the mean and 1 / sqrt(variance + eps) of each row, with sizes of 1 where the row was, as ATen gives
    # them.
    reduced = node.reduced_dims(dims, over, True)
    out = node.out
    return node.result(y, dims, out[0]), node.result(average, reduced, out[1]), node.result(rstd, reduced, out[2])


def layer_norm_backward(
    node: Lowering,
    grad_out: Any,
    input: Any,
    normalized_shape: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Any,
) -> Any:
    g, x, dims = _pair(node, grad_out, input)
    over = range(len(dims) - len(normalized_shape), len(dims))
    axes = axes_in(dims, over)
    average, scale = node.operand(mean, dims), node.operand(rstd, dims)
    # With n = (x - mean) rstd and h = g w, means over the row: dx = rstd (h - mean(h) - n mean(h n)), dw = sum(g n) and
    # db = sum(g) down the columns.
    normal = (x - average) * scale
    w = _affine(node, weight, dims)
    outer = axes_in(dims, range(over.start))
    inner = tuple(dims[i] for i in over)
    gradients: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        gw = g if w is None else g * w
        whole, along = gw.mean(axes), (gw * normal).mean(axes)
        _within(node, whole, along)
        gradients[0] = node.result(scale * (gw - whole - normal * along), dims, node.out[0])
    if output_mask[1]:
        gradients[1] = node.result((g * normal).sum(outer), inner, node.out[1])
    if output_mask[2]:
        gradients[2] = node.result(g.sum(outer), inner, node.out[2])
    return tuple(gradients)


def rms_norm(node: Lowering, input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    x, dims = node.whole(input)
    over = range(len(dims) - len(normalized_shape), len(dims))
    if eps is None:
        eps = torch.finfo(node.out[0].dtype).eps
    rstd = rsqrt((x * x).mean(axes_in(dims, over)) + eps)
    w = _affine(node, weight, dims)
    y = x * rstd if w is None else x * rstd * w
    return node.result(y, dims, node.out[0]), node.result(rstd, node.reduced_dims(dims, over, True), node.out[1])


def rms_norm_backward(
    node: Lowering, grad_out: Any, input: Any, normalized_shape: Any, rstd: Any, weight: Any, output_mask: Any
) -> Any:
    g, x, dims = _pair(node, grad_out, input)
    over = range(len(dims) - len(normalized_shape), len(dims))
    axes = axes_in(dims, over)
    scale = node.operand(rstd, dims)
    w = _affine(node, weight, dims)
    # As a layer norm's, without what the mean adds: dx = rstd (h - n mean(h n)), with n = x rstd and h = g w.
    normal = x * scale
    gradients: list[Tensor | None] = [None, None]
    if output_mask[0]:
        along = ((g if w is None else g * w) * normal).mean(axes)
        _within(node, along)
        gw = g if w is None else g * w
        gradients[0] = node.result(scale * (gw - normal * along), dims, node.out[0])
    if output_mask[1]:
        outer = axes_in(dims, range(over.start))
        gradients[1] = node.result((g * normal).sum(outer), tuple(dims[i] for i in over), node.out[1])
    return tuple(gradients)


def _channel(node: Lowering, tensor: Any, dims: Dims) -> Value:
    """One number for each channel, that lies in memory."""
    if node.made(tensor) is not None:
        raise UnfitError("statistics made in the group")
    return Value(node.body, node.body.load(node.external(tensor), (dims[1],)).value)


def _of_a_channel(dims: Dims) -> tuple[int, ...]:
    """Axes of all that belongs to one channel."""
    axes = axes_in(dims, [i for i in range(len(dims)) if i != 1])
    if not axes or not dims[1]:
        raise UnfitError("one channel, or one number of each")
    return axes


def batch_norm(
    node: Lowering, input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Normalises a batch in training: a channel is a row, and its statistics are the row's. Running statistics come as
    new tensors."""
    if not training:
        raise UnfitError("batch norm by running statistics")
    x, dims = node.whole(input)
    if len(dims) < 2:
        raise UnfitError("no channels")
    axes = _of_a_channel(dims)
    spread, average = variance_of(x, axes, 0)
    node.guard((spread + eps).gt(LEAST_VARIANCE) & spread.lt(FINITE))
    rstd = rsqrt(spread + eps)
    scale = rstd if weight is None else rstd * _channel(node, weight, dims)
    y = (x - average) * scale
    y = y if bias is None else y + _channel(node, bias, dims)
    # The batch is normalised by the variance over n, while running statistics are told the one over n - 1 (Bessel), as
    # torch.nn.BatchNorm has it.
    count = Value(node.body, node.body.extent(axes, spread.kind))
    unbiased = spread * (count / (count - 1.0))
    outputs = [y, average, rstd]
    for old, new in ((mean, average), (var, unbiased)):
        outputs.append(_channel(node, old, dims) * (1.0 - momentum) + new * momentum)
    return tuple(node.result(one, dims if i == 0 else (dims[1],), node.out[i]) for i, one in enumerate(outputs))


def batch_norm_backward(
    node: Lowering,
    grad_out: Any,
    input: Any,
    weight: Any,
    mean: Any,
    var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Any,
) -> Any:
    if not train or save_mean is None or save_invstd is None:
        raise UnfitError("batch norm by running statistics")
    g, x, dims = _pair(node, grad_out, input)
    axes = _of_a_channel(dims)
    scale = _channel(node, save_invstd, dims)
    normal = (x - _channel(node, save_mean, dims)) * scale
    total, along = g.sum(axes), (g * normal).sum(axes)
    _within(node, total, along)
    # As a layer norm's with a channel for a row: dx = w rstd (g - mean(g) - n mean(g n)), where w is one number of the
    # row.
    each = 1.0 / Value(node.body, node.body.extent(axes, g.kind))
    gradients: list[Tensor | None] = [None, None, None]
    if output_mask[0]:
        by = scale if weight is None else scale * _channel(node, weight, dims)
        gradients[0] = node.result(by * (g - total * each - normal * (along * each)), dims, node.out[0])
    if output_mask[1]:
        gradients[1] = node.result(along, (dims[1],), node.out[1])
    if output_mask[2]:
        gradients[2] = node.result(total, (dims[1],), node.out[2])
    return tuple(gradients)


def batch_norm_inference(
    node: Lowering, input: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    dims = node.dims_of(node.shape(input), [input])
    x = node.operand(input, dims)
    scale = rsqrt(_channel(node, var, dims) + eps)
    scale = scale if weight is None else scale * _channel(node, weight, dims)
    y = (x - _channel(node, mean, dims)) * scale
    y = y if bias is None else y + _channel(node, bias, dims)
    for other in node.out[1:]:
        if other.numel() != 0:
            raise UnfitError("batch norm that keeps statistics")
    return node.result(y, dims, node.out[0]), None, None


RULES: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: softmax,
    aten._log_softmax.default: log_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    aten._native_batch_norm_legit_no_training.default: batch_norm_inference,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
