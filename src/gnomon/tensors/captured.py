"""Captured ops: what an op without a kind of its own computes, as the ATen ops that PyTorch ran.

A `Node` is one ATen op with its operands and the tensors that it writes; `Op.nodes` holds those of one call of the
torch API. Bytes and FLOPs follow from the nodes' tensors. Leaves out running them (`runtime.ops.captured`) and making
them (`frontend`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.tensors.dims import Dim, Number, Sizes, numel


@dataclass(frozen=True, slots=True)
class Use:
    """A tensor among the operands, by name."""

    name: str
    """Name of the tensor in its block."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number among the operands that follows from the sizes of the inputs: factor · product of dims + plus."""

    factor: int
    """What the product is multiplied with."""
    names: tuple[str, ...]
    """Names of the dims."""
    plus: int = 0
    """What is added to it."""

    def value(self, sizes: Mapping[str, int]) -> int:
        """The number, given the size of each dim."""
        total = self.factor
        for name in self.names:
            total *= sizes[name]
        return total + self.plus


@dataclass(frozen=True, slots=True)
class Torch:
    """A constant of torch among the operands: `float32`, `strided`, `contiguous_format`, or `device` for the rank's."""

    name: str
    """Its name in torch."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A tensor of few elements that the code wrote out."""

    values: Any
    """Its elements, as nested lists."""
    dtype: str
    """Name of its dtype in torch."""
    shape: tuple[int, ...]
    """Its sizes."""


@dataclass(frozen=True, slots=True)
class Term:
    """A number times the sizes of dims."""

    factor: float
    """The number."""
    dims: tuple[Dim, ...]
    """Dims whose sizes are multiplied with it; empty: the number alone."""


Amount = tuple[Term, ...]
"""A sum of terms, which follows from the sizes of the inputs; empty where nobody says."""


def amount(terms: Amount, sizes: Sizes) -> Number:
    """The sum, given the size of each dim; of a rank's own sizes, its part."""
    total: Any = 0.0
    for term in terms:
        total = total + term.factor * numel(term.dims, sizes)
    # Sizes may be arrays, one for each plan that is priced at once; these stay as they are.
    return round(total) if isinstance(total, float) else total


def seconds(terms: Amount, sizes: Sizes) -> Any:
    """The sum that `amount` rounds, in seconds."""
    return sum((term.factor * numel(term.dims, sizes) for term in terms), start=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What its author says that a custom op costs; what is empty follows from its operands, or from the forward."""

    flops: Amount = ()
    """FLOPs of the forward."""
    bytes: Amount = ()
    """Read and written."""
    seconds: Amount = ()
    """On any device, in place of what FLOPs and bytes give."""
    backward_flops: Amount = ()
    """FLOPs of the backward."""
    backward_bytes: Amount = ()
    """Bytes that the backward reads and writes."""
    backward_seconds: Amount = ()
    """Seconds of the backward on any device, in place of what FLOPs and bytes give."""


BACKWARD = 2
"""Times the forward that a backward costs where nobody says: a gradient for each of two operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One ATen op as PyTorch ran it, with what its author says that it costs."""

    target: str
    """`aten.mul.Tensor`."""
    args: tuple[Any, ...]
    """Literals, `Use`, `Size`, `Torch`, and tuples of these."""
    kwargs: tuple[tuple[str, Any], ...] = ()
    """The same, by name."""
    outputs: tuple[str, ...] = ()
    """Names of the tensors that it writes; empty for one that nothing reads."""
    many: bool = False
    """Whether it returns several."""
    view: bool = False
    """Whether it moves no bytes."""
    matmuls: tuple[tuple[Any, ...], ...] = ()
    """Matrix products in it, (batch, rows, columns, depth) each, as integers or `Size`s."""
    grads: int = 0
    """How many of a product's operands want a gradient."""
    cost: Cost | None = None
    """What its author says of it, of a custom op."""
    read_values: Any = None
    """Numbers that Python read of its output and went on with, in tuples, or one; None for an output that was not."""
    shape: tuple[Any, ...] | None = None
    """That its output has to have, where the op makes it of values: integers or `Size`s."""


def uses(tree: Any) -> Iterator[str]:
    """Names of the tensors among operands."""
    if isinstance(tree, Use):
        yield tree.name
    elif isinstance(tree, tuple):
        for inner in tree:
            yield from uses(inner)


def reads(node: Node) -> tuple[str, ...]:
    """Names of the tensors that a node reads, each once."""
    # In the order of the call: the first operand is what an in-place op writes over.
    return tuple(dict.fromkeys([*uses(node.args), *uses(tuple(value for _, value in node.kwargs))]))


def mutates(node: Node) -> bool:
    """Whether a node writes over its first operand, as ops whose name ends in `_` do."""
    name = node.target.split(".")[1]
    # `__and__.Tensor` and its like are plain operators.
    return name.endswith("_") and not name.endswith("__")


def writes_over(inputs: Iterable[str], nodes: Iterable[Node]) -> tuple[str, ...]:
    """Operands into whose memory the nodes of an op write, themselves or through views of them."""
    base = {name: name for name in inputs}
    found = []
    for node in nodes:
        first = next(uses(node.args), "")
        # A view shares the memory of its base, and views of views do.
        if node.view and first in base:
            base.update(dict.fromkeys(filter(None, node.outputs), base[first]))
        elif first in base and mutates(node):
            found.append(base[first])
            base.update(dict.fromkeys(filter(None, node.outputs), base[first]))
    return tuple(dict.fromkeys(found))
