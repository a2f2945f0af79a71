"""Policies that rank all jobs and run the first: SRTF, LAS and Tiresias.

`by_rank` runs as many jobs of a ranking as fit, keeps those of them that already run where they are, and preempts the
rest only for what comes before them. Sources: SRTF is a textbook's; least attained service is Nuyens and Wierman 2008;
Tiresias is Gu et al., NSDI 2019 (two queues of discretised 2D attained service, FIFO in each).
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.fleet.placement import emptiest, fit, give, take
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State

THRESHOLD_DEVICE_S = 16 * 3600.0
"""Device-seconds after which Tiresias moves a job to its second queue: 16 GPU-hours, as in Pollux's artifact."""


def by_rank(state: State, ranked: Sequence[Active], *, spread_out: bool = False) -> Sequence[Decision]:
    """Run the first of a ranking that fit, each on what it asked for; the others wait. spread_out: on the emptiest
    nodes, in place of the fullest that have room."""
    left = sum(state.free) + sum(active.devices for active in state.running)
    chosen, passed = [], []
    for active in ranked:
        if active.job.devices <= left:
            left -= active.job.devices
            chosen.append(active)
        else:
            passed.append(active)
    free = list(state.free)
    out = []
    stopped = [active for active in passed if active.allocation]
    if not any(not active.allocation for active in chosen):
        return ()
    for active in stopped:
        give(free, active.allocation)
    for active in chosen:
        if active.allocation:
            continue
        count = active.job.devices
        allocation = emptiest(free, range(len(free)), count) if spread_out else fit(state, free, active.job, count)
        if allocation is None:
            continue
        take(free, allocation)
        out.append(Decision(active.job.id, allocation))
    return [*_needed(state, stopped, out), *out]


def _needed(state: State, stopped: Sequence[Active], started: Sequence[Decision]) -> list[Decision]:
    """Which of those that may be stopped must be: the ones whose devices are taken."""
    free = list(state.free)
    short: dict[int, int] = {}
    for decision in started:
        take(free, decision.allocation)
    short = {node: -have for node, have in enumerate(free) if have < 0}
    out = []
    for active in reversed(stopped):  # the last of the ranking first
        if not any(short.get(node, 0) > 0 for node, _ in active.allocation):
            continue
        for node, count in active.allocation:
            if node in short:
                short[node] -= count
        out.append(Decision(active.job.id, ()))
    return out


def srtf(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Shortest remaining time first, with preemption."""
    if not state.queue:
        return ()
    ranked = sorted((*state.queue, *state.running), key=lambda active: (active.left_s(state.now), active.index))
    return by_rank(state, ranked)


def las(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Least attained service first: the job that has had the fewest device-seconds, in steps of a tick's worth."""
    if not state.queue:
        return ()

    def rank(active: Active) -> tuple[float, float, int]:
        # A step of 10 device-minutes; without it, jobs with equal service would take turns at every tick.
        return (active.served_at(state.now) // 600.0, active.job.submit_s, active.index)

    return by_rank(state, sorted((*state.queue, *state.running), key=rank))


def tiresias(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """Two queues by attained service; each in the order in which jobs came to it."""
    return _tiresias(state, spread_out=False)


def tiresias_spread(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """As in Pollux's artifact, which places on the emptiest nodes."""
    return _tiresias(state, spread_out=True)


def _tiresias(state: State, *, spread_out: bool) -> Sequence[Decision]:
    if not state.queue:
        return ()

    def rank(active: Active) -> tuple[bool, float, int]:
        return (active.served_at(state.now) >= THRESHOLD_DEVICE_S, active.job.submit_s, active.index)

    return by_rank(state, sorted((*state.queue, *state.running), key=rank), spread_out=spread_out)


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
