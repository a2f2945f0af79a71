"""What it costs to start, stop, move and lose a job.

`Costs` says it in seconds without progress, and what a stop leaves of the work. Leaves out how fast jobs run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gnomon.errors import InputError
from gnomon.fleet.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What it costs to stop, move and lose a job."""

    restart_s: float = 60.0
    """Seconds to start again from a checkpoint."""
    first_start_s: float = 0.0
    """Seconds to start the first time; traces count them as run time already."""
    resize_s: float = 30.0
    """Seconds without progress when the number or place of devices changes."""
    checkpoint_every_s: float = 1800.0
    """Seconds of work between two checkpoints: what a failure loses, and a preemption without notice."""
    saves_when_preempted: bool = True
    """A preempted job writes a checkpoint first, as on SIGTERM; otherwise it loses the work since its last one."""

    by_model: Mapping[str, float] = field(default_factory=dict)
    """Model -> seconds of its jobs in place of `first_start_s`, `restart_s` and `resize_s`."""

    def __post_init__(self) -> None:
        for name in ("restart_s", "first_start_s", "resize_s", "checkpoint_every_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(f"{name} must be 0 s or more, got {value!r}")
        for model, value in self.by_model.items():
            if not 0 <= value < math.inf:
                raise InputError(f"seconds to start jobs of {model[:40]!r} must be 0 or more, got {value!r}")

    def pause_s(self, job: Job, *, first: bool, resize: bool) -> float:
        """Seconds without progress when a job starts, starts again, or gets another allocation."""
        usual = self.resize_s if resize else self.first_start_s if first else self.restart_s
        return self.by_model.get(job.model, usual)

    @property
    def unsaved_s(self) -> float:
        """Seconds that a job must run before stopping it leaves anything of them; 0 where it saves first."""
        return 0.0 if self.saves_when_preempted else self.checkpoint_every_s
