"""Co-location: two jobs on the same devices, where it is foretold that both gain. Gandiva, CoGNN and QoS-aware sharing.

Each starts what fits alone, first come first served with backfill; then a job that waits may join one that runs, if
their memory fits and the forecast of interference allows. Gandiva: the pair must do more together than one alone.
CoGNN: also in groups of small and large memory in turn, within a budget of memory. QoS: the running job keeps its
target share of speed. Sources: Xiao et al., OSDI 2018; Sun et al., SC 2022 (CoGNN); Zhao et al., Parallel Computing
2022 (SMQoS). The papers' own mechanisms (time slices, streams, shares of SMs) are in the forecast of interference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gnomon.fleet.job import Job
from gnomon.fleet.placement import fit, take
from gnomon.fleet.state import Active, Allocation, Decide, Decision, Forecasts, Policy, State, devices_of

BUDGET = 26 / 32
"""Share of a device's memory that jobs may fill together (CoGNN keeps 26 of 32 GB)."""
QOS_TARGET = 0.95
"""Share of its speed alone that a running job keeps."""

Host = tuple[Active, Allocation]
"""A job that runs alone, or starts now, and its devices."""
May = Callable[[Active, Active, Forecasts], float]
"""(running, joining) -> what the pair gains over the running job alone; 0 or less to keep them apart."""


def sharing(may: May, order: Callable[[Sequence[Active], Forecasts], Sequence[Active]]) -> Decide:
    """A policy that starts jobs alone where it can, and beside others where `may` allows."""

    def decide(state: State, forecasts: Forecasts) -> Sequence[Decision]:
        out, waiting, hosts = start_alone(state, forecasts, order(state.queue, forecasts))
        hosts_used: set[str] = set()
        for active in waiting:
            best, gain = None, 0.0
            for host, host_allocation in hosts:
                # A pair holds the same devices: forecasts of interference know of no others, nor of three jobs.
                if host.job.id in hosts_used or devices_of(host_allocation) != active.job.devices or host.job.slice:
                    continue
                if not memory_fits(state, host, host_allocation, active.job, forecasts):
                    continue
                worth = may(host, active, forecasts)
                if worth > gain:
                    best, gain = (host, host_allocation), worth
            if best is not None:
                hosts_used.add(best[0].job.id)
                out.append(Decision(active.job.id, best[1], best[0].job.id))
        return out

    return decide


def start_alone(
    state: State, forecasts: Forecasts, ordered: Sequence[Active]
) -> tuple[list[Decision], list[Active], list[Host]]:
    """(those that fit on free devices, those that do not, all that run alone and may be joined)."""
    free = list(state.free)
    out = []
    waiting = []
    hosts = [(active, active.allocation) for active in state.running if not active.shares_with]
    for active in ordered:
        allocation = fit(state, forecasts, free, active.job, active.job.devices)
        if allocation is None:
            waiting.append(active)
        else:
            take(free, allocation)
            out.append(Decision(active.job.id, allocation))
            hosts.append((active, allocation))
    return out, waiting, hosts


def memory_fits(state: State, host: Active, host_allocation: Allocation, job: Job, forecasts: Forecasts) -> bool:
    """Whether both fit within the budget; where neither says what it takes, that is not known and they stay apart."""
    count = job.devices
    needed = forecasts.memory_bytes(host.job, count), forecasts.memory_bytes(job, count)
    # 0 means unknown, and an unknown need must not be taken for none.
    if not all(needed):
        return False
    pool = state.machines.pools[state.machines.pool_of[host_allocation[0][0]]]
    return sum(needed) <= BUDGET * pool.memory_bytes


def together(host: Active, joining: Active, forecasts: Forecasts) -> float:
    """What two jobs do in a second over what one does."""
    # Speeds kept by both, less the 1 of the host alone.
    return forecasts.speed_share(host.job, joining.job) + forecasts.speed_share(joining.job, host.job) - 1.0


def _qos(host: Active, joining: Active, forecasts: Forecasts) -> float:
    keeps = forecasts.speed_share(host.job, joining.job)
    return forecasts.speed_share(joining.job, host.job) if keeps >= QOS_TARGET else 0.0


def _by_submission(queue: Sequence[Active], forecasts: Forecasts) -> Sequence[Active]:
    return queue


def _small_and_large(queue: Sequence[Active], forecasts: Forecasts) -> Sequence[Active]:
    """The smallest, the largest, the next smallest … by memory (CoGNN's balanced memory)."""
    ranked = sorted(queue, key=lambda active: (forecasts.memory_bytes(active.job, active.job.devices), active.index))
    out = []
    while ranked:
        out.append(ranked.pop(0))
        if ranked:
            out.append(ranked.pop())
    return out


def _policy(name: str, paper: str, about: str, decide: Decide) -> Policy:
    return Policy(name=name, paper=paper, about=about, decide=decide, needs="memory and interference", shares=True)


GANDIVA = _policy(
    "gandiva",
    "Xiao et al., OSDI 2018",
    "two jobs share devices where together they do more than one",
    sharing(together, _by_submission),
)
COGNN = _policy(
    "cognn",
    "Sun et al., SC 2022",
    "as gandiva, small and large memory in turn",
    sharing(together, _small_and_large),
)
QOS = _policy(
    "qos",
    "Zhao et al., Parallel Computing 2022",
    "a job joins another only if that keeps 95% of its speed",
    sharing(_qos, _by_submission),
)
