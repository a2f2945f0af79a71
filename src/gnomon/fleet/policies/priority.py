"""Policies that rank all jobs and run the first: SRTF, LAS and Tiresias.

`by_rank` runs as many jobs of a ranking as fit. One that runs stays where it is; one that waits takes free devices of a
pool that it can use, else those of jobs that come after it. Sources: SRTF is a textbook's; least attained service is
Nuyens and Wierman 2008; Tiresias is Gu et al., NSDI 2019 (two queues of discretised 2D attained service, FIFO in each).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gnomon.fleet.placement import emptiest, give, take, usable, within
from gnomon.fleet.state import Active, Allocation, Decision, Forecasts, Policy, State

STEP_DEVICE_S = 600.0
"""Device-seconds of attained service that LAS does not tell apart; else jobs with equal service would take turns at
every tick."""
THRESHOLD_DEVICE_S = 16 * 3600.0
"""Device-seconds after which Tiresias moves a job to its second queue: 16 GPU-hours, as in Pollux's artifact."""


def by_rank(
    state: State, forecasts: Forecasts, ranked: Sequence[Active], *, spread_out: bool = False
) -> Sequence[Decision]:
    """Run the first of a ranking that fit, each on what it asked for; the others wait. spread_out: on the emptiest
    nodes, in place of the fullest that have room."""
    ranked = [*ranked]
    chosen = _by_count(state, forecasts, ranked) if state.spread else _by_node(state, forecasts, ranked)
    free = list(state.free)
    # Those lose their devices first, so that places are looked for among all that will be free.
    moving = [a for a in ranked if a.allocation and chosen.get(a.job.id) != _pool(state, a)]
    for active in moving:
        give(free, active.allocation)
    out = [Decision(active.job.id, ()) for active in moving if active.job.id not in chosen]
    waiting = [active for active in ranked if active.job.id in chosen and (not active.allocation or active in moving)]
    for active in waiting:
        pool, count = chosen[active.job.id], active.job.devices
        nodes = state.machines.nodes_of(pool)
        allocation = emptiest(free, nodes, count) if spread_out else within(state, free, pool, count)
        if allocation is not None:
            take(free, allocation)
            out.append(Decision(active.job.id, allocation))
        # It was to move and found no place: it waits.
        elif active.allocation:
            out.append(Decision(active.job.id, ()))
    return out


def _pool(state: State, active: Active) -> int:
    return state.machines.pool_of[active.allocation[0][0]]


def _by_count(state: State, forecasts: Forecasts, ranked: Sequence[Active]) -> Mapping[str, int]:
    """The pool of every job that runs, where any free devices of a pool will do.

    Down the ranking, `left` is what jobs before leave of a pool, and `later` what of that jobs after hold.
    """
    pools = range(len(state.machines.pools))
    later = [0 for _ in pools]
    for active in ranked:
        if active.allocation:
            later[_pool(state, active)] += active.devices
    spare_of_pool = [later[pool] + sum(state.free[node] for node in state.machines.nodes_of(pool)) for pool in pools]
    chosen = {}
    for active in ranked:
        count = active.job.devices
        own = _pool(state, active) if active.allocation else -1
        if own >= 0:
            # From here on its own devices are not those of a job that comes after.
            later[own] -= active.devices
        if own >= 0 and spare_of_pool[own] >= count:
            pool = own
        else:
            some = [pool for pool in usable(state, forecasts, active.job, count) if spare_of_pool[pool] >= count]
            # A pool with truly free devices before one where a later job would have to stop.
            pool = next((pool for pool in some if spare_of_pool[pool] - later[pool] >= count), some[0] if some else -1)
        if pool >= 0:
            chosen[active.job.id] = pool
            spare_of_pool[pool] -= count
    return chosen


def _by_node(state: State, forecasts: Forecasts, ranked: Sequence[Active]) -> Mapping[str, int]:
    """The same where a job may be on no more nodes than it needs, so that free devices here and there are of no use."""
    free = list(state.free)
    holds = {active.job.id: active.allocation for active in ranked if active.allocation}
    after = [active for active in ranked if active.allocation]
    chosen = {}
    for active in ranked:
        # `after` holds running jobs that come later in the ranking, which is those that may be stopped for this one.
        if after and after[0] is active:
            after.pop(0)
        own = holds.pop(active.job.id, ())
        if own:  # nobody before it took its devices
            chosen[active.job.id] = _pool(state, active)
            continue
        pools = usable(state, forecasts, active.job, active.job.devices)
        for pool in [p for p in pools if within(state, free, p, active.job.devices)] or pools:
            allocation = _taking(state, free, holds, after, pool, active.job.devices)
            if allocation is not None:
                chosen[active.job.id] = pool
                take(free, allocation)
                break
    return chosen


def _taking(
    state: State, free: list[int], holds: dict[str, Allocation], after: Sequence[Active], pool: int, count: int
) -> Allocation | None:
    """Devices of a pool, where needed of the last jobs of a ranking, which then hold none.

    holds, free: changed where it succeeds. Jobs are stopped from the last on until there is room; of them those go on,
    the first first, without whose devices there is room too.
    """
    stopped: list[Active] = []
    tried = list(free)
    last_first = [a for a in reversed(after) if a.job.id in holds and _pool(state, a) == pool]
    while within(state, tried, pool, count) is None:
        if not last_first:
            return None
        stopped.append(last_first.pop(0))
        give(tried, stopped[-1].allocation)
    # The last stopped is the first in the ranking: it goes on if there is room without its devices.
    for active in reversed(stopped):
        take(tried, active.allocation)
        if within(state, tried, pool, count) is None:
            give(tried, active.allocation)
            del holds[active.job.id]
    free[:] = tried
    return within(state, free, pool, count)


def srtf(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Shortest remaining time first, with preemption."""
    if not state.queue:
        return ()
    ranked = sorted((*state.queue, *state.running), key=lambda active: (active.left_s(state.now), active.index))
    return by_rank(state, forecasts, ranked)


def las(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Least attained service first: the job that has had the fewest device-seconds, in steps of STEP_DEVICE_S.

    A job that has nothing to show for its start yet keeps its devices; else jobs whose start takes longer than a turn
    would stop one another for ever.
    """
    if not state.queue:
        return ()

    def rank(active: Active) -> tuple[bool, float, int]:
        turn = active.served_at(state.now) // STEP_DEVICE_S
        return (not active.allocation or pays(state, active), turn, active.index)

    return by_rank(state, forecasts, sorted((*state.queue, *state.running), key=rank))


def pays(state: State, active: Active) -> bool:
    """Whether a running job has run for as long as its start took, and has work of it that stopping it leaves."""
    # Otherwise a job could be stopped each time before it has repaid its start, and nobody would ever end.
    ran = state.now - active.ready_s
    return ran > 0 and ran >= max(active.ready_s - active.held_s, state.costs.unsaved_s)


def tiresias(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Two queues by attained service; each in the order in which jobs came to it."""
    return _tiresias(state, forecasts, spread_out=False)


def tiresias_spread(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Tiresias as in Pollux's artifact, which places jobs on the emptiest nodes."""
    return _tiresias(state, forecasts, spread_out=True)


def _tiresias(state: State, forecasts: Forecasts, *, spread_out: bool) -> Sequence[Decision]:
    if not state.queue:
        return ()

    def rank(active: Active) -> tuple[bool, float, int]:
        # First queue before second; in the second, in the order in which jobs came to it.
        if active.served_at(state.now) < THRESHOLD_DEVICE_S:
            return (False, 0.0, active.index)
        return (True, active.reached_s(THRESHOLD_DEVICE_S), active.index)

    return by_rank(state, forecasts, sorted((*state.queue, *state.running), key=rank), spread_out=spread_out)


SRTF = Policy(
    name="srtf",
    paper="textbook",
    about="the shortest remaining time first; preempts",
    decide=srtf,
    needs="duration",
    interval_s=60.0,
)
LAS = Policy(
    name="las",
    paper="Nuyens and Wierman 2008",
    about="the least attained service first; preempts",
    decide=las,
    interval_s=300.0,
    always=True,
)
TIRESIAS = Policy(
    name="tiresias",
    paper="Gu et al., NSDI 2019",
    about="two queues by attained service, FIFO in each; preempts",
    decide=tiresias,
    interval_s=60.0,
    always=True,
)
