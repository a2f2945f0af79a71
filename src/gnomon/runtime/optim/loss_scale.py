"""Dynamic loss scaling for fp16: `LossScale` says what the loss is multiplied by, and changes with what gradients did.

Small gradients would be 0 in fp16, so the loss is scaled up before backward and gradients are scaled down where they
are clipped and applied. A step whose gradients are infinite or NaN is left out, and the scale is halved; after many
good steps it is doubled. The state of it is in checkpoints. Numbers and names are those of `torch.amp.GradScaler`.
Source: Micikevicius et al. 2018.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The scale and how it changes."""

    scale: float = 2.0**16
    """What the loss of the next step is multiplied by."""
    growth_factor: float = 2.0
    """Of the scale after good steps."""
    backoff_factor: float = 0.5
    """Of the scale after a bad one."""
    growth_interval: int = 2000
    """Good steps in a row before it grows."""
    good_steps: int = 0
    """In a row, so far."""

    def update(self, *, finite: bool) -> None:
        """Adapts the scale after a step, by whether its gradients were finite."""
        if not finite:
            self.scale, self.good_steps = self.scale * self.backoff_factor, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * self.growth_factor, 0
