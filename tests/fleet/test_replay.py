"""The replay: worked by hand, conserved to the device-second, the same whichever way it is computed."""

from __future__ import annotations

import numpy as np
import pytest

from gnomon.errors import InputError, RunError
from gnomon.fleet.costs import Costs
from gnomon.fleet.forecast import Curve
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.machines import Machines, Pool, machines
from gnomon.fleet.policies import POLICIES, policy
from gnomon.fleet.replay import replay
from gnomon.fleet.result import Result
from gnomon.fleet.rules import Failure, Rules
from gnomon.fleet.state import REASONS, Decision, Policy

NO_COSTS = Costs(restart_s=0, resize_s=0)


def trace(*jobs: tuple[float, float, int], **more: object) -> Trace:
    """(submit, work, devices) of each."""
    made = tuple(
        Job(id=f"j{i}", submit_s=s, work_s=w, devices=d, line=i + 1, **more)  # type: ignore[arg-type]
        for i, (s, w, d) in enumerate(jobs)
    )
    return Trace(name="t", format="philly", jobs=tuple(sorted(made, key=lambda job: job.submit_s)))


def cluster(nodes: int, per_node: int) -> Machines:
    return Machines((Pool(name="training", device="v100-sxm-32gb", nodes=nodes, per_node=per_node),))


def finish(result: Result) -> list[float]:
    return [round(float(entry), 6) for entry in result.finish_s]


def test_fifo_sjf_and_backfill_by_hand() -> None:
    # 4 devices. j0 holds 3 for 10 s; j1 wants 4, j2 wants 1 for 5 s, j3 wants 1 for 20 s.
    jobs = trace((0, 10, 3), (1, 10, 4), (2, 5, 1), (3, 20, 1))
    assert finish(replay(jobs, cluster(1, 4), policy("fifo"))) == [10, 20, 25, 40]
    # EASY: j2 ends before j1 can start at 10, so it may pass; j3 would delay j1.
    assert finish(replay(jobs, cluster(1, 4), policy("backfill"))) == [10, 20, 7, 40]
    # SJF passes j1 with both; it starts when j3 is done.
    assert finish(replay(jobs, cluster(1, 4), policy("sjf"))) == [10, 37, 7, 27]


def test_srtf_preempts_and_pays_for_it() -> None:
    jobs = trace((0, 1000, 2), (60, 100, 2))
    result = replay(jobs, cluster(1, 2), policy("srtf"), rules=Rules(costs=Costs(restart_s=50)))
    # j1 runs from 60 to 160; j0 has 940 s left, and is asked at the next minute, 180; 50 s to start again.
    assert finish(result) == [180 + 50 + 940, 160]
    assert result.preemptions == 1
    assert result.device_s["overhead"] == 100 and result.device_s["useful"] == 2200


def test_without_notice_the_work_since_the_checkpoint_is_lost() -> None:
    jobs = trace((0, 1000, 2), (300, 100, 2))
    costs = Costs(restart_s=0, checkpoint_every_s=120, saves_when_preempted=False)
    result = replay(jobs, cluster(1, 2), policy("srtf"), rules=Rules(costs=costs))
    # Preempted at 300 with the checkpoint of 240: 60 s are done again.
    assert finish(result) == [420 + 1000 - 240, 400]
    assert result.device_s["lost"] == pytest.approx(120) and result.device_s["useful"] == pytest.approx(2200)


def test_a_failed_node_stops_its_jobs_and_is_accounted_for() -> None:
    jobs = trace((0, 100, 2), (0, 100, 2))
    rules = Rules(costs=Costs(restart_s=0, checkpoint_every_s=30), failures=(Failure(at_s=50, node=0, for_s=500),))
    result = replay(jobs, cluster(2, 2), policy("fifo"), rules=rules)
    # j0 was on node 0 and had saved 30 s; it goes on when j1 is done.
    assert finish(result) == [170, 100] and result.failures == 1
    assert result.device_s["down"] == 2 * 120 and result.device_s["lost"] == pytest.approx(40)


def test_a_gang_spreads_or_waits() -> None:
    jobs = trace((0, 100, 1), (0, 50, 3), (1, 10, 4), (2, 10, 2))
    two = cluster(2, 4)
    spread = replay(jobs, two, policy("sjf"), rules=Rules(record=True))
    packed = replay(jobs, two, policy("sjf"), rules=Rules(spread=False, record=True))
    # Both small ones stand on node 0; the other node is whole for j2.
    assert finish(spread)[2] == finish(packed)[2] == 11
    jobs = trace((0, 100, 3), (0, 100, 3), (1, 10, 2))
    assert finish(replay(jobs, two, policy("sjf"), rules=Rules(record=True)))[2] == 11
    late = replay(jobs, two, policy("sjf"), rules=Rules(spread=False, record=True))
    assert finish(late)[2] == 110
    assert dict(zip(REASONS, late.reasons[2].tolist(), strict=True))["free devices on too many nodes"] == 99


def test_a_job_that_comes_between_two_decisions_waits_for_the_next() -> None:
    """Nothing is in its way: LAS decides every 5 minutes, and the job comes 10 s after the first."""
    late = replay(trace((0, 1000, 1), (10, 50, 1)), cluster(1, 4), policy("las"), rules=Rules(record=True))
    waited = dict(zip(REASONS, late.reasons[1].tolist(), strict=True))
    assert waited["next decision of the policy"] == pytest.approx(late.waited_s[1]) and late.waited_s[1] > 0


def test_jobs_go_to_the_faster_pool_and_finish_sooner() -> None:
    mixed = machines("1x2xv100-sxm-32gb+1x2xh100-sxm")
    jobs = trace((0, 100, 2), (0, 100, 2))
    fast = mixed.pools[1].speed
    assert fast == pytest.approx(989.4 / 125, rel=1e-3)
    assert sorted(finish(replay(jobs, mixed, policy("fifo")))) == [round(100 / fast, 6), 100]


def test_a_policy_that_breaks_the_rules_is_stopped() -> None:
    jobs = trace((0, 10, 2))
    for decisions, message in (
        ((Decision("j0", ((0, 5),)),), "5 devices of node 0, which has 4 free"),
        ((Decision("nobody", ((0, 1),)),), "'nobody', which is not active"),
        ((), "never starts 1 jobs"),
    ):
        bad = Policy(name="bad", paper="-", about="-", decide=lambda state, told, d=decisions: d)
        with pytest.raises(RunError, match=message):
            replay(jobs, cluster(1, 4), bad)


def test_wrong_loads_and_failures_are_refused() -> None:
    jobs = trace((0, 10, 2))
    with pytest.raises(InputError, match="failure is of node 7"):
        replay(jobs, cluster(1, 4), policy("fifo"), rules=Rules(failures=(Failure(at_s=1, node=7, for_s=1),)))
    with pytest.raises(InputError, match="load is 1.5"):
        replay(jobs, cluster(1, 4), policy("fifo"), rules=Rules(demand=((0.0, 1.5),)))


def drawn(seed: int) -> tuple[Trace, tuple[Failure, ...], bool]:
    """A small trace with elastic jobs, failures of nodes, and whether preempted jobs get notice."""
    random = np.random.default_rng(seed)
    jobs = []
    for i in range(int(random.integers(1, 26))):
        devices = int(random.choice((1, 1, 1, 2, 3, 4, 7)))
        elastic = bool(random.integers(2))
        jobs.append(
            Job(
                id=f"j{i}",
                submit_s=float(random.integers(0, 2000)),
                work_s=float(random.integers(0, 900)),
                devices=devices,
                line=i + 1,
                min_devices=max(1, devices // 2) if elastic else 0,
                max_devices=2 * devices if elastic else 0,
            )
        )
    failures = tuple(
        Failure(at_s=float(random.integers(3000)), node=int(random.integers(3)), for_s=float(random.integers(1, 900)))
        for _ in range(int(random.integers(5)))
    )
    made = Trace(name="t", format="philly", jobs=tuple(sorted(jobs, key=lambda job: job.submit_s)))
    return made, failures, bool(random.integers(2))


def check_conserved(result: Result) -> None:
    """Every device-second is somewhere, no job is lost, none runs before it is there."""
    total = result.machines.devices * result.end_s
    assert sum(result.device_s.values()) == pytest.approx(total, rel=1e-9, abs=1e-6)
    assert min(result.device_s.values()) >= -1e-6
    assert np.isfinite(result.finish_s).all()
    assert (result.first_s >= result.submit_s - 1e-9).all() and (result.waited_s >= -1e-9).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [policy.name for policy in POLICIES if not policy.slices and not policy.parts])
def test_every_device_second_is_accounted_for(name: str, seed: int) -> None:
    jobs, failures, notice = drawn(seed)
    rules = Rules(
        costs=Costs(restart_s=30, resize_s=10, checkpoint_every_s=200, saves_when_preempted=notice),
        failures=failures,
        record=True,
    )
    first = replay(jobs, cluster(3, 4), policy(name), rules=rules)
    check_conserved(first)
    work = sum(job.work_s * job.devices for job in jobs.jobs)
    if not any(job.elastic for job in jobs.jobs):
        assert first.device_s["useful"] == pytest.approx(work, abs=1e-5)
    held = sum((run.end_s - run.start_s) * sum(c for _, c in run.allocation) for run in first.runs)
    used = first.device_s["useful"] + first.device_s["lost"] + first.device_s["overhead"]
    assert held == pytest.approx(used, abs=1e-5) or name in ("gandiva", "cognn", "qos")
    assert first.reasons.sum(axis=1) == pytest.approx(first.waited_s, abs=1e-6)
    again = replay(jobs, cluster(3, 4), policy(name), rules=rules)
    assert again.finish_s.tolist() == first.finish_s.tolist() and again.runs == first.runs


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["fifo", "sjf"])
def test_the_fast_way_gives_the_same(name: str, seed: int) -> None:
    jobs, _, _ = drawn(100 + seed)
    fast = replay(jobs, cluster(3, 4), policy(name))
    slow = replay(jobs, cluster(3, 4), policy(name), rules=Rules(record=True))
    assert fast.finish_s.tolist() == slow.finish_s.tolist()
    assert fast.waited_s.tolist() == pytest.approx(slow.waited_s.tolist())
    assert fast.device_s == pytest.approx(slow.device_s)
    check_conserved(fast)


def test_more_speed_is_never_slower_under_fifo() -> None:
    jobs = trace(*((float(i * 7 % 50), float(20 + i * 13 % 90), 1 + i % 4) for i in range(40)))
    slow = replay(jobs, cluster(2, 4), policy("fifo"))
    twice = Machines((Pool(name="training", device="h100-sxm-80gb", nodes=2, per_node=4, speed=2.0),))
    fast = replay(jobs, twice, policy("fifo"), forecasts=Curve(twice))
    assert (fast.finish_s <= slow.finish_s + 1e-9).all()
