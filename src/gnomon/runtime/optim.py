"""AdamW on the part of each stage that a rank updates, and the global gradient norm.

`AdamW.update(parameters, …)` changes master copy and parameters in place; `squares` is a rank's term of the squared
norm, in which every element of the model counts once over all ranks. Matrices decay, vectors (norms, biases) do not.
Left out: schedules of the learning rate, which are the caller's, and communication.
Source: Loshchilov and Hutter 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnomon.runtime.parameters import Parameters

CHUNK = 1 << 20
"""Elements that are updated at once: three times so many are made on the way (12 MiB in float32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """Numbers of the update."""

    lr: float = 3e-4
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Of matrices."""
    clip_norm: float = 1.0
    """Largest global gradient norm, where the plan clips."""


@dataclass(slots=True, kw_only=True)
class AdamW:
    """Moments of one stage's part."""

    first: Tensor
    """Running mean of the gradient."""
    second: Tensor
    """Running mean of its square."""
    steps: int = field(default=0)
    """Updates so far."""

    @staticmethod
    def of(parameters: Parameters) -> AdamW:
        """Moments at 0."""
        size, dtype, device = parameters.mine[1] - parameters.mine[0], parameters.dtypes.states, parameters.device
        first, second = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return AdamW(first=first, second=second)

    def update(self, parameters: Parameters, settings: AdamWSettings, *, scale: Tensor | float) -> None:
        """One step on this rank's part. scale: what gradients are multiplied by (clipping)."""
        self.steps += 1
        target = parameters.shard if parameters.master is None else parameters.master
        for slot, (low, high) in parameters.pieces():
            if len(slot.shape) > 1 and not slot.name.endswith(".bias"):
                target[low:high] *= 1 - settings.lr * settings.weight_decay
        one, two = settings.betas
        grads = parameters.my_grad()
        for part in chunks(len(grads)):
            first, second = self.first[part], self.second[part]
            grad = grads[part].to(first.dtype) * scale
            first.lerp_(grad, 1 - one)
            second.mul_(two).addcmul_(grad, grad, value=1 - two)
            root = (second / (1 - two**self.steps)).sqrt_().add_(settings.eps)
            change = torch.div(first, root, out=root).mul_(settings.lr / (1 - one**self.steps))
            target[part] -= change.to(target.dtype)
        if parameters.master is not None:
            parameters.shard.copy_(parameters.master)


def chunks(size: int) -> Iterator[slice]:
    """Parts of so many elements, so that what the update makes on the way never adds to the peak."""
    for first in range(0, size, CHUNK):
        yield slice(first, min(first + CHUNK, size))


def squares(parameters: Parameters, replicas: int) -> Tensor:
    """This rank's term of the squared norm, in float64.

    replicas: data-parallel ranks that hold this rank's gradients too. Elements that several tensor-parallel ranks hold
    count in part on each.
    """
    grad = parameters.my_grad()
    total = torch.zeros((), dtype=torch.float64, device=parameters.device)
    for slot, (low, high) in parameters.pieces():
        if slot.holders:
            squared = sum(float_squares(grad[low:high][part]) for part in chunks(high - low))
            total += squared / (slot.holders * replicas)
    return total


def float_squares(x: Tensor) -> Tensor:
    """Sum of squares in float64."""
    wide = x.double()
    return torch.dot(wide, wide)


def clip_scale(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `limit`."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
