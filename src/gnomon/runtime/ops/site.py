"""Where an op runs: its place in a block, what its tensors are on this rank, and the groups that it may talk to.

A torch tensor has one dim for each dim of the graph's tensor, products flattened. An op's function takes a `Site` and
its operands, tensors for activations and `Weight`s for parameters, and returns its output (a tuple for several).
Leaves out what happens between ops: collectives that change a layout are `moves`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.graph import Block, Op, is_inner_first, matrix_rows
from gnomon.ops.op import AttrValue
from gnomon.runtime.parameters.parameters import Weight
from gnomon.sharding.context import chunks_of
from gnomon.tensors.dims import Dim
from gnomon.tensors.names import TOKEN_DIMS, base

Segment = tuple[int, int]
"""(first position, how many)."""


@lru_cache(maxsize=64)
def _positions(segments: tuple[Segment, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(first, first + length, device=device) for first, length in segments])


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis as the ops of a rank see it."""

    group: ProcessGroup | None = None
    """None for one rank."""
    ranks: int = 1
    """Ranks in the group."""
    index: int = 0
    """This rank's place."""
    order: str = "contiguous"
    """Which part of what it divides each rank holds: as `sharding.context.chunks_of`."""

    def segments(self, local: int, index: int | None = None) -> tuple[Segment, ...]:
        """Lists the runs of positions that a rank holds, in its order. local: how many those are. index: another rank's
        place than this one's."""
        if self.ranks == 1:
            return ((0, local),)
        chunks = chunks_of(self.index if index is None else index, self.ranks, self.order)
        length = local // len(chunks)
        return tuple((chunk * length, length) for chunk in chunks)

    def positions(self, local: int, device: torch.device) -> Tensor:
        """The positions (local) that this rank holds."""
        return _positions(self.segments(local), device)

    def all_positions(self, local: int, device: torch.device) -> Tensor:
        """The positions (ranks · local) that all ranks hold, rank after rank."""
        return torch.cat([_positions(self.segments(local, index), device) for index in range(self.ranks)])


def requiring_grad(x: Tensor) -> Tensor:
    """An input of the batch that autograd goes back to, though nobody wants its gradient."""
    x = x.detach().requires_grad_()
    x.of_batch = True  # type: ignore[attr-defined]
    return x


def is_given(x: Tensor) -> bool:
    """Whether a tensor is such an input."""
    return getattr(x, "of_batch", False)


ALONE = Axis()
"""One rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One op of one block on this rank."""

    op: Op
    """The op."""
    block: Block
    """Its block."""
    strategy: str = "local"
    """How `sharding` says that it runs: `column`, `row`, `vocab_parallel`, `local` …"""
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """By name; one that is left out has one rank."""
    divided: tuple[str, ...] = ()
    """Axes that divide the positions of the op's first input, the outermost first."""
    keep_gathered: bool = False
    """Whether what an op gathered is what it keeps for backward."""
    ways: Mapping[str, int] = field(default_factory=dict)
    """Dim -> parts that ranks divide it into."""
    weight_rows: int = field(init=False)
    """Of a contraction: how many leading dims of its weight are rows of its matrix."""
    inner_first: bool = field(init=False)
    """Whether these are the contracted dims of a linear, and not its outputs."""
    attrs: Mapping[str, AttrValue] = field(init=False)
    """The op's attributes."""
    dim_names: Mapping[str, tuple[str, ...]] = field(init=False)
    """Names of dims of the op's inputs and outputs."""

    def __post_init__(self) -> None:  # once, and not each time that the op runs
        op, tensors = self.op, {tensor.name: tensor for tensor in self.block.tensors}
        names = [name for name in (*op.inputs, *op.outputs) if name in tensors]
        named = {name: tuple(dim.name for dim in tensors[name].dims) for name in names}
        weight = tensors[op.inputs[1]].dims if op.contracts and op.inputs[1:] else ()
        own_values = {
            "weight_rows": matrix_rows(op, weight),
            "inner_first": is_inner_first(op, weight),
            "attrs": dict(op.attrs),
            "dim_names": named,
        }
        for own, value in own_values.items():
            object.__setattr__(self, own, value)

    def axis(self, name: str) -> Axis:
        """The mesh axis of that name."""
        return self.axes.get(name, ALONE)

    @property
    def position_ranks(self) -> int:
        """Ranks that the positions of the op's first input are divided among."""
        return math.prod(self.axis(name).ranks for name in self.divided)

    def positions(self, local: int, device: torch.device) -> Tensor:
        """The positions (local) of the op's first input that this rank holds."""
        all_positions = torch.arange(local * self.position_ranks, device=device)
        for axis in map(self.axis, self.divided):
            all_positions = all_positions[axis.positions(len(all_positions) // axis.ranks, device)]
        return all_positions

    def attr(self, name: str, default: Any) -> Any:
        """The op's attribute, or `default`."""
        return self.attrs.get(name, default)

    def dims(self, tensor: str) -> tuple[str, ...]:
        """Names of a tensor's dims, one for each dim that it has in torch."""
        return self.dim_names[tensor]

    def local(self, dim: Dim) -> int:
        """Size of a rank's part of it; -1 for what the batch brings. Of fewer heads than ranks each has a copy."""
        return -1 if dim.size is None else max(1, dim.size // self.ways.get(dim.name, 1))

    def token_dim(self, tensor: str) -> int:
        """The dim of a tensor that counts positions."""
        return next(i for i, name in enumerate(self.dims(tensor)) if base(name) in TOKEN_DIMS)


Operand = Tensor | Weight
Result = Tensor | tuple[Tensor, ...]
Function = Callable[..., Result]
"""(site, *operands) -> the op's outputs."""

ANCHOR = torch.zeros((), requires_grad=True)
"""Reads of parameters hang on it, so that backward comes to ops whose other inputs want no gradient."""


class _Read(torch.autograd.Function):
    """A parameter as a tensor: its gradient goes to the `Weight` and nowhere else."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        # A view: autograd writes its history onto what a function returns, and must not onto the stored parameter.
        return weight.value.view_as(weight.value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight: Weight = ctx.weight
        weight.tape.run(lambda: weight.add(grad), grad)
        return None, None


def read(weight: Operand) -> Tensor:
    """The parameter in the shape of the graph's dims, for functions of which autograd knows the derivative."""
    if isinstance(weight, Tensor):
        return weight
    out: Tensor = _Read.apply(ANCHOR, weight)  # type: ignore[no-untyped-call]
    return out
