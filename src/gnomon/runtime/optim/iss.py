"""Group lasso over components of LSTMs at work (`methods.learnt.iss`): a proximal step after each update.

`Iss` is a `WeightRule`. A factor for each hidden unit, max(0, 1 - lr decay / norm), multiplies its rows and columns; a
number that two units share, in the recurrent matrix, takes both. Of a layer at least one unit stays. Biases are in no
norm; those of a removed unit become 0 with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.methods.learnt.iss import GATES, IssSettings, Lstm, LstmLayer
from gnomon.methods.learnt.trained_weights import step_at
from gnomon.runtime.optim.weight_rules import updated
from gnomon.runtime.parameters.parameters import Parameters


class Iss:
    """The LSTMs of a model, all on this rank."""

    def __init__(self, settings: IssSettings, lstms: Sequence[Lstm], steps: int) -> None:
        """Takes the number of steps of the run."""
        self.settings, self.lstms = settings, tuple(lstms)
        self.freeze_at = max(1, step_at(settings.freeze_at, steps))
        self.step = 0
        self.stay: dict[str, Tensor] = {}
        """By recurrent matrix, once it is settled: whether each unit stays."""

    def begin(self, parameters: Parameters) -> None:
        """Nothing is kept beside the weights."""

    def before(self, parameters: Parameters) -> None:
        """The gradient is the loss's alone."""

    def after(self, parameters: Parameters, lr: float) -> None:
        """Shrinks components; once they are settled, keeps what was removed at 0."""
        layers = [layer for lstm in self.lstms for layer in lstm.layers if layer.recurrent in parameters.by_name]
        if not layers:
            return
        self.step += 1
        factors = {layer.recurrent: self._factors(parameters, layer, lr) for layer in layers}
        for layer in layers:
            _scale(parameters, layer, factors[layer.recurrent])
        if self.step == self.freeze_at:
            self.stay = {layer.recurrent: factors[layer.recurrent] > 0 for layer in layers}
        # `updated` is then the master copy, and the next forward reads the shard.
        if parameters.master is not None:
            parameters.shard.copy_(parameters.master)

    def _factors(self, parameters: Parameters, layer: LstmLayer, lr: float) -> Tensor:
        """(hidden,) what each component is multiplied by."""
        if (stay := self.stay.get(layer.recurrent)) is not None:
            # 1 or 0 from here on: nothing shrinks any more, and the update cannot bring back what was removed.
            return stay.to(updated(parameters).dtype)
        norms = component_norms(parameters, layer)
        least = self.settings.threshold if self.step == self.freeze_at else 0.0
        shrunk = (1 - lr * self.settings.decay / norms.clamp(min=1e-30)).clamp(min=0)
        # norms * shrunk is the norm after the step: at the settling step what is below the threshold goes, before it
        # only what has reached 0.
        shrunk = torch.where(norms * shrunk > least, shrunk, 0.0)
        if not bool((shrunk > 0).any()):
            shrunk[norms.argmax()] = 1.0
        return shrunk

    @property
    def nbytes(self) -> int:
        """Bytes of the masks that say which units stay."""
        return sum(x.nbytes for x in self.stay.values())

    @property
    def note(self) -> str:
        """How many units are left."""
        if not self.stay:
            return f"iss: the run ended before its components were settled (step {self.freeze_at})"
        unit_counts = "; ".join(
            f"{lstm.path} {', '.join(f'{int(self.stay[one.recurrent].sum())} of {one.hidden}' for one in lstm.layers)}"
            for lstm in self.lstms
        )
        return f"hidden units that are left after step {self.freeze_at}: {unit_counts}"


def component_norms(parameters: Parameters, layer: LstmLayer) -> Tensor:
    """(hidden,) of each component."""
    input_gates, recurrent = _gates(parameters, layer.input_weights, layer), _gates(parameters, layer.recurrent, layer)
    squares = input_gates.square().sum((0, 2)) + recurrent.square().sum((0, 2)) + recurrent.square().sum((0, 1))
    squares = squares - recurrent.diagonal(dim1=1, dim2=2).square().sum(0)  # which is in its row and its column
    for name in layer.readers:
        squares = squares + _columns(parameters, name, layer).square().sum(0)
    return squares.sqrt()


def _gates(parameters: Parameters, name: str, layer: LstmLayer) -> Tensor:
    """A recurrent weight as (gates, hidden, inputs)."""
    slot = parameters.by_name[name]
    return updated(parameters)[slot.start : slot.stop].view(GATES, layer.hidden, -1)


def _columns(parameters: Parameters, name: str, layer: LstmLayer) -> Tensor:
    """A weight that reads the hidden units, as (rows, hidden)."""
    slot = parameters.by_name[name]
    return updated(parameters)[slot.start : slot.stop].view(-1, layer.hidden)


def _scale(parameters: Parameters, layer: LstmLayer, factors: Tensor) -> None:
    _gates(parameters, layer.input_weights, layer).mul_(factors[None, :, None])
    _gates(parameters, layer.recurrent, layer).mul_(factors[None, :, None]).mul_(factors[None, None, :])
    for name in layer.readers:
        _columns(parameters, name, layer).mul_(factors)
    for name in layer.biases:
        slot = parameters.by_name[name]
        updated(parameters)[slot.start : slot.stop].view(GATES, layer.hidden).mul_((factors > 0).to(factors.dtype))
