"""Pollux: replicas go where they raise the harmonic mean of the jobs' goodput, each relative to a fair share.

At each round the number of replicas of every job is chosen by dynamic programming over the devices: what is minimised
is the sum of 1 / (speed-up over a fair share), and a job whose number changes pays for its restart. Then replicas are
placed on as few nodes as hold them. The published scheduler searches the same objective with a genetic algorithm. A job
may use at most twice as many devices as it has ever had. Source: Qiao et al., OSDI 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gnomon.fleet.placement import give, snug, take
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State, devices_of

RESTART_S = 30.0
"""What a restart is taken to cost when a change is weighed."""
_LEAST = 1e-3
"""Keeps 1 / speed-up finite for a job that waits."""
_FEW = 4
"""Numbers of devices up to which each is looked at by itself."""
Floats = NDArray[np.float64]


def pollux(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Replicas and places of all jobs."""
    if not (state.queue or state.running):
        return ()
    nodes = [n for i, p in enumerate(state.machines.pools) if not p.serves for n in state.machines.nodes_of(i)]
    per_node, every = max(state.machines.capacity), sum(state.machines.capacity[n] for n in nodes)
    if not state.queue and all(_is_best(state, forecasts, a, per_node, every, nodes[0]) for a in state.running):
        return ()
    capacity = sum(state.free[n] for n in nodes) + sum(active.devices for active in state.running)
    if not capacity:
        return ()
    jobs = sorted((*state.queue, *state.running), key=lambda active: (active.served_at(state.now), active.index))
    fair = math.ceil(capacity / len(jobs))
    costs = [_costs(state, forecasts, active, fair, per_node, capacity, nodes[0]) for active in jobs]
    return _placed(state, jobs, fewest_cost(costs, capacity), nodes)


def _is_best(
    state: State, forecasts: Forecasts, active: Active, per_node: int, capacity: int, node: int
) -> bool:  # fmt: skip
    """Whether no other number of devices is worth more to a running job than the one that it has, whatever is free."""
    fewest, most = _range(forecasts, active, capacity)
    if fewest >= most:
        return True  # it has the only number that it can run on
    done = active.done_at(state.now)
    others = forecasts.packed(active.job, done, node, per_node, most)[fewest - 1 :]
    return forecasts.phase(active.job, done, active.allocation)[0] >= _speedup_share(state, active) * float(
        others.max()
    )


def _range(forecasts: Forecasts, active: Active, capacity: int) -> tuple[int, int]:
    """(fewest, most) devices that a job may get now: at most twice as many as it ever had."""
    fewest, limit = forecasts.limits(active.job)
    return fewest, min(limit, max(2 * active.peak, fewest), capacity)


def _speedup_share(state: State, active: Active) -> float:
    """Share of a speed-up that is left where the number of devices changes, for the restarts so far and the next."""
    age = state.now - active.job.submit_s
    if active.first_s < 0:
        return age / (age + RESTART_S) if age else 1.0
    restarts = active.preemptions + active.resizes
    return max(age - restarts * RESTART_S, 0.0) / (age + RESTART_S)


def _costs(
    state: State, forecasts: Forecasts, active: Active, fair: int, per_node: int, capacity: int, node: int
) -> Floats:
    """1 / speed-up of a job on 0, 1, 2 … devices."""
    job, done = active.job, active.done_at(state.now)
    fewest, most = _range(forecasts, active, capacity)
    share = max(fewest, min(fair, forecasts.limits(job)[1]))
    rates = forecasts.packed(job, done, node, per_node, max(most, share))
    base = rates[share - 1]
    speedups = rates[:most] / base if base > 0 else np.arange(1.0, most + 1)
    kept_cost, have = _speedup_share(state, active), active.devices
    costs = np.full(most + 1, 1.0 / _LEAST)
    # Scaled as in the artifact, where a whole node is a speed-up of 1: it sets how much _LEAST matters.
    costs[fewest:] = 1.0 / (speedups[fewest - 1 :] * (kept_cost / per_node) + _LEAST)
    if fewest <= have <= most:
        own = float(forecasts.phase(job, done, active.allocation)[0] / base) if base > 0 else float(have)
        costs[have] = 1.0 / (own / per_node + _LEAST)
    return costs


def fewest_cost(costs: Sequence[Floats], capacity: int) -> list[int]:
    """Devices of each job that make the sum of costs least; costs[j][n] is job j's on n devices."""
    cheapest = [int(row.argmin()) for row in costs]
    # All have what is best for each: there is nothing to weigh.
    if sum(cheapest) <= capacity:
        return cheapest
    best = np.zeros(capacity + 1)
    picks = np.zeros((len(costs), capacity + 1), dtype=np.int32)
    for index, row in enumerate(costs):
        best = _with_one_more(best, row[: capacity + 1], picks[index])
    capacity_left = int(np.argmin(best))
    out = [0] * len(costs)
    for index in range(len(costs) - 1, -1, -1):
        out[index] = int(picks[index, capacity_left])
        capacity_left -= out[index]
    return out


def _with_one_more(best: Floats, row: Floats, picks: NDArray[np.int32]) -> Floats:
    """Least cost by devices with one more job, whose number is written to `picks`."""
    # A number of devices that costs as much as none is never chosen.
    useful = np.flatnonzero(row < row[0])
    if len(useful) > _FEW:
        before = np.concatenate([np.full(len(row) - 1, np.inf), best])
        # Window d turned round is best[d], best[d - 1] …, so sums[d, n] is the cost of the other jobs on d - n devices
        # and of this one on n: infinite for n > d.
        sums = sliding_window_view(before, len(row))[:, ::-1] + row  # [devices, of them this job's]
        picks[:] = sums.argmin(axis=1)
        least: Floats = sums[np.arange(len(best)), picks]
        return least
    after: Floats = best + row[0]
    for count in useful.tolist():
        with_count = best[: len(best) - count] + row[count]
        better = with_count < after[count:]
        after[count:][better] = with_count[better]
        picks[count:][better] = count
    return after


def _placed(state: State, jobs: Sequence[Active], counts: Sequence[int], nodes: Sequence[int]) -> Sequence[Decision]:
    """Those with a new number of devices are placed anew, the largest first; the others stay."""
    free = list(state.free)
    changed = [(active, count) for active, count in zip(jobs, counts, strict=True) if count != active.devices]
    for active, _ in changed:
        give(free, active.allocation)
    out = [Decision(active.job.id, ()) for active, count in changed if not count and active.allocation]
    for active, count in sorted(changed, key=lambda pair: (-pair[1], pair[0].index)):
        if not count:
            continue
        allocation = snug(free, nodes, count)
        assert allocation is not None and devices_of(allocation) == count
        take(free, allocation)
        out.append(Decision(active.job.id, allocation))
    return out


POLLUX = Policy(
    name="pollux",
    paper="Qiao et al., OSDI 2021",
    about="replicas by goodput, relative to a fair share; restarts are weighed",
    decide=pollux,
    needs="scaling",
    interval_s=60.0,
    always=True,
    adapts=True,
)
