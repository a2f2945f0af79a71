"""EasyScale's scheduler between jobs: devices that would stand idle go to the jobs that gain most from them.

A job keeps its logical workers, however many devices of whatever speed they run on, so its result does not change; work
is divided by speed. Rigid demands are met first, first come first served; what is left goes one device at a time to the
elastic job with the largest gain in speed for it, and is taken back first. Three levels of mixing: only the kind that a
job runs on, kinds whose speeds differ by less than a factor, any kind. Source: Li et al., SC 2023 (EasyScale).
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.fleet.job import Job
from gnomon.fleet.placement import fit, take
from gnomon.fleet.state import Allocation, Decide, Decision, Forecasts, Policy, State, devices_of

LEVELS = {"one kind": 1.0, "near kinds": 2.0, "any kind": float("inf")}
"""Level of mixing -> factor within which speeds of the devices of one job must be."""


def easyscale(level: str = "near kinds") -> Decide:
    """The policy at a level of mixing."""
    factor = LEVELS[level]

    def decide(state: State, forecasts: Forecasts) -> Sequence[Decision]:
        free = list(state.free)
        allocations: dict[str, Allocation] = {active.job.id: active.allocation for active in state.running}
        for active in state.queue:
            allocation = fit(state, forecasts, free, active.job, active.job.fewest)
            if allocation is None:
                allocation = _take_back(state, forecasts, free, allocations, active.job)
            if allocation is not None:
                take(free, allocation)
                allocations[active.job.id] = allocation
        _give_out(state, forecasts, free, allocations, factor)
        before = {active.job.id: active.allocation for active in state.running}
        return [Decision(job, now) for job, now in allocations.items() if now != before.get(job, ())]

    return decide


def _take_back(
    state: State, forecasts: Forecasts, free: list[int], allocations: dict[str, Allocation], job: Job
) -> Allocation | None:
    """Devices for a job once extra ones of elastic jobs are taken back, the youngest first, as many as it needs; none
    are taken where all of them would not do."""
    tried, reduced = list(free), dict(allocations)
    # The youngest give back first; whoever has waited longest keeps most.
    for active in reversed(state.running):
        parts = list(reduced[active.job.id])
        for _ in range(devices_of(reduced[active.job.id]) - active.job.fewest):
            # From the last node of its allocation, so that what stays is packed.
            node, used = parts.pop()
            tried[node] += 1
            if used > 1:
                parts.append((node, used - 1))
            reduced[active.job.id] = tuple(parts)
            allocation = fit(state, forecasts, tried, job, job.fewest)
            if allocation is not None:
                # Only now: where even all extra devices are not enough, nobody gives up any.
                free[:] = tried
                allocations.update(reduced)
                return allocation
    return None


def _give_out(
    state: State, forecasts: Forecasts, free: list[int], allocations: dict[str, Allocation], factor: float
) -> None:
    """Idle devices, each to the job with the largest relative gain."""
    speed, pools = state.machines.speed, state.machines.pools
    jobs = state.jobs()
    elastic = [jobs[job] for job in allocations if jobs[job].job.elastic]
    nodes = [node for node, have in enumerate(free) if have and not pools[state.machines.pool_of[node]].serves]
    while elastic and nodes:
        best: tuple[float, int, Allocation] | None = None
        for active in elastic:
            now = allocations[active.job.id]
            if devices_of(now) >= active.job.most:
                continue
            needed = forecasts.memory_bytes(active.job, devices_of(now) + 1)
            large = [n for n in nodes if pools[state.machines.pool_of[n]].memory_bytes >= needed]
            for node in _near(now, large, speed, factor):
                grown = _with(now, node)
                rate, base = (forecasts.phase(active.job, active.done_at(state.now), a)[0] for a in (grown, now))
                # Relative: absolute speeds of different models do not compare.
                gain = rate / base - 1.0
                if gain > 1e-6 and (best is None or gain > best[0]):
                    best = (gain, active.index, grown)
        if best is None:
            return
        job = next(active.job.id for active in elastic if active.index == best[1])
        for node, count in best[2]:
            free[node] -= count - dict(allocations[job]).get(node, 0)
        allocations[job] = best[2]
        nodes = [node for node in nodes if free[node]]


def _near(now: Allocation, nodes: Sequence[int], speed: Sequence[float], factor: float) -> list[int]:
    """One free node of each speed that may be mixed with an allocation: its own nodes first."""
    mine = {node for node, _ in now}
    low, high = min(speed[n] for n in mine), max(speed[n] for n in mine)
    out: dict[float, int] = {}
    for node in sorted(nodes, key=lambda n: (n not in mine, n)):
        # Slowest and fastest of all that it would hold, not the new node against one of them.
        if max(high, speed[node]) <= factor * min(low, speed[node]) + 1e-9:
            out.setdefault(speed[node], node)
    return list(out.values())


def _with(now: Allocation, node: int) -> Allocation:
    parts = dict(now)
    parts[node] = parts.get(node, 0) + 1
    return tuple(parts.items())


EASYSCALE = Policy(
    name="easyscale",
    paper="Li et al., SC 2023",
    about="idle devices of near kinds to the elastic jobs that gain most",
    decide=easyscale(),
    needs="scaling",
    interval_s=60.0,
)
