"""Update rules that look at whole matrices: Adafactor and Muon.

`adafactor_` and `muon_` change one parameter in place. Left out: which parameters are matrices (`apply`), and matrices
in parts on several ranks, which the plan's check refuses.
Sources: Shazeer and Stern 2018, as torch.optim.Adafactor has it; Jordan et al. 2024, as torch.optim.Muon has it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BETA2_DECAY, RELATIVE_EPS, LARGEST = -0.8, 1e-3, 1.0
"""Adafactor: decay of the second moment in steps, smallest size that an update is relative to, largest update."""
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Muon's polynomial, and how often."""

Matrix = tuple[int, int, int]
"""(matrices, rows, columns): experts are several."""


def adafactor_(
    p: Tensor, g: Tensor, moments: tuple[Tensor, Tensor], matrix: Matrix | None, *, lr: float, decay: float, steps: int
) -> None:
    """One step of a parameter, flat. moments: of rows and columns; of a vector its own and none. steps: this one
    included."""
    change = steps**BETA2_DECAY
    eps = torch.finfo(p.dtype).eps
    alpha = max(RELATIVE_EPS, float(p.norm()) / math.sqrt(p.numel())) * min(lr, steps**-0.5)
    if decay:
        p.mul_(1 - lr * decay)
    first, second = moments
    if matrix is None:
        first.lerp_(g.square(), change)
        variance = first.clone()
    else:
        square = g.view(matrix).square()
        first.lerp_(square.mean(-1), change)
        second.lerp_(square.mean(-2), change)
        variance = first.unsqueeze(-1) * second.unsqueeze(-2)
        variance /= first.mean(-1).clamp(min=eps)[:, None, None]
    update = variance.clamp_(min=eps * eps).rsqrt_().view(-1).mul_(g)
    limit = max(1.0, float(update.norm()) / (math.sqrt(update.numel()) * LARGEST))
    p.add_(update, alpha=-alpha / limit)


def muon_(p: Tensor, g: Tensor, momentum: Tensor, matrix: Matrix, *, lr: float, decay: float, mu: float) -> None:
    """One step of matrices, flat, with Nesterov's momentum."""
    _, rows, columns = matrix
    momentum.lerp_(g, 1 - mu)
    update = orthogonal(torch.lerp(g, momentum, mu).view(matrix))
    p.mul_(1 - lr * decay)
    p.add_(update.reshape(-1).to(p.dtype), alpha=-lr * math.sqrt(max(1.0, rows / columns)))


def orthogonal(x: Tensor) -> Tensor:
    """Near the orthogonal factor of each matrix, by Newton and Schulz's iteration in bfloat16 (in float64 for float64
    runs, which compare plans)."""
    a, b, c = COEFFICIENTS
    y = x if x.dtype == torch.float64 else x.bfloat16()
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if tall else y
