"""Plans whose steps are measured, and what measures them."""

from __future__ import annotations

from runtime import parity

from gnomon.runtime import Executor
from gnomon.timeline import Timeline

PLANS = ["one device", "dp", "zero 3", "zero bubble v", "dualpipe v", "pp and tp"]


def measure(executor: Executor) -> tuple[Timeline, Timeline]:
    """The Timeline of a step that is not the first, by rank and by rank class."""
    result, timeline = executor.measured_step(parity.batch(1))
    assert executor.total_loss(result) > 0
    return timeline, executor.per_class(timeline)
