"""FIFO, EASY backfill and SJF: jobs start in an order that is fixed when they come, and run to their end.

Each is a Policy with an `order` (EASY apart, which looks at what runs). FIFO lets nothing pass the head of the queue;
SJF takes the shortest that fits. Sources: textbook; EASY is Lifka, JSSPP 1995.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

from gnomon.fleet.job import Job
from gnomon.fleet.placement import fit, give, take, usable, within
from gnomon.fleet.state import Active, Allocation, Decide, Decision, Forecasts, Policy, State, devices_of


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
            allocation = fit(state, forecasts, free, active.job, active.job.devices)
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
    """Schedules by EASY backfill: the first job that does not fit has a reservation, and others start if they do not
    delay it."""
    if not any(state.free):
        return ()
    free = list(state.free)
    started: list[tuple[Active, Allocation]] = []
    behind: list[Decision] = []
    for place, head in enumerate(state.queue):
        allocation = fit(state, forecasts, free, head.job, head.job.devices)
        if allocation is None:
            ends = [(_end_s(state, forecasts, active), active.allocation) for active in state.running]
            # What starts now is as sure to end as what runs: the reservation counts on both.
            ends += [
                (_end_if_started_s(state, forecasts, active, allocation_of), allocation_of)
                for active, allocation_of in started
            ]
            behind = _behind(state, forecasts, free, state.queue[place:], ends)
            break
        take(free, allocation)
        started.append((head, allocation))
    return [*(Decision(active.job.id, allocation_of) for active, allocation_of in started), *behind]


def _end_s(state: State, forecasts: Forecasts, active: Active) -> float:
    remaining_s = forecasts.remaining_s(active.job, active.done_at(state.now), active.allocation)
    return max(active.ready_s, state.now) + remaining_s


def _end_if_started_s(state: State, forecasts: Forecasts, active: Active, allocation: Allocation) -> float:
    pause = state.costs.pause_s(active.job, first=active.first_s < 0, resize=False)
    pause += forecasts.resize_s(active.job, devices_of(allocation)) if active.first_s >= 0 else 0.0
    return state.now + pause + forecasts.remaining_s(active.job, active.done_s, allocation)


def _reservation(
    state: State, forecasts: Forecasts, free: Sequence[int], head: Active, ends: Sequence[tuple[float, Allocation]]
) -> tuple[float, int, list[int]]:
    """(when, pool, free devices then) of the first moment at which the head of the queue will have its devices."""
    first = (math.inf, -1, list(free))
    for pool in usable(state, forecasts, head.job, head.job.devices):
        then = list(free)
        for end, together in groupby(sorted(ends), key=itemgetter(0)):
            if end >= first[0]:
                break
            for _, allocation in together:
                give(then, allocation)
            if within(state, then, pool, head.job.devices) is not None:
                first = (end, pool, then)
                break
    return first


def _behind(
    state: State, forecasts: Forecasts, free: list[int], queue: Sequence[Active],
    ends: Sequence[tuple[float, Allocation]],
) -> list[Decision]:  # fmt: skip
    """What may start past the head of a queue."""
    head, *others = queue
    if not any(free):
        return []
    shadow, reserved, then = _reservation(state, forecasts, free, head, ends)
    out = []
    for active in others:
        count = active.job.devices
        for pool in usable(state, forecasts, active.job, count):
            allocation = within(state, free, pool, count)
            if allocation is None:
                continue
            if pool == reserved and _end_if_started_s(state, forecasts, active, allocation) > shadow:
                take(then, allocation)
                if within(state, then, reserved, head.job.devices) is None:
                    give(then, allocation)
                    continue
            take(free, allocation)
            out.append(Decision(active.job.id, allocation))
            break
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
