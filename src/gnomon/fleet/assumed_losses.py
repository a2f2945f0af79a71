"""What a simulation of losses of machines takes unless told otherwise: `AssumedLosses`.

By itself, so that the command line can say the numbers without a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedLosses:
    """What a simulation of losses takes unless told otherwise."""

    come_s: float = 600.0
    """Until another machine is there."""
    start_s: float = 30.0
    """Of a start of all processes."""
    takeover_s: float = 1.4
    """Until those left go on without a start."""
    checkpoint_s: float = 300.0
    """Between checkpoints."""
    memory_every: int = 1
    """Steps between copies in memory."""
    hours: float = 24.0
    """That are played."""
    lists: int = 3
    """Of losses, drawn."""
    bulk: float = 0.1
    """Share of losses that take a second machine."""
