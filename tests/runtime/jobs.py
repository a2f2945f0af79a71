"""One group of processes for each world size: everything that the tests ask of it runs in it, once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from runtime import measured, parity, traced

from gnomon.runtime.launch import launch
from gnomon.timeline import Timeline


@dataclass
class Results:
    """Of one rank, by plan."""

    trained: dict[str, tuple[parity.Curve, parity.Part]]
    gradients: dict[str, tuple[float, parity.Part]]
    traced: dict[str, traced.Traced]
    measured: dict[str, tuple[Timeline, Timeline]]


@cache
def results(world_size: int) -> dict[int, Results]:
    """By rank."""
    return launch(run, world_size, world_size)


def run(world_size: int) -> Results:
    names = [name for name, plan in parity.PLANS.items() if plan.world_size == world_size]
    return Results(
        trained=parity.train_all(names),
        gradients=parity.gradients_all(names),
        traced=traced.trace_all([name for name in names if name in traced.ORDERS]),
        measured=measured.measure_all([name for name in names if name in measured.PLANS]),
    )
