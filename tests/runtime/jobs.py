"""One group of processes for each world size: everything that the tests ask of it runs in it, once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from once import once
from runtime import accounted, axes, measured, parity, traced
from runtime.ranks import launch

from gnomon.runtime.checks.parity import ParityResult
from gnomon.timeline import Timeline


@dataclass
class Results:
    """Of one rank, by plan."""

    trained: dict[str, tuple[parity.Curve, parity.Part]]
    gradients: dict[str, list[tuple[float, parity.Part]]]
    traced: dict[str, traced.Traced]
    measured: dict[str, tuple[Timeline, Timeline]]
    accounted: dict[str, accounted.Accounted]
    axes: dict[str, ParityResult]
    updates: dict[str, tuple[list[traced.Call], int]]
    threads: tuple[int, int]
    """Of the process, before the first plan and after the last; (0, 0) where the system does not say."""


def results(world_size: int) -> dict[int, Results]:
    """By rank. A job that failed is not started again: every test that asks for it fails with the same error."""
    result = _outcome(world_size)
    if isinstance(result, Exception):
        raise AssertionError(f"the job of {world_size} processes failed, once for all its tests") from result
    return result


@cache
def _outcome(world_size: int) -> dict[int, Results] | AssertionError:
    return once(f"runtime-{world_size}-ranks", lambda: _run(world_size))


def _run(world_size: int) -> dict[int, Results] | AssertionError:
    try:
        return launch(run, world_size, world_size)
    except Exception as error:
        return AssertionError(str(error))


def run(world_size: int) -> Results:
    names, before = [name for name, plan in parity.PLANS.items() if plan.world_size == world_size], threads()
    trained, gradients, traces, timelines = parity.train_all(names), {}, {}, {}
    for name in names:  # one executor in float32 for all that is asked of it
        executor = parity.float32(parity.PLANS[name])
        gradients[name] = parity.gradients(executor)
        if name in traced.ORDERS:
            traces[name] = traced.trace(executor)
        if name in measured.PLANS:
            timelines[name] = measured.measure(executor)
        executor.leave()
    return Results(
        trained=trained,
        gradients=gradients,
        traced=traces,
        measured=timelines,
        accounted=accounted.account_all(
            [name for name, plan in accounted.PLANS.items() if plan.world_size == world_size]
        ),
        axes=axes.compare_all(world_size),
        updates=traced.trace_updates(world_size),
        threads=(before, threads()),
    )


def threads() -> int:
    """Of this process, torch's and gloo's too."""
    return len(list(Path("/proc/self/task").glob("*")))
