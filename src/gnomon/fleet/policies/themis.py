"""Themis: devices go to the jobs with the worst finish-time fairness, and among these to the largest product.

The finish-time fairness of a job is its time from submission to end over the time that it would take alone on its share
of the cluster (1 over the jobs that there are). At each auction the 1 - f of the jobs with the worst bid, and the
devices go to the winners whose product of 1 over that ratio is largest; what is left goes to the others, the worst
first. Every lease ends at an auction. Source: Mahajan et al., NSDI 2020. Leaves out payments that are held back to keep
bids honest (a forecast does not lie), and placement in the bids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gnomon.fleet.knapsack import choose
from gnomon.fleet.placement import usable
from gnomon.fleet.policies.priority import by_rank, pays
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State, packed_on

F = 0.8
"""Share of the jobs, those treated best, that an auction leaves out; the paper's fairness knob."""
LEASE_S = 1200.0
"""Seconds between auctions, the paper's lease."""


def themis(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Winners first, then the others."""
    if not state.queue:
        return ()
    jobs = [*state.queue, *state.running]
    # Devices of the whole cluster: fairness compares with a share of everything, not of what is free.
    total = sum(state.free[n] for n in _nodes(state)) + sum(active.devices for active in state.running)
    ratios = {active.job.id: fairness(state, forecasts, active, len(jobs), total) for active in jobs}
    worst = sorted(jobs, key=lambda active: (-ratios[active.job.id][0], active.index))
    # The 1 - f treated worst see the offer, which keeps the gap between worst and best small.
    bidders = worst[: max(math.ceil((1 - F) * len(jobs)), 1)]
    won = winners([(active.job.devices, *ratios[active.job.id]) for active in bidders], total)
    first = [active for active, win in zip(bidders, won, strict=True) if win]
    ranked = [*first, *(active for active in worst if active not in first)]
    # One whose start has not paid yet keeps its devices, or leases shorter than a start would stop all for ever.
    return by_rank(state, forecasts, sorted(ranked, key=lambda active: not active.allocation or pays(state, active)))


def winners(bids: Sequence[tuple[int, float, float]], devices: int) -> list[bool]:
    """Picks the bids that get their devices: those with the largest product of 1 over the ratios.

    bids: (devices, ratio without them until the next auction, ratio with them).
    """
    # The product of 1/ratio is largest where the sum of logarithms of (ratio without / ratio with) over winners is: a
    # knapsack.
    picks = choose([[(count, math.log(without / having))] for count, without, having in bids], devices)
    return [pick == 0 for pick in picks]


def fairness(state: State, forecasts: Forecasts, active: Active, jobs: int, devices: int) -> tuple[float, float]:
    """(ratio without devices until the next auction, ratio with them from now on)."""
    job = active.job
    done, machines = active.done_at(state.now), state.machines
    shapes = [
        packed_on(job.devices, machines.nodes_of(pool)[0], machines.pools[pool].per_node)
        for pool in usable(state, forecasts, job, job.devices)
    ]
    rates = [forecasts.phase(job, done, shape)[0] for shape in shapes]
    rate = max(rates, default=0.0)
    # It runs nowhere in this cluster: no share can be unfair to it.
    if not rate:
        return math.inf, math.inf
    share = max(devices / jobs, 1e-9)
    # Alone on its share of the cluster, and no faster than on what it asks for.
    alone_s = max(job.work_s / rate * max(job.devices / share, 1.0), 1e-9)
    age, remaining_s = state.now - job.submit_s, active.left_s(state.now) / rate
    return max(age + LEASE_S + remaining_s, 1e-9) / alone_s, max(age + remaining_s, 1e-9) / alone_s


def _nodes(state: State) -> Sequence[int]:
    pools = state.machines.pools
    return [node for index, pool in enumerate(pools) if not pool.serves for node in state.machines.nodes_of(index)]


THEMIS = Policy(
    name="themis",
    paper="Mahajan et al., NSDI 2020",
    about="auctions to the jobs with the worst finish-time fairness; preempts when leases end",
    decide=themis,
    needs="duration",
    interval_s=LEASE_S,
    always=True,
)
