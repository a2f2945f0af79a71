"""What a method takes beside the step that a plan has without it: `MethodCosts`, in bytes and passes.

Leaves out seconds, which follow from a plan's prices (`prediction.method_costs`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCosts:
    """What a method takes beside the step that a plan has without it."""

    kept_bytes: float = 0.0
    """Between steps, for each number of the matrices that it is about (`trained_weights.compressed`)."""
    moved_bytes: float = 0.0
    """Read and written around an update, for each such number, on average over a run's steps."""
    update_bytes: float = 0.0
    """Read and written around an update by a method that knows its weights by name."""
    teacher_forwards: float = 0.0
    """Forwards of a teacher, a microbatch."""
    forwards: float = 0.0
    """More forwards of the model, a microbatch."""
    input_gradients: float = 0.0
    """More backwards without gradients of weights."""
    backwards: float = 0.0
    """More whole ones."""
    logits: float = 0.0
    """Arrays of the logits' size that are kept from forward to backward, besides the loss's own."""

    def __add__(self, other: MethodCosts) -> MethodCosts:
        """Adds the costs of two methods; a teacher's logits serve both."""
        return MethodCosts(
            kept_bytes=self.kept_bytes + other.kept_bytes,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            update_bytes=self.update_bytes + other.update_bytes,
            # The larger, not the sum: methods of one plan ask one teacher about the same tokens.
            teacher_forwards=max(self.teacher_forwards, other.teacher_forwards),
            forwards=self.forwards + other.forwards,
            input_gradients=self.input_gradients + other.input_gradients,
            backwards=self.backwards + other.backwards,
            logits=max(self.logits, other.logits),
        )
