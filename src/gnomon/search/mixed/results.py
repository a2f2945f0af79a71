"""What a search over unlike devices found: plans that fit, and how many points of its space went which way.

Leaves out how it looked for them (`mixed.best_first`) and what the whole answer says (`mixed.plan_mixed.MixedResult`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.hardware.kinds import Kind
from gnomon.plans import Plan
from gnomon.prediction import Prediction
from gnomon.search.mixed.space import MixedPoint


@dataclass(frozen=True, kw_only=True)
class MixedFound:
    """One plan that was predicted and fits."""

    point: MixedPoint | None
    """None for a plan of one kind of device alone, which the search for equal devices found."""
    plan: Plan
    prediction: Prediction
    kinds: tuple[int, ...]
    """The kinds that take part."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s


@dataclass(kw_only=True)
class MixedCounts:
    """How many points went which way; they add up to the space."""

    space: int = 0
    priced: int = 0
    """Predicted."""
    too_slow: int = 0
    """A bound on the time is above the best."""
    too_large: int = 0
    """A bound on the memory is above a device's."""
    illegal: int = 0
    """Cannot run."""
    left: int = 0
    """Not looked at when the predictions ran out."""

    @property
    def covered(self) -> int:
        """All of these."""
        return self.priced + self.too_slow + self.too_large + self.illegal + self.left


def fits(prediction: Prediction, kinds: tuple[Kind, ...], limits: tuple[int, ...]) -> bool:
    """Whether every rank's peak is within what its device may hold."""
    allowed = {device: limit for kind, limit in zip(kinds, limits, strict=True) for device in kind.devices}
    place = prediction.plan.device_of
    return all(rank.peak_bytes <= min(allowed[place[r]] for r in rank.ranks) for rank in prediction.memory)
