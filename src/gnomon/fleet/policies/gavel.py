"""Gavel: the share of time of every job on every kind of device by a linear programme, and rounds that keep to it.

Effective throughput of a job is the sum over kinds of its speed there times its share X of time there. Shares of a job
add up to 1 at most, and those of a kind, times the devices of each job, to its devices. Three objectives:
*max-min fairness* of throughput over that of an equal share, times devices over weight; *makespan*, the least longest
time left; *sum* of throughput. What the least programme leaves open goes to whoever does most with it. In each round
jobs are started by X over the share of time that they have had, the largest first. Source: Narayanan et al., OSDI 2020.
Leaves out sharing of a device by two jobs, costs, and hierarchies of users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gnomon.fleet.linear import maximise
from gnomon.fleet.placement import decisions_for, usable
from gnomon.fleet.policies.priority import pays
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State, packed_on

Floats = NDArray[np.float64]
ROUND_S = 360.0
"""Seconds of a round, as in the paper."""
TIE = 1e-3
"""How much total throughput counts beside the objective."""
NEVER_RAN = 1e-6
"""Share of time that a job is taken to have had where it has had none, so that such jobs go first."""

Coefficients = Callable[[Sequence[Active], Floats, Floats, State], Floats]
"""(jobs, speeds by job and pool, devices of pools, state) -> what a job's throughput counts in the least."""


def fairness(jobs: Sequence[Active], speeds: Floats, devices: Floats, state: State) -> Floats:
    """Throughput over that of an equal share of all devices, by weight."""
    equal = speeds @ (devices / devices.sum())
    demand = np.array([active.job.devices / active.job.weight for active in jobs])
    least: Floats = demand / np.maximum(equal, 1e-12)
    return least


def makespan(jobs: Sequence[Active], speeds: Floats, devices: Floats, state: State) -> Floats:
    """Throughput over work that is left."""
    return np.array([1.0 / max(active.left_s(state.now), 1e-6) for active in jobs])


def shares(speeds: Floats, demand: Floats, devices: Floats, coefficients: Floats | None) -> Floats:
    """X by job and pool: the most of the least of coefficient x throughput, or, without coefficients, of the sum.

    speeds: work a second of a job on what it asks for, by job and pool; 0 where it cannot run. demand: devices of a
    job. devices: of a pool.
    """
    jobs, pools = speeds.shape
    # Variable job x pools + pool is X of the job on the pool; the one behind them is the least that is maximised.
    count = jobs * pools
    rows, bounds = [], []
    for job in range(jobs):  # a job is in one place at a time
        row = np.zeros(count + 1)
        row[job * pools : (job + 1) * pools] = 1
        rows.append(row)
        bounds.append(1.0)
    for pool in range(pools):
        row = np.zeros(count + 1)
        row[pool:count:pools] = demand
        rows.append(row)
        bounds.append(float(devices[pool]))
    goal = np.zeros(count + 1)
    if coefficients is None:
        goal[:count] = speeds.reshape(-1)
        # Of the sum alone: the variable of the least is held at 0.
        rows.append(np.eye(count + 1)[count])
        bounds.append(0.0)
    else:
        worth = speeds * coefficients[:, None]
        scale = max(float(worth.max()), 1e-300)
        for job in range(jobs):
            row = np.zeros(count + 1)
            # least - worth X <= 0, of each job. In the unit of the largest worth, so that no coefficient is far from 1.
            row[job * pools : (job + 1) * pools] = -worth[job] / scale
            row[count] = 1
            rows.append(row)
            bounds.append(0.0)
        goal[:count] = TIE * worth.reshape(-1) / scale / max(jobs, 1)
        goal[count] = 1
    return maximise(goal, np.array(rows), np.array(bounds))[:count].reshape(jobs, pools)


def gavel(state: State, forecasts: Forecasts, *, coefficients: Coefficients | None) -> Sequence[Decision]:
    """Who runs in the next round, and where."""
    jobs = sorted((*state.queue, *state.running), key=lambda active: active.index)
    pools = [index for index, pool in enumerate(state.machines.pools) if not pool.serves]
    room = {pool: sum(state.free[node] for node in state.machines.nodes_of(pool)) for pool in pools}
    for active in state.running:
        room[state.machines.pool_of[active.allocation[0][0]]] += active.devices
    speeds = np.array([[_speed(state, forecasts, active, pool) for pool in pools] for active in jobs])
    able = [i for i in range(len(jobs)) if speeds[i].any()]
    if not able:
        return ()
    runnable, devices = [jobs[i] for i in able], np.array([float(room[pool]) for pool in pools])
    demand = np.array([float(active.job.devices) for active in runnable])
    scaled = speeds[able]
    factors = coefficients(runnable, scaled, np.maximum(devices, 1e-9), state) if coefficients else None
    share = shares(scaled, demand, devices, factors)
    order = sorted(
        (-share[row, column] / _had(state, active, pool), active.index, row, column)
        for row, active in enumerate(runnable)
        for column, pool in enumerate(pools)
        if scaled[row, column] and share[row, column] > 1e-9
    )
    picks: dict[str, tuple[int, int]] = {}
    for active in state.running:  # or rounds shorter than a start would stop all for ever
        if not pays(state, active):
            pool = state.machines.pool_of[active.allocation[0][0]]
            picks[active.job.id] = (pool, active.devices)
            room[pool] -= active.devices
    for _, _, row, column in order:
        active, pool = runnable[row], pools[column]
        if active.job.id not in picks and room[pool] >= active.job.devices:
            picks[active.job.id] = (pool, active.job.devices)
            room[pool] -= active.job.devices
    return decisions_for(state, jobs, picks)


def _speed(state: State, forecasts: Forecasts, active: Active, pool: int) -> float:
    """Work a second on what a job asks for, packed on a pool."""
    count = active.job.devices
    if pool not in usable(state, forecasts, active.job, count):
        return 0.0
    shape = packed_on(count, state.machines.nodes_of(pool)[0], state.machines.pools[pool].per_node)
    return forecasts.phase(active.job, active.done_at(state.now), shape)[0]


def _had(state: State, active: Active, pool: int) -> float:
    """Share of its time so far that a job had devices of a pool."""
    age = state.now - active.job.submit_s
    had = 0.0
    for place, (_, served, num_devices) in enumerate(active.turns):
        after = active.turns[place + 1][1] if place + 1 < len(active.turns) else active.served_at(state.now)
        if active.pools[place] == pool:
            # Turns are in device-seconds: over the devices of the turn they are seconds.
            had += (after - served) / num_devices
    return max(had / age, NEVER_RAN) if age > 0 else NEVER_RAN


def _policy(name: str, about: str, coefficients: Coefficients | None) -> Policy:
    return Policy(
        name=name,
        paper="Narayanan et al., OSDI 2020",
        about=about,
        decide=partial(gavel, coefficients=coefficients),
        needs="scaling",
        interval_s=ROUND_S,
        always=True,
        adapts=True,
    )


GAVEL = _policy("gavel", "max-min fair shares of time on kinds of devices, kept in rounds; preempts", fairness)
VARIANTS = (
    _policy("gavel-makespan", "as gavel, for the least makespan", makespan),
    _policy("gavel-throughput", "as gavel, for the most work of all jobs together", None),
)
"""Other objectives of the paper."""
