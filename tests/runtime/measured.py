"""Plans whose steps are measured, and what measures them."""

from __future__ import annotations

from dataclasses import replace

from runtime import parity

from gnomon.models.llama import llama
from gnomon.runtime import Executor
from gnomon.timeline import Timeline

PLANS = ["one device", "dp", "zero 3", "zero bubble v", "dualpipe v", "pp and tp"]


def measure(name: str) -> tuple[Timeline, Timeline]:
    """The Timeline of a second step, by rank and by rank class."""
    plan = replace(parity.PLANS[name], precision=parity.FP32)
    executor = Executor(llama(parity.CONFIG), plan, parity.WORKLOAD, settings=parity.SETTINGS)
    executor.step(parity.batch(0))
    result, timeline = executor.measured_step(parity.batch(1))
    assert executor.total_loss(result) > 0
    executor.leave()
    return timeline, executor.per_class(timeline)


def measure_all(names: list[str]) -> dict[str, tuple[Timeline, Timeline]]:
    return {name: measure(name) for name in names}
