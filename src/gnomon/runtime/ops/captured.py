"""`opaque` and captured views: the ATen ops that a module ran, run again.

A node's operands are tensors by name, literals, and numbers that follow from the sizes of this rank's batch. Returns
the op's outputs. Autograd goes through the ATen ops as it went through the module's. Leaves out kinds of the graph,
which have functions of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import RunError
from gnomon.graph import Block, Literal, Node, Op, Size, Torch, Use
from gnomon.runtime.ops.site import Operand, Result, Site, is_given, read


@lru_cache(maxsize=4096)
def aten(target: str) -> Any:
    """`aten.mul.Tensor` -> the op."""
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def drawn(op: Op) -> tuple[str, ...]:
    """What of an op of a captured model draws random numbers: ATen ops, or `dropout`."""
    if op.kind == "dropout" and op.attr("drawn", False):
        return ("dropout",)
    nodes = () if op.captured is None else op.captured.nodes
    return tuple(n.target for n in nodes if torch.Tag.nondeterministic_seeded in aten(n.target).tags)


def written(block: Block) -> frozenset[str]:
    """Results of linears that a captured op writes into, directly or through views. What a function of our own returns
    as a view cannot be written into."""
    from_linear = dict[str, frozenset[str]]()
    found = frozenset[str]()
    for op in block.ops:
        if op.kind == "linear":
            from_linear[op.outputs[0]] = frozenset((op.outputs[0],))
        elif op.captured is None:
            if op.kind in ("reshape", "rename") and op.inputs:
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


class _Frame:
    """Tensors of one run of an op."""

    def __init__(self, values: dict[str, Any], sizes: Mapping[str, int], compute: torch.dtype, where: torch.device):
        self.values, self.sizes, self.compute, self.where = values, sizes, compute, where

    def operand(self, x: Any) -> Any:
        if isinstance(x, Use):
            return self.values[x.name]
        if isinstance(x, Size):
            return x.value(self.sizes)
        if isinstance(x, tuple):
            return [self.operand(inner) for inner in x]
        if isinstance(x, Torch):
            if x.name == "device":
                return self.where
            return self.compute if x.name == "compute" else getattr(torch, x.name)
        if isinstance(x, Literal):
            values = (
                [list(v) if isinstance(v, tuple) else v for v in x.values] if isinstance(x.values, tuple) else x.values
            )
            return torch.tensor(values, dtype=getattr(torch, x.dtype), device=self.where).reshape(x.shape)
        return x


def _held_to(node: Node, made: Tensor, frame: _Frame, op: Op) -> None:
    """RunError where the code would have gone on in another way than with the example: it read other numbers, or
    made another number of rows. A warning where it was a question, or a number that is no count."""
    where = op.captured.where if op.captured is not None else ""
    if node.shape is not None:
        want = tuple(frame.operand(x) for x in node.shape)
        if tuple(made.shape) != want:
            raise RunError(
                f"{where}: {node.target} makes {tuple(made.shape)} of these values, and made {want} of the example's; "
                "the Graph holds for inputs like the example"
            )
        return
    want, got = frame.operand(node.read), made.tolist()
    if torch.equal(torch.tensor(want), torch.tensor(got)):
        return
    said = f"{where}: Python reads {got} here, and read {want} of the example; "
    if made.dtype == torch.bool or made.is_floating_point():
        warnings.warn(f"{said}the Graph goes on as with the example", stacklevel=2)
    else:
        raise RunError(f"{said}the Graph holds for inputs like the example")


def captured(
    site: Site,
    sizes: Mapping[str, int],
    compute: torch.dtype,
    device: torch.device,
    *operands: Operand,
    whole: Mapping[str, int] | None = None,
) -> Result:
    """The op's outputs. sizes: of the dims on this rank; `whole`, of all ranks together, which arithmetic is done with.
    compute: what the graph's `compute` is."""
    op = site.op
    assert op.captured is not None, "of captured ops only"
    values: dict[str, Any] = {name: read(x) for name, x in zip(op.inputs, operands, strict=True)}
    if any(x.requires_grad and not is_given(x) for x in values.values()):  # so there is a way back without the batch
        values = {name: x.detach() if is_given(x) else x for name, x in values.items()}
    frame = _Frame(values, sizes, compute, device)
    for node in op.captured.nodes:
        name = node.target.split(".")[1].rstrip("_")
        frame.sizes = whole if whole is not None and name in ARITHMETIC else sizes
        args = [frame.operand(x) for x in node.args]
        kwargs = {name: frame.operand(x) for name, x in node.kwargs}
        target = RESHAPED.get(node.target, node.target)
        made = aten(target)(*args, **kwargs)
        if node.read is not None or node.shape is not None:
            _held_to(node, made[0] if node.many else made, frame, op)
        for name, x in zip(node.outputs, made if node.many else (made,), strict=False):
            if name:
                values[name] = x
    outs: tuple[Tensor, ...] = tuple(values[name] for name in op.outputs)
    return outs if len(outs) > 1 else outs[0]
