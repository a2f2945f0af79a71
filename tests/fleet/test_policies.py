"""Policies, by hand and against brute force; each is a pure function of what it is given."""

from __future__ import annotations

from itertools import product
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.fleet.assignment import assign
from gnomon.fleet.costs import Costs
from gnomon.fleet.forecast import Curve
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.knapsack import Item, choose
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.mig import Geometry, legal
from gnomon.fleet.points import MeasuredPoints
from gnomon.fleet.policies import POLICIES, policy
from gnomon.fleet.policies.elastic_batch import BatchPoint, cover
from gnomon.fleet.policies.pollux import fewest_cost
from gnomon.fleet.policies.sia import Configuration, exact
from gnomon.fleet.policies.sia import choose as choose_configurations
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules
from gnomon.fleet.scenario import diurnal
from gnomon.fleet.state import Active, State, packed_on


def lent(training: int, inference: int, per_node: int = 4) -> Machines:
    device = "v100-sxm-32gb"
    return Machines(
        (
            Pool(name="training", device=device, nodes=training, per_node=per_node),
            Pool(name="inference", device=device, nodes=inference, per_node=per_node, serves=True),
        )
    )


def value(groups: list[list[Item]], chosen: list[int]) -> float:
    return sum(group[item][1] for group, item in zip(groups, chosen, strict=True) if item >= 0)


@pytest.mark.parametrize("seed", range(30))
def test_the_knapsack_equals_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups: list[list[Item]] = []
    for _ in range(int(random.integers(1, 5))):
        count = int(random.integers(1, 5))
        gains = random.random(count) * 10
        if seed % 2:  # concave, one unit of weight each: the quick way
            values = np.cumsum(np.sort(gains)[::-1])
            groups.append([(i + 1, float(v)) for i, v in enumerate(values)])
        else:
            groups.append([(int(random.integers(1, 6)), float(v)) for v in gains])
    capacity = int(random.integers(0, 10))
    best = max(
        value(groups, list(picks))
        for picks in product(*(range(-1, len(group)) for group in groups))
        if sum(group[i][0] for group, i in zip(groups, picks, strict=True) if i >= 0) <= capacity
    )
    chosen = choose(groups, capacity)
    assert sum(group[i][0] for group, i in zip(groups, chosen, strict=True) if i >= 0) <= capacity
    assert value(groups, chosen) == pytest.approx(best)


def test_pollux_counts_equal_brute_force() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        costs = [random.random(int(random.integers(2, 9))) for _ in range(4)]
        capacity = int(random.integers(1, 9))
        counts = fewest_cost(costs, capacity)
        best = min(
            sum(row[n] for row, n in zip(costs, picks, strict=True))
            for picks in product(*(range(len(row)) for row in costs))
            if sum(picks) <= capacity
        )
        assert sum(counts) <= capacity
        assert sum(row[n] for row, n in zip(costs, counts, strict=True)) == pytest.approx(best)


def state_of(machines: Machines, running: list[tuple[Job, tuple[tuple[int, int], ...]]], owed: int) -> State:
    free = list(machines.capacity)
    actives = []
    for index, (job, allocation) in enumerate(running):
        for node, count in allocation:
            free[node] -= count
        actives.append(Active(job=job, index=index, allocation=allocation, rate=1.0, first_s=0.0))
    return State(now=100.0, machines=machines, queue=(), running=tuple(actives), free=tuple(free), owed=owed)


def job(name: str, devices: int, **more: int) -> Job:
    return Job(id=name, submit_s=0, work_s=1000, devices=devices, **more)  # type: ignore[arg-type]


def test_lyra_vacates_the_node_whose_jobs_cost_least() -> None:
    machines = lent(0 + 1, 3)
    # Node 1 holds two jobs of its own; nodes 2 and 3 hold one job together: half a job each, so node 2 goes.
    running = [
        (job("a", 2), ((1, 2),)),
        (job("b", 2), ((1, 2),)),
        (job("c", 8), ((2, 4), (3, 4))),
    ]
    decisions = policy("lyra").decide(state_of(machines, running, owed=1), Curve(machines))
    assert [(decision.job, decision.allocation) for decision in decisions] == [("c", ())]
    # Node 3 is free then, so two nodes cost no more.
    decisions = policy("lyra").decide(state_of(machines, running, owed=2), Curve(machines))
    assert [(decision.job, decision.allocation) for decision in decisions] == [("c", ())]


def test_lyra_scales_in_before_it_preempts() -> None:
    machines = lent(1, 2)
    running = [(job("a", 4, min_devices=2, max_devices=8), ((0, 2), (1, 2))), (job("b", 2), ((2, 2),))]
    decisions = policy("lyra").decide(state_of(machines, running, owed=1), Curve(machines))
    assert [decision.job for decision in decisions] == ["a"]
    assert {node for node, _ in decisions[0].allocation} == {0} or 1 not in dict(decisions[0].allocation)


def mixed_trace(seed: int, count: int = 60) -> Trace:
    random = np.random.default_rng(seed)
    jobs = []
    for i in range(count):
        devices = int(random.choice((1, 1, 2, 4, 8)))
        elastic = devices > 1 and random.random() < 0.5
        jobs.append(
            Job(
                id=f"j{i}",
                submit_s=float(random.integers(0, 40_000)),
                work_s=float(random.integers(300, 20_000)),
                devices=devices,
                min_devices=devices // 2 if elastic else 0,
                max_devices=2 * devices if elastic else 0,
            )
        )
    return Trace(name="t", format="philly", jobs=tuple(sorted(jobs, key=lambda entry: entry.submit_s)))


def test_lyra_meets_inference_and_shortens_jobs() -> None:
    rules = Rules(costs=Costs(), demand=diurnal(0.2, 1.0, 10 * 86400.0))
    trace = mixed_trace(1)
    mean = {}
    for name in ("lyra-no-loan", "lyra-rigid", "lyra"):
        result = replay(trace, lent(2, 4), policy(name), rules=rules)
        assert result.unmet_s == 0.0
        mean[name] = result.figures()["jct_mean_s"]
    assert mean["lyra"] < mean["lyra-no-loan"] and mean["lyra-rigid"] < mean["lyra-no-loan"]


@pytest.mark.parametrize("name", [policy.name for policy in POLICIES if not policy.slices and not policy.parts])
def test_a_policy_changes_nothing_and_repeats_itself(name: str) -> None:
    machines = lent(2, 1)
    running = [(job("a", 4, min_devices=2, max_devices=8), ((0, 4),)), (job("b", 1), ((1, 1),))]
    state = state_of(machines, running, owed=0)
    waiting = tuple(Active(job=job(f"w{i}", d), index=10 + i, queued_s=float(i)) for i, d in enumerate((1, 4, 2, 1)))
    state = State(now=state.now, machines=machines, queue=waiting, running=state.running, free=state.free, spread=True)
    before = repr(state)
    first = list(policy(name).decide(state, Curve(machines)))
    assert repr(state) == before
    assert list(policy(name).decide(state, Curve(machines))) == first
    assert first


def replayed(name: str, machines: Machines, *jobs: Job, **curve: float) -> tuple[list[float], Trace]:
    trace = Trace(name="t", format="philly", jobs=jobs)
    result = replay(trace, machines, policy(name), rules=Rules(record=True), forecasts=Curve(machines, **curve))
    total = machines.devices * result.end_s
    assert sum(result.device_s.values()) == pytest.approx(total)
    return [round(float(entry), 6) for entry in result.finish_s], trace


def one_pool(nodes: int, per_node: int, **more: object) -> Machines:
    return Machines((Pool(name="p", device="v100-sxm-32gb", nodes=nodes, per_node=per_node, **more),))  # type: ignore[arg-type]


def test_gandiva_shares_where_two_do_more_than_one() -> None:
    jobs = tuple(Job(id=f"j{i}", submit_s=0, work_s=70, devices=1, memory_bytes=2**33) for i in range(2))
    # Each keeps 0.7 of its speed: both end at 100; one after the other would be 70 and 140.
    assert replayed("gandiva", one_pool(1, 1), *jobs, sharing=0.7)[0] == [100, 100]
    assert replayed("gandiva", one_pool(1, 1), *jobs, sharing=0.5)[0] == [70, 140]
    assert replayed("qos", one_pool(1, 1), *jobs, sharing=0.7)[0] == [70, 140]
    assert replayed("qos", one_pool(1, 1), *jobs, sharing=0.95)[0] == [round(70 / 0.95, 6)] * 2
    large = tuple(Job(id=f"j{i}", submit_s=0, work_s=70, devices=1, memory_bytes=2**34) for i in range(2))
    assert replayed("cognn", one_pool(1, 1), *large, sharing=0.7)[0] == [70, 140]  # 32 GiB are over 26/32 of 31.7


class Pairs(Curve):
    """The curve, and what a job keeps of its speed beside another, by name."""

    keeps: ClassVar[dict[str, float]] = {"ax": 0.9, "xa": 0.8, "bx": 0.8, "xb": 0.8, "ay": 0.7, "ya": 0.7, "cz": 0.4}

    def speed_share(self, job: Job, other: Job) -> float:
        return self.keeps.get(job.id + other.id, 0.95 if {job.id, other.id} == {"c", "z"} else 0.1)


def test_federated_tasks_are_matched_together_and_keep_their_partition() -> None:
    """The first that waits would take `a`, the only one that the second may join; `z` would cost `c` over half."""
    cluster = one_pool(1, 3)
    told = Pairs(cluster)

    def active(name: str, index: int, held: bool) -> Active:
        job = Job(id=name, submit_s=index, work_s=70, devices=1, memory_bytes=2**30)
        return Active(job=job, index=index, allocation=((0, 1),) if held else ())

    running = [active(name, index, True) for index, name in enumerate("abc")]
    queue = [active(name, index, False) for index, name in enumerate("xyz", start=3)]
    state = State(now=10, machines=cluster, queue=queue, running=running, free=(0,))
    pairs = {d.job: d.shares_with for d in policy("federated").decide(state, told)}
    assert pairs == {"x": "b", "y": "a"}
    assert {d.job: d.shares_with for d in policy("gandiva").decide(state, told)} == {"x": "a", "z": "c"}


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(0, 5), columns=st.integers(1, 5), seed=st.integers(0, 2**32), ties=st.booleans())
def test_the_assignment_equals_brute_force(rows: int, columns: int, seed: int, ties: bool) -> None:
    random = np.random.default_rng(seed)
    gains = random.uniform(-1, 1, (rows, columns))
    gains = np.round(gains * 2) / 2 if ties else gains
    chosen = assign(gains)
    used = [column for column in chosen if column >= 0]
    assert len(chosen) == rows and len(used) == len(set(used))
    assert all(gains[row, column] > 0 for row, column in enumerate(chosen) if column >= 0)
    best = max(
        sum(gains[row, column] for row, column in enumerate(picks) if column >= 0)
        for picks in product(range(-1, columns), repeat=rows)
        if len([c for c in picks if c >= 0]) == len({c for c in picks if c >= 0})
    )
    assert sum(gains[row, column] for row, column in enumerate(chosen) if column >= 0) == pytest.approx(best)


def test_a_partner_goes_on_alone_when_the_other_ends() -> None:
    jobs = (
        Job(id="a", submit_s=0, work_s=70, devices=1, memory_bytes=2**30),
        Job(id="b", submit_s=0, work_s=35, devices=1, memory_bytes=2**30),
    )
    # b ends at 50; a has done 35 by then and does the other 35 at full speed.
    assert replayed("gandiva", one_pool(1, 1), *jobs, sharing=0.7)[0] == [85, 50]


@pytest.mark.parametrize("seed", range(4))
def test_mig_slices_are_always_legal(seed: int) -> None:
    random = np.random.default_rng(seed)
    profiles = ("1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb", "1g.20gb")
    chosen = [str(random.choice(profiles)) for _ in range(40)]
    jobs = tuple(
        Job(id=f"j{i}", submit_s=float(random.integers(500)), work_s=100.0, devices=int(entry[0]), slice=entry)
        for i, entry in enumerate(chosen)
    )
    machines = one_pool(3, 7, mig=True)
    trace = Trace(name="t", format="philly", jobs=tuple(sorted(jobs, key=lambda entry: entry.submit_s)))
    result = replay(trace, machines, policy("elastic-batch"), rules=Rules(record=True))
    assert result.device_s["useful"] == pytest.approx(sum(100 * job.devices for job in jobs))
    for run in result.runs:  # at no moment more compute slices than a device has
        [(node, _)] = run.allocation
        at = [r for r in result.runs if r.allocation[0][0] == node and r.start_s <= run.start_s < r.end_s]
        assert sum(r.allocation[0][1] for r in at) <= 7
    assert legal({"a": ("4g", 0), "b": ("3g", 4)}) and not legal({"a": ("3g", 0), "b": ("4g", 4)})
    assert not legal({"a": ("4g", 0), "b": ("3g", 0)}) and not legal({"a": ("1g", 7)})


def test_slices_cover_demand_on_few_devices() -> None:
    points = {
        "short": [
            BatchPoint(profile="1g", batch=8, per_s=100, latency_s=0.1),
            BatchPoint(profile="7g", batch=64, per_s=500, latency_s=0.1),
        ],
        "long": [
            BatchPoint(profile="1g", batch=1, per_s=10, latency_s=0.9),
            BatchPoint(profile="3g", batch=4, per_s=60, latency_s=0.2),
        ],
    }
    devices = cover({"short": 350, "long": 100}, points, slo_s=0.25)
    # 4 slices of 1g, 2 of 3g: 10 compute slices on 2 devices; whole devices would be 1 + 2.
    assert len(devices) == 2
    for held in devices:
        geometry = Geometry()
        for i, (_, point) in enumerate(held):
            geometry.add(str(i), point.profile)
    assert sum(p.per_s for held in devices for bucket, p in held if bucket == "short") >= 350


def test_sia_puts_jobs_on_the_kind_that_suits_and_easyscale_uses_what_is_idle() -> None:
    machines = Machines(
        (
            Pool(name="slow", device="t4-16gb", nodes=1, per_node=4),
            Pool(name="fast", device="v100-sxm-32gb", nodes=1, per_node=4, speed=2.0),
        )
    )
    jobs = tuple(Job(id=f"j{i}", submit_s=0, work_s=20000, devices=2, min_devices=1, max_devices=8) for i in range(2))
    trace = Trace(name="t", format="philly", jobs=jobs)
    mean = {}
    for name in ("fifo", "sia", "easyscale"):
        told = Curve(machines, proportional=name == "easyscale")
        result = replay(trace, machines, policy(name), rules=Rules(costs=Costs(resize_s=5)), forecasts=told)
        mean[name] = float(result.jct_s.mean())
    assert mean["sia"] < mean["fifo"] and mean["easyscale"] < mean["fifo"]


@pytest.mark.parametrize("seed", range(8))
def test_sia_equals_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    room = {0: 6, 2: 4} if seed % 2 else {0: 6}
    options = [
        [
            Configuration(int(random.choice(list(room))), int(count), float(random.random() + 1))
            for count in random.choice(5, 3, replace=False) + 1
        ]
        for _ in range(3)
    ]
    best = 0.0
    for picks in product(range(-1, 3), repeat=3):
        chosen = [group[i] for group, i in zip(options, picks, strict=True) if i >= 0]
        if all(sum(entry.count for entry in chosen if entry.pool == pool) <= devices for pool, devices in room.items()):
            best = max(best, sum(entry.value for entry in chosen))
    for chosen_ones in (exact(options, room), choose_configurations(options, room)):
        assert sum(option.value for option in chosen_ones if option is not None) == pytest.approx(best)


def test_jobs_that_all_have_room_get_their_best() -> None:
    """Without weighing anything, and to the same as when it is weighed."""
    options = [[Configuration(0, 1, 1.5), Configuration(0, 2, 2.0)], [Configuration(0, 4, 1.1)], []]
    assert choose_configurations(options, {0: 6}) == [options[0][1], options[1][0], None] == exact(options, {0: 6})
    assert choose_configurations(options, {0: 5}) == exact(options, {0: 5}) == [options[0][0], options[1][0], None]
    costs = [np.array([9.0, 3.0, 2.0]), np.array([9.0, 9.0, 9.0, 1.0])]
    assert fewest_cost(costs, 5) == [2, 3] and fewest_cost(costs, 4) == [1, 3] and fewest_cost(costs, 3) == [0, 3]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_foretold_of_packed_devices_is_what_is_foretold_of_each_number(data: st.DataObject) -> None:
    """The rows that policies read equal the rate of every allocation, for the curve and for measured points."""
    pools = (
        Pool(name="a", device="v100-sxm-32gb", nodes=2, per_node=4),
        Pool(name="b", device="a100-sxm-80gb", nodes=2, per_node=4),
    )
    cluster = Machines(pools)
    curve = Curve(cluster, serial=data.draw(st.floats(0, 1)), spread=data.draw(st.floats(0, 0.9)))
    points = {("m", "v100-sxm-32gb"): ((1, 2.0), (4, 5.0)), ("m", "a100-sxm-80gb"): ((1, 3.0), (8, 9.0))}
    told = data.draw(st.sampled_from((curve, MeasuredPoints(points=points, curve=curve, reference="v100-sxm-32gb"))))
    job = Job(
        id="j", submit_s=0, work_s=100, devices=data.draw(st.integers(1, 8)), model=data.draw(st.sampled_from("mn"))
    )
    node, most = data.draw(st.sampled_from((0, 2))), data.draw(st.integers(1, 8))
    rows = told.packed(job, 0.0, node, 4, most)
    for count in range(1, most + 1):
        nodes = [node] * (-(-count // 4))
        assert packed_on(count, node, 4) == tuple((n, min(4, count - 4 * i)) for i, n in enumerate(nodes))
        assert rows[count - 1] == pytest.approx(told.phase(job, 0.0, packed_on(count, node, 4))[0])
