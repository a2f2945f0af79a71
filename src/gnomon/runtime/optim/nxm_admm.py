"""NxMTransformer's multipliers at work (`methods.learnt.nxm_admm`): updates are drawn to the pattern, then kept in it.

`NxmAdmm` is a `WeightRule`. Z and U of a matrix are beside the copy that is updated, in its dtype; once the pattern is
fixed, they make way for a mask of a byte a number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.methods.learnt.nxm_admm import NxmSettings
from gnomon.methods.learnt.trained_weights import step_at
from gnomon.runtime.optim.weight_rules import parts_of, updated
from gnomon.runtime.parameters.parameters import Parameters, Slot


@dataclass(slots=True)
class _Matrix:
    slot: Slot
    z: Tensor | None
    """What the pattern keeps of W + U; None once it is fixed."""
    u: Tensor | None
    mask: Tensor | None = None


def largest_mask(x: Tensor, n: int, m: int) -> Tensor:
    """Whether each number is among the n largest of its m."""
    sizes = x.abs().view(-1, m)
    mask = torch.zeros_like(sizes, dtype=torch.bool).scatter_(1, sizes.topk(n, dim=1).indices, True)
    return mask.view(x.shape)


class NxmAdmm:
    """The matrices of a rank's stages."""

    def __init__(self, settings: NxmSettings, names: Collection[str], steps: int) -> None:
        """Takes the names of the matrices and the number of steps of the run."""
        self.settings, self.names = settings, names
        self.mask_at = max(1, step_at(settings.mask_at, steps))
        self.matrices: dict[int, list[_Matrix]] = {}
        self.steps: dict[int, int] = {}
        self.off = 0.0
        """Squares of what the mask took away, and of all that there was."""
        self.size = 0.0

    def begin(self, parameters: Parameters) -> None:
        """Z is the pattern's part of the weights, U is 0."""
        own, w = list[_Matrix](), updated(parameters)
        for slot, _ in parts_of(parameters, self.names):
            x = w[slot.start : slot.stop]
            own.append(_Matrix(slot, x * largest_mask(x, *self._pattern), torch.zeros_like(x)))
        self.matrices[id(parameters)], self.steps[id(parameters)] = own, 0

    @property
    def _pattern(self) -> tuple[int, int]:
        return self.settings.n, self.settings.m

    def before(self, parameters: Parameters) -> None:
        """Adds rho (W - Z + U) to the gradient; once the pattern is fixed, what is outside has none."""
        self.steps[id(parameters)] += 1
        w, grads = updated(parameters), parameters.my_grad()
        # Drawn more and more until the pattern is fixed, so that little is lost when it is.
        rho = self.settings.rho * min(1.0, self.steps[id(parameters)] / self.mask_at)
        for one in self.matrices[id(parameters)]:
            at = slice(one.slot.start, one.slot.stop)
            if one.mask is not None:
                grads[at] *= one.mask
            elif rho and one.z is not None and one.u is not None:
                grads[at].add_((w[at] - one.z).add_(one.u), alpha=rho)

    def after(self, parameters: Parameters, lr: float) -> None:
        """Z and U follow at their step, the pattern is fixed at its own; from then on W stays in it."""
        step, w = self.steps[id(parameters)], updated(parameters)
        for one in self.matrices[id(parameters)]:
            x = w[one.slot.start : one.slot.stop]
            if one.z is not None and one.u is not None:
                if step == self.mask_at:
                    one.mask = largest_mask(x + one.u, *self._pattern)
                    one.z = one.u = None
                    self.off += float((x * ~one.mask).square().sum())
                    self.size += float(x.square().sum())
                elif step % self.settings.every == 0:
                    drawn = x + one.u
                    one.z = drawn * largest_mask(drawn, *self._pattern)
                    one.u = drawn - one.z
            if one.mask is not None:
                x *= one.mask
                if parameters.master is not None:
                    parameters.shard[one.slot.start : one.slot.stop] = x

    @property
    def nbytes(self) -> int:
        """Bytes of Z, U and masks."""
        every = (x for own in self.matrices.values() for one in own for x in (one.z, one.u, one.mask))
        return sum(x.nbytes for x in every if x is not None)

    @property
    def note(self) -> str:
        """When the pattern was fixed, and how far from it weights then were."""
        pattern = self.settings.pattern
        if not self.size:
            return f"{pattern} by ADMM: the run ended before its pattern was fixed (step {self.mask_at})"
        share = (self.off / self.size) ** 0.5
        return f"{pattern} by ADMM: fixed after step {self.mask_at}, when {share:.1%} of the weights' norm lay outside"
