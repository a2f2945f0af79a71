"""XTC's rounding at work (`methods.learnt.xtc`): forward and backward read rounded weights, the update changes others.

`Rounded` is a `WeightRule`: before an update the numbers behind the rounded ones are put back, where the optimizer has
no copy of its own; after it they are rounded again. Gradients of rounded weights are taken as theirs (the
straight-through estimator, Bengio et al. 2013).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from gnomon.methods.learnt.xtc import XtcSettings
from gnomon.runtime.optim.weight_rules import parts_of
from gnomon.runtime.parameters.parameters import Parameters

THRESHOLD = 0.7
"""Of the mean size of a group: what is larger is kept (Li and Liu 2016, ternary weight networks)."""


def ternary(groups: Tensor) -> Tensor:
    """Rounds groups (…, group) to -1, 0 or 1 times the mean size of what is kept."""
    sizes = groups.abs()
    nonzero = sizes > THRESHOLD * sizes.mean(-1, keepdim=True)
    scale = (sizes * nonzero).sum(-1, keepdim=True) / nonzero.sum(-1, keepdim=True).clamp_(min=1)
    return torch.sign(groups) * nonzero * scale


def binary(groups: Tensor) -> Tensor:
    """Rounds groups (…, group) to -1 or 1 (0 becomes 1) times the mean size."""
    return torch.where(groups < 0, -1.0, 1.0).to(groups.dtype) * groups.abs().mean(-1, keepdim=True)


class Rounded:
    """The matrices of a rank's stages."""

    def __init__(self, settings: XtcSettings, names: Collection[str]) -> None:
        """Takes the names of the matrices."""
        self.settings, self.names = settings, names
        self.behind: dict[int, dict[str, Tensor]] = {}
        """Of parameters without a master copy: the numbers that are updated."""

    def begin(self, parameters: Parameters) -> None:
        """Rounds what training begins with."""
        self.after(parameters, 0.0)

    def before(self, parameters: Parameters) -> None:
        """Puts back what is updated."""
        for name, x in self.behind.get(id(parameters), {}).items():
            slot = parameters.by_name[name]
            parameters.shard[slot.start : slot.stop] = x

    def after(self, parameters: Parameters, lr: float) -> None:
        """Rounds the weights again after an update."""
        own = self.behind.setdefault(id(parameters), {})
        rounding = ternary if self.settings.kind == "ternary" else binary
        for slot, columns in parts_of(parameters, self.names):
            at = slice(slot.start, slot.stop)
            if parameters.master is None:
                exact = own[slot.name] = parameters.shard[at].clone() if slot.name not in own else own[slot.name]
                # The shard has the exact numbers here: `before` put them back, and the update has changed them.
                exact.copy_(parameters.shard[at])
            else:
                exact = parameters.master[at]
            parameters.shard[at] = rounding(exact.view(-1, self.settings.group or columns)).flatten()

    @property
    def nbytes(self) -> int:
        """Bytes of the full-precision numbers behind the rounded ones."""
        return sum(x.nbytes for own in self.behind.values() for x in own.values())

    @property
    def note(self) -> str:
        """Says what the forward reads."""
        group = f"{self.settings.group} numbers" if self.settings.group else "a row"
        return f"weights of layers are {self.settings.kind}, with a scale for each group of {group}"
