"""`Strategy`: one way to run an op on divided tensors; `Division`: what the ways depend on besides the op.

A strategy names the shardings of inputs and outputs, the axes on which input gradients come out as partial sums, and
the collectives of the op's own algorithm. Leaves out how it is found (`divided`, and the families), and time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gnomon.tensors.dims import Number
from gnomon.tensors.layout import Collective, Scene, Sharding
from gnomon.tensors.tensor import Tensors


class Choices(Protocol):
    """What a plan's layout decides that ops ask for; `plans.Layout` says what each is."""

    @property
    def context(self) -> Literal["ring", "all_gather", "ulysses"]: ...
    @property
    def dispatch(self) -> Literal["all_to_all", "all_gather", "fused", "hybrid_ep"] | None: ...
    @property
    def keep_gathered(self) -> bool: ...
    @property
    def loss_parallel(self) -> bool: ...
    @property
    def sequence_parallel(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What an op's strategies depend on besides the op."""

    block: Tensors
    """The block of the op, not lowered: attention is one op."""
    layout: Choices
    """The plan's layout."""
    scene: Scene
    """Sizes of axes and dims, dtypes."""
    homes: Mapping[str, Sharding]
    """How each tensor lies between ops: `sharding.homes`."""

    def home(self, name: str) -> Sharding:
        """How the tensor `name` lies between ops."""
        return self.homes[name]

    def bytes(self, name: str, sharding: Sharding) -> Number:
        """Bytes of the tensor `name` on one rank."""
        return self.scene.bytes(self.block.tensor(name), sharding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run an op."""

    name: str
    """`column`, `row`, `vocab_parallel`, `ring`, `all_gather`, `ulysses`, `dispatch`, `combine`, `halo`, `local`."""
    inputs: tuple[Sharding, ...]
    """What each input must be."""
    outputs: tuple[Sharding, ...]
    """What each output is, partial sums included."""
    grad_partial: tuple[tuple[str, ...], ...]
    """For each input, axes on which its gradient comes out as a partial sum."""
    inside: tuple[Collective, ...] = ()
    """Collectives of the op's own algorithm, forward ones first."""
    sizes: Mapping[str, Number] = field(default_factory=dict)
    """Sizes of dims inside the op that differ from what the shardings give, as `heads` under Ulysses."""
