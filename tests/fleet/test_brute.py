"""The replay against brute force: `brute` plays textbook policies from the papers, one random trace after another.

`benchmarks/fleet/brute.py` plays 500 traces a policy; here it is a few.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from fleet import brute

from gnomon.fleet.costs import Costs
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.policies import policy
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules

NAMES = ("fifo", "sjf", "backfill", "srtf", "las", "tiresias")
KINDS = {"t4-16gb": 16, "v100-sxm-32gb": 32, "a100-sxm-80gb": 80}
"""Kind of device -> GiB about; jobs take a half, or more than the smaller kinds have."""
Times = list[tuple[float, float]]


@dataclass(frozen=True)
class Case:
    """A trace on machines under costs."""

    jobs: tuple[Job, ...]
    pools: tuple[Pool, ...]
    costs: Costs


def drawn(seed: int, name: str) -> Case:
    """Ties, equal arrivals, gangs, kinds with their speeds and memory, pools that serve inference, dear restarts."""
    draw = random.Random(f"{name} {seed}")
    kinds = draw.sample(sorted(KINDS), draw.choice((1, 1, 2, 3)))
    pools = [
        Pool(name=kind, device=kind, nodes=draw.randint(1, 2), per_node=draw.choice((2, 4, 8)), speed=speed)
        for kind, speed in zip(kinds, draw.sample((1.0, 0.5, 2.0), len(kinds)), strict=True)
    ]
    if draw.random() < 0.3:
        pools.append(Pool(name="inference", device="t4-16gb", nodes=2, per_node=8, serves=True))
    largest = max((pool for pool in pools if not pool.serves), key=lambda pool: pool.devices)
    unit = draw.choice((1, 60, 300, 1000))  # coarse times make ties
    jobs = []
    at = 0
    long = draw.random() < 0.5
    for index in range(draw.randint(2, 24)):
        at += draw.choice((0, 0, 1, 1, 2, 7)) * unit
        gang = draw.choice((1, 1, 2, 3, 4, largest.devices, largest.devices - 1))
        jobs.append(
            Job(
                id=f"j{index}", submit_s=at, devices=max(1, min(gang, largest.devices)),
                work_s=draw.choice((1, 2, 3, 5, 10, 40)) * draw.choice((unit, 60, 3600 if long else 300)),
                device=draw.choice(("", "", *kinds)),
                memory_bytes=draw.choice((0, 0, 0, 8, 24, 60)) * 2**30,
            )
        )  # fmt: skip
    # What can run nowhere is an error of its own (test_memory).
    able = [pool for pool in pools if not pool.serves]
    jobs = [
        job if any(p.devices >= job.devices and p.memory_bytes >= job.memory_bytes for p in able)
        else replace(job, memory_bytes=0)
        for job in jobs
    ]  # fmt: skip
    costs = Costs(
        restart_s=draw.choice((0, 60, 400, 1000)),
        resize_s=draw.choice((0, 30, 500)),
        checkpoint_every_s=draw.choice((600, 1800, 5000)),
        saves_when_preempted=draw.random() < 0.6,
    )
    return Case(tuple(jobs), tuple(pools), costs)


def ours(case: Case, name: str) -> tuple[Times, int, int]:
    """((start, end) of each job, preemptions, moves) of the replay."""
    trace = Trace(name="drawn", format="plain", jobs=case.jobs)
    result = replay(trace, Machines(case.pools), policy(name), rules=Rules(costs=case.costs))
    times = list(zip(result.first_s.tolist(), result.finish_s.tolist(), strict=True))
    return times, result.preemptions, result.resizes


def theirs(case: Case, name: str) -> tuple[Times, int, int]:
    """The same by brute force."""
    jobs = [
        brute.Job(i, int(j.submit_s), int(j.work_s), j.devices, j.device, float(j.memory_bytes))
        for i, j in enumerate(case.jobs)
    ]
    pools = [brute.Pool(p.device, p.devices, Fraction(p.speed), p.serves, p.memory_bytes) for p in case.pools]
    costs = case.costs
    brute.Simulator(
        pools, name, int(policy(name).interval_s), int(costs.restart_s), int(costs.resize_s),
        int(costs.checkpoint_every_s), costs.saves_when_preempted,
    ).play(jobs)  # fmt: skip
    times = [(float(job.started or 0), float(job.finished or 0)) for job in jobs]
    return times, sum(job.stops for job in jobs), sum(job.moves for job in jobs)


def differences(name: str, seeds: Sequence[int]) -> list[int]:
    """Seeds of the traces whose fates differ."""
    out = []
    for seed in seeds:
        case = drawn(seed, name)
        (times, *counts), (expected, *expected_counts) = ours(case, name), theirs(case, name)
        same = all(a == pytest.approx(b, abs=1e-6) for a, b in zip(times, expected, strict=True))
        if not same or counts != expected_counts:
            out.append(seed)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_replay_is_what_brute_force_says(name: str) -> None:
    assert differences(name, range(12)) == []
