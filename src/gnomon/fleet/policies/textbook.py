"""FIFO, EASY backfill and SJF: jobs start in an order that is fixed when they come, and run to their end.

Each is a Policy with an `order` (EASY apart, which looks at what runs). FIFO lets nothing pass the head of the queue;
SJF takes the shortest that fits. Sources: textbook; EASY is Lifka, JSSPP 1995.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gnomon.fleet.job import Job
from gnomon.fleet.placement import fit, take
from gnomon.fleet.state import Active, Decide, Decision, Forecasts, Policy, State


def in_order(key: Callable[[Job], float], *, backfill: bool) -> Decide:
    """A policy that starts waiting jobs in the order of a key; with `backfill` past those that do not fit."""

    def decide(state: State, forecasts: Forecasts) -> Sequence[Decision]:
        total = sum(state.free)
        if not total:
            return ()
        free = list(state.free)
        out = []
        waiting = [active for active in state.queue if active.job.devices <= total] if backfill else state.queue
        if key is not _submitted:  # the queue is in order of submission already
            waiting = sorted(waiting, key=lambda active: (key(active.job), active.index))
        for active in waiting:
            allocation = fit(state, free, active.job, active.job.devices)
            if allocation is None:
                if backfill:
                    continue
                break
            take(free, allocation)
            out.append(Decision(active.job.id, allocation))
            total -= active.job.devices
            if not total:
                break
        return out

    return decide


def _submitted(job: Job) -> float:
    return job.submit_s


def _length(job: Job) -> float:
    return job.work_s


def easy(state: State, forecasts: Forecasts) -> Sequence[Decision]:
    """EASY backfill: the head of the queue has a reservation, and others start if they do not delay it."""
    if not any(state.free):
        return ()
    free = list(state.free)
    out = []
    waiting = state.queue
    for place, head in enumerate(waiting):
        allocation = fit(state, free, head.job, head.job.devices)
        if allocation is None:
            spare, shadow = _reservation(state, free, head)
            out += _behind(state, free, waiting[place + 1 :], spare, shadow)
            break
        take(free, allocation)
        out.append(Decision(head.job.id, allocation))
    return out


def _reservation(state: State, free: Sequence[int], head: Active) -> tuple[int, float]:
    """(devices left over, when) at the moment when enough devices are free for the head."""
    have = sum(free)
    ends = sorted(
        (max(a.ready_s, state.now) + a.left_s(state.now) / a.rate, a.devices) for a in state.running if a.rate
    )
    for end, devices in ends:
        have += devices
        if have >= head.job.devices:
            return have - head.job.devices, end
    return 0, float("inf")


def _behind(state: State, free: list[int], waiting: Sequence[Active], spare: int, shadow: float) -> list[Decision]:
    out = []
    total = sum(free)
    for active in waiting:
        job = active.job
        if job.devices > total:
            continue
        short = state.now + job.work_s <= shadow
        if not short and job.devices > spare:
            continue
        allocation = fit(state, free, job, job.devices)
        if allocation is None:
            continue
        take(free, allocation)
        total -= job.devices
        spare -= 0 if short else job.devices
        out.append(Decision(job.id, allocation))
    return out


FIFO = Policy(
    name="fifo",
    paper="textbook",
    about="first come, first served; nothing passes the head of the queue",
    decide=in_order(_submitted, backfill=False),
    order=_submitted,
)
BACKFILL = Policy(
    name="backfill",
    paper="Lifka, JSSPP 1995",
    about="first come, first served; others start early if they do not delay the head",
    decide=easy,
    needs="duration",
)
SJF = Policy(
    name="sjf",
    paper="textbook",
    about="the shortest job that fits",
    decide=in_order(_length, backfill=True),
    order=_length,
    backfill=True,
    needs="duration",
)
