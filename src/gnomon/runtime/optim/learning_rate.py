"""How the learning rate changes over steps: constant, linear, cosine, or warm-up, stable, decay (WSD).

`LearningRate(...).factor(step)` is what the rate is multiplied by. Pure; leaves out the rate itself.
Sources: SGDR, Loshchilov and Hutter 2017 (cosine); MiniCPM, Hu et al. 2024 (WSD).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gnomon.errors import PlanError

Shape = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Factor of the learning rate by step."""

    shape: Shape = "constant"
    """What follows the warm-up: `constant`; `linear` or `cosine` down to `final` at the last step; `wsd`, constant and
    then linear down over the last `decay_steps`."""
    warmup_steps: int = 0
    """First steps, over which the rate rises linearly from near 0 to its full value."""
    total_steps: int = 0
    """Steps of the whole training; needed by all shapes but constant."""
    decay_steps: int = 0
    """Last steps, of `wsd`."""
    final: float = 0.0
    """Factor at the last step."""

    def __post_init__(self) -> None:
        if self.shape != "constant" and self.total_steps <= self.warmup_steps:
            raise PlanError(
                f"learning rate {self.shape!r} over {self.total_steps} steps with {self.warmup_steps} of warm-up: give "
                f"total_steps above warmup_steps"
            )
        if (self.shape == "wsd") != (self.decay_steps > 0) or not 0.0 <= self.final <= 1.0 or self.warmup_steps < 0:
            raise PlanError(
                f"learning rate {self.shape!r} has decay_steps = {self.decay_steps}, warmup_steps = "
                f"{self.warmup_steps} and final = {self.final}: decay_steps are wsd's, and 0 <= final <= 1"
            )

    def factor(self, step: int) -> float:
        """The factor on the learning rate at step 0, 1, 2 …; past the last step it stays."""
        if step < self.warmup_steps:
            # The first step already moves, and the last of the warm-up has the full rate.
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        first = self.total_steps - self.decay_steps if self.shape == "wsd" else self.warmup_steps
        done = min(max(step - first, 0) / max(self.total_steps - first, 1), 1.0)
        part = (1 - math.cos(math.pi * done)) / 2 if self.shape == "cosine" else done
        return 1.0 - (1.0 - self.final) * part
