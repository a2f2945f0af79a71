"""Goal: what a search should make best, and the limits it must keep.

A value only: `search` reads it. Leaves out how good a plan is, which the simulator says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gnomon.errors import PlanError
from gnomon.units import Bytes, DollarsPerHour, Seconds

Quantity = Literal["tokens_per_s", "tokens_per_s_per_device", "tokens_per_dollar", "step_s", "peak_memory_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What to optimise under which limits."""

    SCHEMA: ClassVar[str] = "gnomon.goal/1"

    best: Quantity = "tokens_per_s"
    """The quantity to make best: rates as high, time and memory as low as they go."""
    memory_fraction: float = 0.92
    """Share of a device's usable memory that a plan may fill; the rest is for fragmentation and what is not
    modelled."""
    memory_bytes: Bytes | None = None
    """A limit on every device in place of that share."""
    max_devices: int | None = None
    """Devices that may be used. Left out: all of the cluster."""
    max_step_s: Seconds | None = None
    """Longest step allowed."""
    max_dollars_per_hour: DollarsPerHour | None = None
    """Highest price allowed."""
    equality: Literal["bitwise", "exact", "statistical"] = "exact"
    """How far a plan may move the result: not by a bit, only by the order of additions, or by methods that change the
    mathematics (delayed updates, compression)."""
    stacks: tuple[str, ...] = ()
    """Names of stacks that must be able to run it. Empty: any."""

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_fraction <= 1.0:
            raise PlanError(f"goal memory_fraction = {self.memory_fraction} must be above 0 and at most 1")
        for field in ("memory_bytes", "max_devices", "max_step_s", "max_dollars_per_hour"):
            if (value := getattr(self, field)) is not None and value <= 0:
                raise PlanError(f"goal {field} = {value} must be above 0; leave it out for no limit")
