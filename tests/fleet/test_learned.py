"""Speeds that jobs learn as they run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.fleet.goodput import Profiled, Profiles
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.kinds import ByKind
from gnomon.fleet.learned import Experience, LearnedForecasts
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.policies import policy
from gnomon.fleet.replay import replay
from gnomon.fleet.throughput import Point

POOLS = (Pool(name="slow", device="slow", nodes=2, per_node=4), Pool(name="fast", device="fast", nodes=1, per_node=4))
SLOW, FAST = 0, 2
"""The first node of each."""
JOB = Job(id="cnn-1", submit_s=0.0, work_s=4000.0, devices=1, model="cnn", batch_size=32)


def profiles(example_s: float) -> Profiles:
    """A job of two epochs whose gradient is noisier in the second, so that a larger batch is worth more there."""
    runs = [
        {
            "app": "cnn",
            "batch_size": str(batch),
            "progress": str(p),
            "iteration": str(p),
            "grad_sqr": "1",
            "grad_var": v,
        }
        for batch in (32, 256)
        for p, v in ((400, "4"), (800, "64"))
    ]
    placed, scaled = [], []
    for shape in ("1", "2", "4", "44"):
        for local in (8, 64):
            sync = 0.0 if shape == "1" else 0.05 * len(shape)
            times = {"step_time": str(0.1 + example_s * local + sync), "sync_time": str(sync)}
            placed.append({"app": "cnn", "placement": shape, "local_bsz": str(local), **times})
            scaled.append({"app": "cnn", "num_nodes": "2", "num_replicas": "8", "local_bsz": str(local), **times})
    return Profiles.of_rows(runs, placed, scaled[-2:], where="here")


KNOWN = ByKind(
    Machines(POOLS),
    {"slow": Profiled(profiles(0.02), adaptive=True), "fast": Profiled(profiles(0.004), adaptive=True)},
)


def test_before_it_ran_a_job_scales_linearly_on_every_kind() -> None:
    told = LearnedForecasts(KNOWN)
    assert told.packed(JOB, 0.0, SLOW, 4, 8) == pytest.approx(np.arange(1, 9))
    assert told.phase(JOB, 0.0, ((FAST, 2),))[0] == 2


def test_from_one_device_others_of_its_kind_are_free_and_other_kinds_are_a_ratio() -> None:
    told = LearnedForecasts(KNOWN)
    told.ran(JOB, 0.0, ((SLOW, 1),))
    seen = told.experience[JOB.id]
    assert seen.noise == (1.0, 4.0)
    (step,) = seen.points["slow"]
    assert step[:3] == (1, 1, 32) and step[3:] == pytest.approx((0.74, 0.0))  # the smallest batch
    one, two = (told.phase(JOB, 0.0, ((SLOW, count),))[0] for count in (1, 2))
    assert 1.5 * one < two
    assert two > KNOWN.phase(JOB, 0.0, ((SLOW, 2),))[0]  # communication is not known yet
    ratio = (64 / (0.1 + 0.004 * 64)) / (64 / (0.1 + 0.02 * 64))
    assert told.phase(JOB, 0.0, ((FAST, 1),))[0] == pytest.approx(one * ratio)
    assert told.packed(JOB, 0.0, FAST, 4, 4) == pytest.approx(told.packed(JOB, 0.0, SLOW, 4, 4) * ratio)


def test_a_step_is_kept_once_and_an_experience_does_not_change() -> None:
    none, step = Experience(), Point(1, 2, 16, 0.5, 0.1)
    once = none.after("slow", step, (1.0, 2.0))
    again = once.after("slow", step._replace(step_s=0.6), (3.0, 4.0))
    assert not none.points and once.points == again.points == {"slow": (step,)}
    assert (once.noise, again.noise) == ((1.0, 2.0), (3.0, 4.0))


@given(st.lists(st.tuples(st.floats(0, 3999), st.sampled_from(["1", "2", "4", "44", "f1", "f4"])), max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_job_that_learns_is_never_faster_than_one_that_knows(steps: list[tuple[float, str]]) -> None:
    told = LearnedForecasts(KNOWN)
    places = {"1": ((0, 1),), "2": ((0, 2),), "4": ((0, 4),), "44": ((0, 4), (1, 4)), "f1": ((2, 1),), "f4": ((2, 4),)}
    for done_s, name in steps:
        told.ran(JOB, done_s, places[name])
    for place in places.values():
        for done_s in (0.0, 3000.0):
            learning, knowing = told.execution.phase(JOB, done_s, place), KNOWN.phase(JOB, done_s, place)
            assert 0 < learning[0] <= knowing[0] * (1 + 1e-9) and learning[1] == knowing[1]


@pytest.mark.parametrize("name", ["pollux", "sia"])
def test_a_replay_begins_anew_and_accounts_for_every_second(name: str) -> None:
    jobs = tuple(replace(JOB, id=f"cnn-{i}", submit_s=100.0 * i, work_s=500.0 + 300 * i) for i in range(6))
    trace, told = Trace(name="t", format="t", jobs=jobs), LearnedForecasts(KNOWN)
    pools = POOLS if name == "sia" else POOLS[:1]
    first, second = (replay(trace, Machines(pools), policy(name), forecasts=told) for _ in range(2))
    assert not told.experience
    assert first.figures() == second.figures() and first.resizes > 0
    assert sum(first.device_s.values()) == pytest.approx(first.machines.devices * first.end_s)
    knowing = replay(trace, Machines(pools), policy(name), forecasts=KNOWN)
    assert first.finish_s.tolist() != knowing.finish_s.tolist()
