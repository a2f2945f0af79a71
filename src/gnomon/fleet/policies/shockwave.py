"""Shockwave: rounds of the near future by the welfare of a market, weighed by finish-time fairness, less the makespan.

For the next ROUNDS rounds every job gets a number of rounds n. Chosen is what makes

    sum of fairness ** POWER x log(progress after n rounds) / (jobs x ROUNDS) - MAKESPAN x longest left / the same now

the most, within the device-rounds that there are: for each longest time left that can be reached, a knapsack with at
least the rounds that it takes. The first round is played: jobs by their rounds, then by fairness. Source: Zheng et al.,
NSDI 2023. Leaves out jobs whose batch grows as they run (a forecast says what it knows), and solves how many rounds
exactly but not which (the paper's programme has one variable for each job and round).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gnomon.fleet.knapsack import choose
from gnomon.fleet.policies.priority import by_rank, pays
from gnomon.fleet.policies.themis import fairness
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State

ROUNDS = 10
"""Rounds that are planned at a time."""
ROUND_S = 360.0
POWER = 5.0
"""How strongly unfair treatment counts."""
MAKESPAN = 0.1
"""How much the longest time left counts."""
LEAST = 1e-3
"""Progress below which no less is told apart."""
MOST_LIMITS = 12
"""Longest times left that are tried, spread over all that there are."""

Bid = tuple[int, float, float, float]
"""(devices, fairness, progress so far as a share of the work, share of the work in a round)."""


def welfare(bids: Sequence[Bid], rounds: Sequence[int]) -> float:
    """What is maximised, of so many rounds for each job."""
    total = sum(_gain(bid, count) for bid, count in zip(bids, rounds, strict=True))
    now = max(_rounds_left(bid, 0) for bid in bids)
    longest = max(_rounds_left(bid, count) for bid, count in zip(bids, rounds, strict=True))
    return total / (len(bids) * ROUNDS) - MAKESPAN * longest / max(now, 1e-9)


def _gain(bid: Bid, count: int) -> float:
    _, ratio, done, each = bid
    return float(ratio**POWER) * math.log(max(min(done + count * each, 1.0), LEAST))


def _rounds_left(bid: Bid, count: int) -> float:
    """Rounds that are left after so many."""
    _, _, done, each = bid
    return max(1.0 - done - count * each, 0.0) / max(each, 1e-12)


def plan(bids: Sequence[Bid], devices: int) -> list[int]:
    """Rounds of each job."""
    reached = sorted({_rounds_left(bid, count) for bid in bids for count in range(ROUNDS + 1)})
    # The makespan term changes only at a time left that some job can reach.
    step = max(len(reached) / MOST_LIMITS, 1.0)
    limits = {reached[min(int(i * step), len(reached) - 1)] for i in range(MOST_LIMITS)} | {math.inf}
    best: tuple[float, list[int]] | None = None
    for limit in sorted(limits):
        rounds = _within(bids, devices * ROUNDS, limit)
        if rounds is not None and (best is None or welfare(bids, rounds) > best[0] + 1e-12):
            best = (welfare(bids, rounds), rounds)
    assert best is not None, "without a limit there is always a plan"
    return best[1]


def _within(bids: Sequence[Bid], capacity: int, limit: float) -> list[int] | None:
    """Rounds with the most gain of which none leaves more than a limit; None where there are not enough devices."""
    least = []
    for bid in bids:
        need = next((count for count in range(ROUNDS + 1) if _rounds_left(bid, count) <= limit), None)
        if need is None:
            return None
        least.append(need)
    # First what the limit itself takes; the knapsack deals out the rest.
    capacity -= sum(bid[0] * need for bid, need in zip(bids, least, strict=True))
    if capacity < 0:
        return None
    groups = [
        [(bid[0] * rounds, _gain(bid, need + rounds) - _gain(bid, need)) for rounds in range(1, ROUNDS - need + 1)]
        for bid, need in zip(bids, least, strict=True)
    ]
    return [need + pick + 1 for need, pick in zip(least, choose(groups, capacity), strict=True)]


def shockwave(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """The first round of the plan."""
    if not state.queue:
        return ()
    jobs = sorted((*state.queue, *state.running), key=lambda active: active.index)
    pools = state.machines.pools
    nodes = [node for i, pool in enumerate(pools) if not pool.serves for node in state.machines.nodes_of(i)]
    devices = sum(state.free[n] for n in nodes) + sum(active.devices for active in state.running)
    bids = []
    for active in jobs:
        ratio = fairness(state, forecasts, active, len(jobs), devices)[1]
        # Capped: at the fifth power one job that waited far too long would drown all others.
        bids.append((active.job.devices, min(ratio, 100.0), _done(state, active), _each(active)))
    rounds = dict(zip((active.index for active in jobs), plan(bids, devices), strict=True))
    ratios = {active.index: bid[1] for active, bid in zip(jobs, bids, strict=True)}

    def rank(active: Active) -> tuple[bool, int, float, int]:
        # One whose start has not paid yet keeps its devices, or rounds shorter than a start would stop all for ever.
        idle = not active.allocation or pays(state, active)
        return (idle, -rounds[active.index], -ratios[active.index], active.index)

    ranked = sorted(jobs, key=rank)
    return by_rank(state, forecasts, ranked)


def _done(state: State, active: Active) -> float:
    return active.done_at(state.now) / max(active.job.work_s, 1e-9)


def _each(active: Active) -> float:
    return min(ROUND_S / max(active.job.work_s, 1e-9), 1.0)


SHOCKWAVE = Policy(
    name="shockwave",
    paper="Zheng et al., NSDI 2023",
    about="rounds by welfare, weighed by finish-time fairness, and makespan; preempts",
    decide=shockwave,
    needs="duration",
    interval_s=ROUND_S,
    always=True,
)
