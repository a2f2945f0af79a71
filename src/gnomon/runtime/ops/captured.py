"""`opaque` and captured views: the ATen ops that a module ran, run again.

A node's operands are tensors by name, literals, and numbers that follow from the sizes of this rank's batch. Returns
the op's outputs. Autograd goes through the ATen ops as it went through the module's. Leaves out kinds of the graph,
which have functions of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import RunError
from gnomon.graph import Block, Literal, Node, Op, Size, Torch, Use
from gnomon.runtime.ops.site import Operand, Result, Site, is_given, read, requiring_grad


@lru_cache(maxsize=4096)
def aten(target: str) -> Any:
    """`aten.mul.Tensor` -> the op."""
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def random_draws(op: Op) -> tuple[str, ...]:
    """What of an op of a captured model draws random numbers: ATen ops, or `dropout`."""
    if op.does == "drops" and op.attr("drawn", False):
        return ("dropout",)
    nodes = () if op.captured is None else op.captured.nodes
    return tuple(n.target for n in nodes if torch.Tag.nondeterministic_seeded in aten(n.target).tags)


def written_linears(block: Block) -> frozenset[str]:
    """Results of linears that a captured op writes into, directly or through views. What a function of our own returns
    as a view cannot be written into."""
    from_linear = dict[str, frozenset[str]]()
    found = frozenset[str]()
    for op in block.ops:
        if op.is_dense_linear:
            from_linear[op.outputs[0]] = frozenset((op.outputs[0],))
        elif op.captured is None:
            if op.rules.memory == "view" and op.inputs:
                from_linear[op.outputs[0]] = from_linear.get(op.inputs[0], frozenset())
        for node in op.captured.nodes if op.captured is not None else ():
            target = node.args[0].name if node.args and isinstance(node.args[0], Use) else ""
            if (of := from_linear.get(target)) is None:
                continue
            if aten(node.target)._schema.is_mutable:
                found |= of
            if node.view or aten(node.target)._schema.is_mutable:
                from_linear |= dict.fromkeys(node.outputs, of)
    return found


RESHAPED = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
"""Views of what may lie otherwise in memory here than where the module was recorded: a part, or a gathered whole."""


ARITHMETIC = frozenset(
    "add sub rsub mul div true_divide floor_divide remainder fmod pow clamp clamp_min clamp_max threshold masked_fill "
    "fill eq ne lt le gt ge maximum minimum addcmul addcdiv lerp xlogy".split()
)
"""Ops whose numbers are values, not lengths: a mean divides by all positions, whoever holds them."""


_OWN = (Use, Literal)
"""Operands that each run has anew."""


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One ATen op, ready to run."""

    node: Node
    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Constants and numbers as torch takes them; `Use` and `Literal`, alone or in lists, where each run has its own."""
    kwargs: dict[str, Any]
    shape: tuple[int, ...] | None
    """What its output must be, where that depends on numbers."""
    fixed: bool
    """Whether no operand is a list of tensors or written out, so that names alone are looked up."""


def calls(
    op: Op, sizes: Mapping[str, int], whole: Mapping[str, int], compute: torch.dtype, where: torch.device
) -> list[AtenCall]:
    """The ATen ops of a captured op. sizes: of the dims on this rank; `whole`, of all ranks together, which arithmetic
    is done with. compute: what the graph's `compute` is. where: what its `device` is."""
    assert op.captured is not None, "of captured ops only"
    aten_calls = []
    for node in op.captured.nodes:
        # A shape wants this rank's sizes, a mean the whole ones.
        known = whole if node.target.split(".")[1].rstrip("_") in ARITHMETIC else sizes
        args = tuple(_ready(x, known, compute, where) for x in node.args)
        kwargs = {name: _ready(x, known, compute, where) for name, x in node.kwargs}
        shape = None if node.shape is None else tuple(_ready(x, known, compute, where) for x in node.shape)
        # Found once: most ops need no walk through their operands each time they run.
        fixed = not any(_is_own(x) for x in (*args, *kwargs.values()) if type(x) is not Use)
        aten_calls.append(AtenCall(node, aten(RESHAPED.get(node.target, node.target)), args, kwargs, shape, fixed))
    return aten_calls


def _ready(x: Any, sizes: Mapping[str, int], compute: torch.dtype, where: torch.device) -> Any:
    if isinstance(x, Size):
        return x.value(sizes)
    if isinstance(x, tuple):
        return [_ready(inner, sizes, compute, where) for inner in x]
    if isinstance(x, Torch):
        if x.name == "device":
            return where
        return compute if x.name == "compute" else getattr(torch, x.name)
    return x


def _is_own(x: Any) -> bool:
    return any(map(_is_own, x)) if isinstance(x, list) else isinstance(x, _OWN)


def _operand(x: Any, values: Mapping[str, Any], where: torch.device) -> Any:
    if isinstance(x, Use):
        return values[x.name]
    if isinstance(x, list):
        return [_operand(inner, values, where) for inner in x]
    if isinstance(x, Literal):
        written = (
            [list(v) if isinstance(v, tuple) else v for v in x.values] if isinstance(x.values, tuple) else x.values
        )
        return torch.tensor(written, dtype=getattr(torch, x.dtype), device=where).reshape(x.shape)
    return x


def _held_to(call: AtenCall, result: Tensor, op: Op) -> None:
    """RunError where the code would have gone on in another way than with the example: it read other numbers, or
    made another number of rows. A warning where it was a question, or a number that is no count."""
    node = call.node
    where = op.captured.where if op.captured is not None else ""
    if call.shape is not None:
        if tuple(result.shape) != call.shape:
            raise RunError(
                f"{where}: {node.target} makes {tuple(result.shape)} of these values, and made {call.shape} of the "
                "example's; the Graph holds for inputs like the example"
            )
        return
    want, got = _listed(node.read_values), result.tolist()
    if torch.equal(torch.tensor(want), torch.tensor(got)):
        return
    message = f"{where}: Python reads {got} here, and read {want} of the example; "
    if result.dtype == torch.bool or result.is_floating_point():
        warnings.warn(f"{message}the Graph goes on as with the example", stacklevel=2)
    else:
        raise RunError(f"{message}the Graph holds for inputs like the example")


def _listed(x: Any) -> Any:
    return [_listed(inner) for inner in x] if isinstance(x, tuple) else x


def captured(aten_calls: Sequence[AtenCall], where: torch.device, site: Site, *operands: Operand) -> Result:
    """Runs the ATen calls of a captured op and returns its outputs. aten_calls: its `calls`."""
    op = site.op
    values: dict[str, Any] = {}
    of_batch, goes_back = list[str](), False
    for name, x in zip(op.inputs, operands, strict=True):
        values[name] = x = x if isinstance(x, Tensor) else read(x)
        if x.requires_grad:
            if is_given(x):
                of_batch.append(name)
            else:
                goes_back = True
    for name in of_batch:  # nobody wants its gradient
        values[name] = values[name].detach()
    for call in aten_calls:
        if call.fixed:
            args = [values[x.name] if type(x) is Use else x for x in call.args]
            kwargs = {name: values[x.name] if type(x) is Use else x for name, x in call.kwargs.items()}
        else:
            args = [_operand(x, values, where) for x in call.args]
            kwargs = {name: _operand(x, values, where) for name, x in call.kwargs.items()}
        out, node = call.function(*args, **kwargs), call.node
        if node.read_values is not None or call.shape is not None:
            _held_to(call, out[0] if node.many else out, op)
        for name, x in zip(node.outputs, out if node.many else (out,), strict=False):
            if name:
                values[name] = x
    outs: tuple[Tensor, ...] = tuple(values[name] for name in op.outputs)
    if of_batch and not goes_back and torch.is_grad_enabled():  # made of the batch alone, and so as the batch is
        outs = tuple(requiring_grad(x) if x.is_floating_point() else x for x in outs)
    return outs if len(outs) > 1 else outs[0]
