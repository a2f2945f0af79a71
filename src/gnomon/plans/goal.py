"""Goal: the limits that every plan of a search must keep. What is made best is the step's time.

A value only: `search` reads it. Leaves out how good a plan is, which the simulator says, and questions of several
searches (`search.questions.goals`): fewest devices, cost, longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gnomon.errors import PlanError
from gnomon.schema import typed
from gnomon.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The limits within which a search looks for the fastest plan."""

    SCHEMA: ClassVar[str] = "gnomon.goal/1"

    memory_fraction: float = 0.92
    """Share of a device's usable memory that a plan may fill; the rest is for fragmentation and what is not
    modelled."""
    memory_bytes: Bytes | None = None
    """A limit on every device in place of that share."""

    @typed
    def __post_init__(self) -> None:
        if not 0.0 < self.memory_fraction <= 1.0:
            raise PlanError(f"goal memory_fraction = {self.memory_fraction} must be above 0 and at most 1")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise PlanError(f"goal memory_bytes = {self.memory_bytes} must be above 0; leave it out for no limit")
