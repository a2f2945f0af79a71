"""Calls of the torch API that an op kind of the graph stands for.

`kind_of(step, trace)` looks at what was called with what and returns a `CallKind`: the graph's kind, its operands in
the graph's order and its attributes. None for a call that no kind says exactly; then it becomes an `opaque` op or a
view. Leaves out dims (`axes`), and whether operands' dims fit together, which `convert` sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from gnomon import ops
from gnomon.frontend.axes import Axes
from gnomon.frontend.records import ForwardTrace, Ref, Step
from gnomon.frontend.rules import Row
from gnomon.ops.op import AttrValue, TorchCall
from gnomon.tensors.captured import Node, mutates


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


class _Call:
    """Arguments of a call by place or name."""

    def __init__(self, step: Step, trace: ForwardTrace) -> None:
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


def kind_of(step: Step, trace: ForwardTrace) -> CallKind | None:
    """The kind of a call; None if none says it."""
    rule = _KINDS.get(step.func)
    if not step.nodes:
        return None
    out = next((index for index in reversed(step.nodes[-1].outs) if index is not None), None)
    first = next((index for index in step.nodes[-1].outs if index is not None), None)
    if out is None or first is None or _writes_over(step, trace):
        return None
    if rule is None:
        return _called(step, out, trace)
    return rule(_Call(step, trace), first if step.func != "native" else out, trace)


def _writes_over(step: Step, trace: ForwardTrace) -> bool:
    """Whether it writes into memory that it did not make."""
    own = set[int]()
    for node in step.nodes:
        reads = [trace.values[x.index].storage for x in node.args if isinstance(x, Ref)]
        if mutates(Node(target=node.target, args=())):
            if reads[0] not in own:
                return True
            continue
        own |= {trace.values[o].storage for o in node.outs if o is not None} - set(reads)
    return False


def _linear(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
    x, weight = call.value(0, "input"), call.parameter(1, "weight", 2)
    bias, bias_argument = call.parameter(2, "bias", 1), call.get(2, "bias")
    if x is None or weight is None or (bias_argument is not None and bias is None) or len(trace.values[x].shape) < 2:
        return None
    return CallKind(kind="linear", operands=(x, weight) if bias is None else (x, weight, bias), out=out)


def _addmm(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
    bias, x, weight = call.parameter(0, "input", 1), call.value(1, "mat1"), call.parameter(2, "mat2", 2)
    if bias is None or x is None or weight is None or {"beta", "alpha", "out"} & set(call.kwargs):
        return None
    if trace.values[bias].shape[0] != trace.values[weight].shape[1]:
        return None
    return CallKind(kind="linear", operands=(x, weight, bias), out=out, inner_first=True)


def _matmul_kind(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
    """The kind of a matmul of rows and a weight: `x @ weight`, or `x @ weight.T`; None for other calls."""
    name = "mat2" if "mat2" in call.kwargs else "other"
    x, weight, other = call.value(0, "input"), call.parameter(1, name, 2), call.value(1, name)
    if x is None or other is None or len(trace.values[x].shape) < 2 or trace.values[x].origin == "parameter":
        return None
    if weight is not None:
        return CallKind(kind="linear", operands=(x, weight), out=out, inner_first=True)
    whole = _transposed(other, trace)
    return None if whole is None else CallKind(kind="linear", operands=(x, whole), out=out, transposed_view=other)


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


def _attention(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
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
    return CallKind(kind="attention", operands=operands, out=out, attrs=options)


def _norm(fn: str) -> Callable[[_Call, int, ForwardTrace], CallKind | None]:
    def rule(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
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
        return CallKind(kind="norm", operands=operands, out=out, attrs={"fn": fn, "eps": float(eps)})

    return rule


def _embedding(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
    ids, table = call.value(0, "input"), call.parameter(1, "weight", 2)
    if ids is None or table is None or call.get(3, "max_norm") or call.get(5, "scale_grad_by_freq", False):
        return None
    if call.get(6, "sparse", False) or not trace.values[ids].shape:
        return None
    padding = call.get(2, "padding_idx")
    options: dict[str, AttrValue] = {}
    if padding is not None and int(padding) != -1:
        options["padding"] = int(padding) % trace.values[table].shape[0]
    return CallKind(kind="embedding", operands=(ids, table), out=out, attrs=options)


def _cross_entropy(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
    logits, labels = call.value(0, "input"), call.value(1, "target")
    if logits is None or labels is None or trace.values[labels].dtype.is_floating_point:
        return None
    if call.get(2, "weight") is not None or call.get(7, "label_smoothing", 0.0):
        return None
    if call.get(6, "reduction", "mean") != "mean" or len(trace.values[logits].shape) != 2:
        return None
    if int(call.get(4, "ignore_index", -100)) >= 0:
        return None
    return CallKind(kind="cross_entropy", operands=(logits, labels), out=out, attrs={"reduction": "mean"})


def _dropout(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
    x = call.value(0, "input")
    p = float(call.get(1, "p", 0.5))
    if (
        x is None
        or not call.get(2, "training", True)
        or not 0 < p < 1
        or trace.values[x].shape != trace.values[out].shape
    ):
        return None
    return CallKind(kind="dropout", operands=(x,), out=out, attrs={"p": p, "drawn": True})


def _activation(fn: str) -> Callable[[_Call, int, ForwardTrace], CallKind | None]:
    def rule(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
        x = call.value(0, "input")
        if x is None or not trace.values[x].grad or trace.values[x].origin == "parameter":
            return None
        name = fn
        if fn == "gelu":
            name = "gelu_tanh" if call.get(1, "approximate", "none") == "tanh" else "gelu"
        return CallKind(kind="activation", operands=(x,), out=out, attrs={"fn": name})

    return rule


def _pair(kind: str) -> Callable[[_Call, int, ForwardTrace], CallKind | None]:
    def rule(call: _Call, out: int, trace: ForwardTrace) -> CallKind | None:
        a, b = call.value(0, "input"), call.value(1, "other")
        if a is None or b is None or call.kwargs.get("alpha", 1) != 1 or call.kwargs.get("out") is not None:
            return None
        lhs, right, output = (trace.values[i] for i in (a, b, out))
        if not (lhs.dtype == right.dtype == output.dtype and lhs.shape == right.shape == output.shape and a != b):
            return None
        if not output.dtype.is_floating_point or "parameter" in (lhs.origin, right.origin):
            return None
        return CallKind(kind=kind, operands=(a, b), out=out)

    return rule


_KINDS: dict[str, Callable[[_Call, int, ForwardTrace], CallKind | None]] = {
    "linear": _linear,
    "addmm": _addmm,
    "mm": _matmul_kind,
    "matmul": _matmul_kind,
    "__matmul__": _matmul_kind,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _norm("layer"),
    "rms_norm": _norm("rms"),
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "gelu": _activation("gelu"),
    "relu": _activation("relu"),
    "silu": _activation("silu"),
    "tanh": _activation("tanh"),
    "sigmoid": _activation("sigmoid"),
    "add": _pair("add"),
    "__add__": _pair("add"),
    "mul": _pair("mul"),
    "__mul__": _pair("mul"),
}


@cache
def _of_calls() -> dict[str, tuple[str, TorchCall]]:
    """Function -> (kind, how it is called), of the kinds that say so."""
    found: dict[str, tuple[str, TorchCall]] = {}
    for kind in ops.every():
        if not isinstance(kind.calls, str):
            found |= {call.function: (kind.name, call) for call in kind.calls}
    return found


ROLES = ("heads", "kv_heads", "head_dim", "v_dim")
"""Names of axes that say what an axis is in any model."""


def named_axes(kind: str) -> tuple[str, ...]:
    """Names of the axes of a kind's operands and result, where its call says them one by one."""
    calls = ops.find(kind).calls
    return next((call.axes for call in calls if isinstance(call, TorchCall) and isinstance(call.axes, tuple)), ())


def _called(step: Step, out: int, trace: ForwardTrace) -> CallKind | None:
    """The kind that says so of a call, of tensors in the dtype that it makes and numbers; None for others."""
    targets = {node.target for node in step.nodes}
    custom = "::".join(next(iter(targets)).split(".")[:2]) if len(targets) == 1 else ""
    found = _of_calls().get(step.func) or _of_calls().get(custom)
    if found is None:
        return None
    (kind, known), call = found, _Call(step, trace)
    if custom == known.function:
        (node,) = step.nodes
        call.args, call.kwargs = tuple(node.args), dict(node.kwargs)
    operands = [call.value(place, name) for place, name in enumerate(known.operands)]
    named = {name: call.get(place, name) for place, name in enumerate(known.numbers, len(operands))}
    named = {name: value for name, value in named.items() if value is not None}
    if not all(isinstance(value, (int, float)) for value in named.values()):
        return None
    values = [trace.values[index] for index in operands if index is not None]
    floats = [value for value in values if value.dtype.is_floating_point]
    if len(values) < len(operands) or any(value.dtype != trace.values[out].dtype for value in floats):
        return None
    trains = ops.find(kind).gradient != "none"
    if values[0].origin == "parameter" or not values[0].dtype.is_floating_point or (trains and not values[0].grad):
        return None
    if ops.find(kind).contracts and (values[1].origin != "parameter" or not values[1].grad):
        return None
    return CallKind(kind=kind, operands=tuple(index for index in operands if index is not None), out=out, attrs=named)


def link_kind(kind: CallKind, rows: list[Row], axes: Axes) -> None:
    """Joins the axes of a kind's operands and output, and says what they are."""
    ins, out = [rows[i] for i in kind.operands], rows[kind.out]
    does = ops.find(kind.kind).does
    match kind.kind:
        case _ if does == "multiplies":
            for a, b in zip(ins[0][:-1], out[:-1], strict=True):
                axes.same(a, b)
            rows_out, inner = kind.weight_of(ins[1])
            axes.same(ins[0][-1], inner)
            axes.same(out[-1], rows_out)
            if len(ins) > 2:
                axes.same(out[-1], ins[2][0])
        case "attention":
            q, k, v = ins[:3]
            for a, b in ((q[0], k[0]), (q[0], v[0]), (q[0], out[0]), (k[2], v[2]), (q[2], out[2]), (k[1], v[1]),
                         (q[1], out[1]), (q[3], k[3]), (v[3], out[3])):  # fmt: skip
                axes.same(a, b)
            axes.role(q[1], "heads")
            axes.role(k[1], "kv_heads")
            axes.role(q[3], "head_dim")
            axes.role(v[3], "v_dim")
            if len(ins) > 3 and len(ins[3]) == 4:  # a bias of each head
                axes.same(q[1], ins[3][1])
        case "embedding":
            for a, b in zip([*ins[0], ins[1][1]], out, strict=True):
                axes.same(a, b)
        case "cross_entropy":
            axes.same(ins[0][0], ins[1][0])
        case "norm":
            for a, b in zip(ins[0], out, strict=True):
                axes.same(a, b)
            for row in ins[1:]:
                axes.same(row[0], out[-1])
        case _ if named := named_axes(kind.kind):
            first = dict[str, Any]()
            for row, names in zip([*ins, out], named, strict=True):
                for axis, name in zip(row, names.split(), strict=True):
                    axes.same(first.setdefault(name, axis), axis)
                    if name in ROLES:
                        axes.role(axis, name)
        case _:
            for row in ins:
                for a, b in zip(row, out, strict=True):
                    axes.same(a, b)
