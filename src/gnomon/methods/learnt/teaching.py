"""How a student learns from its teacher: `Teaching`, the value that a plan's distillation methods ask for.

Leaves out reading it from a method's parameters, and what follows for a model (`teacher`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The loss of knowledge distillation."""

    folder: str
    """config.json and safetensors of the teacher."""
    share: float = 0.7
    """Weight of the KL between logits; the cross-entropy of the text has the rest, 1 - share."""
    added: bool = False
    """Whether the cross-entropy counts whole, and the KL `share` times on top of it."""
    until: int = 0
    """Updates after which the teacher is left out; 0: never."""
    temperature: float = 1.0
    """Above 0: what logits of both are divided by before they are compared."""
    hidden: float = 0.0
    """Weight of the mean squared error between hidden states; 0 for none."""
    layers: tuple[int, ...] = ()
    """The teacher's layers that the model's stand for, from 0, in order; none: all of as many."""
