"""Partial reduce: what its controller decides, on workers of any speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.methods import check_methods
from gnomon.methods.partial_reduce import (
    RECENT,
    Arrival,
    Observation,
    PartialReduceSettings,
    TicketController,
    components,
    grouped,
    replay,
    settings_of,
    shares,
)
from gnomon.plans import Mesh, Optimizer, Pass, Plan, Schedule

PLAN = Plan(mesh=Mesh(dp_replicate=4), schedule=Schedule(num_microbatches=1, passes=(Pass(name="partial_reduce"),)))
SPEEDS = st.lists(st.sampled_from([0.5, 1.0, 1.5, 4.0]), min_size=2, max_size=9)


@given(step_s=SPEEDS, group=st.integers(2, 9), steps=st.integers(1, 12), data=st.data())
def test_every_ticket_is_given_once_and_all_meet_in_the_end(
    step_s: list[float], group: int, steps: int, data: st.DataObject
) -> None:
    """In any order of arrivals: those that train may arrive whenever they like."""
    settings = PartialReduceSettings(workers=len(step_s), group=min(group, len(step_s)))
    controller = TicketController(settings, steps=steps, meet_every=data.draw(st.integers(0, steps)))
    there = [Arrival(worker=worker) for worker in range(settings.workers)]
    tickets, meetings = [], []
    while there:
        arrival = there.pop(data.draw(st.integers(0, len(there) - 1)))
        for worker, reply in controller.arrive(arrival).items():
            assert worker in reply.group and sum(reply.shares) == pytest.approx(1)
            assert len(reply.group) in (1, settings.group, settings.workers)
            if reply.meeting >= 0:
                meetings.append((reply.meeting, worker))
            if reply.ticket >= 0:
                tickets.append(reply.ticket)
                there.append(Arrival(worker=worker, updates=reply.updates + 1, ticket=reply.ticket))
    assert sorted(tickets) == list(range(steps * settings.workers))
    last = [worker for step, worker in meetings if step == steps]
    assert sorted(last) == list(range(settings.workers)) and not controller.waiting


@given(step_s=SPEEDS, steps=st.integers(30, 60))
def test_no_worker_stays_apart(step_s: list[float], steps: int) -> None:
    """Of RECENT groups a worker and as many as it takes for the slowest to come, all are joined by averages."""
    result = replay(PartialReduceSettings(workers=len(step_s), group=2), step_s, steps=steps)
    span = (RECENT + 8) * len(step_s)
    for first in range(0, len(result.groups) - span):
        assert len(set(components(len(step_s), result.groups[first : first + span]))) == 1


def test_workers_that_have_met_nobody_are_put_together_with_others() -> None:
    settings = PartialReduceSettings(workers=4, group=2)
    recent = ((0, 1), (2, 3)) * 16
    assert grouped(settings, Observation(waiting=(0, 1), recent=recent)) is None
    assert grouped(settings, Observation(waiting=(0, 1, 3), recent=recent)) == (0, 3)
    assert grouped(settings, Observation(waiting=(0, 1), recent=recent[:-1])) == (0, 1)


def test_a_slow_worker_costs_its_own_part_and_an_all_reduce_waits_for_it() -> None:
    """16 workers, one of them four times as slow: at most (15 + 1/4) / 16 of the speed is there to be had."""
    speeds = [1.0] * 15 + [4.0]
    alike = replay(PartialReduceSettings(workers=16, group=2), [1.0] * 16, steps=200).seconds
    assert 0.9 < alike / replay(PartialReduceSettings(workers=16, group=2), speeds, steps=200).seconds < 0.953
    assert alike / replay(PartialReduceSettings(workers=16, group=16), speeds, steps=200).seconds == pytest.approx(
        0.25, abs=0.01
    )


def test_a_model_that_is_behind_counts_less() -> None:
    assert shares(PartialReduceSettings(workers=4, group=2), [10, 7]) == (0.5, 0.5)
    assert shares(PartialReduceSettings(workers=4, group=2, weights="dynamic"), [10, 7]) == pytest.approx((0.8, 0.2))


def test_a_trace_of_arrivals_gives_the_same_decisions_again() -> None:
    settings = PartialReduceSettings(workers=5, group=3)
    first, replies, arrivals = TicketController(settings, steps=9), [], [Arrival(worker=worker) for worker in range(5)]
    for arrival in arrivals:  # grows meanwhile
        replies.append(first.arrive(arrival))
        for worker, reply in replies[-1].items():
            if reply.ticket >= 0:
                arrivals.append(Arrival(worker=worker, updates=reply.updates + 1, ticket=reply.ticket))
    again = TicketController(settings, steps=9)
    assert [again.arrive(arrival) for arrival in arrivals] == replies and again.groups == first.groups


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (replace(PLAN, mesh=Mesh(dp_replicate=2, tp=2)), "leave dp_replicate alone above 1"),
        (replace(PLAN, optimizer=Optimizer(zero=1)), "use zero = 0, not 1"),
        (replace(PLAN, mesh=Mesh()), "it has one worker"),
        (replace(PLAN, schedule=replace(PLAN.schedule, passes=(Pass(name="partial_reduce", params=(("group", 5),)),))),
         "groups of 5 are made of 4 workers; use 2 to 4"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_have_it_is_refused(plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_methods(plan, "run")


def test_settings_are_the_plans() -> None:
    assert settings_of(PLAN) == PartialReduceSettings(workers=4, group=2)
    check_methods(PLAN, "run")
