"""Every replay ends: in the fates of all jobs, or in one line that says why it cannot. And no job runs where its memory
is not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gnomon.errors import InputError, RunError
from gnomon.fleet.costs import Costs
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.machines import Machines, Pool, machines
from gnomon.fleet.policies import POLICIES, policy
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules
from gnomon.fleet.state import Decision, Forecasts, Policy, State

ONE = Machines((Pool(name="p", device="v100-sxm-32gb", nodes=1, per_node=8),))
TWO_KINDS = machines("1x8xv100-sxm-32gb+1x8xa100-sxm-80gb")
DEAR = Costs(restart_s=5000, resize_s=5000, checkpoint_every_s=4000, saves_when_preempted=False)


def trace(*jobs: Job) -> Trace:
    return Trace(name="t", format="plain", jobs=jobs)


def job(name: str, submit_s: float, work_s: float, devices: int, **more: object) -> Job:
    return Job(id=name, submit_s=submit_s, work_s=work_s, devices=devices, line=1, **more)  # type: ignore[arg-type]


def elastic(seed: int) -> Trace:
    draw = random.Random(seed)
    jobs = []
    for i in range(draw.randint(2, 10)):
        devices = draw.choice((1, 2, 4, 8))
        bounds = {"min_devices": max(1, devices // 2), "max_devices": devices * 2} if draw.random() < 0.6 else {}
        jobs.append(job(f"j{i}", draw.choice((0, 60, 600)) * i, draw.choice((60, 3000, 20000)), devices, **bounds))
    return trace(*jobs)


@pytest.mark.parametrize("chosen", [p for p in POLICIES if not p.slices and not p.parts], ids=lambda p: p.name)
def test_jobs_whose_start_takes_longer_than_a_turn_come_to_their_end(chosen: Policy) -> None:
    for seed in range(4):
        jobs = elastic(seed)
        for cluster in (ONE, TWO_KINDS):
            for costs in (DEAR, Costs(restart_s=400, resize_s=400)):
                try:
                    result = replay(jobs, cluster, chosen, rules=Rules(costs=costs))
                except RunError as error:
                    assert "again and again" in str(error) or "never starts" in str(error)  # noqa: PT017
                else:
                    assert (result.finish_s >= [one.submit_s for one in jobs.jobs]).all()


@pytest.mark.parametrize("costs", [Costs(restart_s=400), Costs(saves_when_preempted=False), DEAR])
def test_las_ends_where_two_jobs_take_turns(costs: Costs) -> None:
    """Each used to be stopped before it had gone on from where it was, for ever."""
    result = replay(trace(job("a", 0, 7200, 8), job("b", 10, 7200, 8)), ONE, policy("las"), rules=Rules(costs=costs))
    assert result.device_s["lost"] < result.device_s["useful"]
    assert 14400 <= max(result.finish_s) < 2 * 14400 + 2 * costs.restart_s


def test_a_policy_that_never_lets_a_job_get_further_is_stopped() -> None:
    def other(state: State, told: Forecasts) -> Sequence[Decision]:
        stopped = [Decision(active.job.id, ()) for active in state.running]
        return [*stopped, *(Decision(active.job.id, ((0, 8),)) for active in state.queue[:1])]

    bad = Policy(name="bad", paper="-", about="-", decide=other, interval_s=60, always=True, adapts=True)
    with pytest.raises(RunError, match="bad stops jobs .*a.* again and again before they get further"):
        replay(trace(job("a", 0, 7200, 8), job("b", 0, 7200, 8)), ONE, bad, rules=Rules(costs=DEAR))


@pytest.mark.parametrize("name", ["fifo", "srtf", "las", "tiresias", "sia"])
def test_a_gang_that_no_kind_of_device_holds_is_named(name: str) -> None:
    with pytest.raises(RunError, match=r"never starts 1 jobs \(gang\)"):
        replay(trace(job("gang", 0, 60, 12)), TWO_KINDS, policy(name))


def test_jobs_that_wait_take_devices_that_they_can_use() -> None:
    """Free devices of another kind, of a pool that serves inference, or on too many nodes are not room."""
    long = (job("l1", 0, 100000, 5), job("l2", 0, 100000, 5))
    for name in ("srtf", "las", "tiresias"):
        result = replay(trace(*long, job("short", 60, 60, 6)), TWO_KINDS, policy(name))
        assert result.finish_s[2] <= 16 * 3600 / 5 + 1000
        served = machines("1x8xv100-sxm-32gb", inference="2x8xt4-16gb")
        result = replay(trace(job("long", 0, 100000, 8), job("short", 60, 60, 4)), served, policy(name))
        assert result.finish_s[1] <= 16 * 3600 / 8 + 1000
        nodes = Machines((Pool(name="p", device="v100-sxm-32gb", nodes=2, per_node=8),))
        first = (job("a", 0, 100000, 7), job("b", 0, 100000, 7), job("short", 60, 60, 8))
        result = replay(trace(*first), nodes, policy(name), rules=Rules(spread=False))
        assert result.finish_s[2] <= 16 * 3600 / 7 + 1000, name
        assert result.preemptions == 1


def test_memory() -> None:
    """A job goes where it has the memory that it takes; where nothing has, it is an error with its line."""
    large = job("large", 0, 60, 1, memory_bytes=40 * 2**30)
    result = replay(trace(large, job("small", 0, 60, 1)), TWO_KINDS, policy("fifo"))
    assert result.finish_s[0] < 60
    for chosen in POLICIES:
        if not chosen.slices and not chosen.parts:
            with pytest.raises(InputError, match="line 1: job 'large' takes 40.0 GiB of each of its 1 devices"):
                replay(trace(large), ONE, chosen)
    with pytest.raises(RunError, match="pollux gives 'l.', which takes 40.0 GiB, devices of v100-sxm-32gb with"):
        replay(trace(*(job(f"l{i}", 0, 60, 8, memory_bytes=40 * 2**30) for i in range(2))), TWO_KINDS, policy("pollux"))
    cut = machines("1x8xa100-sxm-40gb", mig=True)
    with pytest.raises(InputError, match="job 'a' takes 30.0 GiB"):
        replay(trace(job("a", 0, 60, 3, slice="3g.20gb", memory_bytes=30 * 2**30)), cut, policy("elastic-batch"))
