"""Sia: each job gets the number and kind of devices of its best configuration, by goodput over its own worst.

At each round every job has configurations (pool, number of devices: powers of two of a node, then whole nodes). Its
speedup there is its forecast speed over that of its slowest one; of a change to another configuration only the share of
its age counts that restarts do not take. Chosen is what makes the sum of speedup ** POWER over all jobs least, a job
without devices counting NO_ALLOCATION, within every pool's devices: exactly as long as the table of dynamic programming
is small (LARGEST), else by marginal value for each device, which is not always optimal (the paper solves an integer
program). A job begins on its fewest devices, of any kind, and may then double them, since only what ran is known. A job
that is starting keeps its devices. Source: Jayaram Subramanya et al., SOSP 2023; its artifact
(github.com/siasosp23/artifacts) for the two numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from gnomon.fleet.placement import give, place, take
from gnomon.fleet.state import Active, Decision, Forecasts, Policy, State, devices_of

RESTART_S = 30.0
POWER, NO_ALLOCATION = -0.5, 1.1
"""Of a speedup: how fair shares are; and what a job without devices counts, a slowest configuration counting 1."""
SLOWEST = 1e-4
"""Speedup below which none is told apart."""
LARGEST = 4_000_000
"""Entries of the table by which configurations are chosen exactly."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A number of devices of a pool, and what it is worth to a job."""

    pool: int
    count: int
    value: float


def sia(state: State, forecasts: Forecasts, *, learns: bool = True) -> Sequence[Decision]:
    """Configurations of all jobs, then their places. learns: nothing is known of a job before it ran, so that it begins
    small; otherwise its speed is known everywhere."""
    pools = [i for i, pool in enumerate(state.machines.pools) if not pool.serves]
    if not state.queue and all(_is_best(state, forecasts, active, pools, learns) for active in state.running):
        return ()
    jobs = sorted((*state.queue, *state.running), key=lambda active: active.index)
    room = {i: sum(state.free[n] for n in state.machines.nodes_of(i)) for i in pools}
    for active in state.running:
        pool = state.machines.pool_of[active.allocation[0][0]]
        if pool in room:
            room[pool] += active.devices
    return _placed(
        state, jobs, choose([_configurations(state, forecasts, active, pools, learns) for active in jobs], room)
    )


def choose(options: Sequence[Sequence[Configuration]], room: Mapping[int, int]) -> list[Configuration | None]:
    """A configuration of each job, or none: its best, where all of them have room."""
    wanted = [max(group, key=lambda option: option.value, default=None) for group in options]
    used = Counter[int]()
    for option in wanted:
        if option is not None:
            used[option.pool] += option.count
    if all(count <= room[pool] for pool, count in used.items()):
        return wanted
    size = len(options) * prod(devices + 1 for devices in room.values())
    return exact(options, room) if size <= LARGEST else _by_marginal_value(options, room)


def _is_best(state: State, forecasts: Forecasts, active: Active, pools: Sequence[int], learns: bool) -> bool:
    """Whether no other configuration is worth more to a running job than the one that it has, whatever is free."""
    fewest, most = forecasts.limits(active.job)
    if fewest == most and len(pools) == 1:
        return True  # it has the only one
    now = (state.machines.pool_of[active.allocation[0][0]], active.devices)
    values = {(o.pool, o.count): o.value for o in _configurations(state, forecasts, active, pools, learns)}
    return now in values and values[now] >= max(values.values())


def _configurations(
    state: State, forecasts: Forecasts, active: Active, pools: Sequence[int], learns: bool
) -> list[Configuration]:
    fewest, most = forecasts.limits(active.job)
    most = min(most, max(2 * active.peak, fewest, 1)) if learns else most
    rates = {}
    for pool in pools:
        per_node = state.machines.pools[pool].per_node
        nodes = state.machines.nodes_of(pool)
        for count in _counts(fewest, most, per_node, len(nodes)):
            full, rest = divmod(count, per_node)
            shape = tuple((nodes[0], per_node) for _ in range(full)) + (((nodes[0], rest),) if rest else ())
            rates[pool, count] = forecasts.phase(active.job, active.done_at(state.now), shape)[0]
    if not rates:
        return []
    base = min((rate for rate in rates.values() if rate > 0), default=0.0)
    age = state.now - active.job.submit_s
    lost = RESTART_S * (1 + active.preemptions + active.resizes) / (age + RESTART_S) if active.first_s >= 0 else 0.0
    now = (state.machines.pool_of[active.allocation[0][0]], active.devices) if active.allocation else (-1, 0)
    kept = [entry for entry in rates if entry == now] if active.ready_s > state.now else list(rates)
    worth = {entry: rates[entry] / base * (1.0 if entry == now else max(1.0 - lost, 0.0)) for entry in kept if base}
    if learns and active.first_s < 0:  # nothing is known of it before it ran
        worth = {entry: 1.0 for entry in worth if entry[1] == max(fewest, 1)}
    return [
        Configuration(pool, count, NO_ALLOCATION - max(speedup, SLOWEST) ** POWER)
        for (pool, count), speedup in worth.items()
        if rates[pool, count] > 0
    ]


def _counts(fewest: int, most: int, per_node: int, nodes: int) -> list[int]:
    """Powers of two within a node, then whole nodes; or just what a rigid job wants."""
    if fewest == most:
        return [fewest] if fewest <= per_node * nodes else []
    powers = [1 << i for i in range(per_node.bit_length()) if 1 << i < per_node]
    every = [*powers, *(per_node * i for i in range(1, nodes + 1)), fewest]
    return sorted({count for count in every if fewest <= count <= most})


def exact(options: Sequence[Sequence[Configuration]], room: Mapping[int, int]) -> list[Configuration | None]:
    """The most value: best[c] is that of the jobs so far within the devices c of each pool."""
    pools = list(room)
    best = np.zeros([room[pool] + 1 for pool in pools])
    picks = []
    for group in options:
        after, pick = best.copy(), np.full(best.shape, -1, dtype=np.int16)
        for item, option in enumerate(group):
            axis = pools.index(option.pool)
            if option.count > room[option.pool]:
                continue
            to = tuple(slice(option.count, None) if i == axis else slice(None) for i in range(len(pools)))
            come = tuple(slice(None, -option.count) if i == axis else slice(None) for i in range(len(pools)))
            value = best[come] + option.value
            better = value > after[to] + 1e-12
            after[to] = np.where(better, value, after[to])
            pick[to] = np.where(better, item, pick[to])
        best = after
        picks.append(pick)
    left = list(best.shape)
    left = [size - 1 for size in left]
    chosen: list[Configuration | None] = [None] * len(options)
    for index in range(len(options) - 1, -1, -1):
        item = int(picks[index][tuple(left)])
        if item >= 0:
            chosen[index] = options[index][item]
            left[pools.index(options[index][item].pool)] -= options[index][item].count
    return chosen


def _by_marginal_value(
    options: Sequence[Sequence[Configuration]], room: Mapping[int, int]
) -> list[Configuration | None]:
    """The step with most value a device, again and again: a job's first configuration, or a larger one for it."""
    left = dict(room)
    chosen: list[Configuration | None] = [None] * len(options)
    while True:
        best, gain, index = None, 0.0, -1
        for i, group in enumerate(options):
            have = chosen[i]
            for option in group:
                spare = left[option.pool] + (have.count if have is not None and have.pool == option.pool else 0)
                more = option.value - (have.value if have is not None else 0.0)
                extra = option.count - (have.count if have is not None and have.pool == option.pool else 0)
                worth = more / max(extra, 0.5)
                if option.count <= spare and more > 1e-9 and worth > gain + 1e-12:
                    best, gain, index = option, worth, i
        if best is None:
            return chosen
        old = chosen[index]
        if old is not None:
            left[old.pool] += old.count
        left[best.pool] -= best.count
        chosen[index] = best


def _placed(state: State, jobs: Sequence[Active], chosen: Sequence[Configuration | None]) -> Sequence[Decision]:
    free = list(state.free)
    changed = []
    out = []
    for active, pick in zip(jobs, chosen, strict=True):
        now = (state.machines.pool_of[active.allocation[0][0]], active.devices) if active.allocation else None
        if pick is None and now is None or pick is not None and now == (pick.pool, pick.count):
            continue
        give(free, active.allocation)
        if pick is None:
            out.append(Decision(active.job.id, ()))
        else:
            changed.append((active, pick))
    for active, pick in sorted(changed, key=lambda pair: (-pair[1].count, pair[0].index)):
        allocation = place(free, state.machines.nodes_of(pick.pool), pick.count)
        assert allocation is not None and devices_of(allocation) == pick.count
        take(free, allocation)
        out.append(Decision(active.job.id, allocation))
    return out


SIA = Policy(
    name="sia",
    paper="Jayaram Subramanya et al., SOSP 2023",
    about="number and kind of devices by goodput, over pools of several kinds",
    decide=sia,
    needs="scaling",
    interval_s=60.0,
    always=True,
    adapts=True,
)
