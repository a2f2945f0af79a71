"""Rules that say whether a call of the torch API is an op of a kind, one a function of this file.

A kind names its rules itself (`OpKind.calls`). Each takes the call, the value that it makes and what was recorded, and
returns a `CallKind`: the operands in the order of the kind's inputs and its attributes; None where the call is not
exactly that kind. Leaves out calls whose names say all (`kinds`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gnomon.frontend.records import ForwardTrace, Ref, Step
from gnomon.ops.op import AttrValue


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """What a call is in the graph."""

    kind: str
    """Name of the op kind."""
    operands: tuple[int, ...]
    """Values, in the order of the kind's inputs."""
    out: int
    """The value that it makes."""
    attrs: dict[str, AttrValue] = field(default_factory=dict)
    """Its attributes."""
    inner_first: bool = False
    """Of a linear: whether its weight is (in, out)."""
    transposed_view: int | None = None
    """A transposed view that the call reads, where the kind has what it is a view of."""

    def weight_of(self, dims: Sequence[Any]) -> tuple[Any, Any]:
        """(output, inner) of what a linear's weight has in either order."""
        return (dims[1], dims[0]) if self.inner_first else (dims[0], dims[1])


class Call:
    """A call that may be an op of a kind: its arguments by place or name."""

    def __init__(self, step: Step, trace: ForwardTrace, kind: str) -> None:
        self.function, self.kind = step.func, kind
        self.args, self.kwargs = step.call
        self.trace = trace

    def get(self, place: int, name: str, default: Any = None) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[place] if len(self.args) > place else default

    def value(self, place: int, name: str) -> int | None:
        argument = self.get(place, name)
        return argument.index if isinstance(argument, Ref) else None

    def parameter(self, place: int, name: str, dims: int) -> int | None:
        """The value, if it is a parameter that is trained."""
        index = self.value(place, name)
        if index is None:
            return None
        value = self.trace.values[index]
        return index if value.origin == "parameter" and value.grad and len(value.shape) == dims else None


def linear(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """`linear(x, weight, bias)` of a trained matrix."""
    x, weight = call.value(0, "input"), call.parameter(1, "weight", 2)
    bias, bias_argument = call.parameter(2, "bias", 1), call.get(2, "bias")
    if x is None or weight is None or (bias_argument is not None and bias is None) or len(trace.values[x].shape) < 2:
        return None
    return CallKind(kind=call.kind, operands=(x, weight) if bias is None else (x, weight, bias), out=out)


def addmm(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """`addmm(bias, x, weight)`, whose matrix is (in, out), as GPT-2's Conv1D calls it."""
    bias, x, weight = call.parameter(0, "input", 1), call.value(1, "mat1"), call.parameter(2, "mat2", 2)
    if bias is None or x is None or weight is None or {"beta", "alpha", "out"} & set(call.kwargs):
        return None
    if trace.values[bias].shape[0] != trace.values[weight].shape[1]:
        return None
    return CallKind(kind=call.kind, operands=(x, weight, bias), out=out, inner_first=True)


def matmul(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """The kind of a matmul of rows and a weight: `x @ weight`, or `x @ weight.T`; None for other calls."""
    name = "mat2" if "mat2" in call.kwargs else "other"
    x, weight, other = call.value(0, "input"), call.parameter(1, name, 2), call.value(1, name)
    if x is None or other is None or len(trace.values[x].shape) < 2 or trace.values[x].origin == "parameter":
        return None
    if weight is not None:
        return CallKind(kind=call.kind, operands=(x, weight), out=out, inner_first=True)
    whole = _transposed(other, trace)
    return None if whole is None else CallKind(kind=call.kind, operands=(x, whole), out=out, transposed_view=other)


def _transposed(index: int, trace: ForwardTrace) -> int | None:
    """The parameter whose transpose a value is."""
    value, tensor = trace.values[index], trace.tensors[index]
    if value.origin != "op" or len(value.shape) != 2:
        return None
    for other, parameter in enumerate(trace.values):
        if parameter.origin == "parameter" and parameter.grad and parameter.storage == value.storage:
            same = parameter.shape == value.shape[::-1] and trace.tensors[other].stride() == tensor.stride()[::-1]
            return other if same else None
    return None


def attention(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """`scaled_dot_product_attention` over (batch, heads, positions, dim)."""
    q, k, v = (call.value(i, name) for i, name in enumerate(("query", "key", "value")))
    mask, dropout = call.get(3, "attn_mask"), float(call.get(4, "dropout_p", 0.0))
    if q is None or k is None or v is None or any(len(trace.values[i].shape) != 4 for i in (q, k, v)):
        return None
    shapes = [trace.values[i].shape for i in (q, k, v)]
    if shapes[0][0] != shapes[1][0] or shapes[1][:3] != shapes[2][:3] or shapes[0][1] % shapes[1][1]:
        return None
    scale = call.get(6, "scale")
    options: dict[str, AttrValue] = {"causal": bool(call.get(5, "is_causal", False))}
    if scale is not None and not math.isclose(float(scale), shapes[0][3] ** -0.5, rel_tol=1e-12):
        options["scale"] = float(scale)
    if dropout:
        options["dropout"] = dropout
    if options["causal"] and shapes[0][2] != shapes[1][2]:
        return None  # torch aligns the mask at the first key, the graph at the last
    operands: tuple[int, ...] = (q, k, v)
    if mask is not None:
        if not isinstance(mask, Ref):
            return None
        operands, options["masked"] = (*operands, mask.index), True
    if shapes[0][3] != shapes[2][3] or (mask is not None and trace.values[operands[3]].grad):
        options["values_in_rows"] = trace.tensors[v].is_contiguous()
        options["in_steps"] = True  # where there is no kernel for it (`Kernels.attention_in_steps`)
    return CallKind(kind=call.kind, operands=operands, out=out, attrs=options)


def norm(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """`layer_norm` and `rms_norm` over the last dim."""
    fn = call.function.partition("_")[0]  # layer_norm, rms_norm
    x, shape = call.value(0, "input"), call.get(1, "normalized_shape")
    weight, bias = call.parameter(2, "weight", 1), call.parameter(3, "bias", 1) if fn == "layer" else None
    arguments = [call.get(2, "weight"), call.get(3, "bias") if fn == "layer" else None]
    if x is None or len(shape) != 1 or any(
        a is not None and p is None for a, p in zip(arguments, (weight, bias), strict=True)
    ):  # fmt: skip
        return None
    if bias is not None and weight is None:
        return None
    eps = call.get(4 if fn == "layer" else 3, "eps")
    if eps is None:
        eps = 1e-5 if fn == "layer" else torch.finfo(trace.values[x].dtype).eps
    operands = (x, *(i for i in (weight, bias) if i is not None))
    return CallKind(kind=call.kind, operands=operands, out=out, attrs={"fn": fn, "eps": float(eps)})


def embedding(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """A lookup in a trained table."""
    ids, table = call.value(0, "input"), call.parameter(1, "weight", 2)
    if ids is None or table is None or call.get(3, "max_norm") or call.get(5, "scale_grad_by_freq", False):
        return None
    if call.get(6, "sparse", False) or not trace.values[ids].shape:
        return None
    padding = call.get(2, "padding_idx")
    options: dict[str, AttrValue] = {}
    if padding is not None and int(padding) != -1:
        options["padding"] = int(padding) % trace.values[table].shape[0]
    return CallKind(kind=call.kind, operands=(ids, table), out=out, attrs=options)


def cross_entropy(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """The mean over rows of classes."""
    logits, labels = call.value(0, "input"), call.value(1, "target")
    if logits is None or labels is None or trace.values[labels].dtype.is_floating_point:
        return None
    if call.get(2, "weight") is not None or call.get(7, "label_smoothing", 0.0):
        return None
    if call.get(6, "reduction", "mean") != "mean" or len(trace.values[logits].shape) != 2:
        return None
    if int(call.get(4, "ignore_index", -100)) >= 0:
        return None
    return CallKind(kind=call.kind, operands=(logits, labels), out=out, attrs={"reduction": "mean"})


def dropout(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """Dropout that drops: in training, with 0 < p < 1."""
    x = call.value(0, "input")
    p = float(call.get(1, "p", 0.5))
    if (
        x is None
        or not call.get(2, "training", True)
        or not 0 < p < 1
        or trace.values[x].shape != trace.values[out].shape
    ):
        return None
    return CallKind(kind=call.kind, operands=(x,), out=out, attrs={"p": p, "drawn": True})


def activation(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """An activation of what has a gradient."""
    x = call.value(0, "input")
    if x is None or not trace.values[x].grad or trace.values[x].origin == "parameter":
        return None
    name = call.function
    if name == "gelu":
        name = "gelu_tanh" if call.get(1, "approximate", "none") == "tanh" else "gelu"
    return CallKind(kind=call.kind, operands=(x,), out=out, attrs={"fn": name})


def pair(call: Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """A sum or product of two tensors of the same shape and dtype."""
    a, b = call.value(0, "input"), call.value(1, "other")
    if a is None or b is None or call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("out") is not None:
        return None
    lhs, right, output = (trace.values[i] for i in (a, b, out))
    if not (lhs.dtype == right.dtype == output.dtype and lhs.shape == right.shape == output.shape and a != b):
        return None
    if not output.dtype.is_floating_point or "parameter" in (lhs.origin, right.origin):
        return None
    return CallKind(kind=call.kind, operands=(a, b), out=out)
