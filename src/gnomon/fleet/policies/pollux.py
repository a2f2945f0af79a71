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

from gnomon.fleet.placement import give, place, take
from gnomon.fleet.state import Active, Allocation, Decision, Forecasts, Policy, State, devices_of

RESTART_S = 30.0
"""What a restart is taken to cost when a change is weighed."""
_LEAST = 1e-3
"""Keeps 1 / speed-up finite for a job that waits."""


def pollux(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Replicas and places of all jobs."""
    nodes = [n for i, p in enumerate(state.machines.pools) if not p.serves for n in state.machines.nodes_of(i)]
    jobs = sorted((*state.queue, *state.running), key=lambda active: (active.served_at(state.now), active.index))
    capacity = sum(state.free[n] for n in nodes) + sum(active.devices for active in state.running)
    per_node = max(state.machines.capacity)
    if not jobs or not capacity:
        return ()
    fair = math.ceil(capacity / len(jobs))
    costs = [_costs(state, forecasts, active, fair, per_node, capacity, nodes[0]) for active in jobs]
    counts = fewest_cost(costs, capacity)
    return _placed(state, jobs, counts, nodes)


def _costs(
    state: State, forecasts: Forecasts, active: Active, fair: int, per_node: int, capacity: int, node: int
) -> list[float]:
    """1 / speed-up of a job on 0, 1, 2 … devices."""
    job, now = active.job, state.now
    done = active.done_at(now)
    fewest, limit = forecasts.limits(job)
    most = min(limit, max(2 * active.peak, fewest), capacity)
    base = _goodput(forecasts, active, done, _packed(max(fewest, min(fair, limit)), per_node, node))
    age = now - job.submit_s
    restarts = active.preemptions + active.resizes
    factor = max(age - restarts * RESTART_S, 0.0) / (age + RESTART_S)
    have = active.devices
    out = [1.0 / _LEAST]
    for count in range(1, most + 1):
        if count < fewest:
            out.append(out[0])
            continue
        held = active.allocation if count == have else _packed(count, per_node, node)
        speedup = _goodput(forecasts, active, done, held) / base if base > 0 else float(count)
        if count != have:
            speedup *= factor if active.first_s >= 0 else age / (age + RESTART_S) if age else 1.0
        # Scaled as in the artifact, where a whole node is a speed-up of 1: it sets how much _LEAST matters.
        out.append(1.0 / (speedup / per_node + _LEAST))
    return out


def _goodput(forecasts: Forecasts, active: Active, done: float, held: Allocation) -> float:
    return forecasts.phase(active.job, done, held)[0]


def _packed(count: int, per_node: int, node: int) -> Allocation:
    """A packed allocation of nodes that stand for any."""
    full, rest = divmod(count, per_node)
    return tuple((node, per_node) for _ in range(full)) + (((node, rest),) if rest else ())


def fewest_cost(costs: Sequence[Sequence[float]], capacity: int) -> list[int]:
    """Devices of each job that make the sum of costs least; costs[j][n] is job j's on n devices."""
    best = np.zeros(capacity + 1)
    picks = np.zeros((len(costs), capacity + 1), dtype=np.int32)
    for index, row in enumerate(costs):
        after = best + row[0]
        for count in range(1, min(len(row), capacity + 1)):
            if row[count] >= row[0]:
                continue
            with_count = best[: capacity + 1 - count] + row[count]
            better = with_count < after[count:] - 1e-12
            after[count:][better] = with_count[better]
            picks[index, count:][better] = count
        best = after
    left = int(np.argmin(best))
    out = [0] * len(costs)
    for index in range(len(costs) - 1, -1, -1):
        out[index] = int(picks[index, left])
        left -= out[index]
    return out


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
        allocation = place(free, nodes, count)
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
