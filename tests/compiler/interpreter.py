"""An interpreter of bodies: what the instructions of a group mean, by torch's own operations and without C++.

`Lowered` gives a graph's outputs by one body that computes all of them. Values are tensors
with a dim for each axis of the body, of size 1 where the value is the same along it. Rules, casts and maps of indices
are tried in milliseconds on any inputs; that the C++ text means the same is for programs that are compiled.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gnomon.compiler.graph.groups import lower
from gnomon.compiler.tiles.body import HELD, REDUCTIONS, Body, UnfitError

KINDS = {"F": torch.float32, "D": torch.float64, "L": torch.int64, "B": torch.bool}
MEANS: dict[str, Callable[..., torch.Tensor]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "neg": operator.neg,
    "select": torch.where,
    "fused": lambda a, b, c: torch.addcmul(c, a, b),
    "nearest": torch.round,
    "cdf": lambda x, bell: 0.5 * (1 + torch.erf(x * math.sqrt(0.5))),
    "fits32": lambda x: torch.where((x >= -(2**31)) & (x < 2**31), x, -(2**31)),
    **{name: getattr(operator, name) for name in ("lt", "gt", "le", "ge", "eq", "ne")},
    **{
        name: getattr(torch, name)
        for name in ("maximum", "minimum", "abs", "exp", "log", "sqrt", "erf", "sin", "cos", "floor", "ceil", "trunc",
                     "sigmoid", "tanh", "expm1", "log1p", "pow")
    },
    **{name: lambda x, dtype=dtype: x.to(dtype).to(x.dtype) for dtype, name in HELD.items()},
}  # fmt: skip
SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, dims: x.sum(dims, keepdim=True),
    "max": lambda x, dims: x.amax(dims, keepdim=True),
    "peak": lambda x, dims: x.amax(dims, keepdim=True),
    "min": lambda x, dims: x.amin(dims, keepdim=True),
    "any": lambda x, dims: _each(torch.any, x, dims),
    "all": lambda x, dims: _each(torch.all, x, dims),
    "prod": lambda x, dims: _each(torch.prod, x, dims),
}


class Failed(Exception):
    """A check that the body makes does not hold: ATen computes these inputs."""


def _each(function: Callable[..., torch.Tensor], x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        x = function(x, dim, keepdim=True)
    return x


class Lowered:
    """A function as one body, traced once and run on any inputs of one layout; `body` is None where there is none."""

    def __init__(self, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
        self.traced = make_fx(function, tracing_mode="fake")(*inputs)
        self.traced.graph.eliminate_dead_code()
        self.body: Body | None = Body()
        try:
            for node in self.traced.graph.nodes:
                if node.op == "call_function":
                    lower(self.body, node)
        except (UnfitError, KeyError):
            self.body = None
        [asked] = self.traced.graph.output_node().args
        self.asked = [n for n in (asked if isinstance(asked, (tuple, list)) else (asked,)) if n is not None]
        if self.body is not None and not all(n in self.body.tensors for n in self.asked):
            self.body = None

    def __call__(self, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(the body's, the graph's) outputs. Raises `Failed` where the body leaves these inputs to ATen."""
        assert self.body is not None
        wanted = self.traced(*inputs)
        wanted = [x for x in (wanted if isinstance(wanted, (tuple, list)) else (wanted,)) if x is not None]
        given = dict(zip((n for n in self.traced.graph.nodes if n.op == "placeholder"), inputs, strict=True))
        values = computed(self.body, given)
        return [_tensor(self.body, values, self.body.tensors[node]) for node in self.asked], wanted


def computed(body: Body, given: dict[Any, torch.Tensor]) -> list[torch.Tensor]:
    """The tensor of each instruction. given: memory by node."""
    rank, values = len(body.axes), list[Any]()
    for ins in body.code:
        args = [values[a] for a in ins.args]
        values.append(_value(body, ins, args, given, rank))
    return values


def _value(body: Body, ins: Any, args: list[Any], given: dict[Any, torch.Tensor], rank: int) -> Any:
    ones, kind = [1] * rank, KINDS[ins.kind]
    if ins.op == "load":
        inp = body.inputs[ins.attr]
        memory = given[inp.node]
        shape = [body.axes[a] if a in inp.strides else 1 for a in range(rank)]
        strides = [inp.strides.get(a, 0) for a in range(rank)]
        return memory.as_strided(shape, strides, memory.storage_offset() + inp.offset).to(kind)
    if ins.op == "take":
        inp = body.inputs[ins.attr]
        memory, at = given[inp.node], args[0]
        if not bool(((at >= 0) & (at < inp.rows)).all()):
            raise Failed
        [(axis, step)] = inp.strides.items()
        table = memory.as_strided((inp.rows, body.axes[axis]), (inp.index_stride, step), memory.storage_offset())
        return table[at.squeeze(axis)].movedim(-1, axis).to(kind)
    if ins.op == "const":
        plain = ins.attr == "True" if ins.kind == "B" else int(ins.attr) if ins.kind == "L" else float(ins.attr)
        return torch.full(ones, plain, dtype=kind)
    if ins.op == "extent":
        return torch.full(ones, math.prod(body.axes[a] for a in ins.attr), dtype=kind)
    if ins.op == "index" or ins.op == "is_at":
        along = torch.arange(body.axes[ins.attr]).view([-1 if a == ins.attr else 1 for a in range(rank)])
        return along if ins.op == "index" else along == args[0]
    if ins.op == "check":
        if not bool(args[0].all()):
            raise Failed
        return args[0]
    if ins.op == "cast":
        return args[0].to(kind)
    if ins.op in REDUCTIONS:
        return SUMS[ins.op](args[0], ins.attr)
    return MEANS[ins.op](*args)


def _tensor(body: Body, values: list[torch.Tensor], tensor: Any) -> torch.Tensor:
    whole = values[tensor.value].expand(
        [body.axes[a] if a in {b for dim in tensor.dims for b in dim} else 1 for a in range(len(body.axes))]
    )
    order = [a for dim in tensor.dims for a in dim]
    rest = [a for a in range(len(body.axes)) if a not in order]
    return whole.permute(*order, *rest).reshape(tensor.sizes).to(tensor.dtype)
