"""How a model is taught: `Teaching`, the value that a plan's methods ask for.

Leaves out reading it from a method's parameters, and what follows for a model (`teacher`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """How a model is taught."""

    folder: str
    """config.json and safetensors of the teacher."""
    share: float = 0.7
    """Of the loss, that compares logits; the text's own has the rest."""
    beside: bool = False
    """Whether the text's own loss counts whole, and the comparison `share` times beside it."""
    until: int = 0
    """Updates after which the teacher is left out; 0: never."""
    temperature: float = 1.0
    hidden: float = 0.0
    """Weight of the squares between layers; 0 for none."""
    layers: tuple[int, ...] = ()
    """The teacher's layers that the model's stand for, from 0, in order; none: all of as many."""
