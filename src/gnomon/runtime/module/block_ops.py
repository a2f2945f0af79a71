"""An op of a block with the collectives around it, worked out once: `BlockOp`.

`blocks` makes and runs them, `straight` writes them as lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gnomon.runtime.module.moves import Move
from gnomon.runtime.ops.site import Site
from gnomon.tensors.layout import Sharding

Need = tuple[str, Sharding, tuple[str, ...]]
"""As in `sharding.block`: (tensor, layout in which it is read, axes on which its gradient comes out as terms)."""


@dataclass(frozen=True, slots=True)
class OpInput:
    """An activation that an op reads."""

    need: Need
    there: tuple[Move, ...]
    """From home."""
    back: tuple[Move, ...]
    """Of its gradient."""


@dataclass(frozen=True, slots=True)
class BlockOp:
    """An op as it runs on one rank."""

    site: Site
    inputs: tuple[OpInput | str, ...]
    """Of parameters and states the name."""
    leave: tuple[tuple[Move, ...], ...]
    """Of each output, to its home."""
    enter: tuple[tuple[Move, ...], ...]
    """Of each output's gradient."""
    last: tuple[str, ...]
    """Tensors that no later op reads."""
    moves: bool
    """Whether an output goes to another layout, or its gradient."""
    parts: Mapping[str, tuple[Move, ...]]
    """Of states of a captured model that it reads: which part."""
    no_grad: bool
    """Whether it ran without autograd when it was captured, as nothing wants its gradient."""

    @property
    def stays(self) -> bool:
        """Whether nothing that it reads or makes goes to another layout."""
        return not self.moves and all(isinstance(x, str) or not (x.there or x.back) for x in self.inputs)
