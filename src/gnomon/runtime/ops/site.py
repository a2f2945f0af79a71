"""Where an op runs: its place in a block, what its tensors are on this rank, and the groups that it may talk to.

A torch tensor has one dim for each dim of the graph's tensor, products flattened. An op's function takes a `Site` and
its operands, tensors for activations and `Weight`s for parameters, and returns its output (a tuple for several).
Leaves out what happens between ops: collectives that change a layout are `moves`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.graph import Block, Op
from gnomon.graph.types import AttrValue
from gnomon.runtime.parameters import Weight
from gnomon.sharding.homes import TOKEN_DIMS, base


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis as the ops of a rank see it."""

    group: ProcessGroup | None = None
    """None for one rank."""
    ranks: int = 1
    """Ranks in the group."""
    index: int = 0
    """This rank's place."""


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

    def axis(self, name: str) -> Axis:
        """The mesh axis of that name."""
        return self.axes.get(name, ALONE)

    def attr(self, name: str, default: Any) -> Any:
        """The op's attribute, or `default`."""
        value: AttrValue = self.op.attr(name, default)
        return value

    def dims(self, tensor: str) -> tuple[str, ...]:
        """Names of a tensor's dims, one for each dim that it has in torch."""
        return tuple(dim.name for dim in self.block.tensor(tensor).dims)

    def token_dim(self, tensor: str) -> int:
        """Which dim of a tensor counts positions."""
        return next(i for i, name in enumerate(self.dims(tensor)) if base(name) in TOKEN_DIMS)

    @property
    def weight_rows(self) -> int:
        """Of a contraction: how many leading dims of its weight are outputs; the others are contracted."""
        weight = self.block.tensor(self.op.inputs[1])
        return sum(1 for dim in weight.dims if dim.atoms[0].name not in self.op.contracts)


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
