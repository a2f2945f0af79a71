"""Tasks of federated learning on shared devices: all pairs are chosen together, and none gets less than its partition.

Tasks start alone where they fit, first come first served. Those that wait then compete for the devices of those that
run: a pair is allowed where both keep at least what half a device to itself would give (their virtual resource) and
their memory fits; of all allowed pairs those are taken that together do most (maximum-weight matching). A greedy policy
takes the best host for the first task, which may be the only one for the next. Source: Multi-task federated sharing,
EMDC 2022, as far as its summary says; matching of pairs as in Gavel's space sharing (OSDI 2020).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gnomon.fleet.assignment import assign
from gnomon.fleet.policies.sharing import Host, memory_fits, start_alone, together
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State, devices_of

PARTITION = 0.5
"""Share of its speed that a task has on half of a device: what sharing must not fall below."""
MOST = 128
"""Tasks that wait and are matched at a time, the earliest."""


def federated(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Start alone what fits; match the rest with those that run alone, by number of devices."""
    started, waiting, hosts = start_alone(state, forecasts, state.queue)
    by_count: dict[int, tuple[list[Active], list[Host]]] = defaultdict(lambda: ([], []))
    for active in waiting:
        by_count[active.job.devices][0].append(active)
    for host in hosts:
        if not host[0].job.slice:
            by_count[devices_of(host[1])][1].append(host)
    for tasks, single in by_count.values():
        if tasks and single:
            started += _matched(state, tasks[:MOST], single, forecasts)
    return started


def _matched(state: State, tasks: Sequence[Active], hosts: Sequence[Host], forecasts: Forecasts) -> list[Decision]:
    gains = np.array([[gain(state, host, task, forecasts) for host in hosts] for task in tasks])
    return [
        Decision(task.job.id, hosts[column][1], hosts[column][0].job.id)
        for task, column in zip(tasks, assign(gains), strict=True)
        if column >= 0
    ]


def gain(state: State, host: Host, joining: Active, forecasts: Forecasts) -> float:
    """What a pair does in a second over what the host does alone; 0 where it is not allowed."""
    running, host_allocation = host
    keeps = forecasts.speed_share(running.job, joining.job), forecasts.speed_share(joining.job, running.job)
    if min(keeps) < PARTITION or not memory_fits(state, running, host_allocation, joining.job, forecasts):
        return 0.0
    return together(running, joining, forecasts)


FEDERATED = Policy(
    name="federated",
    paper="Multi-task federated sharing, EMDC 2022",
    about="pairs on shared devices by matching; each keeps at least what half a device gives",
    decide=federated,
    needs="memory and interference",
    shares=True,
)
