"""Policies of fairness and deadlines: each against brute force, or against scipy's linear programmes."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from scipy.optimize import linprog

from gnomon.errors import InputError
from gnomon.fleet.costs import Costs
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.linear import maximise
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.policies import policy
from gnomon.fleet.policies.elasticflow import Demand, plan_uses, remaining, smallest_share
from gnomon.fleet.policies.gavel import TIE, shares
from gnomon.fleet.policies.shockwave import MAKESPAN, POWER, ROUNDS, plan, welfare
from gnomon.fleet.policies.themis import LEASE_S, winners
from gnomon.fleet.replay import replay
from gnomon.fleet.result import Result
from gnomon.fleet.rules import Rules

FREE = Costs(restart_s=0, resize_s=0)


def pools(*devices: tuple[int, float]) -> Machines:
    return Machines(
        tuple(Pool(name=f"p{i}", device=f"d{i}", nodes=1, per_node=n, speed=s) for i, (n, s) in enumerate(devices))
    )


def play(name: str, machines: Machines, *jobs: Job, costs: Costs = FREE) -> Result:
    return replay(Trace(name="t", format="plain", jobs=jobs), machines, policy(name), rules=Rules(costs=costs))


def job(name: str, submit_s: float, work_s: float, devices: int, **more: object) -> Job:
    return Job(id=name, submit_s=submit_s, work_s=work_s, devices=devices, **more)  # type: ignore[arg-type]


# Linear programmes and Gavel.


def test_linear_programmes_are_those_of_scipy() -> None:
    draw = np.random.default_rng(1)
    for _ in range(200):
        rows, columns = draw.integers(1, 8, 2)
        a = np.round(draw.uniform(-1, 3, (rows, columns)), 1)
        b, c = (
            np.round(draw.uniform(0, 4, rows), 1) * draw.integers(0, 2, rows),
            np.round(draw.uniform(-1, 2, columns), 1),
        )
        theirs = linprog(-c, A_ub=a, b_ub=b, method="highs")
        if theirs.status == 3:
            with pytest.raises(InputError, match="has no bound"):
                maximise(c, a, b)
            continue
        x = maximise(c, a, b)
        assert (x >= 0).all() and (a @ x <= b + 1e-7).all()
        assert c @ x == pytest.approx(-theirs.fun, abs=1e-7)
    with pytest.raises(InputError, match="0 is no solution"):
        maximise(np.ones(1), np.ones((1, 1)), -np.ones(1))


def test_shares_of_gavel_are_those_of_the_papers_programme() -> None:
    """Max-min fairness, written again for scipy; what TIE adds may cost that much of it."""
    draw = np.random.default_rng(2)
    for _ in range(40):
        jobs, kinds = int(draw.integers(1, 7)), int(draw.integers(1, 4))
        speeds, asked = draw.uniform(0.1, 4, (jobs, kinds)), draw.integers(1, 5, jobs).astype(float)
        devices, factors = draw.integers(5, 12, kinds).astype(float), draw.uniform(0.5, 3, jobs)
        x = shares(speeds, asked, devices, factors)
        assert (x >= -1e-9).all() and (x.sum(1) <= 1 + 1e-9).all() and (asked @ x <= devices + 1e-7).all()
        a = np.zeros((2 * jobs + kinds, jobs * kinds + 1))
        b = np.zeros(2 * jobs + kinds)
        for m, j in itertools.product(range(jobs), range(kinds)):
            a[m, m * kinds + j], a[jobs + m, m * kinds + j] = -speeds[m, j] * factors[m], 1
            a[2 * jobs + j, m * kinds + j] = asked[m]
        a[:jobs, -1], b[jobs : 2 * jobs], b[2 * jobs :] = 1, 1, devices
        best = -linprog(np.append(np.zeros(jobs * kinds), -1.0), A_ub=a, b_ub=b, method="highs").fun
        least = float(((speeds * x).sum(1) * factors).min())
        assert best * (1 - 3 * TIE) - 3 * TIE * float((speeds * factors[:, None]).max()) <= least <= best + 1e-7
        total = -linprog(-speeds.reshape(-1), A_ub=a[jobs:, :-1], b_ub=b[jobs:], method="highs").fun
        assert (speeds * shares(speeds, asked, devices, None)).sum() == pytest.approx(total)


def test_gavel_gives_equal_jobs_equal_time_on_the_faster_kind() -> None:
    """Two jobs, a device of speed 1 and one of speed 3: each does 2 a second on average, so that both end together."""
    result = play("gavel", pools((1, 1.0), (1, 3.0)), job("a", 0, 36000, 1), job("b", 0, 36000, 1))
    assert result.finish_s == pytest.approx([18000, 18000], abs=800)
    alone = play("gavel", pools((1, 1.0), (1, 3.0)), job("a", 0, 36000, 1), job("b", 0, 36000, 1, weight=3.0))
    assert alone.finish_s[1] < alone.finish_s[0] - 1000
    makespan = play("gavel-makespan", pools((1, 1.0), (1, 3.0)), job("a", 0, 36000, 1), job("b", 0, 12000, 1))
    assert max(makespan.finish_s) == pytest.approx(12000, abs=800)
    assert max(play("gavel-throughput", pools((2, 1.0)), job("a", 0, 600, 2), job("b", 0, 600, 1)).finish_s) <= 1440


# Themis.


def test_auctions_of_themis_have_the_largest_product() -> None:
    draw = random.Random(3)
    for _ in range(100):
        bids = [
            (draw.randint(1, 5), without := draw.uniform(1, 6), without * draw.uniform(0.3, 0.99)) for _ in range(7)
        ]
        devices = draw.randint(1, 14)
        won = winners(bids, devices)

        def product(choice: tuple[bool, ...], bids: list[tuple[int, float, float]] = bids) -> float:
            return math.prod(
                1 / (having if win else without) for win, (_, without, having) in zip(choice, bids, strict=True)
            )

        able = [
            choice
            for choice in itertools.product((False, True), repeat=7)
            if sum(bid[0] for bid, win in zip(bids, choice, strict=True) if win) <= devices
        ]
        assert sum(bid[0] for bid, win in zip(bids, won, strict=True) if win) <= devices
        assert product(tuple(won)) == pytest.approx(max(map(product, able)))


def test_under_themis_jobs_that_came_together_end_together() -> None:
    result = play("themis", pools((4, 1.0)), *(job(f"j{i}", 0, 12000, 4) for i in range(3)))
    assert max(result.finish_s) == pytest.approx(36000)
    assert max(result.finish_s) - min(result.finish_s) <= 3 * LEASE_S


# Shockwave.


def test_rounds_of_shockwave_have_the_most_welfare() -> None:
    draw = random.Random(4)
    for _ in range(12):
        bids = [
            (draw.randint(1, 2), draw.uniform(0.8, 1.5), draw.choice((0.0, 0.2, 0.5)), draw.choice((0.05, 0.1, 0.3)))
            for _ in range(3)
        ]
        devices = draw.randint(1, 3)
        bids = [(min(count, devices), *rest) for count, *rest in bids]  # type: ignore[misc]
        able = (
            rounds
            for rounds in itertools.product(range(ROUNDS + 1), repeat=3)
            if sum(bid[0] * n for bid, n in zip(bids, rounds, strict=True)) <= devices * ROUNDS
        )
        ours = plan(bids, devices)
        assert sum(bid[0] * n for bid, n in zip(bids, ours, strict=True)) <= devices * ROUNDS
        assert welfare(bids, ours) >= max(welfare(bids, rounds) for rounds in able) - 1e-2 * MAKESPAN
    assert POWER == 5.0


def test_under_shockwave_all_jobs_get_on() -> None:
    result = play("shockwave", pools((4, 1.0)), *(job(f"j{i}", 0, 7200, 4) for i in range(3)))
    assert max(result.finish_s) == pytest.approx(21600, rel=0.01)


# ElasticFlow.


def linear(left: float, most: int, due: float) -> Demand:
    return Demand(left_s=left, rates={n: float(n) for n in range(1, most + 1)}, start_s=0.0, due_s=due)


def feasible(demands: list[Demand], devices: int) -> bool:
    """Whether all deadlines can be met: a linear programme of the device-seconds between deadlines."""
    ends = sorted({demand.due_s for demand in demands})
    spans = [(begin, end) for begin, end in zip([0.0, *ends], ends, strict=False)]
    count, length = len(demands), len(spans)
    a_eq, bounds, a_ub = np.zeros((count, count * length)), [], np.zeros((length, count * length))
    for i, demand in enumerate(demands):
        for k, (begin, end) in enumerate(spans):
            a_eq[i, i * length + k] = a_ub[k, i * length + k] = 1
            bounds.append((0, max(demand.rates) * (end - begin) if end <= demand.due_s else 0))
    b_ub = [devices * (end - begin) for begin, end in spans]
    done = linprog(
        np.zeros(count * length), a_ub, b_ub, a_eq, [demand.left_s for demand in demands], bounds, method="highs"
    )
    return bool(done.status == 0)


def test_shares_of_elasticflow_meet_deadlines_and_what_it_refuses_cannot() -> None:
    """Jobs that scale linearly: what is planned is possible; one job more than is possible is refused. Of jobs that can
    use the whole cluster nothing that is possible is refused (but for whole devices)."""
    draw = random.Random(5)
    agreed = 0
    for case in range(150):
        devices = draw.choice((4, 8))
        wide = case % 2 == 0
        demands = [
            linear(draw.randint(1, 30) * 10, devices if wide else draw.randint(1, devices), draw.randint(2, 12) * 10)
            for _ in range(draw.randint(1, 6))
        ]
        uses = plan_uses(demands, 0.0, devices)
        if uses is None:
            if wide and all(d.left_s % devices == 0 for d in demands):
                # Shares are whole devices: a little more room is enough for what could be divided at will.
                tight = [linear(d.left_s, devices, d.due_s * 0.8) for d in demands]
                agreed += not feasible(tight, devices)
                assert not feasible(tight, devices)
            continue
        assert feasible(demands, devices)
        for demand, use in zip(demands, uses, strict=True):
            assert sum((end - begin) * count for begin, end, count in use) == pytest.approx(demand.left_s)
            assert use[-1][1] <= demand.due_s + 1e-6
        times = sorted({at for use in uses for part in use for at in part[:2]})
        for begin, end in zip(times, times[1:], strict=False):
            held = sum(count for use in uses for s, e, count in use if s <= begin and end <= e)
            assert held <= devices


def test_the_smallest_share_by_trying_all() -> None:
    profile = remaining([(0.0, math.inf, 8)], [(0.0, 10.0, 6), (10.0, 20.0, 4)])
    assert profile == [(0.0, 10.0, 2), (10.0, 20.0, 4), (20.0, math.inf, 8)]
    for left in range(1, 200, 7):
        for due in (5.0, 15.0, 25.0, 40.0):
            by_hand = None
            for most in range(1, 9):
                done = min(most, 2) * min(due, 10) + min(most, 4) * min(max(due - 10, 0), 10) + most * max(due - 20, 0)
                if done >= left - 1e-9:
                    by_hand = most
                    break
            found = smallest_share(profile, linear(left, 8, due))
            assert (found[0] if found else None) == by_hand


def test_deadlines_in_a_replay() -> None:
    """FIFO misses them; ElasticFlow meets those of all that it admits, and the one too much runs when there is room."""
    jobs = (
        job("long", 0, 6000, 4, min_devices=1, max_devices=4),
        job("due", 60, 1200, 4, min_devices=1, max_devices=4, deadline_s=2000.0),
        job("also", 60, 600, 4, min_devices=1, max_devices=4, deadline_s=2400.0),
        job("never", 120, 4000, 4, min_devices=1, max_devices=4, deadline_s=2500.0),
    )
    due = [one.deadline_s for one in jobs]
    kept = [end <= at for end, at in zip(play("elasticflow", pools((4, 1.0)), *jobs).finish_s, due, strict=True)]
    assert kept == [True, True, True, False]
    assert [end <= at for end, at in zip(play("fifo", pools((4, 1.0)), *jobs).finish_s, due, strict=True)][1:] == [
        False
    ] * 3
