"""What is done to weights around each update: drawn to a pattern, rounded for the next forward, shrunk by groups.

A `WeightRule` sees the parameters of a stage before and after each of its updates (`State.update`). `parts_of` finds
the matrices that one is about. Leaves out the rules themselves (`nxm_admm`, `xtc`, `iss`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from torch import Tensor

from gnomon.runtime.parameters.parameters import Parameters, Slot


class WeightRule(Protocol):
    """A rule of one rank that changes weights around each update."""

    def begin(self, parameters: Parameters) -> None:
        """Is called before the first step."""

    def before(self, parameters: Parameters) -> None:
        """Is called before an update, whose gradient is whole and clipped."""

    def after(self, parameters: Parameters, lr: float) -> None:
        """Is called after an update. lr: the learning rate that it had."""

    @property
    def nbytes(self) -> int:
        """Bytes of what it keeps."""

    @property
    def note(self) -> str:
        """How it went, in a line."""


def updated(parameters: Parameters) -> Tensor:
    """The copy that an update changes: the optimizer's, or the parameters themselves."""
    return parameters.shard if parameters.master is None else parameters.master


def parts_of(parameters: Parameters, names: Collection[str]) -> Iterator[tuple[Slot, int]]:
    """(parameter, columns) of those that are among `names`, which lie whole in `updated`."""
    for slot in parameters.slots:
        if slot.name in names and slot.matrix is not None:
            yield slot, slot.matrix[2]
