"""ElasticFlow: jobs with deadlines get the smallest share that meets them, and what is left goes where it helps most.

The minimum satisfactory share of a job is the smallest number of devices with which, taking no more than jobs with an
earlier deadline leave, it ends in time. A job is admitted if it and all that were admitted before have such shares;
then it holds its share. What is left goes to jobs without a deadline and to those that were not admitted, first come
first served, and then device by device to the elastic job whose rate grows most. Source: Gu et al., ASPLOS 2023.
Leaves out powers of two, and what resizes cost in the plan. The paper drops jobs that are not admitted; here they run
when there is room, since every job of a replay comes to its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnomon.fleet.placement import decisions_for, usable
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State, packed_on

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Demand:
    """A job as it is planned."""

    left_s: float
    """Work that is left."""
    rates: Mapping[int, float]
    """Devices -> work a second, of all numbers that it can use."""
    start_s: float
    """No progress before."""
    due_s: float
    """When it must have finished."""


Profile = list[tuple[float, float, int]]
"""(from, to, free devices) of the future, without gaps, up to infinity."""
Use = list[tuple[float, float, int]]
"""(from, to, devices) that a job takes."""


def smallest_share(profile: Profile, demand: Demand) -> tuple[int, Use] | None:
    """(most devices at a time, what it takes when) of the smallest share that meets a deadline; None if none does."""
    for most in sorted(demand.rates):
        use = _use(profile, demand, most)
        if use is not None:
            return most, use
    return None


def _use(profile: Profile, demand: Demand, most: int) -> Use | None:
    remaining_s, use = demand.left_s, []
    for begin, end, free in profile:
        # As many as are free up to its share; fewer where an earlier deadline has them.
        count = max((n for n in demand.rates if n <= min(most, free) and demand.rates[n] > 0), default=0)
        if not count:
            continue
        rate, first = demand.rates[count], max(begin, demand.start_s)
        done = first + remaining_s / rate
        if done <= end:
            use.append((begin, done, count))
            return use if done <= demand.due_s + _EPS else None
        remaining_s -= max(end - first, 0.0) * rate
        use.append((begin, end, count))
        # Later stretches cannot help.
        if end > demand.due_s:
            return None
    return None


def remaining(profile: Profile, use: Use) -> Profile:
    """What is left of a profile."""
    out = []
    for begin, end, free in profile:
        cuts = sorted({begin, end, *(at for part in use for at in part[:2] if begin < at < end)})
        for a, b in zip(cuts, cuts[1:], strict=False):
            used = next((count for s, e, count in use if s <= a < e), 0)
            out.append((a, b, free - used))
    return out


def plan_uses(demands: Sequence[Demand], now: float, devices: int) -> list[Use] | None:
    """What every job takes when all meet their deadlines, the earliest first; None where one cannot."""
    profile: Profile = [(now, math.inf, devices)]
    uses: list[Use] = [[] for _ in demands]
    # Earliest deadline first, as in the paper's admission control.
    for place in sorted(range(len(demands)), key=lambda i: (demands[i].due_s, i)):
        found = smallest_share(profile, demands[place])
        if found is None:
            return None
        uses[place] = found[1]
        profile = remaining(profile, found[1])
    return uses


def elasticflow(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Shares of admitted jobs, then what is left."""
    jobs = sorted((*state.queue, *state.running), key=lambda active: active.index)
    room = {
        pool: sum(state.free[node] for node in state.machines.nodes_of(pool))
        for pool, kind in enumerate(state.machines.pools)
        if not kind.serves
    }
    for active in state.running:
        room[state.machines.pool_of[active.allocation[0][0]]] += active.devices
    picks: dict[str, tuple[int, int]] = {}
    for pool in room:
        mine = [active for active in jobs if _home(state, forecasts, active) == pool]
        for active, count in _shares(state, forecasts, mine, pool, room[pool]):
            picks[active.job.id] = (pool, count)
            room[pool] -= count
    _rest(state, forecasts, jobs, room, picks)
    return decisions_for(state, jobs, picks)


def _home(state: State, forecasts: Forecasts, active: Active) -> int:
    """The pool in which a job is planned: where it is, else the first that it can use."""
    if active.allocation:
        return state.machines.pool_of[active.allocation[0][0]]
    return next(iter(usable(state, forecasts, active.job, active.job.fewest)), -1)


def _shares(
    state: State, forecasts: Forecasts, jobs: Sequence[Active], pool: int, devices: int
) -> list[tuple[Active, int]]:
    """Admitted jobs with what they hold now."""
    due = [active for active in jobs if active.job.deadline_s < math.inf]
    started = [active for active in due if active.first_s >= 0]
    admitted: list[tuple[Active, Demand]] = []
    uses: list[Use] = []
    # Those that were admitted before come first: admission is a promise, which a newcomer must not break.
    for active in (*started, *(active for active in due if active.first_s < 0)):
        with_job = [*admitted, (active, _demand(state, forecasts, active, pool))]
        found = plan_uses([demand for _, demand in with_job], state.now, devices)
        if found is not None:
            admitted, uses = with_job, found
    out = []
    for (active, _), use in zip(admitted, uses, strict=True):
        count = next((count for begin, end, count in use if begin <= state.now < end), 0)
        if count:
            out.append((active, count))
    return out


def _demand(state: State, forecasts: Forecasts, active: Active, pool: int) -> Demand:
    # What a start costs is known in advance; a resize's is left out.
    pause = 0.0 if active.allocation else state.costs.pause_s(active.job, first=active.first_s < 0, resize=False)
    return Demand(
        left_s=active.left_s(state.now),
        rates=_rates(state, forecasts, active, pool),
        start_s=max(active.ready_s, state.now) + pause,
        due_s=active.job.deadline_s,
    )


def _rates(state: State, forecasts: Forecasts, active: Active, pool: int) -> dict[int, float]:
    fewest, most = forecasts.limits(active.job)
    home, node = state.machines.pools[pool], state.machines.nodes_of(pool)[0]
    done = active.done_at(state.now)
    counts = range(fewest, min(most, home.devices) + 1)
    return {n: forecasts.phase(active.job, done, packed_on(n, node, home.per_node))[0] for n in counts}


def _rest(
    state: State, forecasts: Forecasts, jobs: Sequence[Active], room: dict[int, int], picks: dict[str, tuple[int, int]]
) -> None:
    """Room for those without a share, first come first served, then for elastic jobs that gain most from a device."""
    for active in jobs:
        if active.job.id in picks:
            continue
        own = state.machines.pool_of[active.allocation[0][0]] if active.allocation else -1
        # Its own pool first: a move would cost a restart.
        pools = sorted(usable(state, forecasts, active.job, active.job.fewest), key=lambda pool: pool != own)
        pool = next((pool for pool in pools if room[pool] >= active.job.fewest), None)
        if pool is not None:
            picks[active.job.id] = (pool, active.job.fewest)
            room[pool] -= active.job.fewest
    elastic = [active for active in jobs if active.job.elastic and active.job.id in picks]
    rates = {active.job.id: _rates(state, forecasts, active, picks[active.job.id][0]) for active in elastic}
    while True:
        best, gain = None, 1e-9
        for active in elastic:
            pool, count = picks[active.job.id]
            extra_gain = rates[active.job.id].get(count + 1, 0.0) - rates[active.job.id].get(count, 0.0)
            if room[pool] and extra_gain > gain:
                best, gain = active.job.id, extra_gain
        if best is None:
            return
        pool, count = picks[best]
        picks[best] = (pool, count + 1)
        room[pool] -= 1


ELASTICFLOW = Policy(
    name="elasticflow",
    paper="Gu et al., ASPLOS 2023",
    about="the smallest shares that meet deadlines; what is left to the elastic jobs that gain most",
    decide=elasticflow,
    needs="duration and scaling",
    interval_s=60.0,
    always=True,
    adapts=True,
)
