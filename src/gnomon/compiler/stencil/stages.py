"""What a stencil is: stages, each a body over a domain, that read each other's values at constant distances.

A `Stage` computes one array from fields: inputs, or stages before it. A `Read` says where: the stage's own place plus a
shift, and what stands outside the field. Bodies are those of groups (`gnomon.compiler.tiles.body`), by the same rules,
so whatever is pointwise there is so here. Dims are those of the arrays without dims of size 1, or, where channels are
mixed, all of them. Leaves out graphs (`find`) and order (`lags`).
Source: the stages and shifts are those of MSC (ICPP 2021); images that images are made of are Halide's (PLDI 2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gnomon.compiler.tiles.body import Body, kind_of
from gnomon.compiler.tiles.stages import live

Shift = tuple[int, ...]
MANY = 16
"""Reads, or numbers of weights, from which on a stage has more of them than registers hold beside its sums."""
FURTHEST = 32
"""Points that a read may be away: rows up to there stay in cache."""


@dataclass(frozen=True, slots=True)
class Read:
    """A field at a stage's own place plus a shift, by dim."""

    field: Any
    """The node of an input or of a stage."""
    shift: Shift
    outside: float | Literal["wrap"] | None = None
    """What stands outside the field: a number, the field again from its other end, or nothing that is read."""
    channel: int | None = None
    """The channel that is read, None for the stage's own."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A number of a weight that is given at run time: its node, the element, and elements from one channel of the
    stage to the next, which are along a dim of the stage."""

    weight: Any
    element: int
    by_channel: int = 0
    dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    node: Any
    sizes: tuple[int, ...]
    dtype: torch.dtype
    body: Body
    """Inputs are of a `Read` or a `Factor` each; the body's axes are dims in order, those of size 1 left out."""
    value: int
    box: tuple[tuple[int, int], ...] | None = None
    """Where it is the body's value, by dim; elsewhere it is what `base` reads."""
    base: Read | None = None

    @property
    def values(self) -> list[int]:
        """Returns the live instructions in order."""
        return live(self.body, [self.value])

    def slots(self) -> Iterator[tuple[int, Any]]:
        """Inputs that are read, with what each is."""
        for slot in dict.fromkeys(
            self.body.code[i].attr for i in self.values if self.body.code[i].op in ("load", "take")
        ):
            yield slot, self.body.inputs[slot].node

    def reads(self) -> list[Read]:
        """All that it reads, the base last."""
        found = [one for _, one in self.slots() if isinstance(one, Read)]
        return [*found, *([] if self.base is None else [self.base])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stencil:
    """Stages in order, with what they read from outside and what is read of them."""

    stages: tuple[Stage, ...]
    inputs: tuple[Any, ...]
    """Nodes of fields and weights, in the order of the call's arguments."""
    outputs: tuple[Any, ...]
    """Nodes of stages."""
    batch: int
    """Dims before the first along which something is shifted, channels that are mixed aside."""
    channel: int | None
    """The dim of channels that are mixed, None where there is none."""

    @property
    def rank(self) -> int:
        return len(self.stages[0].sizes)

    def stage(self, node: Any) -> Stage | None:
        return next((one for one in self.stages if one.node is node), None)

    @property
    def steps(self) -> int:
        """The longest chain of stages that read their neighbours."""
        far: dict[Any, int] = {}
        for one in self.stages:
            # Stages are in order, so what one reads has its number already; a read at the stage's own place adds no
            # step.
            far[one.node] = max(
                (far.get(read.field, 0) + any(read.shift) for read in one.reads()),
                default=0,
            )
        return max(far.values())


def weighted(stage: Stage) -> bool:
    """Whether a stage of floats has more numbers of weights than registers hold."""
    factors = sum(isinstance(source, Factor) for _, source in stage.slots())
    return factors >= MANY and kind_of(stage.dtype) == "F"
