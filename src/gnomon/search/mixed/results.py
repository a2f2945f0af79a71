"""Plans that a search over mixed devices keeps, and whether one fits.

Leaves out how it looked for them (`best_first`) and what the whole answer says (`mixed.plan_mixed.MixedResult`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.hardware.kinds import DeviceKind
from gnomon.plans import Plan
from gnomon.prediction import Prediction, host_memory
from gnomon.search.mixed.space import MixedPoint


@dataclass(frozen=True, kw_only=True)
class MixedFound:
    """One plan that was predicted and fits."""

    point: MixedPoint | None
    """None for a plan of one kind of device alone, which the search for equal devices found."""
    plan: Plan
    """What is run, with a placement of its workers on the kinds of devices."""
    prediction: Prediction
    """Its time and memory."""
    kinds: tuple[int, ...]
    """The kinds that take part."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.prediction.step_s


def fits(prediction: Prediction, kinds: tuple[DeviceKind, ...], limits: tuple[int, ...]) -> bool:
    """Whether every rank's peak is within what its device may hold, and hosts hold what waits there."""
    allowed = {device: limit for kind, limit in zip(kinds, limits, strict=True) for device in kind.devices}
    place = prediction.plan.device_of
    ranks = all(rank.peak_bytes <= min(allowed[place[r]] for r in rank.ranks) for rank in prediction.memory)
    return ranks and host_memory(prediction).fits_in(min(limits))
