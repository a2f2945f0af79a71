"""One node of the graph placed in one body: its operands found or loaded, its results laid on the axes.

`Lowering` is what rules are written against: `operand` and `together` give values, `result` a tensor. Returns
nothing by itself. Leaves out which nodes share a body (`groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gnomon.compiler.tiles.body import Body, External, Tensor, UnfitError, kind_of
from gnomon.compiler.tiles.sizes import Size, equal, sizes_of
from gnomon.compiler.tiles.values import Value, one

Dims = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Lowering:
    body: Body
    """What the group computes so far."""
    node: torch.fx.Node
    """The node that is lowered into it."""
    sources: Any
    """node -> External: where what other nodes made lies in memory."""

    @property
    def out(self) -> Any:
        return self.node.meta["val"]

    def made(self, node: torch.fx.Node) -> Tensor | None:
        return self.body.tensors.get(node)

    def external(self, node: torch.fx.Node) -> External:
        source: External | None = self.sources(node)
        if source is None:
            raise UnfitError("not in memory")
        return source

    def shape(self, node: Any) -> tuple[Size, ...]:
        return sizes_of(node.meta["val"].shape)

    def dims_of(self, shape: Sequence[Size], operands: Sequence[Any]) -> Dims:
        """Axes of an output of this shape, to which operands are broadcast from the right."""
        # `place` may divide axes, those of operands among them, whose dims are then others: they are read again until
        # none is divided.
        for _ in range(8):
            before = len(self.body.axes)
            known: list[tuple[int, ...] | None] = [None] * len(shape)
            for operand in operands:
                tensor = self.made(operand)
                if tensor is None:
                    continue
                shift = len(shape) - len(tensor.sizes)
                for i, (size, dim) in enumerate(zip(tensor.sizes, tensor.dims, strict=True)):
                    if not dim or not equal(size, shape[i + shift]):
                        continue
                    if known[i + shift] not in (None, dim):
                        raise UnfitError("operands on other axes")
                    known[i + shift] = dim
            used = [axis for dim in known if dim for axis in dim]
            if len(used) != len(set(used)):
                raise UnfitError("one axis for two dims")
            dims = self.body.place(shape, known)
            if len(self.body.axes) == before or not self._divided(operands, before):
                return dims
        raise UnfitError("axes that divide without end")

    def _divided(self, operands: Sequence[Any], before: int) -> bool:
        """Whether an axis of an operand was divided, so that what was read of it is old."""
        fresh = set(range(before, len(self.body.axes)))
        return any(
            fresh & {a for dim in tensor.dims for a in dim}
            for tensor in (self.made(operand) for operand in operands)
            if tensor is not None
        )

    def operand(self, node: Any, dims: Dims) -> Value:
        """The value of a tensor broadcast to dims; plain numbers have no node and do not come here."""
        tensor = self.made(node)
        if tensor is None:
            source = self.external(node)
            shift = len(dims) - len(source.sizes)
            # Dims are aligned at the last one. One of size 1 is broadcast: it has no axis, and so no stride.
            mine = tuple(() if equal(size, 1) else dims[i + shift] for i, size in enumerate(source.sizes))
            tensor = self.body.load(source, mine)
        return Value(self.body, tensor.value)

    def operand_on(self, node: Any, dims: Dims) -> Value:
        """The value of a tensor whose dims lie exactly there."""
        tensor = self.made(node)
        if tensor is None:
            return Value(self.body, self.body.load(self.external(node), dims).value)
        if tensor.dims != tuple(dims):
            raise UnfitError("operands on other axes")
        return Value(self.body, tensor.value)

    def whole(self, node: Any) -> tuple[Value, Dims]:
        """A tensor on its own dims."""
        dims = self.dims_of(self.shape(node), [node])
        tensor = self.made(node)
        value = Value(self.body, tensor.value) if tensor is not None else self.operand(node, dims)
        return value, tensor.dims if tensor is not None else dims

    def result(self, value: Value, dims: Dims, meta: Any = None) -> Tensor:
        """Makes the output tensor, converted to the type that it has in memory."""
        fake = self.out if meta is None else meta
        return Tensor(value=as_type(value, fake.dtype).id, sizes=sizes_of(fake.shape), dims=dims, dtype=fake.dtype)

    def guard(self, holds: Value) -> None:
        """ATen computes inputs for which this does not hold anywhere: where it overflows in a way of its own, or has
        two answers (vectors and what is left of them). On a GPU a check stops the program, and nothing is asked."""
        value = self.out
        first = next(x for x in (value if isinstance(value, (tuple, list)) else (value,)) if x is not None)
        if first.device.type == "cpu":
            self.body.emit("check", holds.id, kind="B")

    def reduced_dims(self, dims: Dims, over: Sequence[int], keepdim: bool) -> Dims:
        """Dims after some are reduced."""
        return tuple(() if i in over else dim for i, dim in enumerate(dims) if keepdim or i not in over)


def as_type(value: Value, dtype: torch.dtype) -> Value:
    """The value converted to a type as ATen does on a CPU: what is no integer of 32 bits is the least of them."""
    kind, body = kind_of(dtype), value.body
    converted = value.to(kind)
    if kind == "L" and value.kind in "FD" and dtype in (torch.int32, torch.int16):
        converted = one("fits32", converted)
    return Value(body, body.round_to(converted.id, dtype))


def axes_in(dims: Dims, over: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for i in over for axis in dims[i])


def dims_over(dim: Any, rank: int) -> tuple[int, ...]:
    """ATen's dim argument (None, a number, a list) as numbers from 0."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(rank))
    dim_list = dim if isinstance(dim, (list, tuple)) else [dim]
    return tuple(sorted(d % rank for d in dim_list)) if rank else ()
